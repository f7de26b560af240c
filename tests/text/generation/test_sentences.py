import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpfl.models import PAD, CIFGLanguageModel
from jaxpfl.text import Vocabulary, generate_sentences, sample_tokens
from jaxpfl.text.generation.sentences import SpecialIds, slots_of
from jaxpfl.text.tokenisers.vocabulary import BOS, EOS, UNUSED
from tests.trees import drawn

VOCABULARY = Vocabulary.from_texts(["the cat sat", "a dog sat there"] * 2, 16, source="here")
MODEL = CIFGLanguageModel(vocab_size=len(VOCABULARY), embedding=8, hidden=12, projection=8)
KEY = jax.random.key(1)


@pytest.fixture(scope="module")
def params():
    return drawn(MODEL, 0)


def test_a_sequence_that_ended_makes_room_for_the_next(params):
    """More requests than run at a time, and than one call on the device takes."""
    number = 8_300
    assert slots_of(MODEL) < number
    many = sample_tokens(MODEL, params, KEY, np.arange(number), max_tokens=6)
    rows = np.array([0, 1, 1_500, 8_191, 8_192, 8_299])
    some = sample_tokens(MODEL, params, KEY, rows, max_tokens=6)
    np.testing.assert_array_equal(some, many[rows])
    assert (many[:, 0] != PAD).all()


def test_further_ids_are_never_drawn(params):
    ids = SpecialIds(start=BOS, end=EOS, never=(4, 5))
    drawn = sample_tokens(MODEL, params, KEY, np.arange(500), max_tokens=6, ids=ids)
    assert not {BOS, 4, 5} & set(drawn.reshape(-1).tolist())


def test_sentences_end_at_end_of_sentence(params):
    tokens = sample_tokens(MODEL, params, KEY, np.arange(70), max_tokens=6)
    ended = 0
    for row in tokens.tolist():
        length = row.index(EOS) + 1 if EOS in row else len(row)
        ended += EOS in row
        assert not {PAD, UNUSED, BOS} & set(row[:length])
        assert row[length:] == [PAD] * (len(row) - length)
    assert 0 < ended < 70


def test_samples_follow_the_models_distribution(params):
    """Accepts the temperature asked for and rejects another."""
    number = 4_000
    params = jax.tree.map(lambda leaf: 3 * leaf, params)
    first = sample_tokens(MODEL, params, KEY, np.arange(number), max_tokens=1, temperature=0.5)[
        :, 0
    ]
    got = np.bincount(first, minlength=len(VOCABULARY))
    assert got[[UNUSED, BOS]].sum() == 0
    logits = MODEL.step(params, jnp.array([BOS]), MODEL.initial_carry(1))[0][0]

    def statistic(temperature):
        weights = np.exp(np.asarray(logits, np.float64)[2:] / temperature)
        expected = number * weights / weights.sum()
        return ((got[2:] - expected) ** 2 / expected).sum()

    # Chi-squared with 7 degrees of freedom exceeds 40 once in a million draws.
    assert statistic(0.5) < 40 < statistic(0.7)


def test_generated_sentences_are_a_function_of_key_and_index(params):
    few = generate_sentences(MODEL, params, VOCABULARY, jax.random.key(7), 3, max_tokens=6)
    more = generate_sentences(MODEL, params, VOCABULARY, jax.random.key(7), 9, max_tokens=6)
    assert more[:3] == few
    assert generate_sentences(MODEL, params, VOCABULARY, jax.random.key(8), 9, max_tokens=6) != more


def test_no_requests_draw_nothing(params):
    assert sample_tokens(MODEL, params, KEY, [], max_tokens=6).shape == (0, 6)
