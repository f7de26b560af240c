"""Populations in batches: the same folder as in one piece, whatever the batches and crashes."""

import json
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest

from jaxpfl.data import Population, staging
from jaxpfl.data.sequences import Sequences
from jaxpfl.data.stream import Batch, Source, Stream, collect, of_population, write
from jaxpfl.errors import InputError
from jaxpfl.progress import Progress
from tests.data.populations import same, small


def cut(population: Population, edges: list[int], begin: int = 0) -> Stream:
    """The population in batches that end before the examples `edges`, and at the end."""

    def batches():
        first, told = 0, 0
        for end in [*edges, population.num_examples]:
            rows = slice(max(first, begin), max(end, begin))
            columns = {name: column[rows] for name, column in population.columns.items()}
            done = int(np.searchsorted(population.offsets[1:], end, "right"))
            ids = population.client_ids[told:done].to_pylist()
            yield Batch(columns, ids, population.sizes()[told:done].tolist())
            first, told = end, done

    return Stream(batches(), population.num_examples, population.name, population.unit)


def source(population: Population, edges: list[int]) -> Source:
    """`cut` as a source, which leaves a file in its folder of temporary files."""

    def stream(begin: int, folder: Path):
        (folder / "unpacked").touch()
        return nullcontext(cut(population, edges, begin))

    return Source({"name": population.name}, stream)


def of(*batches: Batch) -> Source:
    return Source({}, lambda begin, folder: nullcontext(Stream(iter(batches), 2, "n", "u")))


@pytest.mark.parametrize("edges", [[], [5], [0, 0, 1, 2, 7, 7, 10]])
def test_streamed_folder_is_the_saved_one(edges, tmp_path, monkeypatch):
    monkeypatch.setattr(staging, "_PIECE", 64)
    population = small()
    population.save(tmp_path / "saved")
    assert write(tmp_path / "streamed", source(population, edges)) == (4, 10)
    same(Population.load(tmp_path / "streamed"), population)
    same(collect(cut(population, edges)), population)
    for name in ("manifest.json", "examples.arrow", "clients.arrow"):
        saved, streamed = (tmp_path / folder / name for folder in ("saved", "streamed"))
        assert saved.read_bytes() == streamed.read_bytes()
    names = [{file.name for file in (tmp_path / folder).iterdir()} for folder in FOLDERS]
    assert names[0] == names[1]
    loaded = Population.load(tmp_path / "streamed")
    assert not loaded.columns["image"].flags.owndata
    assert (tmp_path / "streamed").stat().st_mode & 0o777 == 0o700
    assert {path.name for path in tmp_path.iterdir()} == set(FOLDERS)


FOLDERS = ("saved", "streamed")


def test_fingerprint_is_that_of_the_content(tmp_path):
    """Computed from files while writing: the same as from the columns in memory."""
    population = small()
    write(tmp_path / "streamed", source(population, [3]))
    loaded = Population.load(tmp_path / "streamed")
    anew = Population(loaded.columns, loaded.offsets, loaded.client_ids)
    assert anew.fingerprint == population.fingerprint == loaded.fingerprint


def test_what_is_derived_keeps_its_source_fingerprint(tmp_path):
    """TRUST 29: a part that is streamed to a folder is charged to its source's ledger."""
    part = small().select([2, 1])
    write(tmp_path / "streamed", of_population(part))
    same(Population.load(tmp_path / "streamed"), part)
    assert Population.load(tmp_path / "streamed").fingerprint == small().fingerprint


def test_no_examples_at_all(tmp_path):
    empty = Population({"x": np.zeros((0, 3), np.int16), "t": np.array([], "U1")}, [0, 0], ["a"])
    write(tmp_path / "streamed", source(empty, []))
    same(Population.load(tmp_path / "streamed"), empty)


def test_token_ids_are_streamed_as_they_are_saved(tmp_path):
    ids = Sequences(np.arange(9, dtype=np.uint32), np.array([0, 2, 2, 9]), {"words": 9})
    clients = Population({"tokens": ids}, [0, 1, 3], ["a", "b"])
    write(tmp_path / "streamed", source(clients, [1, 2]))
    clients.save(tmp_path / "saved")
    for name in ("manifest.json", "examples.arrow"):
        saved, streamed = (tmp_path / folder / name for folder in ("saved", "streamed"))
        assert saved.read_bytes() == streamed.read_bytes()


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
    "ragged": ([], Batch({"x": np.zeros(1), "y": np.zeros(2)}, ["a"], [1]), "one length"),
    "nothing": ([], Batch({}, [], []), "at least one column"),
}


@pytest.mark.parametrize("first, second, what", NOT_FITTING.values(), ids=NOT_FITTING)
def test_batches_that_do_not_fit_leave_nothing(first, second, what, tmp_path):
    with pytest.raises(InputError, match=what):
        write(tmp_path / "out" / "streamed", of(*first, second))
    assert list((tmp_path / "out").iterdir()) == []


class Crash(BaseException):
    """The process ends here, as after SIGKILL: nothing is tidied up."""


def crashing(population: Population, edges: list[int], before: int) -> Source:
    """A source that crashes before the batch with this number."""

    def stream(begin: int, folder: Path):
        whole = cut(population, edges, begin)

        def batches():
            for number, batch in enumerate(whole.batches):
                if number == before:
                    raise Crash
                yield batch

        return nullcontext(Stream(batches(), whole.examples, whole.name, whole.unit))

    return Source({"name": population.name}, stream)


@pytest.mark.parametrize("often", [True, False])
def test_an_interrupted_write_goes_on_to_the_same_bytes(often, tmp_path, monkeypatch):
    monkeypatch.setattr(staging, "_SECONDS_BETWEEN_COMMITS", 0.0 if often else 100.0)
    population, edges = small(), [1, 4, 4, 8]
    write(tmp_path / "straight", source(population, edges))
    for number in range(5):
        out, partial = tmp_path / str(number), tmp_path / f".{number}.partial"
        with pytest.raises(Crash):
            write(out, crashing(population, edges, number))
        assert not out.exists() and partial.stat().st_mode & 0o777 == 0o700
        # Written after the last commit, and perhaps only in part.
        for file in (partial / "staging").glob("[0-9]*"):
            with file.open("ab") as end:
                end.write(b"torn")
        write(out, source(population, edges))
        assert not partial.exists()
        for name in ("manifest.json", "examples.arrow", "clients.arrow"):
            assert (out / name).read_bytes() == (tmp_path / "straight" / name).read_bytes()


@pytest.mark.parametrize("step", ["_copy", "files.fsync_path", "storage.finish", "os.rename"])
def test_a_crash_at_the_end_is_gone_on_with(step, tmp_path, monkeypatch):
    population = small()
    write(tmp_path / "straight", source(population, []))

    def crash(*_):
        raise Crash

    with monkeypatch.context() as patched, pytest.raises(Crash):
        patched.setattr(f"jaxpfl.data.staging.{step}", crash)
        write(tmp_path / "out", source(population, [2]))
    if (tmp_path / "out").exists():
        return
    write(tmp_path / "out", source(population, [2]))
    for path in (tmp_path / "straight").iterdir():
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes()


def test_another_conversion_does_not_go_on_in_its_place(tmp_path, monkeypatch):
    monkeypatch.setattr(staging, "_SECONDS_BETWEEN_COMMITS", 0.0)
    with pytest.raises(Crash):
        write(tmp_path / "out", crashing(small(), [4], 1))
    other = Source({"name": "other"}, source(small(), []).stream)
    with pytest.raises(InputError, match="another conversion"):
        write(tmp_path / "out", other)
    write(tmp_path / "out", source(small(), [4]))
    same(Population.load(tmp_path / "out"), small())


def test_two_processes_do_not_write_the_same_folder(tmp_path):
    with (
        staging.partial_folder(tmp_path / "out"),
        pytest.raises(InputError, match="another process"),
    ):
        write(tmp_path / "out", source(small(), []))


def test_an_error_of_the_machine_keeps_what_was_done(tmp_path, monkeypatch):
    monkeypatch.setattr(staging, "_SECONDS_BETWEEN_COMMITS", 0.0)

    def batches():
        yield one(x=np.zeros(1))
        raise OSError(28, "No space left on device")

    def broken(begin: int, folder: Path):
        return nullcontext(Stream(batches(), 2, "n", "u"))

    with pytest.raises(OSError, match="No space"):
        write(tmp_path / "out", Source({}, broken))
    assert [path.name for path in tmp_path.iterdir()] == [".out.partial"]
    rest = [Batch({"x": np.zeros(0)}, ["a"], [1]), Batch({"x": np.ones(1)}, ["b"], [1])]
    write(tmp_path / "out", of(*rest))
    assert Population.load(tmp_path / "out").columns["x"].tolist() == [0, 1]


def test_an_existing_folder_is_kept(tmp_path):
    small().save(tmp_path / "saved")
    with pytest.raises(InputError, match="exists already"):
        write(tmp_path / "saved", source(small(), []))
    same(Population.load(tmp_path / "saved"), small())


def test_progress_counts_examples(tmp_path):
    told = []

    class Told(Progress):
        def begin(self, done, total=None):
            told.append((done, total))

        def update(self, done, values=None):
            told.append(done)

    write(tmp_path / "streamed", source(small(), [4, 4, 9]), progress=Told("x", progress=False))
    assert told == [(0, 10), 4, 4, 9, 10]


def test_splitting_of_the_text_is_kept(tmp_path):
    stream = Stream(iter([one(text=["a b"])]), 1, "n", "u", splitting="spaces")
    write(tmp_path / "out", Source({}, lambda begin, folder: nullcontext(stream)))
    loaded = Population.load(tmp_path / "out")
    assert loaded.splitting == loaded.select([0]).splitting == "spaces"
    assert json.loads((tmp_path / "out" / "manifest.json").read_text())["splitting"] == "spaces"
