import jax
import numpy as np
import pytest

import jaxpfl.data
from jaxpfl.errors import InputError
from jaxpfl.models import PAD, CIFGLanguageModel
from jaxpfl.text import Vocabulary, oov_rates, oov_rates_of, sample_tokens
from jaxpfl.text.tokenisers.vocabulary import BOS, EOS, OOV, UNUSED
from tests.trees import drawn

ROWS = np.array(
    [[OOV, 4, EOS, PAD], [4, OOV, OOV, 4], [EOS, PAD, PAD, PAD], [OOV, EOS, PAD, PAD]], np.int32
)


@pytest.mark.parametrize("begin", [False, True])
def test_a_rate_is_of_the_sentences_that_have_a_word_there(begin):
    rows = np.concatenate([np.full((4, 1), BOS, np.int32), ROWS], axis=1) if begin else ROWS
    rates = oov_rates(rows)
    assert rates.oov_T.tolist() == [2, 1, 1, 0]
    assert rates.words_T.tolist() == [3, 2, 1, 1]
    assert rates.sentences == 4
    np.testing.assert_allclose(rates.rate_T, [2 / 3, 1 / 2, 1, 0])
    assert rates.overall == 4 / 7


def test_no_word_has_no_rate():
    rates = oov_rates(np.array([[EOS, PAD]]))
    assert np.isnan(rates.rate_T).all()
    assert np.isnan(rates.overall)
    assert np.isnan(oov_rates(np.zeros((0, 3), np.int32)).overall)


def test_rates_of_clients():
    population = jaxpfl.data.from_clients(
        {"ada": {"text": ["a gnu", "gnu a"]}, "bob": {"text": ["gnu gnu a a"]}}
    )
    vocabulary = Vocabulary.from_texts(["a"], 5, source="here")
    rates = oov_rates_of(vocabulary.encode(population, 3))
    assert rates.oov_T.tolist() == [2, 2, 0]
    assert rates.words_T.tolist() == [3, 3, 1]
    with pytest.raises(InputError, match="column 'tokens', found columns 'text'"):
        oov_rates_of(population)


def test_rates_of_generated_sentences_are_the_models():
    """At the first place the model's own probabilities say what the rate is."""
    model = CIFGLanguageModel(vocab_size=9, embedding=4, hidden=6, projection=4)
    params = drawn(model, 0, 1.0)
    rates = oov_rates(
        sample_tokens(model, params, jax.random.key(1), np.arange(4000), max_tokens=5)
    )
    logits = model.step(params, jax.numpy.array([BOS]), model.initial_carry(1))[0][0]
    weights = np.exp(np.asarray(logits, np.float64))
    weights[[UNUSED, BOS, EOS]] = 0
    expected = weights[OOV] / weights.sum()
    assert (
        abs(rates.rate_T[0] - expected) < 5 * (expected * (1 - expected) / rates.words_T[0]) ** 0.5
    )
    assert np.all(np.diff(rates.words_T) <= 0)
