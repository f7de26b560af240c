"""Contributions of FreD: halves of matrices, moments against a loop, and what one unit can do."""

import operator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpfl.data.cohort import CohortSpec
from jaxpfl.errors import InputError
from jaxpfl.federated import LocalTraining, Query
from jaxpfl.federated.clients.client import Examples, contribution
from jaxpfl.federated.clients.moments import ClientMoment, from_half, half_shape, to_half
from tests.federated.cohorts import door, embedded, of_everybody
from tests.plans import flat_plan, flat_without_privacy
from tests.refusals import refusal

CLIP = 0.7
DIM = 6
CENTRE = np.array([0.3, -0.2, 0.1, 0.0, 0.4, -0.3], np.float32)


def through_the_door(population, moment, *, unit="example", average=False):
    """The sum of one moment as the server sees it, without noise; float64."""
    fn = ClientMoment(moment, CLIP, average=average)
    units = max(len(population), population.num_examples)
    bounded = unit == "example" or average
    plan = flat_without_privacy(
        population=units, rounds=1, clip_norm=fn.example_bound if bounded else 1e6, unit=unit
    )
    shape = {"count": (), "sum": (DIM,), "second": half_shape(DIM)}[moment]
    return summed(fn, plan, population, shape, CohortSpec(4, 12, clients_per_bucket=4), CENTRE)


def summed(fn, plan, population, shape, spec, centre) -> np.ndarray:
    opened = door(fn, plan, jax.ShapeDtypeStruct(shape, jnp.float32), cohort=spec)
    return np.float64(of_everybody(opened, jnp.asarray(centre), population))


def clip(x):
    return x * min(1.0, CLIP / max(np.linalg.norm(x), 1e-300))


def looped(parts, moment, average=False):
    """The same by a plain loop in float64."""
    total = 0.0
    for part in parts:
        shares = []
        for row in np.float64(part):
            if not np.isfinite(row).all():
                continue
            e = clip(row)
            v = clip(e - np.float64(CENTRE))
            shares.append({"count": 1.0, "sum": e, "second": np.outer(v, v)}[moment])
        if shares:
            mean = 1.0 if moment == "count" else sum(shares) / len(shares)
            total = total + (mean if average else sum(shares))
    return total


@pytest.fixture
def parts():
    rng = np.random.default_rng(0)
    made = [rng.normal(size=(n, DIM)) for n in (3, 1, 12, 0, 5)]
    made[2][4] = 0.0
    return made


@pytest.mark.parametrize("dimension", [1, 2, 3, 6, 7])
def test_a_half_holds_the_matrix_at_the_same_norm(dimension):
    rng = np.random.default_rng(dimension)
    matrix = np.float32(rng.normal(size=(dimension, dimension)))
    matrix = matrix + matrix.T
    half = to_half(jnp.asarray(matrix))
    assert half.shape == half_shape(dimension)
    np.testing.assert_allclose(from_half(np.asarray(half), dimension), matrix, rtol=3e-7)
    np.testing.assert_allclose(np.linalg.norm(half), np.linalg.norm(matrix), rtol=1e-6)


@pytest.mark.parametrize(
    ("unit", "average"), [("example", False), ("client", False), ("client", True)]
)
@pytest.mark.parametrize("moment", ["count", "sum", "second"])
@pytest.mark.parametrize("damaged", [False, True])
def test_moments_are_those_of_a_loop(parts, damaged, moment, average, unit):
    """TRUST 1, 2, 23: clients without examples, padding and buckets change nothing.

    Where embeddings are damaged, NaN and infinity count as no example; a giant one is clipped.
    """
    if damaged:
        parts[0][1, 2], parts[4][0] = np.nan, np.inf
        parts[4][3] = [3e38, -3e38, 0, 0, 0, 0]
    found = through_the_door(embedded(parts), moment, unit=unit, average=average)
    if moment == "second":
        found = from_half(found, DIM)
    np.testing.assert_allclose(found, looped(parts, moment, average), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize(("steps", "batch", "bits"), [(16, 64, 19), (16, 32, 19), (700, 1, 25)])
@pytest.mark.parametrize("moment", ["sum", "second"])
def test_a_sum_is_rounded_once_whatever_the_order(moment, steps, batch, bits):
    """TRUST 16: rows that add up in one direction; the exact sum of cut rows, by whole numbers."""
    rng = np.random.default_rng(2)
    rows = 0.27 * (1 + 0.05 * rng.random((steps * batch, DIM)) * rng.choice([1, 1, 1e-3]))
    rows_SxBxD = np.float32(rows).reshape(steps, batch, DIM)
    fn = ClientMoment(moment, CLIP)
    found = contribution(
        fn,
        jnp.zeros(DIM),
        Examples(
            {"embedding": jnp.asarray(rows_SxBxD)}, jnp.ones((steps, batch), bool), jnp.int32(steps)
        ),
        jax.random.key(0),
    )
    whole_NxD = [[int(x * 2**bits) for x in row] for row in np.float64(rows_SxBxD.reshape(-1, DIM))]
    if moment == "sum":
        exact = [sum(column) / 2**bits for column in zip(*whole_NxD, strict=True)]
    else:
        columns = list(zip(*whole_NxD, strict=True))
        exact = [[sum(map(operator.mul, a, b)) / 4**bits for a in columns] for b in columns]
        exact = to_half(jnp.asarray(exact, jnp.float32))
    np.testing.assert_array_equal(np.float32(found), np.float32(exact))


def adversarial_rows():
    """Rows that try to move a sum by more than they may."""
    rng = np.random.default_rng(1)
    along = CENTRE / np.linalg.norm(CENTRE)
    rows = [np.zeros(DIM), CLIP * along, -CLIP * along, -1e6 * along, np.full(DIM, 3e38)]
    rows += [np.full(DIM, 1e-30), np.full(DIM, -np.inf), np.eye(DIM)[0] * 1e20]
    return rows + list(rng.normal(size=(20, DIM)) * 10.0 ** rng.integers(-3, 4, size=(20, 1)))


@pytest.mark.parametrize("moment", ["count", "sum", "second"])
def test_one_example_moves_a_sum_by_at_most_its_bound(parts, moment):
    """TRUST 16: adding or removing one example, over adversarial ones; the bound is reached."""
    parts = [part[:3] for part in parts]  # few, so that float32 keeps 1e-6 of the difference
    bound = ClientMoment(moment, CLIP).example_bound
    assert bound == pytest.approx({"count": 1.0, "sum": CLIP, "second": CLIP**2}[moment])
    without = through_the_door(embedded(parts), moment)
    moves = []
    for row in adversarial_rows():
        more = [*parts[:1], np.concatenate([parts[1], row[None]]), *parts[2:]]
        moves.append(np.linalg.norm(through_the_door(embedded(more), moment) - without))
    assert max(moves) <= bound * (1 + 1e-6) + 2e-6
    assert max(moves) >= bound * (1 - 1e-4)


@pytest.mark.parametrize("moment", ["count", "sum", "second"])
def test_an_example_has_the_same_bits_in_each_place(moment):
    """TRUST 56: otherwise one that moves to another place would change the sum by itself."""
    function, found = jax.jit(partial(contribution, ClientMoment(moment, CLIP))), set()
    row = np.float32(np.random.default_rng(4).normal(size=DIM))
    for place in range(2 * 33):
        for neighbours in (0, 1e30, np.nan):
            batches, mask = np.full((2 * 33, DIM), neighbours, np.float32), np.zeros(2 * 33, bool)
            batches[place], mask[place] = row, True
            examples = Examples(
                {"embedding": jnp.asarray(batches.reshape(2, 33, DIM))},
                jnp.asarray(mask.reshape(2, 33)),
                jnp.int32(2),
            )
            found.add(np.asarray(function(CENTRE, examples, jax.random.key(0))).tobytes())
    assert len(found) == 1


@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("moment", ["count", "sum", "second"])
def test_one_client_moves_a_sum_by_at_most_its_bound(parts, moment, average):
    """TRUST 16: adding or removing a client, by averages or by at most 12 examples."""
    parts = [part[:2] for part in parts]
    most = 1 if average else 12
    bound = ClientMoment(moment, CLIP).example_bound * most
    without = through_the_door(embedded(parts), moment, unit="client", average=average)
    moves = []
    for row in adversarial_rows():
        added = [*parts, np.repeat(row[None], 30, axis=0)]
        sums = through_the_door(embedded(added), moment, unit="client", average=average)
        moves.append(np.linalg.norm(sums - without))
    added = [*parts, np.array(adversarial_rows())[:12]]
    mixed = through_the_door(embedded(added), moment, unit="client", average=average)
    moves.append(np.linalg.norm(mixed - without))
    assert max(moves) <= bound * (1 + 1e-6) + 5e-6
    assert max(moves) >= bound * (1 - 1e-4)


def test_no_bound_is_relied_on_that_is_not_stated():
    """TRUST 13: the unit example needs a function that bounds each example, within the clip."""
    everyone = dict(population=21, clients_per_round=21, rounds=1, noise_multiplier=1.0, delta=1e-3)
    plan = flat_plan(**everyone, clip_norm=CLIP, unit="example")

    def query(fn, plan=plan):
        return Query("asked", fn, plan, CohortSpec(4, 12))

    query(ClientMoment("sum", CLIP))
    refusal(lambda: query(lambda broadcast, examples, key: broadcast), "example_bound")
    with pytest.raises(InputError, match="example_bound"):
        query(LocalTraining(None, None))  # pyright: ignore[reportArgumentType]
    refusal(lambda: query(ClientMoment("sum", 0.8)), "up to 0.8")
    exact = flat_plan(**everyone, clip_norm=CLIP, unit="example", noise="exact")
    refusal(lambda: query(ClientMoment("sum", CLIP), exact), "unit = 'client' rounded as float32")


def test_with_the_unit_client_the_door_clips_whatever_the_function_states():
    """A bound by example is no excuse: a client of 12 examples is clipped to c."""
    population = embedded([np.ones((12, DIM))])
    plan = flat_without_privacy(population=1, rounds=1, clip_norm=CLIP)
    spec = CohortSpec(12, 12, clients_per_bucket=2)
    total = summed(ClientMoment("sum", CLIP), plan, population, (DIM,), spec, CENTRE)
    assert np.linalg.norm(total) == pytest.approx(CLIP, rel=1e-5)
