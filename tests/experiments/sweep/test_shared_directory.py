"""A sweep's directory that processes share, or in which a record or a process is lost."""

import os
import signal
import threading

import pytest

from jaxpfl import files
from jaxpfl.errors import BudgetExhausted, InputError, RunLocked
from jaxpfl.experiments.engine.signals import Interrupted, caught_signals
from jaxpfl.experiments.sweep import directory as folders
from jaxpfl.experiments.sweep.points import carry_out_point, run_sweep
from jaxpfl.experiments.sweep.results import collect
from tests.experiments.sweep.three_points import failing, result


@pytest.mark.parametrize(
    "error",
    [BudgetExhausted("spent"), OSError(28, "No space left"), InputError("no"), RunLocked("busy")],
)
def test_a_signal_that_was_answered_stops_the_sweep_though_its_point_failed(
    sweep, tmp_path, invented, error
):
    """The next point must not begin, and the failure of this one is recorded."""

    def interrupted(config, _):
        with caught_signals("interrupted after the last round"):
            os.kill(os.getpid(), signal.SIGTERM)
            try:
                raise error
            except OSError as cause:
                raise InputError("another sentence") from cause

    begun = invented(interrupted)
    with pytest.raises(Interrupted, match=f"go on with: jaxpfl sweep {tmp_path}/out$") as caught:
        run_sweep(sweep, tmp_path / "out", progress=False)
    assert caught.value.number == signal.SIGTERM and len(begun) == 1
    failed = collect(sweep, tmp_path / "out").failed
    # Another process has the run of a point that is locked.
    assert list(failed) == ([] if isinstance(error, RunLocked) else ["clients_per_round=5"])
    begun = invented(result)
    assert not run_sweep(sweep, tmp_path / "out", progress=False).failed and len(begun) == 3


def test_what_is_taken_back_waits_for_the_lock_of_the_sweep(sweep, tmp_path):
    """Else the sweep that another process begins here at the same time would lose its files."""
    folders.begin(sweep, tmp_path)
    with folders.sweep_lock(tmp_path):
        taking = threading.Thread(target=folders.take_back, args=[tmp_path])
        taking.start()
        taking.join(0.3)
        assert taking.is_alive() and folders.is_sweep(tmp_path)
    taking.join(60)
    assert not folders.is_sweep(tmp_path)


@pytest.mark.parametrize("content", ["", "[]", '{"error": 3, "seconds": "x"}'])
@pytest.mark.parametrize("name", ["failed.json", "private/durations.json"])
def test_a_damaged_record_of_one_point_stops_no_other(sweep, tmp_path, invented, name, content):
    """TRUST 35: the table is made, and the point is tried again."""
    invented(failing(InputError("no")))
    out = tmp_path / "out"
    run_sweep(sweep, out, progress=False)
    path = out / "points" / "clients_per_round=10" / name
    path.write_text(content)
    outcome = collect(sweep, out)
    assert list(outcome.failed) == ["clients_per_round=10"]
    assert [row["runs"] for row in outcome.rows] == [1, 0, 1]
    outcome = run_sweep(sweep, out, progress=False)
    assert not outcome.failed and not outcome.unfinished
    known = [seconds is not None for seconds, _ in outcome.durations]
    assert known == [True, name == "failed.json", True]


def test_a_failure_that_another_process_removes_meanwhile_is_none(sweep, tmp_path, monkeypatch):
    """It tries the point again while this one makes the table."""
    folders.begin(sweep, tmp_path)
    point, real = tmp_path / "points" / "clients_per_round=10", files.read_record
    folders.fail(point, "no")

    def removed(path, *fields):
        if path.name == "failed.json":
            path.unlink()
        return real(path, *fields)

    monkeypatch.setattr(files, "read_record", removed)
    outcome = collect(sweep, tmp_path)
    assert point.name in outcome.unfinished and not outcome.failed


def test_a_point_that_another_process_has_is_left_to_it(sweep, tmp_path, invented):
    begun = invented(result)
    folders.begin(sweep, tmp_path / "out")
    # What another open file holds is locked for this process, too.
    with folders.held(tmp_path / "out" / "points" / "clients_per_round=5"):
        outcome = run_sweep(sweep, tmp_path / "out", progress=False)
        assert outcome.unfinished == ["clients_per_round=5"] and not outcome.failed
        assert begun == ["clients_per_round=10", "clients_per_round=20"]
    outcome = run_sweep(sweep, tmp_path / "out", progress=False)
    assert begun[2:] == ["clients_per_round=5"] and not outcome.unfinished


def test_the_point_of_a_process_that_ended_meanwhile_is_taken_over(sweep, tmp_path, invented):
    """Its lock goes with it, and this process looks again."""
    out = tmp_path / "out"
    folders.begin(sweep, out)
    other = folders.held(out / "points" / "clients_per_round=5")
    other.__enter__()

    def result_of(config, _):
        if config.training.clients_per_round == 20:
            other.__exit__(None, None, None)
        return result(config)

    begun = invented(result_of)
    assert not run_sweep(sweep, out, progress=False).unfinished
    assert begun[-1] == "clients_per_round=5"


def test_a_failure_of_another_process_is_not_repeated_at_once(sweep, tmp_path, invented):
    begun = invented(failing(InputError("no"), InputError("no")))
    folders.begin(sweep, tmp_path)
    point = sweep.points[1]
    assert folders.failures(sweep, tmp_path)[point.name] is None
    for times in (1, 1):
        assert carry_out_point(point, tmp_path, "grid", known=None) == "failed"
        assert len(begun) == times
    known = folders.failures(sweep, tmp_path)[point.name]
    assert carry_out_point(point, tmp_path, "grid", known=known) == "failed"
    assert len(begun) == 2


def test_a_lock_is_held_by_one_and_waited_for(tmp_path):
    with files.lock(tmp_path / "x") as first, files.lock(tmp_path / "x") as second:
        assert first and not second
    with files.lock(tmp_path / "x", wait=True) as third:
        assert third
