"""Signals stop a run so that it can be resumed, whenever they come; clocks do nothing."""

import json
import os
import signal
import stat
import time
from contextlib import suppress

import pytest

from jaxpfl import cli
from jaxpfl.errors import Interrupted
from jaxpfl.experiments import carry_out
from jaxpfl.experiments.engine import build, run_directory
from jaxpfl.experiments.engine.observers import Observers
from jaxpfl.experiments.engine.run_directory import Run
from jaxpfl.experiments.systems import workspace
from jaxpfl.federated.release import prepared_query
from tests.faults.runs import assert_same, charges_of, config_of

NUMBERS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]


pytestmark = pytest.mark.usefixtures("interruptible")


def signalling(
    monkeypatch, owner, name: str, number: int = signal.SIGTERM, round: int | None = None
) -> None:
    """Sends a signal where `owner.name` is called, or only where that is of a round.

    Kernel and shell both send SIGHUP.
    """
    real = getattr(owner, name)

    def call(*arguments, **options):
        if round is None or options["round"] == round:
            for _ in range(2 if number == signal.SIGHUP else 1):
                os.kill(os.getpid(), number)
        return real(*arguments, **options)

    monkeypatch.setattr(owner, name, call)


@pytest.mark.parametrize(
    ("number", "owner", "name", "round", "said"),
    [
        (signal.SIGHUP, prepared_query, "Cohort", 3, "after round 3"),
        # Else the next stage, or the next point of a sweep, would begin.
        (signal.SIGTERM, Run, "end", None, "after the last round; .*run$"),
    ],
)
def test_a_signal_saves_and_stops(
    tiny_config, tmp_path, straight, monkeypatch, number, owner, name, round, said
):
    """A stop signal ends the round, saves, and leaves a run that resumes to the same bits."""
    out = tmp_path / "run"
    # What a second signal would reach, which is by default the end of these tests.
    default = signal.signal(number, lambda *_: pytest.fail("the round was not finished"))
    try:
        with monkeypatch.context() as patched:
            signalling(patched, owner, name, number, round=round)
            with pytest.raises(Interrupted, match=said) as caught:
                carry_out.run(config_of(tiny_config), out, progress=False)
    finally:
        signal.signal(number, default)
    assert caught.value.number == number
    assert (out / "checkpoints" / f"round_{round or 7:08d}").is_dir()
    assert (out / "private" / "secret.json").exists() == (round is not None)
    carry_out.resume(out, progress=False)
    assert_same(out, straight)


@pytest.mark.parametrize(("round", "said"), [(0, "before the first round"), (2, "after round 2")])
def test_a_signal_while_a_model_is_scored_charges_no_other_round(
    tiny_config, tmp_path, monkeypatch, round, said
):
    real = Observers.observe

    def observe(self, done, metrics, state):
        if done == round:
            os.kill(os.getpid(), signal.SIGINT)
        return real(self, done, metrics, state)

    monkeypatch.setattr(Observers, "observe", observe)
    with pytest.raises(Interrupted, match=said):
        carry_out.run(config_of(tiny_config), tmp_path / "run", progress=False)
    assert len(charges_of(tmp_path / "run")) == round


@pytest.mark.parametrize("number", NUMBERS)
def test_a_signal_while_data_is_read_leaves_nothing(
    tiny_config, tmp_path, monkeypatch, capsys, number
):
    """TRUST 38: one sentence, 128 + the signal's number, and no directory."""
    handlers = [signal.getsignal(each) for each in NUMBERS]
    out = tmp_path / "new" / "run"
    with monkeypatch.context() as patched:
        signalling(patched, build, "read_clients", number)
        assert cli.main(["run", str(tiny_config), "--out", str(out)]) == 128 + number
    assert not out.parent.exists()
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith("error: ") and "interrupted" in last
    assert [signal.getsignal(each) for each in NUMBERS] == handlers


@pytest.mark.parametrize(
    ("number", "owner", "name"),
    [
        pytest.param(signal.SIGINT, workspace, "Loop", marks=pytest.mark.long),
        (signal.SIGTERM, workspace, "Loop"),
        pytest.param(signal.SIGTERM, run_directory, "Ledger", marks=pytest.mark.long),
        (signal.SIGINT, run_directory, "Releaser"),
    ],
)
def test_a_signal_before_the_first_round_leaves_a_run_to_resume(
    tiny_config, tmp_path, straight, monkeypatch, capsys, number, owner, name
):
    """TRUST 33: whenever it comes, the resumed run ends in the same bits."""
    out = tmp_path / "run"
    with monkeypatch.context() as patched:
        signalling(patched, owner, name, number)
        assert cli.main(["run", str(tiny_config), "--out", str(out)]) == 128 + number
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith("error: interrupted") and last.endswith(f"jaxpfl resume {out}")
    assert not charges_of(out) if (out / "ledger.jsonl").exists() else owner is workspace
    if owner is run_directory:  # on the disk before its first use
        assert stat.S_IMODE((out / "private" / "secret.json").stat().st_mode) == 0o600
    assert carry_out.resume(out, progress=False).record["rounds"] == 7
    assert_same(out, straight)


def test_a_clock_that_goes_backwards_changes_nothing(tiny_config, tmp_path, straight, monkeypatch):
    """TRUST 37: each look at it is an hour before the last one, and the files are of the future."""
    real = prepared_query.Cohort
    hours = iter(range(10**6))

    def later(*arguments, round, **options):
        for folder, _, names in os.walk(out):
            for path in (folder, *(os.path.join(folder, name) for name in names)):
                with suppress(FileNotFoundError):  # a checkpoint is being written
                    os.utime(path, (4e9, 4e9))
        if round == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(*arguments, round=round, **options)

    out = tmp_path / "run"
    with monkeypatch.context() as patched:
        patched.setattr(time, "time", lambda: 4e9 - 3600.0 * next(hours))
        patched.setattr(time, "time_ns", lambda: int(4e18) - 3600 * 10**9 * next(hours))
        with monkeypatch.context() as once:
            once.setattr(prepared_query, "Cohort", later)
            with pytest.raises(KeyboardInterrupt):
                carry_out.run(config_of(tiny_config), out, progress=False)
        carry_out.resume(out, progress=False)
    assert_same(out, straight)
    assert len((out / "attempts.jsonl").read_text().splitlines()) == 2
    assert json.loads((out / "result.json").read_text())["rounds"] == 7
