"""Files that are replaced, damaged or removed under a run, which holds them open and goes on."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import jaxpfl as jp
from jaxpfl.errors import CorruptFile
from tests.faults.runs import adding

ROUNDS = 4
CLIENTS = adding(ROUNDS)[1]


def replaced(path: Path) -> None:
    """By a copy with the same bytes."""
    copy = path.with_name("copy")
    shutil.copy(path, copy)
    os.replace(copy, path)


def overwritten(path: Path) -> None:
    """In place, in one byte of the last line."""
    with path.open("r+b") as file:
        file.seek(-3, os.SEEK_END)
        file.write(b"#")


def appended(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"one more\n")


CHANGES = {
    "replaced": replaced,
    "truncated": lambda path: os.truncate(path, path.stat().st_size // 2),
    "deleted": Path.unlink,
    "renamed": lambda path: path.rename(path.with_name("elsewhere")),
    "overwritten": overwritten,
    "appended": appended,
}


def content(path: Path) -> bytes | None:
    return path.read_bytes() if path.exists() else None


def published(out: Path) -> list[int]:
    lines = (content(out / "metrics.jsonl") or b"").splitlines()
    return [json.loads(line)["round"] for line in lines]


@pytest.mark.parametrize(
    ("change", "name"),
    [
        *((change, "ledger.jsonl") for change in CHANGES),
        *(
            pytest.param(change, "run.lock", marks=() if change == "deleted" else pytest.mark.long)
            for change in CHANGES
        ),
    ],
)
def test_a_change_in_any_round_stops_the_run_before_the_next_charge(tmp_path, change, name):
    """TRUST 40: of a ledger outside the run directory, and of the lock in it."""
    for fatal in range(1, ROUNDS + 1):
        folder = tmp_path / str(fatal)
        out, ledger, kept = folder / "run", folder / "ledger.jsonl", folder / "kept"
        changed = ledger if name == ledger.name else out / name
        rounds, left = [], []

        def attack(round, fatal=fatal, ledger=ledger, kept=kept, changed=changed, left=left):
            rounds.append(round)  # noqa: B023
            if round == fatal:
                os.link(ledger, kept)  # whatever becomes of its name, what is written is seen
                CHANGES[change](changed)
                left += [content(changed), content(kept)]

        with pytest.raises(CorruptFile, match=f"{name}: was changed from outside"):
            jp.run(*adding(ROUNDS, attack), ledger=ledger, out=out, every=2)
        assert rounds == list(range(1, fatal + 1))
        assert [content(changed), content(kept)] == left
        assert published(out) == list(range(fatal))
        # The last of them may have been under way.
        saved = {path.name for path in (out / "checkpoints").glob("round_*")}
        assert saved <= {f"round_{round:08d}" for round in range(2, fatal, 2)}
        assert (out / "private" / "secret.json").exists()
        assert not (out / "result.json").exists()


SECRET, RESULT = "private/secret.json", "result.json"
LAST = f"checkpoints/round_{ROUNDS:08d}"
WRITTEN = f"checkpoints/.tmp-round_{ROUNDS:08d}/record.json"
SYNCED = [".run.json.tmp", "metrics.jsonl", WRITTEN]
# The file whose syncing or renaming is followed by the change, and what must not follow then.
INSTANTS = [
    (SYNCED[0], "run.json", ["run.lock"]),
    ("metrics.jsonl", LAST, ["ledger.jsonl", "run.lock"]),
    (WRITTEN, LAST, ["run.lock"]),
    (LAST, RESULT, ["ledger.jsonl", "run.lock"]),
    (RESULT, "no secret", ["ledger.jsonl", "run.lock"]),
]


@pytest.mark.parametrize(
    ("done", "next_one", "name"),
    [(done, next_one, name) for done, next_one, names in INSTANTS for name in names],
)
def test_a_change_between_two_durable_operations_stops_the_next_one(
    tmp_path, monkeypatch, done, next_one, name
):
    """TRUST 40: before the record, each checkpoint and the result, and before the secret goes."""
    out, ledger = tmp_path / "run", tmp_path / "ledger.jsonl"
    jp.Ledger(ledger, CLIENTS).close()  # opening it writes nothing more
    changed, pending = ledger if name == ledger.name else out / name, [True]

    def attack(path: Path) -> None:
        last = done != "metrics.jsonl" or published(out)[-1:] == [ROUNDS]
        if path == out / done and last and pending:
            pending.clear()
            replaced(changed)

    def renamed(real):
        def call(source, target, **options):
            real(source, target, **options)
            attack(Path(target))

        return call

    def synced(real):
        def call(descriptor):
            real(descriptor)
            for path in (out / each for each in SYNCED):
                if path.exists() and os.path.samestat(os.fstat(descriptor), path.stat()):
                    attack(path)

        return call

    with monkeypatch.context() as patched:
        patched.setattr(os, "rename", renamed(os.rename))
        patched.setattr(os, "replace", renamed(os.replace))
        patched.setattr(os, "fsync", synced(os.fsync))
        with pytest.raises(CorruptFile, match=f"{name}: was changed from outside"):
            jp.run(*adding(ROUNDS), ledger=ledger, out=out, every=10)
    assert not pending
    assert not (out / next_one).exists()
    assert (out / SECRET).exists()


RUN = """
import sys, time, pathlib
import jaxpfl as jp
from tests.faults.runs import adding
name = sys.argv[1]
def wait(round):
    pathlib.Path(f"at.{name}").write_text(str(round))
    while round == 4 and not pathlib.Path(f"go.{name}").exists():
        time.sleep(0.01)
out = pathlib.Path("run")
jp.run(*adding(4, wait), ledger=out / "ledger.jsonl", out=out, every=2,
       resume=(out / "run.json").exists())
"""


@pytest.mark.long
def test_a_stopped_process_that_goes_on_touches_nothing_of_its_successor(tmp_path):
    """TRUST 37: its directory was deleted, and another run begun there, while it was stopped."""
    out = tmp_path / "run"

    def start(name):
        return subprocess.Popen(
            [sys.executable, "-c", RUN, name],
            cwd=tmp_path,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )

    def wait_for(name, process):
        """Until it waits in round 4 and has nothing more to write."""
        while (
            content(tmp_path / f"at.{name}") != b"4"
            or not (out / "checkpoints" / "round_00000002").exists()
        ):
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.01)

    def tree():
        return {path: content(path) for path in out.rglob("*") if path.is_file()}

    first = start("first")
    wait_for("first", first)
    first.send_signal(signal.SIGSTOP)
    shutil.rmtree(out)
    second = start("second")
    try:
        wait_for("second", second)
        before = tree()
        (tmp_path / "go.first").touch()
        first.send_signal(signal.SIGCONT)
        said = first.communicate()[1]
        assert first.returncode == 1
        assert "was changed from outside while this process held it" in said.splitlines()[-1]
        after = tree()
        assert after == {**after, **before}
        # Its own curves, which it had in memory.
        assert {path.parent for path in after.keys() - before.keys()} <= {out / "tensorboard"}
    finally:
        first.kill()
        second.kill()
        second.communicate()
    (tmp_path / "go.third").touch()
    third = start("third")
    said = third.communicate()[1]
    assert third.returncode == 0, said
    assert json.loads((out / RESULT).read_text())["rounds"] == ROUNDS
    assert not (out / SECRET).exists()
