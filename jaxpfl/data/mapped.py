"""Columns in mapped files, verified block by block as they are first read.

A buffer is a run of bytes, such as the values of a column. It is cut into blocks of `BLOCK` bytes,
the last one shorter, and its root is a hash over the blocks' SHA-256 sums. A known root vouches for
every block that fits its sum. So a population of any size opens without being read, and yet no
altered byte of it is ever used. Blocks are small, because a cohort is a random sample.

Columns keep the map when examples are selected, by the numbers of their rows, so that a population
that is larger than the memory can be split and sampled.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from jaxpfl.errors import CorruptFile

BLOCK = 2**18
"""Bytes of a block. Fingerprints depend on it."""

_PIECE = 2**16


class BlockHashes:
    """The SHA-256 sums of the blocks of a buffer that grows."""

    def __init__(self) -> None:
        self.size = 0
        self._full: list[bytes] = []
        self._last = hashlib.sha256()

    def update(self, piece: Any) -> None:
        """Adds bytes, or an array's, to the buffer."""
        view = memoryview(piece)
        view = view.cast("B") if view.nbytes else view[:0]
        while len(view):
            part = view[: BLOCK - self.size % BLOCK]
            self._last.update(part)
            self.size += len(part)
            view = view[len(part) :]
            if not self.size % BLOCK:
                self._full.append(self._last.digest())
                self._last = hashlib.sha256()

    @property
    def sums(self) -> list[bytes]:
        return self._full + ([self._last.digest()] if self.size % BLOCK else [])

    @property
    def root(self) -> str:
        return root_of(self.sums, self.size)


def root_of(sums: Sequence[bytes], size: int) -> str:
    """The root (hex) of a buffer of `size` bytes with blocks of these SHA-256 sums."""
    digest = hashlib.sha256(f"jaxpfl blocks 1 {BLOCK} {size}\0".encode())
    digest.update(b"".join(sums))
    return digest.hexdigest()


class Blocks:
    """A mapped file, uint8 [bytes], of which a block is verified by its sum when first read."""

    def __init__(self, path: Path, what: str, content: np.ndarray, sums: Sequence[bytes]) -> None:
        self.unverified = content
        self._path, self._what, self._sums = path, what, sums
        self._missing = np.ones(len(sums), bool)
        self._left = len(sums)

    @cached_property
    def root(self) -> str:
        return root_of(self._sums, len(self.unverified))

    def verify(self, begin: int, end: int) -> None:
        """Verifies the blocks of the bytes begin .. end - 1."""
        if self._left and begin < end:
            blocks = slice(begin // BLOCK, (end - 1) // BLOCK + 1)
            self._verify(np.flatnonzero(self._missing[blocks]) + blocks.start)

    def verify_all(self, begins: np.ndarray, ends: np.ndarray) -> None:
        """Verifies the blocks of the bytes begins[i] .. ends[i] - 1 of every i, int64 [runs]."""
        if not self._left:
            return
        some = begins < ends
        first, last = begins[some] // BLOCK, (ends[some] - 1) // BLOCK
        # A block is read if more runs have begun up to it than have ended before it.
        number = len(self._sums) + 1
        changes = np.bincount(first, minlength=number) - np.bincount(last + 1, minlength=number)
        read = np.cumsum(changes)[:-1] > 0
        self._verify(np.flatnonzero(read & self._missing))

    def unfit(self, reason: str) -> CorruptFile:
        """The error that says why this buffer makes no sense although its blocks are unaltered."""
        return CorruptFile(f"{self._path}: {self._what}: {reason}")

    def _verify(self, blocks: np.ndarray) -> None:
        # Two threads may verify the same block: no harm is done.
        for block in blocks.tolist():
            begin = block * BLOCK
            content = self.unverified[begin : begin + BLOCK]
            if hashlib.sha256(content.data).digest() != self._sums[block]:
                place = f"bytes {begin} .. {begin + len(content) - 1} of the file"
                where = f"{self._path} was altered: block {block} of {self._what} ({place})"
                raise CorruptFile(f"{where} is not the one of its manifest")
            self._missing[block] = False
        if len(blocks):
            self._left = int(self._missing.sum())


def chosen(numbers: range | np.ndarray, rows: Any) -> range | np.ndarray:
    """The stored row numbers at `rows`, a slice or int [...]; neighbouring ones stay a range."""
    if isinstance(rows, slice):
        selected = numbers[rows]
        whole = isinstance(selected, np.ndarray) or selected.step == 1
        return selected if whole else np.asarray(selected, np.int64)
    rows = np.asarray(rows, np.int64)
    # Rows out of range would be those of other clients.
    if rows.size and not 0 <= rows.min() <= rows.max() < len(numbers):
        raise IndexError(f"rows must lie in 0 .. {len(numbers) - 1}")
    return rows + numbers.start if isinstance(numbers, range) else numbers[rows]


def origin_of(rows: range | np.ndarray, stored: int) -> str:
    """Says which of `stored` rows these are; PRIVATE."""
    if isinstance(rows, range):
        return f"{rows.start} {len(rows)} all"
    return f"0 {stored} {hashlib.sha256(np.ascontiguousarray(rows).data).hexdigest()}"


@dataclass(frozen=True, eq=False, repr=False)
class Mapped:
    """A column of numbers or booleans, as an array is one, except that rows are read on demand.

    Attributes:
      blocks: the stored column.
      rows: which stored row each example is: those of a range, or int64 [examples].
    """

    blocks: Blocks
    dtype: np.dtype
    example: tuple[int, ...]
    rows: range | np.ndarray

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def shape(self) -> tuple[int, ...]:
        return len(self), *self.example

    @property
    def ndim(self) -> int:
        return 1 + len(self.example)

    def select(self, rows: slice | np.ndarray) -> "Mapped":
        """These rows, without reading them."""
        return replace(self, rows=chosen(self.rows, rows))

    def __getitem__(self, rows: Any) -> np.ndarray:
        """The rows of a slice, or of row numbers >= 0, int [...]; or one row, also from the end."""
        if isinstance(rows, int):
            rows = range(len(self))[rows]
        places = chosen(self.rows, rows)
        if isinstance(places, range):
            begin, end = places.start, places.start + len(places)
            self.blocks.verify(begin * self._row_bytes, end * self._row_bytes)
            return self._stored[begin:end]
        stored, places = self.located(rows)
        return stored[places]

    def located(self, rows: Any) -> tuple[np.ndarray, np.ndarray]:
        """All stored rows, of which these, int [...], are verified; and their places in it."""
        places = np.asarray(chosen(self.rows, rows))
        return self.of_runs(places.reshape(-1), places.reshape(-1) + 1), places

    def of_runs(self, begins: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """All stored rows, of which begins[i] .. ends[i] - 1 of every i are verified."""
        self.blocks.verify_all(begins * self._row_bytes, ends * self._row_bytes)
        return self._stored

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        whole = self.whole
        return whole if dtype is None else whole.astype(dtype)

    @cached_property
    def whole(self) -> np.ndarray:
        """All rows as a read-only array: a view of the file, or a copy where rows were selected."""
        values = self[:]
        values.flags.writeable = False
        return values

    def max(self) -> Any:
        """The largest value of all rows, which are read in pieces."""
        pieces = range(0, len(self), _PIECE)
        return max(self[start : start + _PIECE].max() for start in pieces)

    @property
    def root(self) -> str | None:
        """The root of the stored column if this is all of it."""
        whole = isinstance(self.rows, range) and len(self) == len(self._stored)
        return self.blocks.root if whole else None

    @property
    def origin(self) -> str:
        """Says which rows of which stored column these are, without reading them; PRIVATE."""
        return self.root or f"{self.blocks.root} {origin_of(self.rows, len(self._stored))}"

    @property
    def _row_bytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.example)

    @cached_property
    def _stored(self) -> np.ndarray:
        return self.blocks.unverified.view(self.dtype).reshape(-1, *self.example)


@dataclass(frozen=True, eq=False, repr=False)
class MappedText:
    """A column of texts.

    Attributes:
      edges: int64 [examples + 1], where each text begins in `content`, and the end.
      content: uint8, the texts in UTF-8, one after the other.
    """

    edges: Mapped
    content: Mapped

    def __len__(self) -> int:
        return len(self.edges) - 1

    def select(self, rows: slice) -> "MappedText":
        """Neighbouring texts, without reading them."""
        first, last, _ = rows.indices(len(self))
        return replace(self, edges=self.edges.select(slice(first, max(first, last) + 1)))

    @cached_property
    def whole(self) -> pa.Array:
        """All texts as a large_string array, a view of the file."""
        if not len(self):
            return pa.nulls(0, pa.large_string())
        edges, content = self.edges[:], self.content.blocks
        if not 0 <= edges[0] <= edges[-1] <= len(content.unverified):
            raise content.unfit("they do not lie within it")
        content.verify(int(edges[0]), int(edges[-1]))
        buffers = pa.py_buffer(edges), pa.py_buffer(content.unverified)
        texts = pa.LargeStringArray.from_buffers(len(self), *buffers)
        try:
            # Unchecked, Arrow would read beyond the content. Its message may quote a text.
            texts.validate(full=True)
        except ValueError:
            raise content.unfit("they do not begin one after the other, or are not UTF-8") from None
        return texts
