"""Packing: every example where it belongs, whatever the shapes."""

import tracemalloc

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from jaxpfl.data import Cohort, CohortSpec, Population, from_clients
from jaxpfl.data.cohort import client_keys
from jaxpfl.data.mapped import Mapped
from jaxpfl.errors import InputError


def population_of(sizes) -> Population:
    """Client k's examples are k * 1000 + 1, k * 1000 + 2, ...: no example is 0, as padding is."""
    sizes = np.asarray(sizes)
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])
    values = np.concatenate([k * 1000 + 1 + np.arange(n) for k, n in enumerate(sizes)])
    return Population(
        {"x": values.astype(np.int32), "pair": np.stack([values, -values], 1).astype(np.float32)},
        offsets,
        [str(k) for k in range(len(sizes))],
    )


def packed(population, clients, spec, **options):
    return list(Cohort(population, clients, spec, **{"seed": 0, "round": 0, **options}))


def client_of(seed=0, number=100) -> dict[tuple[int, ...], int]:
    """Client by the words that its draws follow from."""
    words = client_keys(population_of([0] * number), np.arange(number), seed)
    return {tuple(key): number for number, key in enumerate(words.tolist())}


def batches_of(buckets, seed=0, number=100) -> dict[int, list[list[int]]]:
    """Client -> its batches in order, without padding."""
    found, known = {}, client_of(seed, number)
    for bucket in buckets:
        for slot in np.flatnonzero(bucket.weight):
            steps = [
                bucket.batches["x"][slot, step][bucket.mask[slot, step]].tolist()
                for step in range(bucket.steps[slot])
            ]
            client = known[tuple(bucket.key[slot].tolist())]
            assert client not in found
            found[client] = steps
    return found


SPECS = st.builds(
    CohortSpec,
    batch_size=st.integers(1, 5),
    max_examples=st.integers(1, 12),
    epochs=st.integers(1, 3),
    clients_per_bucket=st.sampled_from([4, 8]),
)


@hypothesis.given(
    sizes=st.lists(st.integers(0, 15), min_size=1, max_size=20),
    spec=SPECS,
    shards=st.sampled_from([1, 2, 4]),
    data=st.data(),
)
def test_every_client_is_packed_once_with_all_it_may_use(sizes, spec, shards, data):
    population = population_of(sizes)
    chosen = data.draw(st.lists(st.sampled_from(range(len(sizes))), unique=True))
    buckets = packed(population, chosen, spec, shards=shards)
    assert len(buckets) == -(-len(chosen) // spec.clients_per_bucket)
    found = batches_of(buckets)
    assert sorted(found) == sorted(chosen)
    for client, batches in found.items():
        used = min(sizes[client], spec.max_examples)
        per_epoch = -(-used // spec.batch_size)
        assert len(batches) == per_epoch * spec.epochs
        held = set(range(client * 1000 + 1, client * 1000 + 1 + sizes[client]))
        epochs = [
            [x for batch in batches[e * per_epoch : (e + 1) * per_epoch] for x in batch]
            for e in range(spec.epochs)
        ]
        for epoch in epochs:
            assert len(epoch) == len(set(epoch)) == used
            assert set(epoch) == set(epochs[0]) <= held
    for bucket in buckets:
        slots, rung, batch = bucket.mask.shape
        assert (slots, batch) == (spec.clients_per_bucket, spec.batch_size)
        assert rung in spec.rungs
        assert bucket.steps.max() <= rung
        # Padding is zero everywhere, and no step beyond `steps` holds an example.
        for name in ("x", "pair"):
            assert not bucket.batches[name][~bucket.mask].any()
            assert bucket.batches[name][bucket.mask].all()
        np.testing.assert_array_equal(
            bucket.mask.any(2), np.arange(rung)[None, :] < bucket.steps[:, None]
        )
        fields = (bucket.mask, bucket.steps, bucket.weight, bucket.key)
        assert [field.dtype.name for field in fields] == ["bool", "int32", "float32", "uint32"]
        assert not bucket.steps[bucket.weight == 0].any()
        np.testing.assert_array_equal(bucket.batches["pair"][..., 0], bucket.batches["x"])


def test_large_examples_are_packed_as_small_ones_are():
    population = population_of([3, 0, 15, 7, 1])
    columns = population.numeric()
    wide = np.repeat(columns["x"][:, None], 4096, axis=1)
    population = Population(
        {"x": columns["x"], "wide": wide}, population.offsets, population.client_ids
    )
    spec = CohortSpec(batch_size=4, max_examples=12, epochs=2, clients_per_bucket=8)
    (bucket,) = packed(population, np.arange(5), spec, shards=2)
    assert bucket.batches["wide"].nbytes > 2**21
    np.testing.assert_array_equal(
        bucket.batches["wide"], np.broadcast_to(bucket.batches["x"][..., None], (8, 6, 4, 4096))
    )
    assert bucket.mask.sum() == 2 * (3 + 12 + 7 + 1)


def test_a_clients_batches_depend_on_its_address_alone():
    """Not on who else takes part, the order given, the capacity, the shards or the shape."""
    sizes = [3, 30, 11, 0, 18, 7, 9, 2]
    population = population_of(sizes)
    reference = batches_of(packed(population, range(8), CohortSpec(4, 12, 2)))
    variants = [
        (range(7, -1, -1), CohortSpec(4, 12, 2), 1),
        (range(8), CohortSpec(4, 12, 2, clients_per_bucket=2), 2),
        (range(8), CohortSpec(4, 12, 2, one_shape=True), 4),
        ([4, 1], CohortSpec(4, 12, 2), 1),
    ]
    for chosen, spec, shards in variants:
        found = batches_of(packed(population, list(chosen), spec, shards=shards))
        assert found == {client: reference[client] for client in chosen}


@pytest.mark.parametrize("dropped", [False, True])
def test_stragglers_do_fewer_epochs_whatever_their_examples(dropped):
    epochs, number = 4, 4000
    sizes = [1 + 2 * (i % 2) for i in range(number)]
    population = population_of(sizes)

    def of(clients, spec, round=0):
        return batches_of(packed(population, range(clients), spec, round=round), number=number)

    settings = {"stragglers": 0.6, "drop_stragglers": dropped}
    spec = CohortSpec(1, 3, epochs, **settings, clients_per_bucket=400)
    found, whole = of(number, spec), of(number, CohortSpec(1, 3, epochs))
    for parity in (0, 1):
        done = np.array([len(found[i]) / sizes[i] for i in range(parity, number, 2)])
        share = 0.6 * np.array([int(dropped), *[(1 - dropped) / epochs] * epochs])
        share[epochs] += 0.4
        counts = np.bincount(done.astype(int), minlength=epochs + 1)
        np.testing.assert_allclose(counts / len(done), share, atol=4 * 0.5 / len(done) ** 0.5)
    # What is left is what the client would have done first.
    assert all(found[i] == whole[i][: len(found[i])] for i in range(number))
    again = of(50, spec)
    assert again == {i: found[i] for i in range(50)}
    assert of(50, spec, round=1) != again


@pytest.mark.parametrize("change", [{"seed": 1}, {"round": 1}, {"seed": 2**64}])
def test_seed_and_round_shuffle_anew(change):
    population = population_of([40, 40])
    spec = CohortSpec(40, 40)
    (here,) = packed(population, [0, 1], spec)
    (there,) = packed(population, [0, 1], spec, **change)
    assert (here.batches["x"][:2] != there.batches["x"][:2]).any(axis=(1, 2)).all()
    orders = [here.batches["x"][slot, 0] % 1000 for slot in range(2)]
    assert (orders[0] != orders[1]).any(), "two clients share one shuffle"
    (bucket,) = packed(population, [0], CohortSpec(40, 40, epochs=2))
    first, second = bucket.batches["x"][0, :2]
    assert (first != second).any(), "two epochs share one shuffle"
    np.testing.assert_array_equal(np.sort(first), np.sort(second))


def test_orders_and_subsets_are_uniform():
    """Of 6 examples 3 are used: in 1,800 rounds each comes first 300 times, and in 900."""
    population = population_of([6])
    spec = CohortSpec(3, 3, clients_per_bucket=1)
    first, used = np.zeros(6), np.zeros(6)
    for round in range(1_800):
        (bucket,) = packed(population, [0], spec, round=round)
        rows = bucket.batches["x"][0, 0] - 1
        first[rows[0]] += 1
        used[rows] += 1
    # Five standard deviations.
    assert np.abs(first - 300).max() < 5 * np.sqrt(1_800 * 5 / 36)
    assert np.abs(used - 900).max() < 5 * np.sqrt(1_800 / 4)


def test_giant_client_is_capped_and_memory_stays_flat():
    """TRUST 4: a client of two million examples costs what its cap costs."""
    sizes = np.array([5, 2_000_000, 3])
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])
    population = Population(
        {"x": np.ones(offsets[-1], np.uint8)}, offsets, [str(i) for i in range(3)]
    )
    spec = CohortSpec(8, 16, epochs=2, clients_per_bucket=4)
    tracemalloc.start()
    (bucket,) = packed(population, [0, 1, 2], spec)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert bucket.mask.shape == (4, 4, 8)
    assert bucket.mask.sum() == 2 * (5 + 16 + 3)
    assert peak < 100_000


def test_clients_without_examples_are_counted():
    """TRUST 1: weight 1, no steps; also if all are empty."""
    (bucket,) = packed(population_of([0, 2, 0]), [0, 1, 2], CohortSpec(2, 4, clients_per_bucket=4))
    assert bucket.weight.tolist() == [1, 1, 1, 0]
    assert bucket.steps.tolist() == [1, 0, 0, 0]
    assert [client_of().get(tuple(key)) for key in bucket.key.tolist()] == [1, 0, 2, None]
    empty = from_clients({"a": {"x": np.zeros((0, 3), np.float32)}, "b": {"x": []}})
    (bucket,) = packed(empty, [0, 1], CohortSpec(2, 4, clients_per_bucket=4))
    assert bucket.weight.tolist() == [1, 1, 0, 0]
    assert bucket.batches["x"].shape == (4, 2, 2, 3)
    assert not bucket.mask.any()
    assert not bucket.batches["x"].any()


def test_shards_get_balanced_work_and_real_clients_first():
    sizes = np.random.default_rng(0).integers(0, 60, 90)
    spec = CohortSpec(4, 60, clients_per_bucket=32)
    for bucket in packed(population_of(sizes), np.arange(90), spec, shards=4):
        steps = bucket.steps.reshape(4, 8)
        assert np.ptp(steps.sum(1)) <= steps.max()
        assert (np.diff(steps, axis=1) <= 0).all()
        weight = bucket.weight.reshape(4, 8)
        assert (np.diff(weight, axis=1) <= 0).all()
        assert np.ptp(weight.sum(1)) <= 1
    spec = CohortSpec(4, 60, clients_per_bucket=10)
    (bucket,) = packed(population_of(np.arange(40, 0, -4)), np.arange(10), spec, shards=2)
    # Dealt always forth, it would be 30 and 25.
    assert bucket.steps.reshape(2, 5).sum(1).tolist() == [28, 27]


def leaves_of(bucket):
    return [*bucket.batches.values(), bucket.mask, bucket.steps, bucket.weight, bucket.key]


@hypothesis.given(
    sizes=st.lists(st.integers(0, 15), min_size=1, max_size=20),
    spec=SPECS,
    processes=st.sampled_from([[(0, 1), (2, 3)], [(3, 0), (1,), (2,)], [(0, 1, 2, 3)]]),
)
def test_blocks_that_are_packed_apart_are_those_of_the_whole_bucket(sizes, spec, processes):
    """Each process packs its devices' slots alone; together they make the bits of one process.

    Nor does the order of the cohort change one.
    """
    population, everyone = population_of(sizes), range(len(sizes))
    whole = packed(population, everyone, spec, shards=4)
    for blocks in processes:
        shares = packed(population, everyone[::-1], spec, shards=4, blocks=blocks)
        for bucket, share in zip(whole, shares, strict=True):
            for leaf, found in zip(leaves_of(bucket), leaves_of(share), strict=True):
                by_block = leaf.reshape(4, -1, *leaf.shape[1:])[list(blocks)]
                np.testing.assert_array_equal(found, by_block.reshape(-1, *leaf.shape[1:]))
                assert found.dtype == leaf.dtype


def test_a_process_reads_only_the_examples_of_its_own_blocks(tmp_path, monkeypatch):
    sizes = np.random.default_rng(0).integers(1, 30, 200)
    population = population_of(sizes)
    population.with_columns({"x": population.columns["x"]}).save(tmp_path / "saved")
    stored, read = Population.load(tmp_path / "saved"), []
    located = Mapped.located
    monkeypatch.setattr(
        Mapped, "located", lambda self, rows: (read.append(rows.size), located(self, rows))[1]
    )

    def rows_read(blocks):
        read.clear()
        packed(stored, range(200), CohortSpec(4, 20), shards=4, blocks=blocks)
        return sum(read)

    first, second = rows_read((0, 1)), rows_read((2, 3))
    assert first + second == rows_read(None) == np.minimum(sizes, 20).sum()
    assert abs(first - second) < 0.1 * (first + second)


def test_the_number_of_shapes_is_bounded():
    """Of cohorts of every size: the number of compilations is at most two."""
    population = population_of(np.random.default_rng(1).integers(0, 70, 200))
    for spec in (
        CohortSpec(4, 50, clients_per_bucket=16),
        CohortSpec(4, 50, one_shape=True, clients_per_bucket=16),
    ):
        shapes = set()
        for round, size in enumerate([1, 2, 10, 50, 200]):
            chosen = np.random.default_rng(round).choice(200, size, replace=False)
            shapes |= {bucket.mask.shape for bucket in packed(population, chosen, spec)}
        assert {steps for _, steps, _ in shapes} <= set(spec.rungs)
        assert len(shapes) <= len(spec.rungs) and spec.rungs[-1] >= spec.max_steps


def test_stats_count_what_was_packed():
    population = population_of([8, 3, 0])
    spec = CohortSpec(2, 8, clients_per_bucket=2)
    cohort = Cohort(population, [0, 1, 2], spec, seed=0, round=0)
    for _ in range(2):
        assert len(list(cohort)) == 2
        assert (cohort.examples, cohort.run_slots) == (11, 8 + 4)
        assert cohort.padding_waste == pytest.approx(1 / 12)
    # TRUST 4: buckets are made as they are asked for; 24: an empty Poisson round is legal.
    cohort = Cohort(population, [1, 2], CohortSpec(2, 8, clients_per_bucket=1), seed=0, round=0)
    assert next(iter(cohort)).mask.sum() == cohort.examples == 3
    cohort = Cohort(population, np.zeros(0, np.int64), spec, seed=0, round=0)
    assert list(cohort) == [] and cohort.padding_waste == 0.0


@pytest.mark.parametrize(
    ("clients", "options", "expected"),
    [
        ([0, 0], {}, "found one twice"),
        ([2], {}, r"must lie in 0 \.\. 1"),
        ([-1], {}, r"must lie in 0 \.\. 1"),
        ([0.5], {}, "whole numbers"),
        ([0], {"shards": 3}, "no multiple of 3 shards"),
        ([0], {"seed": -1}, "seed"),
        ([0], {"round": 1.0}, "round"),
    ],
)
def test_bad_cohort_is_refused_before_the_first_bucket(clients, options, expected):
    """TRUST 7, 9, 12."""
    with pytest.raises(InputError, match=expected):
        Cohort(
            population_of([2, 2]),
            clients,
            CohortSpec(1, 2, clients_per_bucket=4),
            **{"seed": 0, "round": 0, **options},
        )
    population = from_clients({"a": {"text": ["x"]}})
    with pytest.raises(InputError, match="needs a numeric column, found text: text"):
        Cohort(population, [0], CohortSpec(1, 1), seed=0, round=0)
    wrong = {"batch_size": (0, 1.0), "max_examples": (-1,), "epochs": (True,)}
    wrong |= {"clients_per_bucket": ("4", 0)}
    for field, values in wrong.items():
        for value in values:
            with pytest.raises(InputError):
                CohortSpec(**{"batch_size": 2, "max_examples": 8, field: value})
