"""Packing a cohort: who is in it, which examples, in which shapes."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpfl.data import Bucket, Cohort, CohortSpec, Population, from_clients, pack
from jaxpfl.errors import InputError


def population(sizes: list[int]) -> Population:
    """Clients of these sizes; example j of client k is 1000 k + j + 1: no zero, all different."""
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    number = np.concatenate(
        [np.zeros(0)] + [1000 * k + np.arange(size) + 1 for k, size in enumerate(sizes)]
    )
    columns = {"x": np.stack([number, -number], 1).astype(np.float32), "y": number.astype(np.int32)}
    return Population(columns, offsets, [f"id {k}" for k in range(len(sizes))], "test", "client")


def packed(sizes, spec, clients=None, *, seed=0, round=0, shards=1) -> list[Bucket]:
    clients = np.arange(len(sizes)) if clients is None else clients
    return list(pack(population(sizes), clients, spec, seed=seed, round=round, shards=shards))


def by_client(buckets) -> dict[int, list[list[int]]]:
    """client -> its steps, each the numbers of its real examples in order."""
    found: dict[int, list[list[int]]] = {}
    for bucket in buckets:
        for slot in np.flatnonzero(bucket.weight):
            client = int(bucket.client[slot])
            assert client not in found, "a client is in the cohort twice"
            found[client] = [
                y[m].tolist()
                for y, m in zip(bucket.batches["y"][slot], bucket.mask[slot], strict=True)
            ]
            found[client] = found[client][: bucket.steps[slot]]
    return found


def flat(steps: list[list[int]]) -> list[int]:
    return [number for step in steps for number in step]


SIZES = st.lists(st.integers(0, 23), max_size=25)
SPECS = st.builds(
    CohortSpec,
    batch_size=st.integers(1, 6),
    max_examples=st.integers(1, 15),
    epochs=st.integers(1, 3),
    clients_per_bucket=st.sampled_from([4, 8, 12]),
)


@given(SIZES, SPECS, st.sampled_from([1, 2, 4]), st.integers(0, 2**70), st.integers(0, 99))
@settings(max_examples=200)
def test_a_cohort_holds_each_client_once_and_what_it_may_use(sizes, spec, shards, seed, round):
    """TRUST 1, 4: every client counts once, also an empty one; caps hold; padding is zeros."""
    buckets = packed(sizes, spec, seed=seed, round=round, shards=shards)
    assert sorted(by_client(buckets)) == list(range(len(sizes)))
    for client, steps in by_client(buckets).items():
        held = set(range(1000 * client + 1, 1000 * client + sizes[client] + 1))
        used = min(sizes[client], spec.max_examples)
        per_epoch = -(-used // spec.batch_size)
        assert len(steps) == spec.epochs * per_epoch
        epochs = [flat(steps[e * per_epoch :][:per_epoch]) for e in range(spec.epochs)]
        for epoch in epochs:
            assert len(epoch) == used and set(epoch) <= held and len(set(epoch)) == used
            # A client over the cap uses one subset in all epochs of a round.
            assert set(epoch) == set(epochs[0])
    for bucket in buckets:
        capacity, rung, batch = bucket.mask.shape
        assert (capacity, batch) == (spec.clients_per_bucket, spec.batch_size)
        assert rung in spec.rungs and bucket.steps.max(initial=0) <= rung
        assert bucket.batches["x"].shape == (capacity, rung, batch, 2)
        dtypes = (bucket.mask.dtype, bucket.steps.dtype, bucket.weight.dtype, bucket.client.dtype)
        assert dtypes == (np.bool_, np.int32, np.float32, np.uint32)
        assert bucket.batches["x"].dtype == np.float32 and bucket.batches["y"].dtype == np.int32
        for column in bucket.batches.values():
            assert not column[~bucket.mask].any(), "padding holds data"
        assert not bucket.mask[bucket.weight == 0].any()
        assert not bucket.steps[bucket.weight == 0].any()
        assert not bucket.client[bucket.weight == 0].any()
        np.testing.assert_array_equal(bucket.batches["x"][..., 0], bucket.batches["y"])
        np.testing.assert_array_equal(bucket.batches["x"][..., 1], -bucket.batches["y"])


@given(SIZES, SPECS, st.sampled_from([1, 2, 4]))
def test_clients_are_dealt_so_that_shards_have_similar_work(sizes, spec, shards):
    for bucket in packed(sizes, spec, shards=shards):
        steps_SxC = bucket.steps.reshape(shards, -1)
        weight_SxC = bucket.weight.reshape(shards, -1)
        assert np.ptp(steps_SxC.sum(1)) <= bucket.steps.max()
        assert np.ptp(weight_SxC.sum(1)) <= 1
        # In each block: clients before padding, those with more steps first.
        assert (np.diff(weight_SxC, axis=1) <= 0).all()
        assert (np.diff(steps_SxC, axis=1) <= 0).all()


@given(SIZES, SPECS, st.integers(0, 99))
def test_buckets_are_filled_by_clients_of_falling_size_and_few(sizes, spec, seed):
    buckets = packed(sizes, spec, seed=seed)
    assert len(buckets) == -(-len(sizes) // spec.clients_per_bucket)
    ordered = np.concatenate([np.zeros(0)] + [b.steps[b.weight == 1] for b in buckets])
    assert (np.diff(ordered) <= 0).all()
    assert len({b.mask.shape for b in buckets}) <= len(spec.rungs)
    for bucket in buckets:
        # The first rung that holds the largest client, not just any.
        assert bucket.mask.shape[1] == min(r for r in spec.rungs if r >= bucket.steps.max())


@given(st.lists(st.integers(0, 23), min_size=2, max_size=25), st.data())
def test_what_a_client_does_depends_on_seed_round_and_itself_alone(sizes, data):
    """Other members of the cohort, their order, capacity and shards change no client's batches."""
    settings_ = dict(batch_size=3, max_examples=10, epochs=2)
    everyone = by_client(packed(sizes, CohortSpec(**settings_), seed=5, round=7))
    some = data.draw(st.lists(st.sampled_from(range(len(sizes))), unique=True, min_size=1))
    capacity = data.draw(st.sampled_from([2, 4, 64]))
    spec = CohortSpec(**settings_, clients_per_bucket=capacity)
    shards = data.draw(st.sampled_from([1, 2]))
    fewer = by_client(packed(sizes, spec, some, seed=5, round=7, shards=shards))
    assert fewer == {client: everyone[client] for client in some}


def test_the_order_in_which_a_cohort_is_given_changes_nothing():
    sizes, spec = [3, 0, 9, 3, 12], CohortSpec(batch_size=4, max_examples=10, clients_per_bucket=2)
    one = packed(sizes, spec, np.array([0, 1, 2, 3, 4]))
    other = packed(sizes, spec, np.array([4, 2, 3, 0, 1]))
    assert len(one) == len(other) == 3
    for a, b in zip(one, other, strict=True):
        for left, right in zip(a[1:], b[1:], strict=True):
            np.testing.assert_array_equal(left, right)
        np.testing.assert_array_equal(a.batches["x"], b.batches["x"])


def test_another_round_seed_or_client_shuffles_anew():
    spec = CohortSpec(batch_size=40, max_examples=40, epochs=2)
    first = by_client(packed([40, 40], spec, seed=1, round=1))
    assert first == by_client(packed([40, 40], spec, seed=1, round=1))
    orders = [
        tuple(np.array(epoch) - 1000 * client)
        for seed, round in [(1, 1), (1, 2), (2, 1), (1 + 2**64, 1)]
        for client, steps in by_client(packed([40, 40], spec, seed=seed, round=round)).items()
        for epoch in steps
    ]
    assert len(set(orders)) == len(orders) == 16


def test_a_client_over_the_cap_uses_another_uniform_subset_each_round():
    """TRUST 4: no example of a large client is never used, none is used more than its share."""
    spec, rounds = CohortSpec(batch_size=5, max_examples=5), 2000
    counts = np.zeros(20)
    for round in range(rounds):
        used = np.array(flat(by_client(packed([20], spec, round=round))[0])) - 1
        counts[used] += 1
    # Binomial(2000, 1/4): standard deviation 19.4; five of them on each side.
    np.testing.assert_array_less(np.abs(counts - rounds / 4), 97)


def test_a_giant_client_costs_no_more_than_the_cap():
    """TRUST 4: shapes, and so memory, come from the caps and not from what a client holds."""
    spec = CohortSpec(batch_size=10, max_examples=40, clients_per_bucket=2)
    giant = Population(
        {"y": np.arange(2_000_001, dtype=np.int32)},
        np.array([0, 2_000_000, 2_000_001]),
        ["giant", "small"],
        "test",
        "client",
    )
    (bucket,) = pack(giant, [0, 1], spec, seed=0, round=0)
    assert bucket.mask.shape == (2, 4, 10)
    assert bucket.mask.sum(axis=(1, 2)).tolist() == [40, 1]
    assert len(np.unique(bucket.batches["y"][0])) == 40


@pytest.mark.parametrize("sizes", [[0], [0, 0, 0, 0, 0], []])
def test_clients_without_examples_are_counted_and_do_nothing(sizes):
    """TRUST 1, 24: all clients empty, or nobody sampled."""
    spec = CohortSpec(batch_size=2, max_examples=8, clients_per_bucket=4)
    buckets = packed(sizes, spec)
    assert sum(int(b.weight.sum()) for b in buckets) == len(sizes)
    assert len(buckets) == -(-len(sizes) // 4)
    for bucket in buckets:
        assert not bucket.mask.any() and not bucket.steps.any() and not bucket.batches["x"].any()


def test_a_population_whose_clients_are_all_empty_from_the_start_can_be_packed():
    """TRUST 1"""
    empty = from_clients({"a": {"x": []}, "b": {"x": []}})
    (bucket,) = pack(empty, [0, 1], CohortSpec(batch_size=2, max_examples=2), seed=0, round=0)
    assert bucket.weight.sum() == 2 and not bucket.mask.any()


def test_non_finite_examples_are_packed_as_they_are_and_stay_with_their_client():
    """TRUST 2: the door zeroes the contribution; padding of other clients holds none of it."""
    clients = {"a": {"x": np.array([np.nan, np.inf])}, "b": {"x": np.zeros(1)}}
    spec = CohortSpec(batch_size=2, max_examples=4, clients_per_bucket=4)
    (bucket,) = pack(from_clients(clients), [0, 1], spec, seed=0, round=0)
    assert not np.isfinite(bucket.batches["x"][0][bucket.mask[0]]).any()
    assert not bucket.batches["x"][1:].any()


def test_text_columns_are_not_packed():
    clients = from_clients({"a": {"text": ["one", "two"], "x": np.ones(2)}})
    (bucket,) = pack(clients, [0], CohortSpec(batch_size=2, max_examples=2), seed=0, round=0)
    assert list(bucket.batches) == ["x"]
    with pytest.raises(InputError, match="numeric column, found text: text"):
        pack(
            from_clients({"a": {"text": ["one"]}}),
            [0],
            CohortSpec(batch_size=2, max_examples=2),
            seed=0,
            round=0,
        )


@pytest.mark.parametrize("max_steps", [1, 2, 4, 5, 25, 1024])
def test_the_default_ladder_is_short_and_ends_at_the_cap(max_steps):
    rungs = CohortSpec(batch_size=10, max_examples=10 * max_steps).rungs
    assert rungs[-1] == max_steps and -(-max_steps // 4) in rungs
    assert list(rungs) == sorted(set(rungs)) and rungs[0] >= 1


def test_a_stated_ladder_is_used():
    spec = CohortSpec(batch_size=1, max_examples=9, ladder=(3, 12), clients_per_bucket=1)
    assert [b.mask.shape[1] for b in packed([2, 4, 3, 20], spec)] == [12, 12, 3, 3]


def test_stats_are_those_of_a_plain_count():
    sizes = [0, 1, 2, 3, 5, 8, 13, 21, 34, 55]
    spec = CohortSpec(
        batch_size=4, max_examples=40, epochs=2, ladder=(2, 5, 20), clients_per_bucket=4
    )
    cohort = Cohort(population(sizes), np.arange(10), spec, seed=0, round=0)
    assert cohort.stats.padding_waste == 0.0 and cohort.stats.memory_waste == 0.0
    for _ in range(2):  # a second iteration counts anew
        buckets = cohort.materialise()
        # 55, 34, 21, 13; then 8, 5 and, equal in steps and so by index, 1, 2; then 3, 0.
        assert [b.mask.shape[1] for b in buckets] == [20, 5, 2]
        assert cohort.stats.buckets == {20: 1, 5: 1, 2: 1}
        assert cohort.stats.slots == {20: 4 * 20 * 4, 5: 4 * 5 * 4, 2: 4 * 2 * 4}
        assert cohort.stats.run_slots == {
            20: 2 * 4 * (10 + 9 + 6 + 4),
            5: 2 * 4 * (2 + 2 + 1 + 1),
            2: 2 * 4 * 1,
        }
        assert cohort.stats.examples == {
            20: 2 * (40 + 34 + 21 + 13),
            5: 2 * (8 + 5 + 1 + 2),
            2: 2 * 3,
        }
        assert cohort.stats.padding_waste == pytest.approx(1 - 254 / 288)
        assert cohort.stats.memory_waste == pytest.approx(1 - 254 / 432)


def test_buckets_are_made_one_at_a_time():
    """TRUST 4: a cohort of any size takes the memory of one bucket."""
    cohort = Cohort(
        population([1] * 100),
        np.arange(100),
        CohortSpec(batch_size=1, max_examples=1, clients_per_bucket=10),
        seed=0,
        round=0,
    )
    next(iter(cohort))
    assert cohort.stats.buckets == {1: 1}


@pytest.mark.parametrize(
    "wrong",
    [
        dict(batch_size=0),
        dict(batch_size=float("nan")),
        dict(batch_size=2.0),
        dict(batch_size=True),
        dict(max_examples="10"),
        dict(max_examples=-1),
        dict(epochs=0),
        dict(clients_per_bucket=0),
        dict(ladder=()),
        dict(ladder=(2, 2, 5)),
        dict(ladder=(5, 1)),
        dict(ladder=(0, 5)),
        dict(ladder=(1, 4)),
    ],
)
def test_a_spec_out_of_range_is_refused(wrong):
    """TRUST 9"""
    with pytest.raises(InputError, match=next(iter(wrong))):
        CohortSpec(**{**dict(batch_size=2, max_examples=10), **wrong})


@pytest.mark.parametrize(
    ("clients", "options", "message"),
    [
        ([0, 3], {}, "must lie in 0 .. 2"),
        ([-1], {}, "must lie in 0 .. 2"),
        ([1, 1], {}, "must be different"),
        ([0.0], {}, "whole numbers"),
        ([True], {}, "whole numbers"),
        ([[0]], {}, "whole numbers"),
        ([0], {"shards": 3}, "not a multiple of 3 shards"),
        ([0], {"shards": 0}, "shards"),
        ([0], {"seed": -1}, "seed"),
        ([0], {"round": 1.5}, "round"),
    ],
)
def test_a_wrong_cohort_is_refused_before_the_first_bucket(clients, options, message):
    options = {"seed": 0, "round": 0, **options}
    with pytest.raises(InputError, match=message):
        pack(population([1, 1, 1]), clients, CohortSpec(batch_size=1, max_examples=1), **options)
