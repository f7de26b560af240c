"""Rows of token ids, and the tokeniser of raw bytes."""

import numpy as np

from jaxpfl.models import PAD
from jaxpfl.text.tokenisers.base import packed, pad, text_rows
from tests.text.tokenisers.utf8_bytes import UTF8Bytes

BYTES = UTF8Bytes()
TEXTS = ["", "it's 2024,  two  spaces\n\ttabs", "naïve — 日本語 \U0001f600"]


class WithStart(UTF8Bytes):
    start = 255


def test_padding_is_no_token_of_any_vocabulary():
    rows = pad([np.array([5, 6, 7], np.int32), np.array([], np.int32)], 2)
    np.testing.assert_array_equal(rows, [[5, 6], [-1, -1]])
    assert rows.dtype == np.int32


def test_a_row_has_a_start_and_an_end_where_there_is_room():
    """The end is a label like any other: it is not what rows are padded with."""
    np.testing.assert_array_equal(
        text_rows(BYTES, ["a", "abc", ""], 3), [[97, 256, -1], [97, 98, 99], [256, -1, -1]]
    )
    np.testing.assert_array_equal(
        text_rows(WithStart(), ["a", "abcd", ""], 3),
        [[255, 97, 256, -1], [255, 97, 98, 99], [255, 256, -1, -1]],
    )
    assert text_rows(WithStart(), [], 3).shape == (0, 4)
    assert text_rows(WithStart(), ["a"], 3).dtype == np.int32


def test_packed_rows_lose_no_token_and_mark_every_end():
    sequences = [np.arange(3), np.arange(0), np.arange(4)]
    rows = packed(sequences, 4, 9)
    np.testing.assert_array_equal(rows, [[0, 1, 2, 9], [9, 0, 1, 2], [3, 9, -1, -1]])
    assert packed([], 4, 9).shape == (0, 4)


def test_bytes_round_trip():
    for text, ids in zip(TEXTS, BYTES.encode(TEXTS), strict=True):
        assert BYTES.decode(ids) == text
        assert len(ids) == len(text.encode())
    # A lone surrogate, and bytes that are no text.
    assert BYTES.decode(BYTES.encode(["a\ud800b"])[0]) == "a\ufffdb"
    assert BYTES.decode([0xE2, 0x82, 65, PAD]) == "\ufffdA"
