"""The recurrent language models against plain float64 loops over their equations."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpfl.models import CIFGLanguageModel, LSTMLanguageModel

SMALL = CIFGLanguageModel(vocab_size=11, embedding=4, hidden=6, projection=4)
DEEP = CIFGLanguageModel(
    vocab_size=9, embedding=3, hidden=5, projection=4, layers=2, tied=False, peepholes=True
)
LSTM = LSTMLanguageModel(vocab_size=9, embedding=3, hidden=5, layers=2)
TOKENS = np.array([[1, 5, 3, 8, 2, -1], [1, 4, 4, 6, 7, 3], [1, 2, -1, -1, -1, -1]], np.int32)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def perturbed(model, scale=0.5):
    """Parameters with no zeros, so that biases and peepholes are exercised too."""
    params = model.init(jax.random.key(3))
    leaves, tree = jax.tree.flatten(params)
    rng = np.random.default_rng(0)
    return tree.unflatten(
        [leaf + jnp.asarray(rng.normal(size=leaf.shape) * scale, jnp.float32) for leaf in leaves]
    )


def reference_loss(model, params, tokens):
    """The equations in float64 loops over examples and steps; the mean over non-pad."""
    params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    total, count = 0.0, 0
    is_lstm = isinstance(model, LSTMLanguageModel)
    outputs = model.hidden if is_lstm else model.projection
    for row in tokens:
        states = [(np.zeros(outputs), np.zeros(model.hidden)) for _ in range(model.layers)]
        for current, target in zip(row[:-1], row[1:], strict=True):
            x = params["embedding"][current]
            for i in range(model.layers):
                layer = params[f"layer_{i}"]
                m, c = states[i]
                gates = np.concatenate([x, m]) @ layer["kernel"] + layer["bias"]
                if is_lstm:
                    j, f, g, o = np.split(gates, 4)
                    c = sigmoid(f) * c + sigmoid(j) * np.tanh(g)
                    x = sigmoid(o) * np.tanh(c)
                else:
                    j, f, o = np.split(gates, 3)
                    if model.peepholes:
                        f = f + layer["peepholes"][0] * c
                    forget = sigmoid(f + 1)
                    c = forget * c + (1 - forget) * np.tanh(j)
                    if model.peepholes:
                        o = o + layer["peepholes"][1] * c
                    x = (sigmoid(o) * np.tanh(c)) @ layer["projection"]
                states[i] = (x, c)
            logits = params.get("output", params["embedding"]) @ x + params["output_bias"]
            if target != -1:
                total += np.log(np.exp(logits - logits.max()).sum()) + logits.max()
                total -= logits[target]
                count += 1
    return total / count


@pytest.mark.parametrize("model", [SMALL, DEEP, LSTM])
def test_loss_and_every_gradient_follow_the_equations(model):
    params = perturbed(model)
    slope = jax.jit(jax.value_and_grad(model.loss, has_aux=True))
    (loss, metrics), gradient = slope(params, {"tokens": TOKENS}, np.ones(3, bool))
    np.testing.assert_allclose(loss, reference_loss(model, params, TOKENS), rtol=1e-5)
    assert metrics["count"] == 10
    leaves, tree = jax.tree.flatten(params)
    rng = np.random.default_rng(1)
    for index, slope in enumerate(jax.tree.leaves(gradient)):
        direction = rng.normal(size=slope.shape)
        losses = []
        for sign in (1, -1):
            moved = [np.asarray(leaf, np.float64) for leaf in leaves]
            moved[index] = moved[index] + sign * 1e-5 * direction
            losses.append(reference_loss(model, tree.unflatten(moved), TOKENS))
        expected = (losses[0] - losses[1]) / 2e-5
        got = np.sum(np.asarray(slope, np.float64) * direction)
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-6)


def test_steps_give_the_sequences_logits():
    params = perturbed(DEEP)
    whole = jax.jit(DEEP.logits)(params, TOKENS[:, :-1])
    carry, step = DEEP.initial_carry(3), jax.jit(DEEP.step)
    for t in range(TOKENS.shape[1] - 1):
        logits, carry = step(params, TOKENS[:, t], carry)
        np.testing.assert_allclose(logits, whole[:, t], rtol=1e-5, atol=1e-5)


def test_clients_side_by_side_equal_clients_one_by_one():
    params = [perturbed(DEEP), DEEP.init(jax.random.key(1))]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *params)
    tokens = np.stack([TOKENS, TOKENS[::-1]])
    mask = np.ones((2, 3), bool)

    @jax.jit
    def gradient(params, tokens, mask):
        return jax.grad(lambda p: DEEP.loss(p, {"tokens": tokens}, mask)[0])(params)

    together = jax.vmap(gradient)(stacked, tokens, mask)
    for i in range(2):
        jax.tree.map(
            lambda a, b, i=i: np.testing.assert_allclose(a[i], b, rtol=1e-4, atol=1e-6),
            together,
            gradient(params[i], tokens[i], mask[i]),
        )


def test_top_1_counts_every_target_but_padding_and_no_unknown_word_is_a_hit():
    params = jax.tree.map(jnp.zeros_like, SMALL.init(jax.random.key(0)))
    symbols = dataclasses.replace(SMALL, oov=None)

    @partial(jax.jit, static_argnums=0)
    def evaluate(model, params):
        return model.evaluate(params, {"tokens": TOKENS}, np.ones(3, bool))

    for token, hits in ((2, 2), (3, 2), (4, 2), (0, 0)):
        params["output_bias"] = jnp.zeros(11).at[token].set(1.0)
        for model, expected in ((SMALL, 0 if token == 3 else hits), (symbols, hits)):
            sums = evaluate(model, params)
            assert (sums["correct"], sums["count"]) == (expected, 10)


def test_prior_makes_the_first_prediction_unigram():
    prior = tuple(np.log(np.arange(1, 12) / 66).tolist())
    model = dataclasses.replace(SMALL, output_bias_prior=prior)
    np.testing.assert_allclose(model.init(jax.random.key(0))["output_bias"], prior, rtol=1e-6)
