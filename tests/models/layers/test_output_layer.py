from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpfl.models.base import PAD
from jaxpfl.models.layers import embedding
from jaxpfl.models.layers.embedding import mean_cross_entropy, next_token_loss
from tests import trees

assert_close = partial(trees.assert_close, atol=1e-6)

N, V, P = 7, 11, 3
REAL = np.array([1, 1, 0, 1, 0, 1, 1], bool)
# A target that occurs twice, and one of a row that does not count.
TARGETS = np.array([4, 0, 2, 4, 10, 10, 6], np.int32)


def layer(scale=1.0):
    rng = np.random.default_rng(0)
    shapes = ((N, P), (V, P), (V,))
    return tuple(jnp.asarray(scale * rng.normal(size=shape), jnp.float32) for shape in shapes)


both = jax.jit(jax.value_and_grad(mean_cross_entropy, (0, 1, 2)))


def value_and_gradients(arguments, targets=TARGETS, real=REAL):
    return both(*arguments, targets, real)


def reference(m, matrix, bias, targets, real):
    """Loss and gradients in float64, row by row, from softmax - one_hot."""
    m, matrix, bias = (np.asarray(leaf, np.float64) for leaf in (m, matrix, bias))
    loss, dm, d_matrix, d_bias = 0.0, np.zeros_like(m), np.zeros_like(matrix), np.zeros_like(bias)
    for n in np.flatnonzero(real):
        logits = matrix @ m[n] + bias
        exponentials = np.exp(logits - logits.max())
        slope = exponentials / exponentials.sum()
        loss -= np.log(slope[targets[n]])
        slope[targets[n]] -= 1
        slope /= real.sum()
        dm[n] = slope @ matrix
        d_matrix += np.outer(slope, m[n])
        d_bias += slope
    return loss / real.sum(), (dm, d_matrix, d_bias)


@pytest.mark.parametrize("real", [REAL, np.ones(N, bool), np.arange(N) == 3])
def test_loss_and_gradients_follow_the_equations(real):
    m, matrix, bias = arguments = layer()
    found = value_and_gradients(arguments, real=real)
    assert_close(found, reference(m, matrix, bias, TARGETS, real))


def test_an_outer_function_scales_the_gradients():
    m, matrix, bias = arguments = layer()
    tripled = jax.grad(lambda m: 3.0 * mean_cross_entropy(m, matrix, bias, TARGETS, REAL))
    assert_close(jax.jit(tripled)(m), 3 * value_and_gradients(arguments)[1][0])


def test_extreme_logits_stay_finite_and_right():
    arguments = layer(1e3)
    loss, gradients = value_and_gradients(arguments)
    assert np.isfinite(loss)
    m, matrix, bias = (np.asarray(leaf, np.float64) for leaf in arguments)
    logits = m @ matrix.T + bias
    # At this scale the softmax is one_hot at the highest logit.
    slope = np.eye(V)[logits.argmax(1)] - np.eye(V)[TARGETS]
    slope *= REAL[:, None] / REAL.sum()
    assert_close(gradients, (slope @ matrix, slope.T @ m, slope.sum(0)), atol=1e-3)


def test_a_logit_that_is_not_finite_is_not_hidden():
    m, matrix, bias = layer()
    loss, gradients = value_and_gradients((m.at[1, 0].set(np.nan), matrix, bias))
    assert np.isnan(loss)
    assert np.isnan(np.asarray(gradients[1])).any()


@pytest.mark.parametrize("real", [REAL, np.ones(N, bool), np.zeros(N, bool)])
def test_metrics_of_blocks_are_those_of_all_rows_that_count(real, monkeypatch):
    """Also where the last block is not full, or no row counts."""
    monkeypatch.setattr(embedding, "_METRIC_ROWS", 3)
    # A row that does not count would be correct, if it counted.
    targets = np.array([np.argmax(row) for row in _logits(layer(3.0))], np.int32)
    targets[:2] = TARGETS[:2]
    given = np.where(real, targets, PAD)
    metrics = jax.jit(lambda *given: next_token_loss(*given)[1])(*layer(3.0), given)
    found = jax.device_get(metrics)
    logits = _logits(layer(3.0))[real]
    picked = logits[np.arange(real.sum()), targets[real]]
    correct = np.sum(logits.argmax(1) == targets[real])
    loss_sum = np.sum(np.log(np.exp(logits).sum(1)) - picked)
    assert found["loss_sum"] == pytest.approx(loss_sum, rel=1e-5)
    assert (found["correct"], found["count"]) == (correct, real.sum())


def _logits(arguments):
    m, matrix, bias = (np.asarray(leaf, np.float64) for leaf in arguments)
    return m @ matrix.T + bias
