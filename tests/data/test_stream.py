"""Populations in batches: the same folder as in one piece, whatever the batches."""

from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest

from jaxpfl.data import Population
from jaxpfl.data.population import collect
from jaxpfl.data.sequences import Sequences
from jaxpfl.data.storage import _new, write
from jaxpfl.data.stream import Batch, Stream
from jaxpfl.errors import InputError
from tests.data.populations import same, small


def cut(population: Population, edges: list[int]) -> Stream:
    """The population in batches that end before the examples `edges`, and at the end."""

    def batches():
        first, seen = 0, 0
        for end in [*edges, population.num_examples]:
            columns = {name: column[first:end] for name, column in population.columns.items()}
            done = int(np.searchsorted(population.offsets[1:], end, "right"))
            ids = population.client_ids[seen:done].to_pylist()
            yield Batch(columns, ids, population.sizes()[seen:done].tolist())
            first, seen = end, done

    return Stream(batches(), population.num_examples, population.name, population.unit)


def source(population: Population, edges: list[int]):
    """What opens `cut`, and leaves a file in its folder of temporary files."""

    def opened(folder: Path):
        (folder / "unpacked").touch()
        return nullcontext(cut(population, edges))

    return opened


def of(*batches: Batch, **options):
    return lambda folder: nullcontext(Stream(iter(batches), 2, "n", "u", **options))


TOKENS = Sequences(np.arange(9, dtype=np.uint32), np.array([0, 2, 2, 9]), {"words": 9})
POPULATIONS = {
    "all kinds": small(),
    "token ids": Population({"tokens": TOKENS}, [0, 1, 3], ["a", "b"]),
    "no clients": Population({"x": np.zeros(0), "t": np.array([], "U1")}, [0], []),
    "no examples": Population(
        {"x": np.zeros((0, 3), np.int16), "t": np.array([], "U1")}, [0, 0], ["a"]
    ),
}


@pytest.mark.parametrize("kind", POPULATIONS)
@pytest.mark.parametrize("edges", [[], [1], [0, 0, 1, 2, 2]], ids=str)
def test_a_streamed_folder_is_the_saved_one(kind, edges, tmp_path):
    """TRUST 40: its fingerprint is computed while it is written."""
    population = POPULATIONS[kind]
    edges = [edge for edge in edges if edge <= population.num_examples]
    population.save(tmp_path / "saved")
    expected = len(population), population.num_examples
    assert write(tmp_path / "streamed", source(population, edges)) == expected
    saved, streamed = (sorted((tmp_path / name).iterdir()) for name in ("saved", "streamed"))
    assert [path.name for path in saved] == [path.name for path in streamed]
    for one, other in zip(saved, streamed, strict=True):
        assert one.read_bytes() == other.read_bytes()
    loaded = Population.load(tmp_path / "streamed")
    assert (loaded.fingerprint, loaded.content) == (population.fingerprint, population.content)
    assert (tmp_path / "streamed").stat().st_mode & 0o777 == 0o700
    assert {path.name for path in tmp_path.iterdir()} == {"saved", "streamed"}
    if kind == "all kinds":
        same(loaded, population)
        same(collect(cut(population, edges)), population)


def one(**columns) -> Batch:
    return Batch(columns, ["a"], [1])


FIRST = one(x=np.zeros(1))
NOT_FITTING = {
    "columns": ([FIRST], Batch({"y": np.zeros(1)}, [], []), "other columns"),
    "type": ([FIRST], Batch({"x": np.zeros(1, int)}, ["b"], [1]), "holds int64.*float64"),
    "shape": ([FIRST], Batch({"x": np.zeros((1, 2))}, ["b"], [1]), "the first one float64"),
    "text": ([FIRST], Batch({"x": ["a"]}, ["b"], [1]), "holds text"),
}


@pytest.mark.parametrize("first, second, what", NOT_FITTING.values(), ids=NOT_FITTING)
def test_batches_that_do_not_fit_leave_nothing(first, second, what, tmp_path):
    with pytest.raises(InputError, match=what):
        write(tmp_path / "out" / "streamed", of(*first, second))
    assert list((tmp_path / "out").iterdir()) == []


def test_what_a_killed_process_left_is_removed_and_a_living_one_is_not_disturbed(tmp_path):
    left = tmp_path / ".out.partial" / "unpacked"
    left.mkdir(parents=True)
    (left / "torn").touch()
    write(tmp_path / "out", source(small(), [4]))
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    same(Population.load(tmp_path / "out"), small())
    with _new(tmp_path / "two"), pytest.raises(InputError, match="another process"):
        write(tmp_path / "two", source(small(), []))


def test_splitting_of_the_text_is_kept(tmp_path):
    write(tmp_path / "out", of(one(text=["a b"]), splitting="spaces"))
    loaded = Population.load(tmp_path / "out")
    assert loaded.splitting == loaded.select([0]).splitting == "spaces"
