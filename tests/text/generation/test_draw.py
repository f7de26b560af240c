import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpfl.text.generation.decoding import draw, keep_top_p, probabilities


def weights_of(seed, vocabulary, rows=5):
    logits = 3 * np.random.default_rng(seed).standard_normal((rows, vocabulary)).astype(np.float32)
    return probabilities(jnp.asarray(logits), jnp.float32(0.7)), logits


def test_probabilities_are_the_softmax():
    weights, logits = weights_of(0, 40)
    expected = np.exp(logits.astype(np.float64) / 0.7)
    got = np.asarray(weights, np.float64)
    np.testing.assert_allclose(
        got / got.sum(1, keepdims=True), expected / expected.sum(1, keepdims=True), rtol=2e-6
    )


@pytest.mark.parametrize("p", [0.01, 0.5, 0.9, 0.999])
def test_top_p_keeps_the_nucleus(p):
    """Against a sort in float64."""
    weights, _ = weights_of(2, 300)
    kept = np.asarray(keep_top_p(weights, jnp.float32(p)))
    for row, values in enumerate(np.asarray(weights, np.float64)):
        ranks = np.argsort(-values)
        share = np.cumsum(values[ranks]) / values.sum()
        count = int(np.searchsorted(share, p)) + 1
        assert set(np.flatnonzero(kept[row])) == set(ranks[:count])


def test_tokens_that_tie_with_the_last_one_kept_are_kept():
    weights = jnp.array([[1.0, 0.5, 0.5, 0.25]])
    np.testing.assert_array_equal(keep_top_p(weights, jnp.float32(0.5)), [[1, 0.5, 0.5, 0]])


@pytest.mark.parametrize("vocabulary", [1, 5, 33, 130])
def test_draws_are_in_proportion_to_the_weights(vocabulary):
    """Zero weights, whole blocks of them too, are never drawn."""
    generator = np.random.default_rng(4)
    weights = generator.exponential(size=vocabulary).astype(np.float32)
    if vocabulary > 5:
        weights[generator.integers(0, vocabulary, vocabulary // 3)] = 0
        weights[16:32] = 0
    number = 40_000
    keys = jax.random.split(jax.random.key(5), number)
    rows = jnp.broadcast_to(jnp.asarray(weights)[None], (number, vocabulary))
    got = np.bincount(np.asarray(jax.jit(draw)(keys, rows)), minlength=vocabulary)
    expected = number * weights.astype(np.float64) / weights.sum(dtype=np.float64)
    assert (got[weights == 0] == 0).all()
    there = weights > 0
    statistic = ((got - expected)[there] ** 2 / expected[there]).sum()
    # Chi-squared with n degrees of freedom exceeds n + 5 sqrt(2 n) + 20 less than once in 10^6.
    assert statistic < vocabulary + 5 * np.sqrt(2 * vocabulary) + 20
