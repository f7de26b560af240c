"""A sweep's directory that processes share, or in which a record or a process is lost."""

import os
import signal
from functools import partial

import pytest

from jaxpfl import files
from jaxpfl.errors import BudgetExhausted, InputError, Interrupted, RunLocked
from jaxpfl.experiments.sweep.directory import PointFolder, begin
from jaxpfl.experiments.sweep.points import carry_out_point, here, run_sweep
from jaxpfl.experiments.sweep.results import collect
from jaxpfl.signals import caught_signals
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
    with pytest.raises(Interrupted, match="the same command goes on$") as caught:
        run_sweep(sweep, tmp_path / "out", progress=False)
    assert caught.value.number == signal.SIGTERM and len(begun) == 1
    failed = collect(sweep, tmp_path / "out").failed
    # Another process has the run of a point that is locked.
    assert list(failed) == ([] if isinstance(error, RunLocked) else ["clients_per_round=5"])
    begun = invented(result)
    assert not run_sweep(sweep, tmp_path / "out", progress=False).failed and len(begun) == 3


@pytest.mark.parametrize("content", ["", "[]", '{"error": 3}'])
def test_a_damaged_record_of_one_point_stops_no_other(sweep, tmp_path, invented, content):
    """TRUST 35: the table is made, and the point is tried again."""
    invented(failing(InputError("no")))
    out = tmp_path / "out"
    run_sweep(sweep, out, progress=False)
    path = out / "points" / "clients_per_round=10" / "failed.json"
    path.write_text(content)
    outcome = collect(sweep, out)
    assert list(outcome.failed) == ["clients_per_round=10"]
    assert [row["runs"] for row in outcome.rows] == [1, 0, 1]
    outcome = run_sweep(sweep, out, progress=False)
    assert not outcome.failed and not outcome.unfinished


def test_a_failure_that_another_process_removes_meanwhile_is_none(sweep, tmp_path, monkeypatch):
    """It tries the point again while this one makes the table."""
    begin(sweep, tmp_path)
    point, real = tmp_path / "points" / "clients_per_round=10", files.read_record
    point.mkdir(parents=True)
    PointFolder(point).fail(InputError("no"))

    def removed(path, *fields):
        if path.name == "failed.json":
            path.unlink()
        return real(path, *fields)

    monkeypatch.setattr(files, "read_record", removed)
    outcome = collect(sweep, tmp_path)
    assert point.name in outcome.unfinished and not outcome.failed


def test_a_point_that_another_process_has_is_left_to_it(sweep, tmp_path, invented):
    begun = invented(result)
    begin(sweep, tmp_path / "out")
    # What another open file holds is locked for this process, too.
    with PointFolder(tmp_path / "out" / "points" / "clients_per_round=5").claimed():
        outcome = run_sweep(sweep, tmp_path / "out", progress=False)
        assert outcome.unfinished == ["clients_per_round=5"] and not outcome.failed
        assert begun == ["clients_per_round=10", "clients_per_round=20"]


def test_the_point_of_a_process_that_ended_meanwhile_is_taken_over(sweep, tmp_path, invented):
    """Its lock goes with it, and this process looks again."""
    out = tmp_path / "out"
    begin(sweep, out)
    other = PointFolder(out / "points" / "clients_per_round=5").claimed()
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
    begin(sweep, tmp_path)
    point = sweep.points[1]
    folder = PointFolder.of(point, tmp_path)
    for _ in range(2):
        assert carry_out_point(point, folder, None, partial(here, {}))
        assert len(begun) == 1
    assert carry_out_point(point, folder, folder.failure, partial(here, {}))
    assert len(begun) == 2


def test_a_lock_is_held_by_one_and_waited_for(tmp_path):
    with files.lock(tmp_path / "x") as first, files.lock(tmp_path / "x") as second:
        assert first and not second
    with files.lock(tmp_path / "x", wait=True) as third:
        assert third
