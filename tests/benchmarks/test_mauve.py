"""MAUVE beside its authors' own program, `mauve-text` 0.4.0, whose values stand here."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.macro.mauve import LEAST_TEXTS, frontier_area, last_states, mauve
from jaxpfl.models.decoder.config import DecoderConfig
from jaxpfl.models.decoder.network import Decoder
from jaxpfl.text.generation.language_model import LanguageModel
from tests.refusals import refusal
from tests.text.tokenisers.utf8_bytes import UTF8Bytes
from tests.trees import drawn


def test_the_area_is_that_of_the_authors():
    p, q = np.array([0.5, 0.3, 0.2]), np.array([0.1, 0.1, 0.8])
    assert frontier_area(p, q) == pytest.approx(0.3496562897177974, rel=1e-12)
    rising = np.arange(1, 41) / 820
    assert frontier_area(rising, rising[::-1]) == pytest.approx(0.3829941637621339, rel=1e-12)
    assert frontier_area(p, p) == pytest.approx(1)
    apart = np.array([1 - 1e-9, 1e-9])
    assert frontier_area(apart, apart[::-1]) == pytest.approx(0.004072097137373552, rel=1e-9)


@pytest.mark.parametrize(
    ("shift", "theirs"),
    [
        (1.0, 0.637),
        *(pytest.param(*row, marks=pytest.mark.long) for row in ((0, 0.971), (2, 0.182))),
    ],
)
def test_the_score_is_that_of_the_authors(shift, theirs):
    """`mauve_star` of two seeds, which differ by 0.012 at most."""
    draw = np.random.RandomState(1)
    one, other = (draw.randn(LEAST_TEXTS, 8) * np.arange(1, 9) for _ in range(2))
    other[:, 7] += 8 * shift
    assert mauve(one, other) == pytest.approx(theirs, abs=0.02)


def test_too_few_texts_are_refused():
    few, enough = np.ones((LEAST_TEXTS - 1, 2)), np.ones((LEAST_TEXTS, 2))
    refusal(lambda: mauve(few, enough), "2,500 2,499")
    refusal(lambda: mauve(enough, few), "2,500 2,499")


def test_a_texts_state_is_that_of_its_last_token_whatever_is_beside_it():
    config = DecoderConfig("gpt2", 260, hidden_size=16, layers=2, heads=2, positions=32)
    model = Decoder(config)
    writer = LanguageModel(model, drawn(model, 0), UTF8Bytes())
    texts = ["some words", "", "of which one is longer than all positions", "other word"]
    states = last_states(writer, texts, microbatch_size=2)
    assert states.shape == (4, 16)
    hidden = jax.jit(model.hidden)
    for text, state in zip(texts, states, strict=True):
        ids = [*text.encode()][:32] or [writer.tokeniser.end_of_text]
        alone = hidden(writer.params, jnp.array([ids], jnp.int32))
        np.testing.assert_allclose(state, alone[0, -1], rtol=1e-4, atol=1e-5)
