"""Benchmarks by name: what is compared with what, the picture, and the command."""

import json

from benchmarks import comparison, roofline
from benchmarks.suite import SUITE, sentence
from jaxpfl.cli import main

HERE = {"device": "2 x cpu", "machine": "2 cores, A", "jax": "1"}


def stored(**row):
    return {"date": "2026-11-01 10:00", **HERE, **row}


def test_a_row_is_compared_with_the_last_row_of_the_same_setting_and_machine():
    rows = [stored(what="door", clients=10, seconds=2.0)]
    earlier = [
        stored(what="door", clients=10, seconds=9.0),
        stored(what="door", clients=10, seconds=4.0, jax="0"),
        stored(what="door", clients=20, seconds=1.0),
        stored(what="read", clients=10, seconds=1.0),
        stored(what="door", clients=10, seconds=1.0) | {"machine": "2 cores, B"},
        stored(what="door", clients=10, seconds=1.0) | {"device": "1 x gpu"},
    ]
    (found,) = comparison.compared(rows, earlier)
    assert (found.unit, found.now, found.before, found.better) == ("seconds", 2.0, 4.0, 2.0)


def test_a_higher_rate_is_better_and_a_new_row_is_compared_with_nothing():
    rows = [stored(what="door", seconds=2.0, **{"GB/s": 30.0}), stored(what="read", ms=1.0)]
    earlier = [stored(what="door", seconds=1.0, **{"GB/s": 20.0})]
    door, read = comparison.compared(rows, earlier)
    assert (door.unit, door.better) == ("GB/s", 1.5)
    assert (read.before, read.date, read.better) == (None, None, None)


def test_the_picture_is_drawn_where_there_are_rates(tmp_path):
    found = comparison.compared([stored(what="step", **{"GFLOP/s": 80.0})], [])
    path = tmp_path / "roofline.png"
    ceilings = {"GFLOP/s": 100.0, "GB/s": 10.0}
    assert roofline.draw(path, {"model_step": found}, ceilings, "here")
    assert path.exists()
    none = comparison.compared([stored(what="step", seconds=1.0)], [])
    assert not roofline.draw(tmp_path / "none.png", {"model_step": none}, ceilings, "here")
    assert not (tmp_path / "none.png").exists()


def test_the_command_lists_the_names(capsys):
    assert all(len(sentence(each)) > 20 for each in SUITE.values())
    assert main(["bench", "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)["benchmarks"]) == set(SUITE)


def test_an_unknown_name_is_refused_before_anything_runs(capfd, tmp_path):
    assert main(["bench", "agregate", "--out", str(tmp_path / "out")]) == 2
    assert "aggregate" in capfd.readouterr().err
    assert not (tmp_path / "out").exists()
