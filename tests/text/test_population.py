import numpy as np
import pytest

import jaxpfl.data
from jaxpfl.errors import InputError
from jaxpfl.text import Vocabulary
from jaxpfl.text.tokenisers.vocabulary import with_words, word_lists

CLIENTS = {"ada": {"text": ["a b", "zebra"]}, "bob": {"text": ["b a b"]}}


def test_public_population_gives_the_vocabulary_of_its_texts():
    population = jaxpfl.data.from_clients(CLIENTS)
    vocabulary = Vocabulary.from_public(population, 6)
    assert vocabulary.tokens[4:] == ("b", "a")
    assert vocabulary.source == population.name


def test_encoded_population_keeps_its_clients():
    population = jaxpfl.data.from_clients(CLIENTS)
    vocabulary = Vocabulary.from_public(population, 6)
    encoded = vocabulary.encode(population, sequence_length=4)
    np.testing.assert_array_equal(encoded.offsets, population.offsets)
    assert list(encoded.columns) == ["tokens"]
    assert np.asarray(encoded.examples(1)["tokens"]).tolist() == [[1, 4, 5, 4, 2]]


def test_a_population_without_text_is_refused():
    """TRUST 7: a missing column is named before anything runs."""
    population = jaxpfl.data.from_clients({"ada": {"x": np.zeros(2, np.float32)}})
    with pytest.raises(InputError, match='column "text"'):
        Vocabulary.from_public(population, 6)


def test_words_are_the_tokens_of_the_text():
    population = jaxpfl.data.from_clients(
        {
            "ada": {"text": ["I have\x1f it, caf\u00e9", ""], "y": np.arange(2)},
            "bob": {"text": ["\0"], "y": np.arange(1)},
        }
    )
    got = with_words(population)
    assert got.columns["words"].to_pylist() == ["i\x1fhave\x1fit\x1f,\x1fcaf\u00e9", "", ""]
    assert got.columns["y"].tolist() == [0, 1, 0]
    assert got.fingerprint == population.fingerprint
    assert [list(row) for row in word_lists(got)] == [list(row) for row in word_lists(population)]


def test_words_are_encoded_instead_of_the_text():
    """A token with a space in it is looked up whole: it is out of the vocabulary."""
    population = jaxpfl.data.from_clients(
        {"ada": {"text": ["a b", "b"]}, "bob": {"text": ["b a b"]}}
    )
    vocabulary = Vocabulary.from_public(population, 6)
    joined = with_words(population).columns["words"].to_pylist()
    changed = population.with_columns(
        {
            "text": population.columns["text"],
            "words": ["a b", joined[1], "\x1f".join(["b a", "", "b"])],
        }
    )
    got = vocabulary.encode(changed, 3)
    assert got.columns["tokens"].tolist() == [[1, 3, 2, -1], [1, 4, 2, -1], [1, 3, 4, 2]]
    assert with_words(changed).columns["words"].to_pylist()[0] == "a b"
    assert "a b" not in vocabulary
    assert "a" in vocabulary
    assert "<oov>" not in vocabulary
    assert vocabulary.encode(with_words(population), 3).columns["tokens"].tolist() == (
        vocabulary.encode(population, 3).columns["tokens"].tolist()
    )


def test_a_column_of_numbers_is_no_text():
    population = jaxpfl.data.from_clients({"ada": {"words": np.zeros(2, np.float32)}})
    with pytest.raises(InputError, match='column "words": expected text, found float32'):
        Vocabulary(("<unused>", "<bos>", "<eos>", "<oov>"), (0, 0, 0, 0), "none").encode(population)
