"""The tokeniser of llama2.c's models: byte-pair merges in the order of their scores.

The binary file holds, little-endian, the length of the longest piece (int32), then for each piece
its score (float32), its length (int32) and its bytes. Ids 0, 1 and 2 are unknown, start and end;
3 .. 258 are the single bytes, spelt "<0x0A>", for characters without a piece of their own.

A text, with a space put before it, is divided into characters. Among all neighbours whose
concatenation is a piece, those with the highest score (the first of several) are joined, until
there are none.
"""

import heapq
import math
import re
import struct
from collections.abc import Iterable, Sequence
from functools import cached_property, lru_cache
from pathlib import Path

import numpy as np

from jaxpfl.errors import CorruptFile
from jaxpfl.models.checkpoints.model_files import expect_file
from jaxpfl.text.tokenisers.base import Tokeniser, clean

_START, _END, _BYTES = 1, 2, 3
_BYTE_PIECE = re.compile(rb"<0x([0-9A-F]{2})>")
_RECORD = struct.Struct("<fi")
_WORD = re.compile(" ?[^ ]+| ")
_LONGEST = 1 << 16


class ScoredTokeniser(Tokeniser):
    """See the head of this file; made by `llama2c`.

    The start token ends a generated text, because in training it began the next one; the end token
    does too. `decode` removes the space before a text.
    """

    start = _START
    end_of_text = _START
    ends = (_START, _END)

    def __init__(self, pieces: Sequence[bytes], scores: Sequence[float], *, name: str):
        self.name = name
        self.vocab_size = len(pieces)
        self._pieces = tuple(pieces)
        self._scores = tuple(scores)
        self._ids = {piece: i for i, piece in reversed([*enumerate(pieces)])}
        # Where no piece extends into the next word, each word can be tokenised alone.
        self._by_word = not any(b" " in piece[1:] for piece in pieces)
        self._merge = lru_cache(maxsize=65_536)(self._merged)

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        found = []
        for text in clean(texts):
            spaced = f" {text}" if text else ""
            parts = _WORD.findall(spaced) if self._by_word else [spaced]
            ids = [i for part in parts for i in self._merge(part)]
            found.append(np.array(ids, np.int32))
        return found

    def decode(self, ids: Iterable[int]) -> str:
        return super().decode(ids).removeprefix(" ")

    def _merged(self, text: str) -> tuple[int, ...]:
        ids: list[int] = []
        for character in text:
            content = character.encode("utf-8")
            i = self._ids.get(content)
            ids += [value + _BYTES for value in content] if i is None else [i]
        after = [*range(1, len(ids)), -1]
        before = [*range(-1, len(ids) - 1)]
        waiting: list[tuple[float, int, int, int, int]] = []

        def consider(left: int, right: int) -> None:
            if left < 0 or right < 0:
                return
            union = self._ids.get(self._pieces[ids[left]] + self._pieces[ids[right]])
            if union is not None:
                entry = (-self._scores[union], left, ids[left], ids[right], union)
                heapq.heappush(waiting, entry)

        for left, right in enumerate(after):
            consider(left, right)
        while waiting:
            _, left, left_id, right_id, union = heapq.heappop(waiting)
            right = after[left]
            if ids[left] != left_id or right < 0 or ids[right] != right_id:
                continue
            ids[left], ids[right] = union, -1
            after[left] = after[right]
            if after[left] >= 0:
                before[after[left]] = left
            consider(before[left], left)
            consider(left, after[left])
        return tuple(i for i in ids if i >= 0)

    @cached_property
    def _bytes(self) -> tuple[bytes, ...]:
        found = [b""] * _BYTES
        for piece in self._pieces[_BYTES:]:
            byte = _BYTE_PIECE.fullmatch(piece)
            found.append(bytes([int(byte[1], 16)]) if byte else piece)
        return tuple(found)


def llama2c(path: str | Path) -> ScoredTokeniser:
    """The tokeniser in a file such as tok512.bin.

    Raises:
      InputError: there is no such file.
      CorruptFile: it is not a whole tokeniser of this format.
    """
    path = expect_file(Path(path))
    content = path.read_bytes()
    pieces, scores, place = [], [], 4
    while place < len(content):
        score, length = math.nan, -1
        if place + _RECORD.size <= len(content):
            score, length = _RECORD.unpack_from(content, place)
        place += _RECORD.size + length
        if not math.isfinite(score) or not 0 < length <= _LONGEST or place > len(content):
            raise CorruptFile(f"{path}: piece {len(pieces)} is broken or cut off")
        pieces.append(content[place - length : place])
        scores.append(score)
    single = [f"<0x{value:02X}>".encode() for value in range(256)]
    if pieces[_BYTES : _BYTES + 256] != single:
        raise CorruptFile(f"{path}: pieces 3 .. 258 must be the bytes <0x00> .. <0xFF>")
    return ScoredTokeniser(pieces, scores, name=path.stem)
