import collections

import numpy as np
import pytest

import jaxpfl.data
from jaxpfl.errors import InputError
from jaxpfl.text import Vocabulary
from jaxpfl.text.characters import complete_word, encode_words
from jaxpfl.text.faults import public_words

POPULATION = jaxpfl.data.from_clients(
    {"a": {"text": ["p q r", "x"] * 300}, "b": {"text": ["p gnu"] * 300}}
)
VOCABULARY = Vocabulary.from_texts(["p q r"], 7, source="here")


def words_of(tokens):
    return [(complete_word(row[1:]) or b"").decode() for row in tokens]


def test_rare_words_come_first_and_faulty_ones_are_their_share():
    found = words_of(public_words(POPULATION, VOCABULARY, seed=0, faulty=0.4, max_bytes=8))
    assert found[:600] == ["x"] * 300 + ["gnu"] * 300
    assert len(found) == 1000


def test_faults_are_of_neighbours_and_alike():
    made = words_of(public_words(POPULATION, VOCABULARY, seed=0, faulty=0.9, max_bytes=8))[600:]
    counts = collections.Counter(made)
    pairs = [("p", "q"), ("q", "r"), ("p", "gnu")]
    shares = {("p", "q"): 0.5 * (0.5 + 0.25), ("q", "r"): 0.5 * 0.25, ("p", "gnu"): 0.5}
    expected = {}
    for a, b in pairs:
        for word in (f"{a} {b}", a + b, b + a, f"{a}_{b}"):
            expected[word] = len(made) * shares[a, b] / 4
    assert set(counts) == set(expected)
    statistic = sum((counts[word] - mean) ** 2 / mean for word, mean in expected.items())
    # Chi-squared with 11 degrees of freedom exceeds 50 once in a million draws.
    assert statistic < 50


def test_words_are_a_function_of_the_seed():
    first, again, other = (public_words(POPULATION, VOCABULARY, seed=seed) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert (first[600:] != other[600:]).any()


def test_no_faults_are_rare_words_alone():
    got = public_words(POPULATION, VOCABULARY, seed=0, faulty=0.0, max_bytes=4)
    np.testing.assert_array_equal(got, encode_words(["x"] * 300 + ["gnu"] * 300, 4))


def test_what_cannot_be_made_is_refused():
    with pytest.raises(InputError, match="faulty must be less than 1"):
        public_words(POPULATION, VOCABULARY, seed=0, faulty=1.0)
    with pytest.raises(InputError, match="faulty"):
        public_words(POPULATION, VOCABULARY, seed=0, faulty=-0.1)
    with pytest.raises(InputError, match="seed"):
        public_words(POPULATION, VOCABULARY, seed=-1)
    full = Vocabulary.from_texts(["p q r x gnu"], 9, source="here")
    with pytest.raises(InputError, match="no word is out of the vocabulary"):
        public_words(POPULATION, full, seed=0)
    lonely = jaxpfl.data.from_clients({"a": {"text": ["x", "gnu"]}})
    with pytest.raises(InputError, match="no sentence has two words"):
        public_words(lonely, VOCABULARY, seed=0)
