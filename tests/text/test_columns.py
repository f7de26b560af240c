"""Texts in columns, and as rows of bytes, which can be part of a state that consists of arrays."""

import numpy as np

from jaxpfl.data import from_clients
from jaxpfl.text import columns
from jaxpfl.text.columns import from_byte_rows, texts_of, to_byte_rows


def test_texts_are_read_by_blocks(monkeypatch):
    monkeypatch.setattr(columns, "_BLOCK", 2)
    texts = [str(n) for n in range(5)]
    assert list(texts_of(from_clients({"a": {"text": texts}}))) == texts


def test_rows_of_bytes_are_cut_between_characters():
    texts = ["", "ab", "€uro", "aé€", "€€€"]
    rows = to_byte_rows(texts, 6)
    assert rows.shape == (5, 6) and rows.dtype == np.uint8
    assert from_byte_rows(rows) == ["", "ab", "€uro", "aé€", "€€"]
    for width, expected in ((1, ""), (2, "é"), (3, "é"), (4, "é"), (5, "é€")):
        assert from_byte_rows(to_byte_rows(["é€"], width)) == [expected]
    # Half of a surrogate pair, which no UTF-8 can hold.
    assert from_byte_rows(to_byte_rows(["a\ud83d"], 8)) == ["a?"]
