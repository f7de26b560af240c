"""The characters of the field's Shakespeare task, and the rows that a character model reads.

The vocabulary, its order and the special tokens are those of TensorFlow Federated's baseline, which
McMahan et al. 2017 began: 86 ASCII characters, ids 1 to 86; 87 any other byte of UTF-8; 88 the
beginning and 89 the end of a text; 0 is never a character, because it is padding there. Rows here
are padded with `jaxpfl.models.PAD`.
"""

import numpy as np

from jaxpfl.checks import positive_int
from jaxpfl.data.population import Population
from jaxpfl.models.base import PAD
from jaxpfl.text.columns import texts_of

CHARACTERS = (
    "dhlptx@DHLPTX $(,048cgkoswCGKOSW[_#'/37;?bfjnrvzBFJNRVZ\"&*.26:\naeimquyAEIMQUY]!%)-159\r"
)
OOV, BOS, EOS = len(CHARACTERS) + 1, len(CHARACTERS) + 2, len(CHARACTERS) + 3
VOCAB_SIZE = len(CHARACTERS) + 4

_ID_OF_BYTE = np.full(256, OOV, np.int32)
_ID_OF_BYTE[np.frombuffer(CHARACTERS.encode("ascii"), np.uint8)] = 1 + np.arange(len(CHARACTERS))


def ids_of(text: str) -> np.ndarray:
    """The ids of a text's characters, int32, without special ones."""
    return _ID_OF_BYTE[np.frombuffer(text.encode("utf-8", "replace"), np.uint8)]


def character_rows(text: str, sequence_length: int) -> np.ndarray:
    """A text as rows of ids, int32 [rows, sequence_length + 1].

    The beginning, the characters and the end follow each other through the rows, without overlap;
    the last row is padded. A model reads all ids of a row but the last and predicts all but the
    first.
    """
    ids = ids_of(text)
    width = sequence_length + 1
    rows = np.full((-(-(len(ids) + 2) // width), width), PAD, np.int32)
    flat = rows.reshape(-1)
    flat[0] = BOS
    flat[1 : len(ids) + 1] = ids
    flat[len(ids) + 1] = EOS
    return rows


def encode(population: Population, sequence_length: int) -> Population:
    """The same clients, whose examples are the rows of their texts, in the column "tokens".

    The fingerprint does not change, because the rows are as private as the text.
    """
    positive_int("sequence_length", sequence_length)
    rows_of_text = [character_rows(text, sequence_length) for text in texts_of(population)]
    tokens = np.concatenate([np.zeros((0, sequence_length + 1), np.int32), *rows_of_text])
    rows = np.cumsum([0, *map(len, rows_of_text)], dtype=np.int64)
    return population.with_examples({"tokens": tokens}, rows[population.offsets])
