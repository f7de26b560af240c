"""Rows of token ids of texts, as a language model reads them, from its own tokeniser."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxpfl.checks import positive_int
from jaxpfl.data.population import Population
from jaxpfl.errors import InputError
from jaxpfl.text.tokenisers.base import Tokeniser, one_per_row


def text_rows(tokeniser: Tokeniser, texts: Sequence[str], tokens: int) -> np.ndarray:
    """One text per row, padded: int32 [texts, tokens], or one more with a start token.

    A row is the start token, if the tokeniser has one, at most `tokens` tokens of the text and, if
    there is room for it, end-of-text; a longer text is cut and has no end.
    """
    positive_int("tokens", tokens)
    rows = tokeniser.encode(texts)
    if tokeniser.start is None:
        return one_per_row(rows, tokens, tokeniser.end_of_text)
    start = np.array([tokeniser.start], np.int32)
    rows = [np.concatenate([start, row]) for row in rows]
    return one_per_row(rows, tokens + 1, tokeniser.end_of_text)


@dataclass(frozen=True)
class TextEncoder:
    """Encodes clients' texts with a tokeniser, as a `Vocabulary` does with words."""

    tokeniser: Tokeniser

    def encode_texts(self, texts: Sequence[str], sequence_length: int) -> np.ndarray:
        """`text_rows` of at most `sequence_length` tokens of each text."""
        return text_rows(self.tokeniser, texts, sequence_length)

    def encode(self, population: Population, sequence_length: int) -> Population:
        """The population with "tokens" as its only column.

        Raises:
          InputError: the population has no column "text".
        """
        if "text" not in population.columns:
            found = ", ".join(map(repr, population.columns)) or "none"
            raise InputError(
                f"population {population.name!r} must have a column 'text', found {found}"
            )
        texts = population.columns["text"].to_pylist()
        return population.with_columns({"tokens": self.encode_texts(texts, sequence_length)})
