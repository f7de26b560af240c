"""The key of a ledger: made once, on the disk before it is used, and its owner's alone."""

import os

import pytest

from jaxpfl.privacy.sources import open_key


def test_a_key_is_on_the_disk_before_it_is_used(tmp_path, monkeypatch):
    """TRUST 36: its bytes, then its name; and a crash before the name leaves no key."""
    seen = []
    real = os.fsync

    def watched(descriptor):
        seen.append((os.fstat(descriptor).st_ino, (tmp_path / "a.key").exists()))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", watched)
    open_key(tmp_path / "a.key", create=True)
    file, folder = (tmp_path / "a.key").stat().st_ino, tmp_path.stat().st_ino
    assert seen == [(file, False), (folder, True)]

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        open_key(tmp_path / "b.key", create=True)
    assert not (tmp_path / "b.key").exists()
    monkeypatch.setattr(os, "fsync", real)
    open_key(tmp_path / "b.key", create=True)
