"""Checks that hold for every model."""

import jax
import numpy as np


def check_masked(model, real, padding):
    """Padding appended to a batch changes nothing but the rounding of longer matrix products."""
    params = model.init(jax.random.key(0))
    step = jax.jit(jax.value_and_grad(model.loss, has_aux=True))
    size = len(next(iter(real.values())))
    extra = len(next(iter(padding.values())))
    both = {name: np.concatenate([real[name], padding[name]]) for name in real}
    blank = {name: np.concatenate([real[name], np.ones_like(padding[name])]) for name in real}
    mask = np.arange(size + extra) < size
    (loss, metrics), gradient = step(params, both, mask)
    (blank_loss, _), blank_gradient = step(params, blank, mask)
    (alone_loss, alone_metrics), alone_gradient = step(params, real, np.ones(size, bool))
    # What padding holds makes no difference at all.
    assert loss == blank_loss
    jax.tree.map(np.testing.assert_array_equal, gradient, blank_gradient)
    np.testing.assert_allclose(loss, alone_loss, rtol=1e-6)
    assert metrics["count"] == alone_metrics["count"]
    assert metrics.get("correct") == alone_metrics.get("correct")
    assert metrics.keys() == alone_metrics.keys()
    for name in metrics:
        np.testing.assert_allclose(metrics[name], alone_metrics[name], rtol=1e-6)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6),
        gradient,
        alone_gradient,
    )


def check_all_masked(model, batch):
    """No real example: loss, metrics and gradient are exactly zero."""
    params = model.init(jax.random.key(0))
    mask = np.zeros(len(next(iter(batch.values()))), bool)
    step = jax.jit(jax.value_and_grad(model.loss, has_aux=True))
    (loss, metrics), gradient = step(params, batch, mask)
    assert loss == 0
    assert all(value == 0 for value in metrics.values())
    assert all((np.asarray(leaf) == 0).all() for leaf in jax.tree.leaves(gradient))


def check_parameters_kept(model, batch):
    """Calls neither change the parameters nor keep anything for the next call."""
    params = model.init(jax.random.key(0))
    before = jax.tree.map(np.array, params)
    mask = np.ones(len(next(iter(batch.values()))), bool)
    first = model.loss(params, batch, mask)[0]
    other = jax.tree.map(lambda leaf: leaf + 1, params)
    assert model.loss(other, batch, mask)[0] != first
    assert model.loss(params, batch, mask)[0] == first
    jax.tree.map(np.testing.assert_array_equal, params, before)
