"""The noise against the normal law, and the test against planted defects."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from jaxpfl.privacy import mechanisms
from jaxpfl.privacy.keys import training_root

DRAWS = 2_000_000

Draw = Callable[[jax.Array, tuple[int, ...]], jax.Array]


def noise(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The library's noise at unit scale, through the function that rounds call."""
    return mechanisms.standard_normal(key, shape)


def plain(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return jax.random.normal(key, shape, jnp.float32)


def scaled(factor: float) -> Draw:
    return lambda key, shape: noise(key, shape) * factor


@pytest.fixture(scope="module")
def largest_component() -> float:
    """The largest |z| that a float32 normal draw attains, measured on 2^25 draws.

    Its uniform has 2^23 values, so the extreme ones turn up several times among these.
    """
    draw = jax.jit(lambda key: jnp.max(jnp.abs(plain(key, (2**23,)))))
    return max(float(draw(jax.random.key(seed))) for seed in range(4))


def faults(draw: Draw, largest_component: float) -> set[str]:
    """What is wrong with a sampler of N(0, 1): a subset of {"sigma", "shape", "support"}."""
    found = set()
    values = np.asarray(draw(training_root(1), (DRAWS,)), np.float64)
    if not abs(values.std() - 1) < 0.005 or not abs(values.mean()) < 0.005:
        found.add("sigma")
    if not stats.kstest(values, "norm").pvalue > 1e-3:
        found.add("shape")
    # The sampler's own arithmetic on components that are all at their extreme: traced anew.
    mechanisms.standard_normal.clear_cache()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            jax.random,
            "normal",
            lambda key, shape, dtype: jnp.full(shape, largest_component, jnp.float32).astype(dtype),
        )
        reach = float(draw(training_root(2), (1,))[0])
    mechanisms.standard_normal.clear_cache()
    # Few attainable values in the tail show as repeated ones.
    tail = values[np.abs(values) > 4]
    repeated = 1 - len(np.unique(tail)) / max(len(tail), 1)
    if not reach >= 7 or not len(tail) or not repeated < 0.02:
        found.add("support")
    return found


def test_the_noise_is_normal_to_seven_standard_deviations(largest_component):
    """TRUST 18: sigma within 0.5% on 2 million draws, KS passes, support beyond 7 sigma."""
    assert faults(noise, largest_component) == set()


@pytest.mark.parametrize("factor", [2 / 3, 3 / 2])
def test_noise_of_another_scale_is_rejected(factor, largest_component):
    """TRUST 18: the test must reject 2/3 sigma and 3/2 sigma."""
    assert {"sigma", "shape"} <= faults(scaled(factor), largest_component)


def test_plain_float32_draws_are_rejected_for_their_support(largest_component):
    """TRUST 18: `jax.random.normal` ends at 5.4 sigma, which no moment or KS test sees."""
    assert 5 < largest_component < 5.6
    assert faults(plain, largest_component) == {"support"}


def test_leaves_are_cut_from_one_vector_in_their_order():
    """TRUST 19, 22: another division into leaves, of narrow types, draws the same float32."""
    tree = {"a": jnp.zeros((3, 5)), "b": jnp.zeros((), jnp.int8), "c": jnp.zeros((0, 2))}
    tree["d"] = jnp.zeros(7, jnp.bfloat16)
    noise = mechanisms.cut(mechanisms.standard_normal(training_root(5), (23,)), tree)
    whole = mechanisms.standard_normal(training_root(5), (40,))
    leaves = jax.tree.leaves(noise)
    assert [leaf.shape for leaf in leaves] == [(3, 5), (), (0, 2), (7,)]
    assert {leaf.dtype for leaf in leaves} == {jnp.dtype("float32")}
    values = np.concatenate([np.ravel(leaf) for leaf in leaves])
    np.testing.assert_array_equal(values, whole[: len(values)])
