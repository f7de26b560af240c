"""The field's character rows against a plain reading of what TensorFlow Federated does."""

import numpy as np
import pytest

from jaxpfl.data import from_clients
from jaxpfl.errors import InputError
from jaxpfl.text.tokenisers import characters


def plainly(text: str, width: int) -> list[list[int]]:
    ids = [88]
    for byte in text.encode():
        place = characters.CHARACTERS.find(chr(byte))
        ids.append(87 if place < 0 else place + 1)
    ids.append(89)
    ids += [-1] * (-len(ids) % width)
    return [ids[i : i + width] for i in range(0, len(ids), width)]


def test_the_vocabulary_has_the_fields_size():
    assert len(set(characters.CHARACTERS)) == len(characters.CHARACTERS) == 86
    assert characters.VOCAB_SIZE == 90


@pytest.mark.parametrize("text", ["", "d", "dhl~é", "To be,\r\nor not", "eight ch"])
def test_rows_are_those_of_the_baseline(text):
    np.testing.assert_array_equal(characters.character_rows(text, 4), plainly(text, 5))


def test_clients_keep_their_texts():
    clients = {"a": ["dhlp" * 5, ""], "b": [], "c": ["x"]}
    population = from_clients(
        {name: {"text": texts} for name, texts in clients.items()}, name="x", unit="y"
    )
    encoded = characters.encode(population, 9)
    assert encoded.fingerprint == population.fingerprint
    assert encoded.sizes().tolist() == [4, 0, 1]
    for index, texts in enumerate(clients.values()):
        rows = [row for text in texts for row in plainly(text, 10)]
        found = encoded.examples(index)["tokens"]
        np.testing.assert_array_equal(found, np.array(rows, np.int32).reshape(-1, 10))
    with pytest.raises(InputError, match="text"):
        characters.encode(encoded, 9)
