"""Texts as rows of bytes, so that they can be part of a state of arrays."""

from collections.abc import Sequence

import numpy as np


def to_byte_rows(texts: Sequence[str], width: int) -> np.ndarray:
    """UTF-8, uint8 [texts, width], filled up with zeros; a longer text is cut between characters.

    A zero byte at a text's end is lost.
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
