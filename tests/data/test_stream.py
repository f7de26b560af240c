"""Populations in batches: the same folder as in one piece, whatever the batches."""

import json

import numpy as np
import pytest

from jaxpfl.data import Population, stream
from jaxpfl.data.stream import Batch, Stream, collect, write
from jaxpfl.errors import InputError
from tests.data.populations import same, small


def cut(population: Population, edges: list[int]) -> Stream:
    """The population in batches that end before the examples `edges`, and at the end."""

    def batches():
        begin, told = 0, 0
        for end in [*edges, population.num_examples]:
            columns = {name: column[begin:end] for name, column in population.columns.items()}
            done = int(np.searchsorted(population.offsets[1:], end, "right"))
            ids = population.client_ids[told:done].to_pylist()
            yield Batch(columns, ids, population.sizes()[told:done].tolist())
            begin, told = end, done

    return Stream(batches(), population.num_examples, population.name, population.unit)


@pytest.mark.parametrize("edges", [[], [5], [0, 0, 1, 2, 7, 7, 10]])
def test_streamed_folder_is_the_saved_one(edges, tmp_path, monkeypatch):
    monkeypatch.setattr(stream, "_PIECE", 64)
    population = small()
    population.save(tmp_path / "saved")
    assert write(tmp_path / "streamed", cut(population, edges)) == (4, 10)
    same(Population.load(tmp_path / "streamed"), population)
    same(collect(cut(population, edges)), population)
    manifests = [json.loads((tmp_path / f / "manifest.json").read_text()) for f in FOLDERS]
    assert manifests[0].keys() == manifests[1].keys()
    for key in ("fingerprint", "content", "columns", "clients", "examples", "name", "unit"):
        assert manifests[0][key] == manifests[1][key]
    names = [{file.name for file in (tmp_path / folder).iterdir()} for folder in FOLDERS]
    assert names[0] == names[1]
    loaded = Population.load(tmp_path / "streamed")
    assert not loaded.columns["image"].flags.owndata
    assert (tmp_path / "streamed").stat().st_mode & 0o777 == 0o700


FOLDERS = ("saved", "streamed")


def test_fingerprint_is_that_of_the_content(tmp_path):
    """Computed from files while writing: the same as from the columns in memory."""
    population = small()
    write(tmp_path / "streamed", cut(population, [3]))
    loaded = Population.load(tmp_path / "streamed")
    anew = Population(loaded.columns, loaded.offsets, loaded.client_ids)
    assert anew.fingerprint == population.fingerprint == loaded.fingerprint


def test_no_examples_at_all(tmp_path):
    empty = Population({"x": np.zeros((0, 3), np.int16), "t": np.array([], "U1")}, [0, 0], ["a"])
    write(tmp_path / "streamed", cut(empty, []))
    same(Population.load(tmp_path / "streamed"), empty)


def one(**columns) -> Batch:
    return Batch(columns, ["a"], [1])


NOT_FITTING = {
    "columns": ([one(x=np.zeros(1))], Batch({"y": np.zeros(1)}, [], []), "other columns"),
    "type": ([one(x=np.zeros(1))], Batch({"x": np.zeros(1, int)}, ["b"], [1]), "holds int64"),
    "shape": (
        [one(x=np.zeros(1))],
        Batch({"x": np.zeros((1, 2))}, ["b"], [1]),
        "the first one float64",
    ),
    "text": ([one(x=np.zeros(1))], Batch({"x": ["a"]}, ["b"], [1]), "holds text"),
    "sizes": ([one(x=np.zeros(1))], Batch({"x": np.zeros(1)}, ["b"], [2]), "sum to its examples"),
    "ids": ([one(x=np.zeros(1))], Batch({"x": np.zeros(1)}, ["a"], [1]), "different ids"),
    "ragged": ([], Batch({"x": np.zeros(1), "y": np.zeros(2)}, ["a"], [1]), "sum to its examples"),
    "nothing": ([], Batch({}, [], []), "at least one column"),
}


@pytest.mark.parametrize("first, second, what", NOT_FITTING.values(), ids=NOT_FITTING)
def test_batches_that_do_not_fit_leave_nothing(first, second, what, tmp_path):
    batches = iter([*first, second])
    with pytest.raises(InputError, match=what):
        write(tmp_path / "out" / "streamed", Stream(batches, 2, "n", "u"))
    assert list((tmp_path / "out").iterdir()) == []


def test_a_stream_that_breaks_leaves_nothing(tmp_path):
    def batches():
        yield one(x=np.zeros(1))
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        write(tmp_path / "out" / "streamed", Stream(batches(), 2, "n", "u"))
    assert list((tmp_path / "out").iterdir()) == []


def test_an_existing_folder_is_kept(tmp_path):
    small().save(tmp_path / "saved")
    with pytest.raises(InputError, match="exists already"):
        write(tmp_path / "saved", cut(small(), []))
    same(Population.load(tmp_path / "saved"), small())


def test_progress_counts_examples(tmp_path):
    told = []
    write(tmp_path / "streamed", cut(small(), [4, 4, 9]), told.append)
    assert told == [4, 4, 9, 10]
