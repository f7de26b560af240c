"""What the tests of the ledger and its chain share."""

from pathlib import Path

import pytest


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Of a ledger that is not there yet, in a folder that is not there either."""
    return tmp_path / "folder" / "ledger.jsonl"
