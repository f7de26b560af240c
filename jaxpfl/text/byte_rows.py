"""Texts as rows of bytes, which can be part of a state that consists of arrays."""

from collections.abc import Sequence

import numpy as np


def to_byte_rows(texts: Sequence[str], width: int) -> np.ndarray:
    """UTF-8 bytes uint8 [texts, width], padded with 0; longer texts are cut between characters.

    Zero bytes at the end of a text are lost.
    """
    rows = np.zeros((len(texts), width), np.uint8)
    for row, text in zip(rows, texts, strict=True):
        content = text.encode("utf-8", "replace")[:width]
        content = content.decode("utf-8", "ignore").encode()
        row[: len(content)] = np.frombuffer(content, np.uint8)
    return rows


def from_byte_rows(rows: np.ndarray) -> list[str]:
    """The texts of `to_byte_rows`."""
    return [bytes(row).rstrip(b"\0").decode("utf-8") for row in np.asarray(rows)]
