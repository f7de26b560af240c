import os

import pytest


@pytest.fixture
def small_machine(monkeypatch):
    """Has 64 MiB of memory."""
    known = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 2**14}
    really = os.sysconf
    monkeypatch.setattr(os, "sysconf", lambda name: known.get(name) or really(name))
