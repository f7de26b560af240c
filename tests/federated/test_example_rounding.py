"""Sums over examples: what rounding adds to one example is what the noise is for."""

from dataclasses import dataclass
from itertools import pairwise, permutations

import jax.numpy as jnp
import numpy as np
import pytest

from jaxpfl.data import Population
from jaxpfl.data.cohort import CohortSpec
from jaxpfl.errors import InputError
from jaxpfl.federated import Execution, Query, client_mesh
from jaxpfl.federated.clients.moments import ClientMoment
from jaxpfl.federated.release.prepared_query import PreparedQuery, Work, in_blocks
from jaxpfl.privacy.participation import shuffled
from tests.plans import flat_plan, flat_without_privacy

EXAMPLES, QUESTIONS = 2_048, 512
CHARGED = 2.0**-7
WORDS = np.arange(4, dtype=np.uint32)


@dataclass(frozen=True)
class Shares:
    """The sums of as many numbers of an example, each at most 1: so many questions at once."""

    example_bound: float = 1.0
    dtype: str = "float32"

    def init(self, broadcast, key):
        return jnp.zeros(QUESTIONS, self.dtype)

    def step(self, broadcast, total, batch, mask, key):
        rows = jnp.where(mask[:, None], batch["x"], jnp.float32(0))
        return total + jnp.sum(rows, axis=0).astype(self.dtype)

    def finish(self, broadcast, total):
        return total


def rows(count: int) -> np.ndarray:
    """Just below 1. Those of the second half cancel those of the first, so that sums are small."""
    sizes = 1 - 0.05 * np.random.default_rng(0).random((count, QUESTIONS))
    sizes[count // 2 :] *= -1
    return sizes.astype(np.float32)


def population(count: int) -> Population:
    return Population({"x": rows(count)}, np.array([0, 1, count]), ["one", "all others"])


def query(cohort: CohortSpec, client_fn=None, *, private=False, devices=1, chunk=1, **changes):
    settings = dict(rounds=1, clip_norm=1.0, unit="example") | {"population": EXAMPLES, **changes}
    noisy = flat_plan(**settings, delta=1e-10) if private else flat_without_privacy(**settings)
    execution = Execution(client_mesh(devices), chunk)
    return Query("sum", client_fn or Shares(), noisy, cohort, execution=execution)


@pytest.mark.parametrize(
    ("devices", "chunk", "batch", "block", "in_a_bucket"),
    [
        (1, 1, 32, 32, 64),
        (1, 1, 8, 32, 4),
        (2, 1, 16, 16, 8),
        (1, 8, 32, 32, 64),
        (2, 4, 4, 8, 8),
        (1, 16, 8, 8, 64),
    ],
)
def test_one_example_moves_a_sum_by_what_is_charged(devices, chunk, batch, block, in_a_bucket):
    """TRUST 56: for every place that it may take, at every layout, whatever the others hold."""
    cohort = CohortSpec(batch, block, clients_per_bucket=in_a_bucket)
    asked = query(cohort, devices=devices, chunk=chunk)
    prepared = PreparedQuery.of(asked, np.zeros((), np.float32), population(EXAMPLES))
    prepared.broadcast.read(np.zeros((), np.float32))

    def total(places):
        work = Work(1, np.float32(1), WORDS, WORDS, WORDS, WORDS, WORDS)
        return np.float64(prepared.sum(work, places)[0].value)

    rng, share = np.random.default_rng(1), np.float64(rows(EXAMPLES)[0])
    worst = 0.0
    for last in (0, 1, block // 2, block - 2, block - 1):
        # The number of examples that the last block has without the one in question, the first.
        without = np.arange(1, EXAMPLES - block + last)
        half = len(without) // 2
        without[:half] = rng.permutation(without[:half])
        place = rng.integers(len(without))
        having = np.append(without, without[place])
        having[place] = 0
        worst = max(worst, np.max(np.abs(total(having) - total(without) - share)))
    # The released sums are small, and rounded once more to float32, before they are compared.
    assert 1e-6 < worst <= asked.rounding + 1e-6
    assert asked.rounding <= CHARGED


def blocks(places: np.ndarray, size: int) -> list[list[int]]:
    made = in_blocks(places, size)
    numbers = made.columns["example"].tolist()
    return [numbers[start:stop] for start, stop in pairwise(made.offsets)]


@pytest.mark.parametrize("size", [1, 5, 32])
def test_one_example_more_takes_one_place_and_changes_two_blocks(size):
    for count in (1, 31, 64, 96, 100):
        without = np.random.default_rng(count).permutation(count)
        place = count // 3
        having = np.append(without, without[place])
        having[place] = count
        before, after = blocks(without, size), blocks(having, size)
        assert [len(block) for block in before[:-1]] == [size] * (len(before) - 1)
        before += [[]] * (len(after) - len(before))
        pairs = enumerate(zip(before, after, strict=True))
        changed = [number for number, (old, new) in pairs if old != new]
        assert changed in ([place // size, len(after) - 1], [len(after) - 1])


def test_places_are_uniformly_random_and_as_secret_as_the_cohort():
    """Of four examples all 24 orders come equally often; they follow from secret and round."""
    orders = [tuple(shuffled(np.arange(4), seed, 1).tolist()) for seed in range(4_800)]
    times = [orders.count(order) for order in permutations(range(4))]
    # Their standard deviation is 14.
    assert 200 - 70 < min(times) <= max(times) < 200 + 70
    asked = query(CohortSpec(8, 8))
    prepared = PreparedQuery.of(asked, np.zeros((), np.float32), population(EXAMPLES))
    work = Work(1, np.float32(1), WORDS, WORDS, WORDS, WORDS, WORDS)
    first, *others = (
        prepared.drawn(each)
        for each in (work, work, work._replace(cohort=WORDS + 1), work._replace(round=1))
    )
    np.testing.assert_array_equal(np.sort(first), np.arange(EXAMPLES))
    same = [np.mean(first == other) for other in others]
    assert same[0] == same[2] == 1 and same[1] < 0.01
    assert np.mean(first == np.arange(EXAMPLES)) < 0.01


def test_the_noise_is_for_the_bound_and_for_its_rounding():
    for unit, charged in (("client", 1.0), ("example", 1 + CHARGED)):
        plan = flat_plan(
            population=99, rounds=1, clip_norm=0.5, noise_multiplier=3.0, unit=unit, delta=1e-9
        )
        assert plan.value_noise_std(0.5) == pytest.approx(3 * 0.5 * charged, rel=1e-12)


@pytest.mark.parametrize("client_fn", [Shares(), ClientMoment("second", 1.0)])
@pytest.mark.parametrize("devices", [1, 2])
def test_more_rounding_than_is_charged_is_refused(client_fn, devices):
    for block in (32, 256):
        cohort = CohortSpec(32, block, clients_per_bucket=64 * devices)
        asked = query(cohort, client_fn, private=True, devices=devices)
        assert asked.rounding < CHARGED
    for cohort, examples in (
        (CohortSpec(16_384, 16_384, clients_per_bucket=devices), EXAMPLES),
        (CohortSpec(32, 32, clients_per_bucket=devices), 10**8),
    ):
        with pytest.raises(InputError, match="by rounding"):
            query(cohort, client_fn, private=True, devices=devices, population=examples)


def test_one_program_sums_all_blocks():
    assert len(query(CohortSpec(4, 32)).cohort.rungs) == 1


def test_sums_of_examples_are_float32():
    asked = query(CohortSpec(8, 8), Shares(dtype="float16"))
    with pytest.raises(InputError, match="float32"):
        PreparedQuery.of(asked, np.zeros((), np.float32), population(EXAMPLES))
