"""The file of a ledger and its key: what was altered, torn or is held by another is refused."""

import json
import os
import shutil
import stat

import pytest

from jaxpfl.errors import CorruptFile, InputError, RunLocked
from jaxpfl.privacy import Ledger
from jaxpfl.privacy.chain import Chain
from jaxpfl.privacy.ledger import open_key
from tests.privacy.ledgers import CLIENTS, charge, filled, key_of
from tests.refusals import refusal


def test_a_key_is_made_with_the_ledger_for_its_owner_alone(path):
    filled(path)
    assert stat.S_IMODE(key_of(path).stat().st_mode) == 0o600
    assert stat.S_IMODE(key_of(path).parent.stat().st_mode) == 0o700
    assert {found.name for found in path.parent.rglob("*.*")} == {
        "ledger.jsonl",
        "ledger.jsonl.key",
    }


@pytest.mark.parametrize("damage", ["missing", "short", "another"])
def test_without_its_key_a_ledger_can_be_read_but_not_charged(path, tmp_path, damage):
    filled(path)
    before, key = path.read_bytes(), key_of(path).read_bytes()
    filled(tmp_path / "other")
    if damage == "missing":
        key_of(path).unlink()
    elif damage == "short":
        key_of(path).write_bytes(key[:-1])
    else:
        shutil.copy(key_of(tmp_path / "other"), key_of(path))
    refusal(lambda: Ledger(path, CLIENTS), "ledger.jsonl.key", CorruptFile)
    assert key_of(path).exists() == (damage != "missing"), "none is made for an old ledger"
    ledger = Ledger.read(path)
    ledger.verify()
    assert len(ledger) == 5 and ledger.spent(1e-5) > 0
    assert ledger.summary(1e-5)["population"] == json.loads(before.splitlines()[0])["population"]
    for use in (
        lambda: ledger.covers(CLIENTS),
        lambda: charge(ledger, 9),
        lambda: ledger.record("fed_avg a 0", "one"),
    ):
        with pytest.raises(InputError, match="opened for reading"):
            use()
    key_of(path).write_bytes(key)
    Ledger(path, CLIENTS).close()
    assert path.read_bytes() == before


def test_a_flipped_bit_in_the_key_is_found(path):
    """TRUST 35"""
    filled(path)
    key = key_of(path).read_bytes()
    # In each byte one bit, and each of the eight.
    for bit in range(0, 8 * len(key), 9):
        damaged = bytearray(key)
        damaged[bit // 8] ^= 1 << bit % 8
        key_of(path).write_bytes(damaged)
        refusal(lambda: Ledger(path, CLIENTS), "is not the key of", CorruptFile)


def test_an_altered_line_is_refused_by_file_and_number(path):
    """TRUST 40: on opening, reading and verifying; `test_chain` has all kinds of damage."""
    filled(path)
    before = Ledger.read(path)
    path.write_text(path.read_text().replace('"noise_multiplier":1.5', '"noise_multiplier":99.0'))
    for look in (lambda: Ledger(path, CLIENTS), lambda: Ledger.read(path), before.verify):
        refusal(look, f"{path} line 2 was altered", CorruptFile)


@pytest.mark.parametrize("kind", ["cut off", "forged"])
def test_the_head_that_was_kept_elsewhere_shows_what_the_chain_cannot(path, tmp_path, kind):
    """TRUST 40: lines that were cut off the end, and a chain whose hashes were all made anew."""
    head, other = filled(path), tmp_path / "forged"
    if kind == "forged":
        key_of(other).parent.mkdir()
        shutil.copy(key_of(path), key_of(other))
        filled(other, rounds=3)
        path.write_bytes(other.read_bytes())
    else:
        path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-2]))
    with Ledger(path, CLIENTS) as ledger:
        assert len(ledger) == 3 and not ledger.contains(head) and ledger.contains(ledger.head)
        refusal(lambda: ledger.verify(head), "cut off or replaced", CorruptFile)
        ledger.verify(ledger.head)


def test_a_torn_first_line_is_an_empty_ledger(path):
    """TRUST 33: a crash at creation; its key is kept, by which the first line is the same."""
    filled(path, rounds=0)
    header = path.read_bytes()
    for cut in (0, 1, len(header) // 2, len(header) - 2):
        path.write_bytes(header[:cut])
        refusal(lambda: Ledger.read(path), "empty", CorruptFile)
        Ledger(path, CLIENTS).close()
        assert path.read_bytes() == header


def test_a_full_disk_leaves_no_charge_and_no_half_line(path, monkeypatch):
    """TRUST 36: the error is the system's, the file is as before, nobody goes on charging."""
    filled(path)
    before = path.read_bytes()
    ledger = Ledger(path, CLIENTS)
    real = os.write
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", lambda descriptor, data: real(descriptor, data[:10]))
        refusal(lambda: charge(ledger, 5), "cannot be written", OSError)
    assert path.read_bytes() == before
    refusal(lambda: charge(ledger, 5), "closed")
    with Ledger(path, CLIENTS) as again:
        charge(again, 5)


def test_a_ledger_has_one_holder(path):
    """TRUST 37: by the kernel's lock; `faults/test_resume.py` has holders that are killed."""
    filled(path)
    with Ledger(path, CLIENTS):
        refusal(lambda: Ledger(path, CLIENTS), "another run holds this ledger", RunLocked)
        assert len(Ledger.read(path)) == 5, "readers need no lock"
    Ledger(path, CLIENTS).close()


def test_the_file_holds_public_things_only(path):
    """TRUST 40: exactly these fields; no times, ids, sizes or keys."""
    filled(path)
    with Ledger(path, CLIENTS) as ledger:
        ledger.record("fed_avg a 0", "released")
    header, *charges, record = (json.loads(line) for line in path.read_text().splitlines())
    seal = {"bytes", "previous", "hash"}
    assert set(header) == {"format", "key", "population", "unit", "budget"} | seal
    for line in charges:
        assert set(line) == {"run", "label", "round", "event", "identity"} | seal
    assert set(record) == {"identity", "release"} | seal


@pytest.mark.parametrize(
    "fields",
    [
        {"event": {"type": "gaussian", "noise_multiplier": "x"}},
        {"event": {"type": "something else"}},
        {"event": 3},
        {"event": {"type": "repeated", "count": 10**400, "event": {"type": "non_private"}}},
        {"run": 7, "label": "a", "round": 1, "identity": "i", "event": {"type": "none"}},
        {"run": "a", "label": "a", "round": True, "identity": "i", "event": {"type": "none"}},
        {"run": "a", "label": "a", "round": 1, "identity": [], "event": {"type": "none"}},
        {"identity": "i", "release": None},
        {"run": "a"},
        {"population": 3},
        {},
        {"format": "jaxpfl ledger 2"},
    ],
    ids=str,
)
def test_a_sealed_line_that_says_nothing_known_is_refused(path, fields):
    """Whoever seals lines can also seal nonsense, or write another format."""
    words = "line 7 was altered"
    if "format" in fields:
        words = "expected the format 'jaxpfl ledger 3'"
    else:
        filled(path)
    chain = Chain(path)
    chain.append(fields)
    chain.close()
    for open_it in (Ledger.read, lambda path: Ledger(path, CLIENTS)):
        refusal(lambda open_it=open_it: open_it(path), words, CorruptFile)


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
    refusal(lambda: open_key(tmp_path / "b.key", create=True), "No space", OSError)
    assert not (tmp_path / "b.key").exists()
    monkeypatch.setattr(os, "fsync", real)
    open_key(tmp_path / "b.key", create=True)
