"""Texts as rows of bytes."""

import numpy as np
import pytest

from jaxpfl.text.byte_rows import from_byte_rows, to_byte_rows


def test_texts_come_back_and_longer_ones_are_cut_between_characters():
    texts = ["", "ab", "€uro", "aé€", "€€€"]
    rows = to_byte_rows(texts, 6)
    assert rows.shape == (5, 6) and rows.dtype == np.uint8
    assert from_byte_rows(rows) == ["", "ab", "€uro", "aé€", "€€"]
    # Of the third sign there is room for two of its three bytes.
    assert from_byte_rows(to_byte_rows(["€€€"], 8)) == ["€€"]
    # Half of a surrogate pair, which no UTF-8 can hold.
    assert from_byte_rows(to_byte_rows(["a\ud83d"], 8)) == ["a?"]


@pytest.mark.parametrize("width", [1, 2, 3])
def test_a_row_is_never_half_a_character(width):
    found = from_byte_rows(to_byte_rows(["é€"], width))
    assert found == [{1: "", 2: "é", 3: "é"}[width]]
