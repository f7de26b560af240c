"""Texts in the columns of populations, and as rows of bytes, which a state of arrays can hold."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from jaxpfl.data.population import Population
from jaxpfl.errors import InputError

_BLOCK = 65_536


def text_column(population: Population, name: str = "text") -> Any:
    column = population.column(name)
    if isinstance(column, np.ndarray):
        expected = f"a column {name!r} of text, found {column.dtype}"
        raise InputError(f"population {population.name!r} must have {expected}")
    return column


def texts_of(population: Population, name: str = "text") -> Iterator[str]:
    """The texts of a column, a block of which is in memory at a time; errors as `text_column`."""
    column = text_column(population, name)
    for start in range(0, len(column), _BLOCK):
        yield from column[start : start + _BLOCK].to_pylist()


def to_byte_rows(texts: Sequence[str], width: int) -> np.ndarray:
    """UTF-8 bytes uint8 [texts, width], padded with 0; longer texts are cut between characters.

    Zero bytes at the end of a text are lost.
    """
    cut = (text.encode("utf-8", "replace")[:width].decode("utf-8", "ignore") for text in texts)
    rows = np.array([text.encode() for text in cut], f"S{width}")
    return rows.view(np.uint8).reshape(len(texts), width)


def from_byte_rows(rows: np.ndarray) -> list[str]:
    """The texts of `to_byte_rows`."""
    return [bytes(row).rstrip(b"\0").decode("utf-8") for row in np.asarray(rows)]
