"""Densities of sentences against the model's own loss, one sentence at a time."""

import jax
import numpy as np
import pytest

from jaxpfl.errors import InputError
from jaxpfl.models.base import PAD
from jaxpfl.models.recurrent import CIFGLanguageModel
from jaxpfl.text.metrics.prediction import log_densities, unlikely
from jaxpfl.text.tokenisers.vocabulary import BOS, EOS
from tests.trees import drawn

MODEL = CIFGLanguageModel(vocab_size=12, embedding=4, hidden=6, projection=4)


def rows(number: int) -> np.ndarray:
    """Sentences of 0 to 6 words; one of 6 has no room for its end."""
    generator = np.random.default_rng(0)
    tokens = np.full((number, 7), PAD, np.int32)
    tokens[:, 0] = BOS
    for row in tokens:
        words = generator.integers(0, 7)
        row[1 : 1 + words] = generator.integers(4, 12, words)
        row[1 + words : 2 + words] = EOS
    return tokens


def test_a_density_is_the_loss_of_the_sentence_alone():
    params = drawn(MODEL, 0)
    tokens = rows(40)
    found = log_densities(MODEL, params, tokens)
    one = jax.numpy.ones(1, bool)
    alone = jax.jit(lambda row: MODEL.loss(params, {"tokens": row[None]}, one)[0])
    losses = [alone(row) for row in tokens]
    np.testing.assert_allclose(found, -np.array(losses), rtol=1e-5)
    # More than a batch, in any order.
    many = np.tile(tokens, (30, 1))
    np.testing.assert_allclose(log_densities(MODEL, params, many), np.tile(found, 30), rtol=1e-5)
    assert log_densities(MODEL, params, tokens[:0]).shape == (0,)


def test_unlikely_sentences_are_those_below_the_threshold():
    params = drawn(MODEL, 1)
    tokens = rows(50)
    densities = log_densities(MODEL, params, tokens)
    threshold = float(np.quantile(densities, 0.3))
    found = unlikely(MODEL, params, tokens, threshold)
    np.testing.assert_array_equal(found, densities < threshold)
    assert 0 < found.sum() < 50
    with pytest.raises(InputError, match="threshold"):
        unlikely(MODEL, params, tokens, float("nan"))
