"""Masked language models: what is hidden, what counts in the loss, and that training helps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpfl.experiments.central.adamw import Training
from jaxpfl.experiments.central.training import fit
from jaxpfl.models.base import PAD
from jaxpfl.models.encoder.config import EncoderConfig
from jaxpfl.models.encoder.masked import MaskedTokens, masked_rows
from jaxpfl.models.encoder.network import Encoder
from tests.published_models import SIZES

MASK, END = 9, 0


def rows(number=400, seed=0):
    """Tokens 1 .. 8 that count upwards and start anywhere; two rows are shorter."""
    starts = np.random.default_rng(seed).integers(8, size=number)
    rows = ((starts[:, None] + np.arange(6)[None]) % 8 + 1).astype(np.int32)
    rows[:2, 4:] = PAD
    return rows


def test_three_of_ten_tokens_are_hidden_and_the_frame_never_is():
    given = rows()
    columns = masked_rows(given, MASK, (END, END), np.random.default_rng(0))
    tokens, hidden = columns["tokens"], columns["given"]
    np.testing.assert_array_equal(tokens[2:, 1:-1], given[2:])
    assert tokens[0].tolist() == [END, *given[0, :4].tolist(), END, PAD, PAD]
    changed = tokens != hidden
    assert set(hidden[changed].tolist()) == {MASK}
    assert not changed[:, 0].any() and not changed[:, -1].any() and not changed[:2, 5:].any()
    assert changed[:, 1:-1].mean() == pytest.approx(0.3, abs=0.05)


def test_the_loss_is_of_the_hidden_tokens_alone():
    """Against cross-entropies in float64, with an example that does not count."""
    config = EncoderConfig("bert", vocab_size=10, positions=8, **SIZES)
    model = MaskedTokens(Encoder(config, head=True), MASK)
    params = model.init(jax.random.key(0))
    columns = masked_rows(rows(3), MASK, (END, END), np.random.default_rng(1))
    real = jnp.array([True, True, False])
    batch = {name: jnp.asarray(array) for name, array in columns.items()}
    loss, metrics = model.loss(params, batch, real)
    hidden = model.encoder.hidden(params, batch["given"])
    logits = np.asarray(model.encoder.logits(params, hidden), np.float64)
    logs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    places = np.argwhere(columns["given"][:2] == MASK)
    losses = [-logs[row, place, columns["tokens"][row, place]] for row, place in places]
    assert len(losses) > 1 and int(metrics["count"]) == len(losses)
    assert float(loss) == pytest.approx(np.mean(losses), rel=1e-5)


def test_a_trained_model_knows_what_is_hidden():
    config = EncoderConfig("bert", vocab_size=10, positions=8, initializer_range=0.1, **SIZES)
    model = MaskedTokens(Encoder(config, head=True), MASK)
    columns = [
        masked_rows(rows(400, i), MASK, (END, END), np.random.default_rng(i)) for i in (0, 1)
    ]
    settings = Training(epochs=40, batch_size=40, learning_rate=0.01)
    start = model.init(jax.random.key(0))
    found = fit(model, start, columns[0], settings, seed=0, valid=columns[1])
    losses = found.record["valid_loss"]
    # Eight equally likely tokens have log 8 = 2.08.
    assert losses[-1] < 0.6 < 1.8 < losses[0]
