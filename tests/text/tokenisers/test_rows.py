"""Rows of token ids of texts, with a start token where the tokeniser has one."""

import numpy as np
import pytest

from jaxpfl.data.population import Population
from jaxpfl.errors import InputError
from jaxpfl.text.tokenisers.base import UTF8Bytes
from jaxpfl.text.tokenisers.rows import TextEncoder, text_rows


class WithStart(UTF8Bytes):
    start = 255


def test_a_row_has_a_start_and_an_end_where_there_is_room():
    np.testing.assert_array_equal(
        text_rows(UTF8Bytes(), ["a", "abc", ""], 3), [[97, 256, -1], [97, 98, 99], [256, -1, -1]]
    )
    np.testing.assert_array_equal(
        text_rows(WithStart(), ["a", "abcd", ""], 3),
        [[255, 97, 256, -1], [255, 97, 98, 99], [255, 256, -1, -1]],
    )
    assert text_rows(WithStart(), [], 3).shape == (0, 4)


def test_clients_texts_become_tokens_alone():
    clients = Population({"text": ["a", "b", "c"]}, np.array([0, 1, 3]), ["x", "y"], "here")
    found = TextEncoder(UTF8Bytes()).encode(clients, 2)
    assert list(found.columns) == ["tokens"]
    np.testing.assert_array_equal(found.columns["tokens"], [[97, 256], [98, 256], [99, 256]])
    assert found.fingerprint == clients.fingerprint
    with pytest.raises(InputError, match="'here' must have a column 'text', found 'tokens'"):
        TextEncoder(UTF8Bytes()).encode(found, 2)
