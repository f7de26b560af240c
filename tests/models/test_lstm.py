"""The LSTM against plain loops, and the number of parameters that the field gives."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpfl.errors import InputError
from jaxpfl.models import LSTMLanguageModel, count_parameters
from jaxpfl.models.layers import lstm_cell
from tests.models.masking import check_all_masked, check_masked, check_parameters_kept

SMALL = LSTMLanguageModel(vocab_size=7, embedding=3, hidden=5, layers=2)
SHALLOW = LSTMLanguageModel(vocab_size=7, embedding=3, hidden=5, layers=1)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def plain(x_TxBxI, kernel, bias):
    """The recurrence in float64, gate by gate."""
    hidden = len(bias) // 4
    h = c = np.zeros((x_TxBxI.shape[1], hidden))
    outputs = []
    for x in x_TxBxI:
        gates = np.concatenate([x, h], axis=1) @ kernel + bias
        i, f, g, o = (gates[:, k * hidden : (k + 1) * hidden] for k in range(4))
        c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
        h = sigmoid(o) * np.tanh(c)
        outputs.append(h)
    return np.stack(outputs)


def batch(rows: int) -> dict[str, Any]:
    rng = np.random.default_rng(rows)
    tokens = rng.integers(0, SMALL.vocab_size, (rows, 6), np.int32)
    tokens[0, 4:] = -1
    return {"tokens": tokens}


def test_it_has_the_fields_number_of_parameters():
    shapes = jax.eval_shape(LSTMLanguageModel().init, jax.random.key(0))
    assert count_parameters(shapes) == 820_522


def test_logits_are_those_of_a_plain_loop():
    params = SMALL.init(jax.random.key(0))
    tokens = np.abs(batch(4)["tokens"])
    x = np.asarray(params["embedding"], np.float64)[tokens.T]
    for i in range(2):
        layer = params[f"layer_{i}"]
        x = plain(x, np.asarray(layer["kernel"], np.float64), np.asarray(layer["bias"]))
    expected = x @ np.asarray(params["output"]).T + np.asarray(params["output_bias"])
    found = SMALL.logits(params, jnp.asarray(tokens))
    np.testing.assert_allclose(found, expected.transpose(1, 0, 2), atol=1e-5)


def test_the_gradient_is_that_of_automatic_differentiation():
    keys = [jax.random.fold_in(jax.random.key(1), i) for i in range(4)]
    x, dh = (jax.random.normal(keys[i], (5, 2, 3 + i)) for i in range(2))
    weights = lstm_cell.Weights(
        jax.random.normal(keys[2], (7, 16)), jax.random.normal(keys[3], (16,))
    )

    def automatic(x, weights):
        h = c = jnp.zeros((2, 4))
        outputs = []
        for one in x:
            gates = jnp.concatenate([one, h], 1) @ weights.kernel + weights.bias[None, :]
            i, f, g, o = jnp.split(gates, 4, axis=1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            outputs.append(h)
        return jnp.stack(outputs)

    found, expected = (
        jax.jit(jax.grad(lambda *a, run=run: jnp.sum(run(*a) * dh), (0, 1)))(x, weights)
        for run in (lstm_cell.run, automatic)
    )
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), *[found, expected]
    )


def test_padding_and_purity():
    check_masked(SHALLOW, batch(3), batch(2))
    check_all_masked(SHALLOW, batch(3))
    check_parameters_kept(SHALLOW, batch(3))


def test_targets_are_all_tokens_but_padding():
    params = SMALL.init(jax.random.key(0))
    given = batch(3)
    loss, metrics = SMALL.loss(params, given, jnp.ones(3, bool))
    assert metrics["count"] == 3 * 5 - 2
    np.testing.assert_allclose(loss, metrics["loss_sum"] / metrics["count"], rtol=1e-6)


def test_sizes_are_checked():
    with pytest.raises(InputError, match="hidden"):
        LSTMLanguageModel(hidden=0)
