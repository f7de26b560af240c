"""SHA-256 by blocks: a large buffer is verified piece by piece, when it is first read.

A buffer is a run of bytes, such as the values of a column. It is cut into blocks of `BLOCK` bytes,
the last one shorter, and its root is a hash over the blocks' SHA-256 sums. A known root vouches for
every block that fits its sum. So a population of any size opens without being read, and yet no
altered byte of it is ever used. Blocks are small, because a cohort is a random sample.
"""

import hashlib
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from jaxpfl.errors import CorruptFile

BLOCK = 2**18
"""Bytes of a block. Fingerprints depend on it."""


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
        """See `root_of`."""
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
        """See `root_of`."""
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
                raise CorruptFile(
                    f"{self._path} was altered: block {block} of {self._what} (bytes {begin} .. "
                    f"{begin + len(content) - 1} of the file) is not the one of its manifest"
                )
            self._missing[block] = False
        if len(blocks):
            self._left = int(self._missing.sum())
