"""Texts in columns, and as rows of bytes, which can be part of a state that consists of arrays."""

import numpy as np
import pytest

from jaxpfl.data import from_clients
from jaxpfl.errors import InputError
from jaxpfl.text import columns
from jaxpfl.text.columns import from_byte_rows, text_column, texts_of, to_byte_rows
from jaxpfl.text.tokenisers.vocabulary import Vocabulary


def test_texts_are_read_by_blocks(monkeypatch):
    monkeypatch.setattr(columns, "_BLOCK", 2)
    texts = [str(n) for n in range(5)]
    assert list(texts_of(from_clients({"a": {"text": texts}}))) == texts


def test_a_population_without_texts_is_refused():
    """TRUST 7: a missing column is named before anything runs."""
    numbers = from_clients({"ada": {"x": np.zeros(2, np.float32)}}, name="here")
    with pytest.raises(InputError, match="'here' must have a column 'text', found columns 'x'"):
        text_column(numbers)
    with pytest.raises(InputError, match="'here' must have a column 'x' .* found float32"):
        text_column(numbers, "x")
    with pytest.raises(InputError, match="column 'text'"):
        Vocabulary.from_public(numbers, 6)


def test_rows_of_bytes_are_cut_between_characters():
    texts = ["", "ab", "€uro", "aé€", "€€€"]
    rows = to_byte_rows(texts, 6)
    assert rows.shape == (5, 6) and rows.dtype == np.uint8
    assert from_byte_rows(rows) == ["", "ab", "€uro", "aé€", "€€"]
    for width, expected in ((1, ""), (2, "é"), (3, "é"), (4, "é"), (5, "é€")):
        assert from_byte_rows(to_byte_rows(["é€"], width)) == [expected]
    # Half of a surrogate pair, which no UTF-8 can hold.
    assert from_byte_rows(to_byte_rows(["a\ud83d"], 8)) == ["a?"]
