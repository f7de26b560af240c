"""No file of a run tells how long anything took, which depends on how much the clients hold."""

import os
import re
import time
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp

import jaxpfl as jp
from jaxpfl import files
from jaxpfl.experiments.records.checkpoint import Checkpoints
from tests.faults.runs import adding

_PUBLIC = {"run.lock", "attempts.jsonl", "report.html"}


def _run(out: Path, seconds: float) -> dict[str, bytes]:
    """The public files of a run, one of whose rounds takes longer."""
    slow = adding(4, lambda round: time.sleep(seconds if round == 3 else 0))
    jp.run(
        *slow, ledger=out.parent / "l.jsonl", out=out, every=1, seed=jp.privacy.ReproducibleSeed(0)
    )
    found = [p for p in out.rglob("*") if "private" not in p.relative_to(out).parts]
    return {p.relative_to(out).as_posix(): p.read_bytes() for p in found if p.is_file()}


def _without_its_ledger(content: bytes) -> bytes:
    """A run's head in its ledger, and hashes over it, follow from the ledger's random key."""
    return re.sub(
        rb'"(ledger_head|sha256|head|key|population|origin|seal)": "[0-9a-f]{64}"', b"", content
    )


def _times(out: Path) -> set[tuple[float, ...]]:
    # Folders last, because to list one sets when it was read.
    entries = sorted([out, *out.rglob("*")])
    return {(entry.stat().st_mtime, entry.stat().st_atime) for entry in entries}


def test_a_round_that_takes_longer_changes_no_public_file(tmp_path):
    quick = _run(tmp_path / "quick" / "run", 0.0)
    slow = _run(tmp_path / "slow" / "run", 1.2)
    assert quick.keys() == slow.keys()
    for name in quick.keys() - _PUBLIC:
        assert _without_its_ledger(quick[name]) == _without_its_ledger(slow[name]), name


def test_files_of_a_run_have_no_times_of_their_own(tmp_path, monkeypatch):
    """Neither at its end nor, for what is written in rounds, before."""
    during, real = {}, Checkpoints.save
    out = tmp_path / "run"

    def looking(*arguments, **options):
        for path in [out / "metrics.jsonl", *out.glob("checkpoints/round_*/**/*")]:
            during[path, path.stat().st_mtime] = True
        return real(*arguments, **options)

    monkeypatch.setattr(Checkpoints, "save", looking)
    began = time.time()
    times: list[set[tuple[float, ...]]] = []
    real_end = files.without_times

    def ending(path, **options):
        real_end(path, **options)
        if path == out:
            times.append(_times(out))

    monkeypatch.setattr(files, "without_times", ending)
    _run(out, 0.0)
    assert len({mtime for mtime, _ in times[-1]}) == 1
    assert during and all(mtime < began - 10**6 for _, mtime in during)
    assert os.stat(out / "attempts.jsonl").st_mtime < began - 10**6


def test_the_arrays_of_a_checkpoint_are_read_by_orbax(tmp_path):
    _run(tmp_path / "run", 0.0)
    state = tmp_path / "run" / "checkpoints" / "round_00000004" / "state"
    with ocp.StandardCheckpointer() as reader:
        assert np.isfinite(reader.restore(state)["0"])
