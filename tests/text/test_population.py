import numpy as np
import pytest

import jaxpfl.data
from jaxpfl.errors import InputError
from jaxpfl.text import Vocabulary

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
