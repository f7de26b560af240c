"""Hashes of columns and offsets, from which fingerprints and the identities of releases follow.

A column is one or two buffers: its values; or the edges of its texts or sequences, int64, the first
of them 0, and the values that they divide. A buffer's root follows from its blocks (see
`data.mapped`), and a hash of columns from the roots, so that stored columns need not be read.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from jaxpfl import files
from jaxpfl.data.columns import Column, describe, is_numeric, read, text_buffers
from jaxpfl.data.mapped import BlockHashes, Mapped, MappedText, origin_of
from jaxpfl.data.sequences import Padded, Sequences
from jaxpfl.errors import InputError


class Roots(NamedTuple):
    """A column as it is hashed: what `columns.describe` says, and its buffers' roots, if any."""

    what: str
    examples: int
    buffers: list[str]


def content_hash(columns: Mapping[str, Column], offsets: np.ndarray) -> str:
    """SHA-256 (hex) of columns and offsets, however they are stored.

    PRIVATE: a guess of the data can be tested against it. It reads all columns except whole ones of
    a file, whose roots the manifest states.
    """
    return hash_of({name: _roots(column) for name, column in columns.items()}, offsets)


def origin_hash(columns: Mapping[str, Column], offsets: np.ndarray) -> str:
    """As `content_hash`, but reads nothing of a mapped file. PRIVATE.

    For rows that were selected from one, it hashes their numbers and the root of their stored
    column. The hash differs if a byte of a column differs; a byte that was altered behind the
    file's manifest is refused when it is read.
    """
    return hash_of({name: _roots(column, True) for name, column in columns.items()}, offsets)


def hash_of(columns: Mapping[str, Roots], offsets: np.ndarray) -> str:
    """The hash of columns whose roots are known, and of offsets int64 [clients + 1]."""
    digest = hashlib.sha256(b"jaxpfl population 2\0")
    digest.update(f"{len(offsets)}\0".encode())
    digest.update(np.ascontiguousarray(offsets, "<i8").data)
    for name in sorted(columns):
        column = columns[name]
        parts = (name, column.what, str(column.examples), *column.buffers)
        digest.update("".join(f"{len(part.encode())} {part}\0" for part in parts).encode())
        digest.update(b"\0")
    return digest.hexdigest()


def type_of(column: Column) -> dict[str, Any]:
    """A column's type in JSON's types, as a manifest states it."""
    if is_numeric(column):
        return {"dtype": column.dtype.name, "shape": list(column.shape[1:])}
    if isinstance(column, Sequences):
        return {"dtype": column.dtype.name, "shape": [None], "encoding": dict(column.encoding)}
    return {"dtype": "text", "shape": []}


def buffer_names(type_: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of the buffers of a column of this type, in their order."""
    divided = type_["dtype"] == "text" or type_["shape"] == [None]
    return ("edges", "values") if divided else ("values",)


class Growing:
    """A column that grows by examples: its buffers are hashed, and may be written to files."""

    def __init__(self, like: Column, files: Sequence[BinaryIO] = ()) -> None:
        """Takes a column of the same type, and a file for each of its `buffer_names`, or none."""
        self.type, self.examples, self._what = type_of(like), 0, describe(like)
        self._hashes = [BlockHashes() for _ in buffer_names(self.type)]
        self._files = files
        self._end = np.int64(0)

    def append(self, column: Column) -> None:
        if describe(column) != self._what:
            raise InputError(f"a batch holds {describe(column)}, the first one {self._what}")
        if not len(column):
            return
        if isinstance(column, np.ndarray):
            self._write([np.ascontiguousarray(column).data])
        else:
            if isinstance(column, Sequences):
                column = column.compact()
                edges, content = np.asarray(column.edges), np.asarray(column.values).data
            else:
                edges, content = text_buffers(column)
            edges = edges + (self._end - edges[0])
            self._end = edges[-1]
            # The first edge was written as the end of the example before.
            self._write([(edges[1:] if self.examples else edges).data, content])
        self.examples += len(column)

    def _write(self, buffers: list[Any]) -> None:
        for hashes, buffer in zip(self._hashes, buffers, strict=True):
            hashes.update(buffer)
        for file, buffer in zip(self._files, buffers, strict=False):
            file.write(buffer)

    def roots(self) -> "Roots":
        roots = [hashes.root for hashes in self._hashes] if self.examples else []
        return Roots(self._what, self.examples, roots)

    def synced(self) -> list[dict[str, Any]]:
        """Makes the files durable; returns the size of each and the sums of its blocks (hex)."""
        for file in self._files:
            files.sync(file)
        buffers = self._hashes if self.examples else []
        return [{"bytes": hashes.size, "blocks": b"".join(hashes.sums).hex()} for hashes in buffers]


def _roots(column: Column, origins: bool = False) -> Roots:
    if isinstance(column, Padded):
        column = column.sequences
    parts, rows = _stored(column)
    roots = [part.root for part in parts if part.root] if len(column) else []
    # A whole stored column has the same hash as one in memory.
    if not len(column) or (parts and not rows and len(roots) == len(parts)):
        return Roots(describe(column), len(column), roots)
    if parts and origins:
        return Roots(describe(column), len(column), [*(part.origin for part in parts), *rows])
    grown, whole = Growing(column), read(column)
    for piece in whole.blocks() if isinstance(whole, Sequences) else [whole]:
        grown.append(piece)
    return grown.roots()


def _stored(column: Column) -> tuple[list[Mapped], list[str]]:
    """The stored columns that one reads, none in memory; which of their sequences, if not all."""
    if isinstance(column, Mapped):
        return [column], []
    if isinstance(column, MappedText):
        return [column.edges, column.content], []
    parts: list[Any] = [column.edges, column.values] if isinstance(column, Sequences) else []
    if not parts or not all(isinstance(part, Mapped) for part in parts):
        return [], []
    rows, stored = column.rows, len(column.edges) - 1
    whole = isinstance(rows, range) and len(rows) == stored
    return parts, [] if whole else [origin_of(rows, stored)]
