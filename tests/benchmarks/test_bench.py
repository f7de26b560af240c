"""Benchmarks by name: what is compared with what, the picture, and the command."""

from functools import partial

import pytest

from benchmarks import comparison, roofline
from benchmarks.__main__ import Config
from benchmarks.__main__ import main as run
from benchmarks.suite import SUITE, sentence

HERE = {"device": "2 x cpu", "machine": "2 cores, A", "jax": "1"}


def stored(**row):
    return {"date": "2026-11-01 10:00", **HERE, **row}


def test_a_row_is_compared_with_the_last_row_of_the_same_setting_and_machine():
    """A higher rate is better; a new row is compared with nothing."""
    door = partial(stored, what="door")
    rows = [door(clients=10, seconds=2.0), door(**{"GB/s": 30.0}), stored(what="read", ms=1.0)]
    earlier = [
        door(clients=10, seconds=9.0),
        door(clients=10, seconds=4.0, jax="0"),
        door(clients=20, seconds=1.0),
        stored(what="read", clients=10, seconds=1.0),
        door(clients=10, seconds=1.0) | {"machine": "2 cores, B"},
        door(clients=10, seconds=1.0) | {"device": "1 x gpu"},
        door(**{"GB/s": 20.0}),
    ]
    time, rate, new = comparison.compared(rows, earlier)
    assert (time.unit, time.now, time.before, time.better) == ("seconds", 2.0, 4.0, 2.0)
    assert (rate.unit, rate.better) == ("GB/s", 1.5)
    assert (new.before, new.date, new.better) == (None, None, None)


def test_the_picture_is_drawn_where_there_are_rates(tmp_path):
    found = comparison.compared([stored(what="step", **{"GFLOP/s": 80.0})], [])
    path = tmp_path / "roofline.png"
    ceilings = {"GFLOP/s": 100.0, "GB/s": 10.0}
    assert roofline.draw(path, {"model_step": found}, ceilings, "here")
    assert path.exists()
    none = comparison.compared([stored(what="step", seconds=1.0)], [])
    assert not roofline.draw(tmp_path / "none.png", {"model_step": none}, ceilings, "here")
    assert not (tmp_path / "none.png").exists()


def test_the_command_lists_the_names_and_refuses_others(capsys, tmp_path):
    assert all(len(sentence(each)) > 20 for each in SUITE.values())
    run(Config())
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(SUITE)
    with pytest.raises(SystemExit, match="did you mean 'aggregate'"):
        run(Config(("agregate",), out=tmp_path / "out"))
    assert not (tmp_path / "out").exists()
