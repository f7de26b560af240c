"""A sweep's directory: failures are recorded, repetitions are counted."""

import json
import os
import re

import pytest
import yaml

from jaxpfl import cli, files
from jaxpfl.errors import BudgetExhausted, InputError
from jaxpfl.experiments.sweep.config import load_sweep
from jaxpfl.experiments.sweep.directory import PointFolder
from jaxpfl.experiments.sweep.points import run_sweep
from tests.experiments.sweep.three_points import failing, result

SECRET = "the text of a client"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        # A page does not name the folder that somebody works in.
        (InputError(f"s: no such file{files.where('s')}"), "s: no such file in the working folder"),
        (BudgetExhausted("the budget is spent"), "the budget is spent"),
        (OSError(28, "No space left on device", "x.npz"), "x.npz: No space left on device"),
        (RuntimeError(SECRET), "RuntimeError, a fault of the program"),
    ],
)
def test_a_failed_point_is_recorded_and_tried_again(path, tmp_path, invented, capsys, error, said):
    begun = invented(failing(error))
    command = ["sweep", str(path), "--out", str(tmp_path / "out")]
    assert cli.main(command) == 4
    printed = capsys.readouterr()
    assert f"failed: clients_per_round=10: {said}" in printed.out
    assert len(begun) == 3
    record = json.loads((tmp_path / "out" / "sweep.json").read_text())
    states = [point["state"] for point in record["points"]]
    assert states == ["finished", "failed", "finished"]
    assert said in record["points"][1]["error"]
    assert [row["mean"] for row in record["rows"]] == [7.05, None, 7.2]
    page = (tmp_path / "out" / "report.html").read_text()
    assert said in page and "2 of 3 points" in page and "FAILED" in page
    # Only what is known not to hold a client's data is shown; a fault is kept for the owner.
    assert SECRET not in page + json.dumps(record) + printed.out + printed.err
    if type(error) is RuntimeError:
        private = tmp_path / "out" / "points" / "clients_per_round=10" / "private"
        assert private.stat().st_mode & 0o077 == 0
        assert SECRET in (private / "failure.txt").read_text()
    assert cli.main(command) == 0
    assert begun[3:] == ["clients_per_round=10"]
    assert "\nfailed" not in capsys.readouterr().out
    assert "FAILED" not in (tmp_path / "out" / "report.html").read_text()


def test_a_metric_that_is_not_there_is_said_after_the_first_point(sweep, tmp_path, invented):
    begun = invented(lambda *_: {"metrics": {"loss": 1.0}, "private": True})
    with pytest.raises(InputError, match="one of loss, found 'accuracy'"):
        run_sweep(sweep, tmp_path / "out", progress=False)
    assert len(begun) == 1


def test_a_failure_of_a_later_hour_is_tried_again(sweep, tmp_path, invented):
    """TRUST 37: the clock was put back between two calls."""
    begun = invented(failing(InputError("no"), InputError("no")))
    out = tmp_path / "out"
    run_sweep(sweep, out, progress=False)
    (failed,) = out.glob("points/*/failed.json")
    os.utime(failed, (4e9, 4e9))
    before = len(begun)
    run_sweep(sweep, out, progress=False)
    assert len(begun) == before + 1


def test_an_altered_result_is_refused_where_it_stands(sweep, tmp_path, invented):
    invented(result)
    outcome = run_sweep(sweep, tmp_path / "out", progress=False)
    altered = outcome.out / "points" / "clients_per_round=5" / "result.json"
    altered.write_text(altered.read_text().replace("7.05", "7.99"))
    (error,) = run_sweep(sweep, outcome.out, progress=False).failed.values()
    assert "was altered after the point was finished" in error


def test_what_was_refused_as_a_whole_is_corrected_in_the_same_directory(path, tmp_path, invented):
    def refused(config, _):
        raise InputError("no such file")

    invented(refused)
    outcome = run_sweep(load_sweep(path), tmp_path / "out", progress=False)
    assert len(outcome.failed) == 3
    assert (outcome.out / "report.html").read_text().count("no such file") == 3
    corrected = load_sweep(path, ["--privacy.clip_norm", "0.7"])
    # Not while another process may be about to begin.
    held = PointFolder(tmp_path / "out" / "points" / "clients_per_round=5").claimed()
    with held, pytest.raises(InputError, match="holds another sweep"):
        run_sweep(corrected, tmp_path / "out", progress=False)
    invented(result)
    assert not run_sweep(corrected, tmp_path / "out", progress=False).failed
    with pytest.raises(InputError, match="holds another sweep"):
        run_sweep(load_sweep(path), tmp_path / "out", progress=False)


def test_seeds_repeat_every_point_from_the_first_on(path, tmp_path, invented, capsys):
    invented(result)
    sweep = load_sweep(path, seeds=3)
    assert [point.config.run.seed for point in sweep.points] == [7, 8, 9] * 3
    assert cli.main(["sweep", str(path), "--out", str(tmp_path / "out"), "--seeds", "3"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"^5 +8\.05 +1 +3 of 3$", text, re.MULTILINE)
    record = json.loads((tmp_path / "out" / "sweep.json").read_text())
    assert "a mean over repetitions: each of them is a point that spent its own" in record["note"]
    assert record["note"] in (tmp_path / "out" / "report.html").read_text()
    # They replace those of the file.
    mapping = yaml.safe_load(path.read_text())
    mapping["grid"]["run.seed"] = [3, 5, 11]
    path.write_text(yaml.safe_dump(mapping))
    assert {point.config.run.seed for point in load_sweep(path, seeds=2).points} == {3, 4}
