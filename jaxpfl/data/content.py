"""Hashes of columns and offsets, from which fingerprints and the identities of releases follow.

A column is one or two buffers: its values; or the edges of its texts or sequences, int64, the first
of them 0, and what they divide. A buffer's root follows from its blocks (see `data.blocks`), and a
hash of columns follows from the roots, so that what is stored need not be read to be hashed.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from jaxpfl.data.blocks import block_hashes, root_of
from jaxpfl.data.columns import Column, describe, read, text_buffers
from jaxpfl.data.mapped import Mapped, MappedText
from jaxpfl.data.sequences import Padded, Sequences


class Roots(NamedTuple):
    """A column as it is hashed.

    Attributes:
      what: as `columns.describe` says it.
      examples: how many.
      buffers: the roots of its buffers; none without examples.
    """

    what: str
    examples: int
    buffers: list[str]


def content_hash(columns: Mapping[str, Column], offsets: np.ndarray) -> str:
    """SHA-256 (hex) of columns and offsets, however they are stored. PRIVATE: a guess of the data
    can be tested against it.

    It reads all columns but those of a file that nothing was selected from.
    """
    return hash_of({name: _roots(column) for name, column in columns.items()}, offsets)


def origin_hash(columns: Mapping[str, Column], offsets: np.ndarray) -> str:
    """As `content_hash`, but reads nothing of a mapped file: of what was selected from one, it
    hashes which rows of which stored column they are. PRIVATE.

    Where a byte of a column differs, so does the hash; or else the byte was altered behind the
    file's manifest, and is refused when it is read.
    """
    return hash_of({name: _origins(column) for name, column in columns.items()}, offsets)


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


def root(pieces: Iterable[Any]) -> str:
    """The root of a buffer that comes in pieces."""
    return root_of(*block_hashes(pieces))


def _roots(column: Column) -> Roots:
    if isinstance(column, Padded):
        return _roots(column.sequences)
    known = _known(column)
    if known is None:
        known = [root(pieces) for pieces in _buffers(read(column))]
    return Roots(describe(column), len(column), known)


def _origins(column: Column) -> Roots:
    if isinstance(column, Padded):
        return _origins(column.sequences)
    if isinstance(column, Mapped):
        origins = [column.origin]
    elif isinstance(column, MappedText):
        origins = [column.edges.origin, column.content.origin]
    else:
        origins = column.origins if isinstance(column, Sequences) else None
    # A whole stored column has the same hash as one in memory.
    if origins is None or _known(column) is not None:
        return _roots(column)
    return Roots(describe(column), len(column), origins)


def _known(column: Column) -> list[str] | None:
    """The roots of a column that is all of a stored one."""
    if not len(column):
        return []
    if isinstance(column, Mapped):
        found = [column.root]
    elif isinstance(column, MappedText):
        found = [column.edges.root, column.content.root]
    elif isinstance(column, Sequences) and column.rows is None:
        parts = (column.edges, column.values)
        found = [part.root if isinstance(part, Mapped) else None for part in parts]
    else:
        return None
    return [each for each in found if each] if all(found) else None


def _buffers(column: Column) -> Iterator[Iterator[Any]]:
    """The buffers of a column with examples, each in pieces."""
    if isinstance(column, np.ndarray):
        yield iter([np.ascontiguousarray(column).data])
    elif isinstance(column, Sequences):
        yield _edges(column)
        yield (np.ascontiguousarray(block.values).data for block in column.blocks())
    else:
        edges, content = text_buffers(column)
        yield iter([(edges - edges[0]).data])
        yield iter([content])


def _edges(column: Sequences) -> Iterator[Any]:
    end = np.zeros(1, np.int64)
    yield end.data
    for block in column.blocks():
        yield (block.edges[1:] + end).data
        end = end + block.edges[-1]
