"""Clipping: the bound holds for every input, and what must stay untouched does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpfl.privacy import clipping

KINDS = ("flat", "per_layer")
BOUND = 0.7

clip = jax.jit(clipping.clip_contribution, static_argnums=1)


def contribution(scale: float, seed: int = 0, dtype=jnp.float32):
    rng = np.random.default_rng(seed)
    return {
        "kernel": jnp.asarray(rng.normal(0, scale, (17, 5)), jnp.float32).astype(dtype),
        "bias": jnp.asarray(rng.normal(0, 10 * scale, 5), jnp.float32).astype(dtype),
        "scalar": jnp.asarray(rng.normal(0, scale), jnp.float32).astype(dtype),
    }


def exact_norm(tree) -> float:
    return float(
        np.sqrt(sum(np.sum(np.asarray(x, np.float64) ** 2) for x in jax.tree.leaves(tree)))
    )


def clipped(tree, kind: str, bound: float = BOUND):
    return clip(tree, kind, jnp.float32(bound))


@pytest.mark.parametrize("kind", KINDS)
@given(exponent=st.floats(-30, 18), seed=st.integers(0, 2**32 - 1), bound=st.floats(1e-3, 1e3))
def test_the_norm_never_exceeds_the_bound(kind, exponent, seed, bound):
    """TRUST 16: at most S (1 + 1e-6), whatever comes in, overflow of the norm included."""
    result, _, _ = clipped(contribution(10.0**exponent, seed), kind, bound)
    assert exact_norm(result) <= float(np.float32(bound)) * (1 + 1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("leaf", ["kernel", "bias", "scalar"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_one_value_that_is_not_finite_zeroes_the_whole_contribution(kind, leaf, bad):
    """TRUST 2: no leaf survives, the output is finite, and the client is reported."""
    tree = contribution(0.01)
    tree[leaf] = jnp.ravel(tree[leaf]).at[0].set(bad).reshape(tree[leaf].shape)
    result, norm, finite = clipped(tree, kind)
    assert not bool(finite)
    assert np.isposinf(float(norm))
    assert all(not np.any(np.asarray(x)) for x in jax.tree.leaves(result))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("huge", [3e19, 1e30, 3e38])
def test_a_norm_that_overflows_is_not_let_through(kind, huge):
    """TRUST 2: finite values whose squares overflow float32 become zero, not NaN."""
    tree = contribution(0.01)
    tree["bias"] = jnp.full(5, huge, jnp.float32)
    result, norm, finite = clipped(tree, kind)
    assert not bool(finite)
    assert np.isposinf(float(norm))
    assert exact_norm(result) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_zero_stays_zero(kind):
    """TRUST 3: and no division by zero, also where only one leaf is zero."""
    zero = jax.tree.map(jnp.zeros_like, contribution(1.0))
    result, norm, finite = clipped(zero, kind)
    assert bool(finite)
    assert float(norm) == 0
    assert exact_norm(result) == 0
    part = contribution(1.0) | {"bias": jnp.zeros(5)}
    result, _, finite = clipped(part, kind)
    assert bool(finite)
    assert not np.any(np.asarray(result["bias"]))
    assert exact_norm(result) > 0


@pytest.mark.parametrize("kind", KINDS)
def test_within_the_bound_nothing_changes(kind):
    """TRUST 3: bit for bit."""
    tree = contribution(1e-4)
    result, norm, _ = clipped(tree, kind)
    assert float(norm) == pytest.approx(exact_norm(tree), rel=1e-6)
    jax.tree.map(np.testing.assert_array_equal, result, tree)


def test_flat_clipping_keeps_the_direction_and_reaches_the_bound():
    tree = contribution(3.0)
    result, norm, _ = clipped(tree, "flat")
    factor = BOUND / exact_norm(tree)
    assert float(norm) == pytest.approx(exact_norm(tree), rel=1e-6)
    for found, given_ in zip(jax.tree.leaves(result), jax.tree.leaves(tree), strict=True):
        np.testing.assert_allclose(found, np.asarray(given_) * factor, rtol=1e-5)


def test_per_layer_clipping_bounds_each_leaf_by_its_share():
    """McMahan et al. 2018, section 3.2: S / sqrt(L) each; a small leaf is left alone."""
    tree = contribution(3.0) | {"scalar": jnp.float32(1e-3)}
    result, _, _ = clipped(tree, "per_layer")
    share = BOUND / np.sqrt(3)
    assert exact_norm(result["kernel"]) == pytest.approx(share, rel=1e-6)
    assert exact_norm(result["bias"]) == pytest.approx(share, rel=1e-6)
    assert float(result["scalar"]) == float(tree["scalar"])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.int8, jnp.int32])
def test_narrow_types_are_clipped_in_float32(kind, dtype):
    """TRUST 19: norm and result are those of the same values in float32."""
    narrow = contribution(20.0, dtype=dtype)
    wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), narrow)
    result, norm, finite = clipped(narrow, kind)
    expected, expected_norm, _ = clipped(wide, kind)
    assert bool(finite)
    assert norm.dtype == jnp.float32
    assert float(norm) == float(expected_norm)
    for found, wanted in zip(jax.tree.leaves(result), jax.tree.leaves(expected), strict=True):
        assert found.dtype == jnp.float32
        np.testing.assert_array_equal(found, wanted)


def test_a_sum_of_squares_beyond_a_narrow_type_is_right():
    """TRUST 19: 300^2 overflows float16, and 100,000 ones are lost in a bfloat16 sum."""
    assert float(clipping.global_norm({"x": jnp.full(4, 300, jnp.float16)})) == 600
    ones = {"x": jnp.ones(100_000, jnp.bfloat16)}
    assert float(clipping.global_norm(ones)) == pytest.approx(100_000**0.5, rel=1e-6)
    assert float(clipping.global_norm({"x": jnp.full(4, 100, jnp.int8)})) == 200


def test_an_unknown_clipping_is_refused():
    with pytest.raises(ValueError, match="'flat' or 'per_layer'"):
        clipping.clip_contribution(contribution(1.0), "global", jnp.float32(1))  # type: ignore
