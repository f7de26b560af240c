"""A sweep's directory: failures are recorded, repetitions are counted."""

import json
import math
import os
import re

import pytest
import yaml

from jaxpfl import cli, files
from jaxpfl.errors import BudgetExhausted, InputError, NoDataFolder
from jaxpfl.experiments.sweep import directory as folders
from jaxpfl.experiments.sweep.config import load_sweep
from jaxpfl.experiments.sweep.points import run_sweep
from tests.experiments.sweep.three_points import failing, result

SECRET = "the text of a client"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (InputError("data.source: no such file"), "data.source: no such file"),
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
    private = tmp_path / "out" / "points" / "clients_per_round=10" / "private"
    assert private.stat().st_mode & 0o077 == 0
    if type(error) is RuntimeError:
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


def test_a_point_whose_metric_is_not_finite_stops_nothing(path, tmp_path, invented, capsys):
    out = tmp_path / "out"

    def diverged(config, _):
        value = math.inf if config.training.clients_per_round == 5 else 0.5
        return {"metrics": {"accuracy": value}, "private": True, "privacy": "(8, 0)"}

    begun = invented(diverged)
    assert cli.main(["sweep", str(path), "--out", str(out)]) == 0
    assert len(begun) == 3 and "not finite" in capsys.readouterr().out
    assert cli.main(["sweep", str(out)]) == 0


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


def test_points_of_an_unknown_sweep_are_not_taken_for_this_one(sweep, tmp_path):
    (tmp_path / "points" / "clients_per_round=5").mkdir(parents=True)
    (tmp_path / "points" / "clients_per_round=5" / "config.yaml").touch()
    with pytest.raises(InputError, match="holds another sweep"):
        run_sweep(sweep, tmp_path, progress=False)


def test_what_was_refused_as_a_whole_is_corrected_in_the_same_directory(path, tmp_path, invented):
    def refused(config, _):
        raise InputError("no such file")

    invented(refused)
    outcome = run_sweep(load_sweep(path), tmp_path / "out", progress=False)
    assert len(outcome.failed) == 3
    assert (outcome.out / "report.html").read_text().count("no such file") == 3
    corrected = load_sweep(path, ["--privacy.clip_norm", "0.7"])
    # Not while another process may be about to begin.
    held = folders.held(tmp_path / "out" / "points" / "clients_per_round=5")
    with held, pytest.raises(InputError, match="holds another sweep"):
        run_sweep(corrected, tmp_path / "out", progress=False)
    invented(result)
    assert not run_sweep(corrected, tmp_path / "out", progress=False).failed
    with pytest.raises(InputError, match="holds another sweep"):
        run_sweep(load_sweep(path), tmp_path / "out", progress=False)


def test_without_the_name_of_the_data_nothing_is_left(sweep, tmp_path, invented):
    def refused(config, _):
        raise NoDataFolder("JAXPFL_DATA is not set")

    begun = invented(refused)
    with pytest.raises(NoDataFolder):
        run_sweep(sweep, tmp_path / "out", progress=False)
    # But the file that other processes may wait for.
    assert len(begun) == 1 and os.listdir(tmp_path / "out") == ["sweep.lock"]


def test_a_begun_sweep_goes_on_from_its_directory(path, sweep, tmp_path, invented):
    invented(failing(InputError("no")))
    out = tmp_path / "out"
    cli.main(["sweep", str(path), "--out", str(out)])
    path.unlink()
    begun = folders.load_begun(out)
    assert begun == sweep and [p.config for p in begun.points] == [p.config for p in sweep.points]
    (out / "report.html").unlink()
    assert cli.main(["sweep", str(out)]) == 0
    assert (out / "report.html").exists()


def test_seeds_repeat_every_point_from_the_first_on(path, tmp_path, invented, capsys):
    invented(result)
    sweep = load_sweep(path, seeds=3)
    assert [point.config.run.seed for point in sweep.points] == [7, 8, 9] * 3
    assert cli.main(["sweep", str(path), "--out", str(tmp_path / "out"), "--seeds", "3"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"^5 +8\.05 +1 +3 ", text, re.MULTILINE)
    record = json.loads((tmp_path / "out" / "sweep.json").read_text())
    assert "a mean over repetitions: each of them is a point that spent its own" in record["note"]
    assert record["note"] in (tmp_path / "out" / "report.html").read_text()
    # They replace those of the file.
    mapping = yaml.safe_load(path.read_text())
    mapping["grid"]["run.seed"] = [3, 5, 11]
    path.write_text(yaml.safe_dump(mapping))
    assert {point.config.run.seed for point in load_sweep(path, seeds=2).points} == {3, 4}


@pytest.mark.parametrize(
    ("change", "seeds", "message"),
    [
        ({}, 0, "--seeds must be at least 1"),
        ({}, 10**12, "--seeds must be at most"),
        ({"base": None}, None, "base must be text, found None"),
        ({"base": "a\0b"}, None, "the config cannot be read: no file has such a name"),
        ({"metric": None}, None, "metric must be text, found None"),
        ({"cases": {"a": {"run.seed": 1}}}, 2, "--seeds needs cases without run.seed.*'a'"),
    ],
)
def test_seeds_that_cannot_be(path, change, seeds, message):
    path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | change))
    with pytest.raises(InputError, match=message):
        load_sweep(path, seeds=seeds)


def test_durations_are_for_the_terminal_alone(path, tmp_path, invented, capsys, monkeypatch):
    """docs/threat_model.md: they depend on what the clients hold."""
    invented(result)
    clock = iter(range(0, 10_000, 123))
    monkeypatch.setattr(folders.time, "monotonic", lambda: next(clock))
    out = tmp_path / "out"
    assert cli.main(["sweep", str(path), "--out", str(out)]) == 0
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("20 "))
    # 3 rounds of 20 clients in 123 seconds.
    assert row.split()[2:] == ["2", "min", "3", "s", "0.49"]
    outside = [each for each in out.rglob("*") if each.is_file() and "private" not in each.parts]
    for each in outside:
        assert b"123" not in each.read_bytes() or each.name == "sweep.png", each
    for each in out.rglob("private"):
        assert each.stat().st_mode & 0o077 == 0


def test_the_time_of_a_point_that_was_killed_is_not_known(sweep, tmp_path, invented):
    folder = tmp_path / "out" / "points" / "clients_per_round=5" / "private"
    folders.begin(sweep, tmp_path / "out")
    folder.mkdir(parents=True)
    files.write_json(folder / "durations.json", {"seconds": 0.0, "begun": 1, "ended": 0})
    begun = invented(result)
    outcome = run_sweep(sweep, tmp_path / "out", progress=False)
    assert len(begun) == 3
    assert [pair[0] is None for pair in outcome.durations] == [True, False, False]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--ray", "2", "--dry-run"], "--ray goes with neither"),
        (["--ray", "0"], "--ray must be at least 1"),
    ],
)
def test_options_that_do_not_go_together(path, capsys, options, message):
    assert cli.main(["sweep", str(path), *options]) == 2
    assert message in capsys.readouterr().err
