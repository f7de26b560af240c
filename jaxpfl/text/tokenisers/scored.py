"""The tokeniser of llama2.c's models: byte-pair merges in the order of their scores.

The binary file is int32 longest piece, then per piece float32 score, int32 length and that many
bytes, little-endian. Ids 0, 1 and 2 are unknown, start and end; 3 .. 258 the single bytes, spelt
"<0x0A>", for characters without a piece of their own.

A text gets a space before it, and is taken apart into characters. Of all neighbours whose union is
a piece, those with the highest score are joined (the first of several), until none can be.
"""

import heapq
import math
import re
import struct
from collections.abc import Iterable, Sequence
from functools import cached_property, lru_cache
from pathlib import Path

import numpy as np

from jaxpfl.errors import CorruptFile, InputError
from jaxpfl.text.tokenisers.base import ByteJoining, clean

_START, _END, _BYTES = 1, 2, 3
_BYTE_PIECE = re.compile(rb"<0x([0-9A-F]{2})>")
_RECORD = struct.Struct("<fi")
_WORD = re.compile(" ?[^ ]+| ")
_LONGEST = 1 << 16


class ScoredTokeniser(ByteJoining):
    """See the head of this file; made by `llama2c`.

    The start token ends what is drawn, as these models were trained on texts that each begin with
    it; the end token does too. `decode` drops the space before a text.
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
        # No piece goes across the beginning of a word, so that words can be looked up.
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
        found = []
        for i, piece in enumerate(self._pieces):
            byte = _BYTE_PIECE.fullmatch(piece)
            if i < _BYTES:
                found.append(b"")
            elif byte:
                found.append(bytes([int(byte[1], 16)]))
            else:
                found.append(piece)
        return tuple(found)


def llama2c(path: str | Path) -> ScoredTokeniser:
    """The tokeniser in a file such as tok512.bin.

    Raises:
      InputError: there is no such file.
      CorruptFile: it is not a whole tokeniser of this format.
    """
    path = Path(path)
    if not path.is_file():
        raise InputError(f"there is no file {path}")
    content = path.read_bytes()
    pieces, scores, place = [], [], 4
    while place < len(content):
        score, length = (
            _RECORD.unpack_from(content, place)
            if place + _RECORD.size <= len(content)
            else (math.nan, -1)
        )
        place += _RECORD.size + length
        if not math.isfinite(score) or not 0 < length <= _LONGEST or place > len(content):
            raise CorruptFile(f"{path}: piece {len(pieces)} is broken or cut off")
        pieces.append(content[place - length : place])
        scores.append(score)
    single = [f"<0x{value:02X}>".encode() for value in range(256)]
    if pieces[_BYTES : _BYTES + 256] != single:
        raise CorruptFile(f"{path}: pieces 3 .. 258 must be the bytes <0x00> .. <0xFF>")
    return ScoredTokeniser(pieces, scores, name=path.stem)
