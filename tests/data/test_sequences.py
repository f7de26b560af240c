"""Token ids of any length on the disk, and the rows that a model reads of them."""

import itertools

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpfl.data import Cohort, CohortSpec, Population
from jaxpfl.data.sequences import Padded, Sequences
from jaxpfl.errors import InputError
from jaxpfl.models import PAD

LISTS = st.lists(st.lists(st.integers(0, 9), max_size=5), max_size=7)


def of(lists: list[list[int]], dtype: type = np.uint16) -> Sequences:
    edges = np.cumsum([0, *map(len, lists)], dtype=np.int64)
    return Sequences(np.array([i for each in lists for i in each], dtype), edges, {"words": 10})


def padded(lists: list[list[int]], length: int) -> np.ndarray:
    """The reference, one value after the other."""
    rows = np.full((len(lists), length), PAD, np.int32)
    for row, each in enumerate(lists):
        for place, value in enumerate(each[:length]):
            rows[row, place] = value
    return rows


@given(LISTS, st.integers(1, 7), st.data(), st.sampled_from([np.uint16, np.uint32]))
def test_rows_are_cut_and_padded(lists, length, data, dtype):
    column = Padded(of(lists, dtype), length)
    expected = padded(lists, length)
    assert np.array_equal(np.asarray(column), expected)
    assert np.asarray(column).dtype == column.dtype == np.int32
    assert column.shape == expected.shape and column.ndim == 2
    rows = np.array(data.draw(st.lists(st.integers(0, len(lists) - 1))) if lists else [], np.int64)
    assert np.array_equal(column[rows], expected[rows])
    assert np.array_equal(column.select(rows)[:2], expected[rows][:2])
    part = data.draw(st.slices(len(lists)))
    assert np.array_equal(np.asarray(column.select(part)), expected[part])


@given(LISTS, st.data())
def test_what_is_selected_can_be_stored_alone(lists, data):
    part = data.draw(st.slices(len(lists)))
    kept = of(lists)[part]
    rows = data.draw(st.permutations(range(len(kept))))
    found = kept[np.array(rows, np.int64)].compact()
    expected = [lists[part][row] for row in rows]
    assert [each.tolist() for each in found.to_list()] == expected
    assert len(found.values) == sum(map(len, expected))


@pytest.mark.parametrize(
    ("values", "edges"),
    [
        (np.zeros(3, np.int32), np.array([0, 3])),
        (np.zeros((3, 1), np.uint16), np.array([0, 3])),
        (np.zeros(3, np.uint16), np.array([0, 4])),
        (np.zeros(3, np.uint16), np.array([0, 3], np.int32)),
        (np.zeros(3, np.uint16), np.array([], np.int64)),
    ],
)
def test_what_is_no_sequence_is_refused(values, edges):
    with pytest.raises(InputError):
        Sequences(values, edges, {})


@pytest.fixture
def clients() -> Population:
    generator = np.random.default_rng(0)
    lists = [generator.integers(0, 9, size).tolist() for size in generator.integers(0, 9, 60)]
    return Population({"tokens": of(lists)}, [0, 0, 5, 6, 40, 60], list("abcde"))


def test_saved_ids_come_back_mapped(clients, tmp_path):
    clients.save(tmp_path / "saved")
    allocated = pa.total_allocated_bytes()
    loaded = Population.load(tmp_path / "saved")
    held, before = loaded.columns["tokens"], clients.columns["tokens"]
    assert pa.total_allocated_bytes() - allocated <= 1024
    assert not np.asarray(held.values).flags.owndata
    assert np.array_equal(held.values, before.values) and held.encoding == before.encoding
    for part in (loaded.select([1, 2, 3]), loaded.select([3, 1]), loaded.split({"a": 1.0}, 0)["a"]):
        assert np.shares_memory(np.asarray(part.columns["tokens"].values), np.asarray(held.values))
    loaded.select([3, 1]).save(tmp_path / "part")
    assert Population.load(tmp_path / "part").content == clients.select([3, 1]).content
    assert len(Population.load(tmp_path / "part").columns["tokens"].values) < len(held.values)


def test_a_cohort_of_ids_is_that_of_rows_in_memory(clients):
    spec = CohortSpec(batch_size=4, max_examples=12, epochs=2, clients_per_bucket=2)
    rows = Padded(clients.columns["tokens"], 6)
    lazy, made = (clients.with_columns({"tokens": each}) for each in (rows, np.asarray(rows)))
    for chosen in ([0, 1, 2, 3, 4], [4, 2], [0]):
        buckets = [Cohort(each, chosen, spec, seed=1, round=2) for each in (lazy, made)]
        for found, expected in itertools.zip_longest(*buckets):
            assert np.array_equal(found.batches["tokens"], expected.batches["tokens"])
            assert np.array_equal(found.mask, expected.mask)


def test_ids_without_a_length_are_no_rows(clients):
    with pytest.raises(InputError, match="token ids uint16"):
        Cohort(clients, [1], CohortSpec(batch_size=4, max_examples=12), seed=1, round=1)
