"""What tests of federated share."""

import pytest


@pytest.fixture
def ledger_path(tmp_path):
    return tmp_path / "ledger.jsonl"
