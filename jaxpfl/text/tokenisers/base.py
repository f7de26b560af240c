"""Tokenisers of language models, and the arrays of token ids that networks read.

Rows are padded with `jaxpfl.models.PAD` (-1), which is no token of any vocabulary, so it can be
taken neither for a word nor for the end of a text.

Special tokens never come from a text: one that spells "<|endoftext|>" is tokenised as these
characters. A lone surrogate becomes U+FFFD. An id stands for bytes (`token_bytes`); the text of
several ids is their bytes decoded as UTF-8, where invalid bytes become U+FFFD.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from jaxpfl.checks import positive_int
from jaxpfl.data.columns import without_surrogates
from jaxpfl.errors import InputError
from jaxpfl.models.base import PAD


class Tokeniser:
    """From texts to token ids and back; a subclass defines `encode` and `_bytes`.

    Attributes:
      name: for reports; never a path.
      vocab_size: ids are 0 .. vocab_size - 1.
      end_of_text: the id after a finished text, or None.
      ends: all ids that end a generated text, among them `end_of_text`.
      start: the id that models of this vocabulary read before a text, or None.
    """

    name: str
    vocab_size: int
    end_of_text: int | None
    ends: tuple[int, ...]
    start: int | None
    _bytes: Any

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The ids of every text, int32, without special tokens."""
        raise NotImplementedError

    def prompts(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The ids of every text as a prompt, int32: after the start token, if there is one."""
        start = [] if self.start is None else [self.start]
        return [np.array([*start, *row], np.int32) for row in self.encode(texts)]

    def without_chat(self) -> "Tokeniser":
        """The same tokeniser, which puts prompts into no message."""
        return self

    def decode(self, ids: Iterable[int]) -> str:
        """The text of one sequence; special tokens and padding are left out."""
        pieces = self.token_bytes()
        content = []
        for token in map(int, ids):
            if token == PAD:
                continue
            if not 0 <= token < len(pieces):
                raise InputError(f"ids must lie in 0 .. {len(pieces) - 1}, found {token}")
            content.append(pieces[token])
        return b"".join(content).decode("utf-8", "replace")

    def token_bytes(self) -> tuple[bytes, ...]:
        """The bytes that each id adds to the text before it; special tokens add none."""
        return self._bytes


def pad(sequences: Sequence[Any], length: int) -> np.ndarray:
    """The sequences as int32 [N, length], cut or padded with PAD on the right."""
    positive_int("length", length)
    rows_NxL = np.full((len(sequences), length), PAD, np.int32)
    for row_L, sequence in zip(rows_NxL, sequences, strict=True):
        row_L[: len(sequence)] = sequence[:length]
    return rows_NxL


def padded_batches(
    sequences: Sequence[Any], lengths: np.ndarray, longest: int, tokens: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Batches of sequences that are padded to one length, the longest first.

    Each is the places of its sequences, and rows int32 [B, L] of these and then of padding alone. L
    is the least of `lengths`, ascending, that they fit, or `longest`, and B follows from L and the
    number of `tokens`: there are at most as many shapes, and compiled programs, as lengths.
    """
    lengths = np.append(lengths[lengths < longest], longest)
    length_N = lengths[np.searchsorted(lengths, np.array(list(map(len, sequences)), np.int64))]
    for length in np.unique(length_N)[::-1].tolist():
        here, size = np.flatnonzero(length_N == length), max(1, tokens // length)
        for batch in np.split(here, range(size, len(here), size)):
            yield (
                batch,
                pad([sequences[i] for i in batch.tolist()] + [[]] * (size - len(batch)), length),
            )


def text_rows(tokeniser: Tokeniser, texts: Sequence[str], tokens: int) -> np.ndarray:
    """One text per row, padded: int32 [texts, tokens], or one more with a start token.

    A row is the start token, if the tokeniser has one, at most `tokens` tokens of the text and, if
    there is room for it, end-of-text; a longer text is cut and has no end.
    """
    positive_int("tokens", tokens)
    around = tokeniser.start, tokeniser.end_of_text
    start, end = (np.array([] if token is None else [token], np.int32) for token in around)
    rows = [np.concatenate([start, row, end]) for row in tokeniser.encode(texts)]
    return pad(rows, tokens + len(start))


def packed(sequences: Sequence[np.ndarray], length: int, end_of_text: int) -> np.ndarray:
    """All texts in a sequence, each followed by `end_of_text`, cut into rows for pretraining.

    Every place of the int32 [rows, length] holds a token, except after the last text.
    """
    positive_int("length", length)
    end = np.array([end_of_text], np.int32)
    joined = np.concatenate([part for text in sequences for part in (text, end)] or [end[:0]])
    rows = -(-len(joined) // length)
    rows_NxL = np.full(rows * length, PAD, np.int32)
    rows_NxL[: len(joined)] = joined
    return rows_NxL.reshape(rows, length)


def check_fits(tokeniser: Tokeniser, vocab_size: int) -> None:
    """Refuses a tokeniser with more ids than the `vocab_size` of a model; fewer are usual."""
    if tokeniser.vocab_size > vocab_size:
        last = f"{tokeniser.vocab_size - 1}, but the model's vocab_size is {vocab_size}"
        raise InputError(f"the tokeniser {tokeniser.name} has token ids up to {last}")


def clean(texts: Sequence[str]) -> list[str]:
    """The texts with U+FFFD in place of lone surrogates, which UTF-8 cannot encode."""
    if isinstance(texts, str):
        raise InputError("encode takes a list of texts, found one text")
    return list(map(without_surrogates, texts))
