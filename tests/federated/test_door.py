"""The door: what it sums, whom it counts, and that nothing else gets through."""

import dataclasses
from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpfl.errors import InputError
from jaxpfl.federated import ClientSteps, client_mesh
from jaxpfl.federated.release.accumulators import FixedPoint
from jaxpfl.privacy import AdaptiveClip, Cyclic
from jaxpfl.privacy.clipping import clip_factors
from jaxpfl.privacy.exact_noise import STEPS
from tests.federated.cohorts import (
    DIM,
    SHAPE,
    ZERO,
    bucket_of,
    clipped_sum,
    door,
    held_vector,
    keys,
    no_noise,
    plan,
    through,
    vectors,
)


def summed(buckets, *, broadcast=ZERO, chosen=None, key=None, client_fn=held_vector, **execution):
    """The release's only leaf, as numpy."""
    opened = door(client_fn, chosen or no_noise(), SHAPE, **execution)
    return np.asarray(through(opened, broadcast, buckets, key).value["a"])


@pytest.mark.parametrize("chunk", [None, 1, 2, 4])
def test_sum_of_clipped_contributions_is_the_plain_loops(chunk):
    values = vectors(8, scale=1.5)
    found = summed([bucket_of(values)], chunk=chunk)
    np.testing.assert_allclose(found, clipped_sum(values, 1.0), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("chosen", [no_noise(), plan(noise="exact")], ids=["float", "exact"])
@pytest.mark.parametrize("padding", [np.nan, 1.0])
def test_padding_contributes_nothing(chosen, padding):
    """TRUST 23: padding clients hold NaN, or what would count, and still add exactly 0."""
    values = vectors(8)
    settings = {"chosen": chosen, "chunk": 4}
    plain = summed([bucket_of(values)], **settings)
    padded = summed([bucket_of(values, 16, padding)], **settings)
    parts = [bucket_of(values[:5], 8, padding), bucket_of(values[5:], 8, padding)]
    split = summed(parts, **settings)
    np.testing.assert_allclose(padded, plain, rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(split, plain, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3e38])
def test_client_that_is_not_finite_counts_as_zero(bad):
    """TRUST 2: the whole contribution is zeroed; the others' sum is untouched.

    3e38 is finite itself, but its square overflows: the clip must hold for it too.
    """
    values = vectors(8)
    poisoned = values.copy()
    poisoned[3, 2] = bad
    found = summed([bucket_of(poisoned)])
    others = clipped_sum(np.delete(values, 3, axis=0), 1.0)
    assert np.all(np.isfinite(found))
    assert np.linalg.norm(found - others) <= 1.0 * (1 + 1e-6)
    if not np.isfinite(bad):
        np.testing.assert_allclose(found, others, rtol=1e-5, atol=1e-6)


def test_empty_round_releases_noise_only():
    """TRUST 1, 24: no bucket at all, or buckets of padding alone: noise, at the full scale."""
    private = plan(noise_multiplier=2.0)
    nothing = summed([], chosen=private)
    padding = summed([bucket_of(np.zeros((0, DIM), np.float32), slots=4)], chosen=private)
    assert np.all(nothing != 0)
    np.testing.assert_array_equal(nothing, padding)
    assert np.array_equal(summed([]), np.zeros(DIM))  # without privacy: exactly nothing


def test_removing_a_client_moves_the_sum_by_at_most_the_clip_norm():
    """TRUST 16: random and adversarial neighbours."""
    rng = np.random.default_rng(1)
    shape = {"a": jax.ShapeDtypeStruct((DIM,), jnp.float32), "b": SHAPE["a"]}

    def two_leaves(broadcast, examples, key):
        value = examples.batches["x"][0, 0]
        return {"a": value, "b": jnp.flip(value) * 3.0}

    opened = door(two_leaves, no_noise(), shape)
    for scale in (1e-20, 1e-3, 1.0, 1e4, 1e18):
        values = (scale * rng.normal(size=(4, DIM))).astype(np.float32)
        without = bucket_of(values[:3], slots=4)
        full, less = (
            jax.device_get(through(opened, ZERO, [bucket]).value)
            for bucket in (bucket_of(values), without)
        )
        moved = np.concatenate([full[name] - less[name] for name in ("a", "b")])
        # The difference of two float32 sums of four clients carries their rounding.
        assert np.linalg.norm(moved.astype(np.float64)) <= 1.0 + 1e-6


def exact(**changes):
    return {"chosen": plan(noise="exact", **changes)}


def test_exact_noise_is_the_same_bits_in_any_order_and_layout():
    """TRUST 22, 23, 27, 50: reversed clients, other chunks, buckets and devices; noise once, too.

    Noise is bound to the sum, so equal noise also says that the sums are equal to the bit.
    """
    values, settings = vectors(8, scale=3.0), exact(noise_multiplier=3.0)
    first = summed([bucket_of(values)], **settings)
    for other in (
        summed([bucket_of(values[::-1].copy())], **settings),
        summed([bucket_of(values)], **settings, chunk=4),
        summed([bucket_of(values[:3], 4), bucket_of(values[3:], 8)], **settings),
        summed([bucket_of(values)], **settings, mesh=client_mesh(1), chunk=8),
    ):
        np.testing.assert_array_equal(other, first)
    assert np.abs(first - clipped_sum(values, 1.0)).max() > 0.1


@pytest.mark.parametrize("multiplier", [0.05, 1.0, 300.0])
@pytest.mark.parametrize("clip_norm", [1e-6, 0.3, 1e5])
def test_exact_noise_is_added_to_the_sum_at_the_plans_scale(multiplier, clip_norm):
    """The same clients often: 2,000 coordinates of the mean of noisy sums less the exact sum."""
    values = np.tile(vectors(4, scale=100.0), (1, 400)) * np.float32(clip_norm)
    shape = {"a": jax.ShapeDtypeStruct((values.shape[1],), jnp.float32)}
    settings = exact(noise_multiplier=multiplier, clip_norm=clip_norm)
    opened = door(held_vector, settings["chosen"], shape)
    zero = jnp.zeros(values.shape[1])
    sums = clipped_sum(values, clip_norm) / clip_norm
    noise = [
        np.asarray(through(opened, zero, [bucket_of(values)], keys(k)).value["a"], np.float64)
        / clip_norm
        - sums
        for k in range(4)
    ]
    flat = np.concatenate(noise) / multiplier
    assert abs(flat.std() - 1) < 5 / (2 * flat.size) ** 0.5
    assert abs(flat.mean()) < 5 / flat.size**0.5


def test_exact_sums_move_by_less_than_the_noise_is_for():
    """TRUST 16, 50: a client's whole steps are shorter than STEPS / z, as charged, to the step."""
    sums = FixedPoint()
    for seed in range(20):
        value = vectors(1, scale=10.0**seed, seed=seed)
        z, clip_norm = jnp.float32(0.7), jnp.float32(3.3)
        scale = sums.scale(clip_norm, z)
        factor, _, finite = clip_factors(jnp.asarray(value[0]), clip_norm, ordered=True)
        start = sums.start(sums.zeros(jnp.zeros(DIM), 1))
        total = sums.add(start, jnp.asarray(value), factor[None], scale)
        whole = np.asarray(total.high).astype(np.int64) * 2**16 + np.asarray(total.low)
        bound = STEPS / np.float64(z)
        assert bool(finite)
        assert np.linalg.norm(whole.astype(np.float64)) < bound
        if seed > 1:
            assert np.linalg.norm(whole.astype(np.float64)) > bound * (1 - 1e-4)


def test_exact_noise_that_is_too_small_for_its_steps_is_refused():
    """TRUST 27: with a population so large, or noise so small, sums could wrap around."""
    with pytest.raises(InputError, match="noise multiplier"):
        door(held_vector, exact(noise_multiplier=1e-3)["chosen"], SHAPE)
    epochs = plan(noise="exact_banded", sampling="cyclic", clients_per_round=1, rounds=20_000)
    door(held_vector, epochs, SHAPE)
    with pytest.raises(InputError, match="at most 10,000 rounds per epoch, found 10,001"):
        dataclasses.replace(epochs, participation=Cyclic(10_001, 1))
    large = exact(noise_multiplier=0.1, population=2**27, delta=1e-9)["chosen"]
    with pytest.raises(InputError, match="noise multiplier"):
        door(held_vector, large, SHAPE)
    few = dict(population=100_000, clients_per_round=10_000, delta=1e-6)
    for std, refused in ((9.0, True), (11.0, False)):
        chosen = exact(adaptive_clip=AdaptiveClip(indicator_noise=std), **few)["chosen"]
        with pytest.raises(InputError, match="indicator_noise") if refused else nullcontext():
            door(held_vector, chosen, SHAPE)


def test_low_halves_of_a_large_chunk_do_not_wrap():
    """TRUST 27: 40,000 low halves of 2^16 - 1 do not fit an int32."""
    chosen = exact(population=100_000)["chosen"]
    value = np.float32((2**16 - 1) * 2.0**-20 * chosen.value_noise_std(1.0) * (1 + 2.0**-15))
    buckets = [bucket_of(np.tile(value, (40_000, DIM)))]
    wide, narrow = (
        summed(buckets, chosen=chosen, mesh=client_mesh(1), chunk=chunk) for chunk in (40_000, 1)
    )
    np.testing.assert_array_equal(wide, narrow)


def drawn(key):
    """Drawn as a user may do it: of a key that was split, which once took XLA for CPUs for ever."""
    first, second = jax.random.split(key)
    scale = jax.random.randint(second, (), 1, 5).astype(jnp.float32)
    return scale * jax.random.normal(first, (DIM,))


def draws(broadcast, examples, key):
    return {"a": drawn(key)}


draws_by_step = ClientSteps(
    lambda broadcast, key: {"a": jnp.zeros(DIM)},
    lambda broadcast, state, batch, mask, key: {"a": state["a"] + drawn(key)},
    lambda broadcast, state: state,
)


@pytest.mark.parametrize("client_fn", [draws, draws_by_step], ids=["whole", "by step"])
def test_client_keys_belong_to_clients(client_fn):
    """A client draws the same wherever it is packed, and other clients draw otherwise."""
    values = np.zeros((4, DIM), np.float32)
    bucket, settings = bucket_of(values), dict(client_fn=client_fn, chosen=no_noise(clip_norm=1e3))
    alone = []
    for client in range(4):
        single = bucket_of(values[:1], 4)._replace(key=np.array([[0, client]] * 4, np.uint32))
        alone.append(summed([single], **settings))
    np.testing.assert_allclose(sum(alone), summed([bucket], **settings), rtol=1e-6)
    assert len({row.tobytes() for row in alone}) == 4


def test_on_several_cpus_nothing_is_dispatched_while_a_collective_runs():
    """Else XLA may wait for ever for a device whose collective it does not start."""
    opened = door(held_vector, plan(), SHAPE, mesh=client_mesh(2))
    for _ in range(3):
        found = through(opened, ZERO, [bucket_of(vectors(64))] * 8)
        assert all(leaf.is_ready() for leaf in jax.tree.leaves((found.value, found.clip_norm)))


def test_one_compilation_serves_every_cohort_clip_norm_and_noise():
    """One process compiles once for a sweep of clients per round 10, 50, 200, 1,000."""
    traces = []

    def counted(broadcast, examples, key):
        traces.append(None)
        return held_vector(broadcast, examples, key)

    for count, noise in ((10, 0.5), (50, 1.0), (200, 2.0), (1_000, 4.0)):
        values = vectors(count)
        buckets = [bucket_of(values[i : i + 16], 16) for i in range(0, count, 16)]
        chosen = plan(clients_per_round=count, noise_multiplier=noise, clip_norm=noise)
        summed(buckets, chosen=chosen, client_fn=counted)
    assert len(traces) == 1


@pytest.mark.parametrize(
    ("slots", "chunk", "message"), [(3, None, "3 clients"), (8, 3, "chunk = 3")]
)
def test_layouts_that_would_drop_clients_are_refused(slots, chunk, message):
    with pytest.raises(InputError, match=message):
        summed([bucket_of(vectors(slots))], chunk=chunk, mesh=client_mesh(2))


@pytest.mark.parametrize("dtype", [np.float16, np.int32, jnp.bfloat16])
def test_low_precision_contributions_are_summed_in_float32(dtype):
    """TRUST 19: 600 ones in float16 or bfloat16 would stop growing or round; in float32 not."""
    values = np.ones((8, DIM)).astype(dtype)
    bucket = bucket_of(np.ones((8, DIM), np.float32))
    bucket = bucket._replace(batches={"x": values[:, None, None, :]})

    def as_it_is(broadcast, examples, key):
        return {"a": examples.batches["x"][0, 0]}

    found = summed([bucket] * 75, client_fn=as_it_is, chosen=no_noise(clip_norm=10.0))
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, np.full(DIM, 600.0))
