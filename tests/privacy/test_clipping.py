"""Clipping: the bound holds for every input, and what must stay untouched does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from jaxpfl.privacy import clipping

BOUND = 0.7


def clip_contribution(tree, bound):
    """The clipped contribution, its norm before and whether it counts, as the door has them."""
    factors, norm, counts = clipping.clip_factors(tree, bound)
    clipped = jax.tree.map(
        lambda leaf, factor: jnp.where(counts, leaf.astype(jnp.float32) * factor, 0.0),
        tree,
        factors,
    )
    return clipped, norm, counts


clip = jax.jit(clip_contribution)


def contribution(scale: float, seed: int = 0, dtype=jnp.float32):
    rng = np.random.default_rng(seed)
    return {
        "kernel": jnp.asarray(rng.normal(0, scale, (17, 5)), jnp.float32).astype(dtype),
        "bias": jnp.asarray(rng.normal(0, 10 * scale, 5), jnp.float32).astype(dtype),
        "scalar": jnp.asarray(rng.normal(0, scale), jnp.float32).astype(dtype),
    }


def norm_of(tree) -> jax.Array:
    """The L2 norm as the clip finds it."""
    return clipping.clip_factors(tree, jnp.float32(jnp.inf))[1]


def exact_norm(tree) -> float:
    return float(
        np.sqrt(sum(np.sum(np.asarray(x, np.float64) ** 2) for x in jax.tree.leaves(tree)))
    )


def clipped(tree, bound: float = BOUND):
    return clip(tree, jnp.float32(bound))


TINY = float(np.finfo(np.float32).tiny)  # below it numbers are subnormal, and may be flushed
OVERFLOWS = float(np.sqrt(np.finfo(np.float32).max))

LARGEST = float(np.finfo(np.float32).max)


def up_to(exponent: int):
    """Nine float32 of at most 2^exponent."""
    limit = min(2.0**exponent, LARGEST)
    return hnp.arrays(np.float32, 9, elements=st.floats(-limit, limit, width=32))


# Of one magnitude, or of all, NaN and infinities among them.
nine = st.integers(-149, 128).flatmap(up_to) | hnp.arrays(np.float32, 9)
norms = st.floats(-12, 12).map(lambda exponent: 10.0**exponent)


def ones_and(bad: float, place: int) -> np.ndarray:
    return np.where(np.arange(9) == place, np.float32(bad), np.float32(1))


@given(values=nine, bound=norms)
@example(values=ones_and(np.nan, 0), bound=1.0)
@example(values=ones_and(np.inf, 5), bound=1.0)
@example(values=ones_and(-np.inf, 8), bound=1.0)
def test_whatever_the_float32_the_clip_is_exact_or_zero(values, bound):
    """TRUST 2, 3, 16: over all of float32 and of a plan's clip norms, every line of the table."""
    bound = np.float32(bound)
    tree = {"a": values[:4].reshape(2, 2), "b": values[4:8], "c": values[8]}
    result, norm, counts = jax.tree.map(np.asarray, clip(tree, bound))
    exact = exact_norm(tree) if np.all(np.isfinite(values)) else np.inf
    found = np.concatenate([np.ravel(result[name]) for name in "abc"])
    assert np.all(np.isfinite(found))
    assert exact_norm(result) <= float(bound) * (1 + 1e-6)
    if exact > OVERFLOWS * (1 + 1e-6):
        assert not counts and np.isposinf(norm) and not np.any(found)
        return
    if exact > OVERFLOWS * (1 - 1e-6) and not counts:
        return
    assert counts and abs(float(norm) - exact) <= 1e-6 * exact + 1e-18
    factor = min(1.0, float(bound) / exact) if exact else 1.0
    for name in "abc":
        wanted = tree[name].astype(np.float64) * factor
        if exact <= float(bound) * (1 - 1e-6):
            kept = np.where(np.abs(wanted) < TINY, result[name], tree[name])
            np.testing.assert_array_equal(result[name], kept)
        np.testing.assert_allclose(result[name], wanted, rtol=1e-6, atol=1.01 * TINY)


@pytest.mark.parametrize("bound", [0.0, 1e-45, 5e-36, 1e-20, 9.9e-13, np.nan])
def test_a_clip_norm_too_small_for_float32_squares_lets_nothing_through(bound):
    """TRUST 16: where the norm would be wrong by 10^6 the contribution is zero."""
    result, norm, counts = clipped(contribution(1e-30), bound)
    assert not bool(counts) and np.isposinf(float(norm))
    assert exact_norm(result) == 0
    for extreme in (clipping.SMALLEST_CLIP_NORM, clipping.LARGEST_CLIP_NORM):
        result, _, counts = clipped(contribution(1e15), extreme)
        assert bool(counts)
        assert exact_norm(result) == pytest.approx(extreme, rel=1e-6)


def test_values_whose_squares_are_flushed_do_not_add_up():
    """TRUST 16: a hundred million of them beside the smallest clip norm, in one leaf or spread."""
    smallest = clipping.SMALLEST_CLIP_NORM
    leaf = np.full(10**6, 1.05e-19, np.float32)
    leaf[0] = smallest
    result, _, _ = clip({"x": leaf}, jnp.float32(smallest))
    missing = exact_norm(result) ** 2 - float(np.asarray(result["x"])[0]) ** 2
    whole = np.sqrt(float(np.float32(smallest)) ** 2 + 100 * missing)
    assert whole <= smallest * (1 + 1e-6)


@pytest.mark.parametrize(
    ("leaves", "size"),
    [
        pytest.param(leaves, size, marks=pytest.mark.long if leaves * size > 100_000 else ())
        for leaves in (1, 3, 200)
        for size in (1, 1_000, 5_000, 60_000)
    ],
)
def test_sums_of_many_equal_squares_do_not_drift(leaves, size):
    """TRUST 16: float32 sums one after the other would be off by 1e-5 and more."""
    for value in (0.7345, 0.5123, 0.9001):
        tree = [np.full(size, value, np.float32)] * leaves
        result, norm, _ = clipped(tree, 0.01)
        assert exact_norm(result) <= 0.01 * (1 + 1e-6)
        assert float(norm) == pytest.approx(exact_norm(tree), rel=1e-6)


def test_zero_stays_zero():
    """TRUST 3: and no division by zero, also where only one leaf is zero."""
    zero = jax.tree.map(jnp.zeros_like, contribution(1.0))
    result, norm, finite = clipped(zero)
    assert bool(finite)
    assert float(norm) == 0
    assert exact_norm(result) == 0
    part = contribution(1.0) | {"bias": jnp.zeros(5)}
    result, _, finite = clipped(part)
    assert bool(finite)
    assert not np.any(np.asarray(result["bias"]))
    assert exact_norm(result) > 0


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.int8, jnp.int32])
def test_narrow_types_are_clipped_in_float32(dtype):
    """TRUST 19: norm and result are those of the same values in float32."""
    narrow = contribution(20.0, dtype=dtype)
    wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), narrow)
    result, norm, finite = clipped(narrow)
    expected, expected_norm, _ = clipped(wide)
    assert bool(finite)
    assert norm.dtype == jnp.float32
    assert float(norm) == float(expected_norm)
    for found, wanted in zip(jax.tree.leaves(result), jax.tree.leaves(expected), strict=True):
        assert found.dtype == jnp.float32
        np.testing.assert_array_equal(found, wanted)


def test_a_sum_of_squares_beyond_a_narrow_type_is_right():
    """TRUST 19: 300^2 overflows float16, and 100,000 ones are lost in a bfloat16 sum."""
    assert float(norm_of({"x": jnp.full(4, 300, jnp.float16)})) == 600
    ones = {"x": jnp.ones(100_000, jnp.bfloat16)}
    assert float(norm_of(ones)) == pytest.approx(100_000**0.5, rel=1e-6)
    assert float(norm_of({"x": jnp.full(4, 100, jnp.int8)})) == 200
