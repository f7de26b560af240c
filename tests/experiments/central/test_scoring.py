"""Accuracy and perplexity of a language model count every real target once."""

from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from jaxpfl.errors import InputError
from jaxpfl.experiments.central.scoring import in_batches, score
from jaxpfl.federated.clients.client import Static
from jaxpfl.models.decoder.config import DecoderConfig
from jaxpfl.models.decoder.network import Decoder
from jaxpfl.text.microbatches import dealt, placed
from tests.trees import drawn

MODEL = Decoder(DecoderConfig("gpt2", 23, 16, 1, 2, positions=12, initializer_range=0.5))


@pytest.fixture(scope="module")
def params() -> Any:
    return drawn(MODEL, 0)


def _scored(params: Any, tokens: np.ndarray, size: int, mesh: Mesh | None = None) -> Any:
    batches = dealt(in_batches({"tokens": tokens}, size), mesh)
    return score(Static(MODEL), placed(params, mesh), batches).result()


def _tokens(rows: int = 11) -> np.ndarray:
    generator = np.random.default_rng(0)
    tokens = generator.integers(0, 23, (rows, 12)).astype(np.int32)
    # Few lengths: the reference compiles each.
    for row, length in enumerate(generator.choice([0, 1, 2, 5, 12], rows)):
        tokens[row, length:] = -1
    return tokens


def test_it_is_the_mean_over_real_targets(params):
    tokens = _tokens()
    hits, losses = [], []
    logits_of = jax.jit(lambda params, row: MODEL.logits(params, MODEL.hidden(params, row)))
    for row in tokens:
        row = row[row >= 0]
        if len(row) < 2:
            continue
        logits = np.asarray(logits_of(params, row[None])[0, :-1], np.float64)
        hits += list(np.argmax(logits, axis=1) == row[1:])
        log_sum = np.log(np.sum(np.exp(logits), axis=1))
        losses += list(log_sum - logits[np.arange(len(row) - 1), row[1:]])
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    for size, devices in ((3, None), (4, mesh)):
        found = _scored(params, tokens, size, devices)
        assert found["count"] == len(hits)
        assert found["accuracy"] == pytest.approx(np.mean(hits))
        assert found["loss"] == pytest.approx(np.mean(losses), rel=1e-5)
        assert found["perplexity"] == pytest.approx(np.exp(np.mean(losses)), rel=1e-5)


def test_no_targets_are_nan(params):
    found = _scored(params, np.array([[3, -1]], np.int32), 1)
    assert np.isnan(found["accuracy"])
    assert found["count"] == 0


def test_no_examples_are_refused(params):
    with pytest.raises(InputError, match="no examples to score"):
        _scored(params, np.zeros((0, 4), np.int32), 4)
