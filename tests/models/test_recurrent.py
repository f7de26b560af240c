"""The recurrent language models against plain float64 loops over their equations."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpfl.models import CIFGLanguageModel, LSTMLanguageModel
from tests.trees import assert_close, drawn

SMALL = CIFGLanguageModel(vocab_size=11, embedding=4, hidden=6, projection=4)
DEEP = CIFGLanguageModel(
    vocab_size=9, embedding=3, hidden=5, projection=4, layers=2, tied=False, peepholes=True
)
TOKENS = np.array([[1, 5, 3, 8, 2, -1], [1, 4, 4, 6, 7, 3], [1, 2, -1, -1, -1, -1]], np.int32)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def reference_logits(model, params, row):
    """SPEC B.3's equations in float64, step by step: what follows each of a row's symbols."""
    params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    states = [(np.zeros(model.projection), np.zeros(model.hidden)) for _ in range(model.layers)]
    found = []
    for current in row:
        x = params["embedding"][current]
        for i in range(model.layers):
            layer = params[f"layer_{i}"]
            m, c = states[i]
            j, f, o = np.split(np.concatenate([x, m]) @ layer["kernel"] + layer["bias"], 3)
            if model.peepholes:
                f = f + layer["peepholes"][0] * c
            forget = sigmoid(f + 1)
            c = forget * c + (1 - forget) * np.tanh(j)
            if model.peepholes:
                o = o + layer["peepholes"][1] * c
            m = (sigmoid(o) * np.tanh(c)) @ layer["projection"]
            states[i] = (m, c)
            x = m
        matrix = params["embedding"] if model.tied else params["output"]
        found.append(matrix @ x + params["output_bias"])
    return np.array(found)


def reference_loss(model, params, tokens):
    """The mean over targets that are no padding."""
    losses = []
    for row in tokens:
        for logits, target in zip(reference_logits(model, params, row), row[1:], strict=False):
            if target != -1:
                total = np.log(np.exp(logits - logits.max()).sum()) + logits.max()
                losses.append(total - logits[target])
    return np.mean(losses)


@pytest.mark.parametrize("model", [SMALL, DEEP])
def test_loss_and_every_gradient_follow_the_equations(model):
    params = drawn(model, 0, 0.5)
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
    params = drawn(DEEP, 0, 0.5)
    whole = jax.jit(DEEP.logits)(params, TOKENS[:, :-1])
    carry, step = DEEP.initial_carry(3), jax.jit(DEEP.step)
    for t in range(TOKENS.shape[1] - 1):
        logits, carry = step(params, TOKENS[:, t], carry)
        np.testing.assert_allclose(logits, whole[:, t], rtol=1e-5, atol=1e-5)


def test_clients_side_by_side_equal_clients_one_by_one():
    params = [drawn(DEEP, 0, 0.5), drawn(DEEP, 1)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *params)
    tokens = np.stack([TOKENS, TOKENS[::-1]])
    mask = np.ones((2, 3), bool)

    @jax.jit
    def gradient(params, tokens, mask):
        return jax.grad(lambda p: DEEP.loss(p, {"tokens": tokens}, mask)[0])(params)

    together = jax.vmap(gradient)(stacked, tokens, mask)
    for i in range(2):
        found = jax.tree.map(lambda leaf, i=i: leaf[i], together)
        assert_close(found, gradient(params[i], tokens[i], mask[i]), rtol=1e-4, atol=1e-6)


def test_extreme_logits_stay_finite():
    params = jax.tree.map(lambda leaf: leaf * 1e4, drawn(SMALL, 0, 0.5))
    slope = jax.jit(jax.value_and_grad(SMALL.loss, has_aux=True))
    (loss, _), gradient = slope(params, {"tokens": TOKENS}, np.ones(3, bool))
    assert np.isfinite(loss)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))


def test_top_1_counts_every_target_but_padding_and_no_unknown_word_is_a_hit():
    params = jax.tree.map(np.zeros_like, drawn(SMALL))
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


def lstm(x_TxBxI, kernel, bias):
    """The recurrence gate by gate."""
    h = c = jnp.zeros((x_TxBxI.shape[1], len(bias) // 4))
    outputs = []
    for x in x_TxBxI:
        gates = jnp.concatenate([x, h], axis=1) @ kernel + bias[None, :]
        i, f, g, o = jnp.split(gates, 4, axis=1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        outputs.append(h)
    return jnp.stack(outputs)


def test_logits_and_gradients_of_an_lstm_are_those_of_a_plain_loop():
    model = LSTMLanguageModel(vocab_size=9, embedding=3, hidden=5, layers=2)
    params, tokens = drawn(model, 0, 0.5), np.abs(TOKENS)

    def plain(params):
        x = params["embedding"][tokens.T]
        for i in range(2):
            x = lstm(x, params[f"layer_{i}"]["kernel"], params[f"layer_{i}"]["bias"])
        logits = x @ params["output"].T + params["output_bias"][None, None, :]
        return jnp.sum(jnp.sin(logits)), logits.transpose(1, 0, 2)

    def ours(params):
        logits = model.logits(params, tokens)
        return jnp.sum(jnp.sin(logits)), logits

    found, expected = (jax.jit(jax.grad(f, has_aux=True))(params) for f in (ours, plain))
    assert_close(found, expected, rtol=1e-4, atol=1e-5)
