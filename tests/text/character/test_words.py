import math
import re

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxpfl.data
from jaxpfl.models import PAD
from jaxpfl.text import Vocabulary, char_lm, oov_words, with_words
from jaxpfl.text.character.words import (
    END,
    START,
    SYMBOLS,
    complete_word,
    encode_words,
    log_prior,
    show,
)
from jaxpfl.text.tokenisers.vocabulary import words
from tests.trees import drawn

ENCODED = [
    # word, cap, ids
    ("ab", 3, [START, 97, 98, END, PAD]),
    ("abc", 3, [START, 97, 98, 99, END]),
    # Cut: no end.
    ("abcd", 3, [START, 97, 98, 99, PAD]),
    # Cut inside a character.
    ("ab\u00e9", 3, [START, 97, 98, 0xC3, PAD]),
    ("\u20ac", 3, [START, 0xE2, 0x82, 0xAC, END]),
    ("i h", 3, [START, 105, 32, 104, END]),
    ("\ud800", 3, [START, 0xEF, 0xBF, 0xBD, END]),
]


@pytest.mark.parametrize(("word", "cap", "expected"), ENCODED)
def test_words_are_their_bytes(word, cap, expected):
    got = encode_words([word], cap)
    assert got.dtype == np.int32
    assert got.tolist() == [expected]


@given(st.text(st.characters(codec=None)), st.integers(1, 12))
def test_every_token_of_every_text_is_encoded(text, cap):
    """TRUST 8: padding is in no word, so nothing real is masked; the end is there or not."""
    tokens = list(words(text))
    for token, row in zip(tokens, encode_words(tokens, cap), strict=True):
        raw = token.encode()
        drawn = complete_word(row[1:])
        assert drawn == (raw if len(raw) <= cap else None)
        assert np.count_nonzero(row != PAD) == min(len(raw), cap) + 1 + (len(raw) <= cap)


SHOWN = [
    (b"i have", "i have"),
    ("caf\u00e9 \U0001f600".encode(), "caf\u00e9 \U0001f600"),
    (b"\xff", "\\xff"),
    (b"a\xc3", "a\\xc3"),
    # Too long a way to write "/", and a surrogate: no UTF-8.
    (b"\xc0\xaf", "\\xc0\\xaf"),
    (b"\xed\xa0\x80", "\\xed\\xa0\\x80"),
    (b"\\xff", "\\\\xff"),
    (b"\x1b[2J\n\t\x00", "\\x1b[2J\\x0a\\x09\\x00"),
    (
        "\u202eabc\u00a0\u2028\u0085".encode(),
        "\\xe2\\x80\\xaeabc\\xc2\\xa0\\xe2\\x80\\xa8\\xc2\\x85",
    ),
]


@pytest.mark.parametrize(("raw", "expected"), SHOWN)
def test_stated_policy_for_bytes(raw, expected):
    assert show(raw) == expected


def bytes_shown(text):
    """The inverse of `show`."""
    return b"".join(
        bytes([int(part[2:], 16)])
        if part.startswith("\\x")
        else b"\\"
        if part == "\\\\"
        else part.encode()
        for part in re.findall(r"\\x[0-9a-f]{2}|\\\\|[^\\]", text)
    )


@given(st.binary() | st.text().map(str.encode) | st.text("\\x0aF\x07\u00e9").map(str.encode))
def test_what_is_shown_tells_the_bytes(raw):
    shown = show(raw)
    assert bytes_shown(shown) == raw
    assert not re.search("[\0-\x1f\x7f-\x9f]", shown)


CLIENTS = {
    "ada": {"text": ["the zebra", "the the"]},
    "bob": {"text": ["the"]},
    "eve": {"text": ["", "gnu the zebra gnu"]},
}


def test_words_out_of_the_vocabulary_stay_with_their_clients():
    population = jaxpfl.data.from_clients(CLIENTS)
    vocabulary = Vocabulary.from_texts(["the"], 5, source="here")
    got = oov_words(population, vocabulary, max_bytes=4)
    assert got.offsets.tolist() == [0, 1, 1, 4]
    assert got.fingerprint == population.fingerprint
    assert got.client_ids.equals(population.client_ids)
    drawn = [complete_word(row[1:]) for row in got.columns["tokens"]]
    assert drawn == [None, b"gnu", None, b"gnu"]
    cut = got.columns["tokens"][0]
    assert cut.tolist() == [START, *b"zebr", PAD]


def test_concatenated_words_are_out_of_the_vocabulary():
    population = with_words(jaxpfl.data.from_clients(CLIENTS))
    joined = population.columns["words"].to_pylist()
    joined[1] = "the the"
    changed = population.with_columns({"words": joined})
    vocabulary = Vocabulary.from_texts(["the zebra gnu"], 9, source="here")
    assert oov_words(population, vocabulary).num_examples == 0
    got = oov_words(changed, vocabulary)
    assert got.offsets.tolist() == [0, 1, 1, 1]
    assert complete_word(got.columns["tokens"][0][1:]) == b"the the"


def test_the_model_learns_an_end_but_no_padding():
    """Targets: every byte, and the end of a word that is not cut."""
    model = char_lm(embedding=4, hidden=4, projection=4, layers=1)
    batch = {"tokens": jax.numpy.asarray(encode_words(["ab", "abcd"], 3))}
    params = drawn(model, 0)
    metrics = jax.jit(model.evaluate)(params, batch, jax.numpy.ones(2, bool))
    assert float(metrics["count"]) == 3 + 3


def test_log_prior_is_the_frequency_of_targets():
    prior = log_prior(encode_words(["ab", "abcd"], 3))
    assert len(prior) == SYMBOLS
    total = 6 + SYMBOLS
    assert math.isclose(math.fsum(map(math.exp, prior)), 1)
    for symbol, count in ((97, 2), (99, 1), (END, 1), (0, 0), (START, 0)):
        assert math.isclose(prior[symbol], math.log((count + 1) / total))
