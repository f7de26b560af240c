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


def faults(draw: Draw) -> set[str]:
    """What is wrong with a sampler of N(0, 1): a subset of {"sigma", "shape", "support"}."""
    found = set()
    values = np.asarray(draw(training_root(1), (DRAWS,)), np.float64)
    if not abs(values.std() - 1) < 0.005 or not abs(values.mean()) < 0.005:
        found.add("sigma")
    if not stats.kstest(values, "norm").pvalue > 1e-3:
        found.add("shape")
    # Few attainable values in the tail show as repeated ones.
    tail = values[np.abs(values) > 4]
    repeated = 1 - len(np.unique(tail)) / max(len(tail), 1)
    if not len(tail) or not repeated < 0.02:
        found.add("support")
    return found


def test_the_noise_is_normal_and_its_tail_has_many_values():
    """TRUST 18: sigma within 0.5 % on 2 million draws, and KS passes."""
    assert faults(noise) == set()


@pytest.mark.parametrize("factor", [2 / 3, 3 / 2])
def test_noise_of_another_scale_is_rejected(factor):
    """TRUST 18: the test must reject 2/3 sigma and 3/2 sigma."""
    assert {"sigma", "shape"} <= faults(scaled(factor))


def test_plain_float32_draws_are_rejected_for_their_support():
    """TRUST 18: `jax.random.normal` ends at 5.4 sigma, which no moment or KS test sees."""
    assert faults(plain) == {"support"}


def test_numbers_are_those_of_box_and_muller_and_reach_seven_deviations():
    """TRUST 18: the extreme words are among those that a block can have."""
    rng = np.random.default_rng(0)
    words = rng.integers(0, 2**32, (100_000, 4), np.uint32, endpoint=False)
    extremes = np.array([0, 1, 2**31 - 1, 2**31, 2**32 - 1], np.uint32)
    words = np.vstack([words, np.stack(np.meshgrid(*[extremes] * 4), -1).reshape(-1, 4)])
    drawn = np.asarray(mechanisms.normal_of_words(jnp.asarray(words)), np.float64)
    uniform = (words + 0.5) / 2.0**32
    terms = [
        np.sqrt(-np.log(uniform[:, first])) * np.cos(2 * np.pi * words[:, first + 1] / 2.0**32)
        for first in (0, 2)
    ]
    # Near 1, float32 has steps of 2^-24 where the reference has 2^-32: of a small radius.
    expected = np.sum(terms, axis=0)
    np.testing.assert_allclose(drawn, expected, rtol=0, atol=4e-4)
    usual = uniform[:, [0, 2]].max(axis=1) < 0.999
    np.testing.assert_allclose(drawn[usual], expected[usual], rtol=0, atol=1e-5)
    assert 7 < drawn.max() < 9.6 and -9.6 < drawn.min() < -7


def test_coordinates_are_independent_of_their_neighbours():
    """No word is used for two coordinates, nor twice for one."""
    values = np.asarray(noise(training_root(3), (DRAWS,)), np.float64)
    for power in (1, 2):
        centred = values**power - (power == 2)
        deviation = np.sqrt(len(values)) * (centred.var())
        for lag in (1, 2, 4):
            assert abs(np.sum(centred[lag:] * centred[:-lag])) < 6 * deviation


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
