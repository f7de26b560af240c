"""How much memory the batches of an Arrow file take, found out before any of them is unpacked.

A file of some kilobytes may hold buffers that unpack to gigabytes, and Arrow takes the memory that
each of them asks for. How much that is stands in the first eight bytes of every buffer, whose place
is in the metadata of its message (a flatbuffer; Arrow's Columnar Format, "Serialization and
Interprocess Communication"). pyarrow shows neither, so both are read here.
"""

import struct
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pyarrow as pa

_MARK = b"ARROW1"
_CONTINUED = 0xFFFFFFFF
_DICTIONARY, _RECORDS = 2, 3
# Arrow 0.17 named the compression in the metadata of each message, of this version of the format.
_VERSION_4, _COMPRESSION_0_17 = 3, b"ARROW:experimental_compression"
_BLOCK = np.dtype([("at", "<i8"), ("metadata", "<i4"), ("", "<i4"), ("body", "<i8")])
_BUFFER = np.dtype([("at", "<i8"), ("size", "<i8")])


class _Message(NamedTuple):
    """A batch: what kind it is, what it unpacks to, and the number of the first byte after it."""

    kind: int
    unpacked: int
    end: int


def most_unpacked(content: memoryview) -> int:
    """The bytes of the largest batch once it is unpacked, together with all dictionaries.

    Args:
      content: of an Arrow file or stream. Batches without compression count nothing; dictionaries
        count whenever they are listed, because Arrow appends each to those before it.
    """
    largest = kept = 0
    try:
        for message in _of_file(content) if content[:6] == _MARK else _of_stream(content):
            if message.kind == _DICTIONARY:
                kept += message.unpacked
            else:
                largest = max(largest, message.unpacked)
    except (struct.error, ValueError, OverflowError) as error:
        raise pa.ArrowInvalid(f"its metadata lead out of it: {error}") from None
    return largest + kept


def _of_stream(content: memoryview) -> Iterator[_Message]:
    at = 0
    while at + 8 <= len(content) and not _is_end(content, at):
        message = _message(content, at)
        at = message.end
        yield message


def _of_file(content: memoryview) -> Iterator[_Message]:
    size = _number("<i", content, len(content) - 10)
    footer = _root(content, len(content) - 10 - size)
    for field in (2, 3):
        for block in _vector(content, footer, field, _BLOCK).tolist():
            yield _message(content, block[0])


def _is_end(content: memoryview, at: int) -> bool:
    first, second = _number("<I", content, at), _number("<I", content, at + 4)
    return not (second if first == _CONTINUED else first)


def _message(content: memoryview, at: int) -> _Message:
    # Before version 0.15 nothing stood before the size of the metadata.
    at += 4 * (_number("<I", content, at) == _CONTINUED)
    body = at + 4 + _number("<i", content, at)
    table = _root(content, at + 4)
    kind = _scalar("<B", content, table, 1)
    end = body + _scalar("<q", content, table, 3)
    if end <= at:
        raise ValueError("a message of a negative size")
    unpacked = 0
    if kind in (_DICTIONARY, _RECORDS):
        batch = _table(content, table, 2)
        batch = _table(content, batch, 1) if kind == _DICTIONARY else batch
        named = _scalar("<h", content, table, 0) == _VERSION_4 and _field(content, table, 4)
        compressed = _field(content, batch, 3) or (
            named and _COMPRESSION_0_17 in bytes(content[at:body])
        )
        if compressed or kind == _DICTIONARY:
            for place, size in _vector(content, batch, 2, _BUFFER).tolist():
                # -1 stands before a buffer that is stored as it is.
                claimed = _number("<q", content, body + place) if compressed and size else -1
                unpacked += size if claimed < 0 else claimed
    return _Message(kind, unpacked, end)


def _number(form: str, content: memoryview, at: int) -> int:
    if at < 0:
        raise ValueError("a place before the file")
    return struct.unpack_from(form, content, at)[0]


def _root(content: memoryview, at: int) -> int:
    """The table that a flatbuffer begins with."""
    return at + _number("<I", content, at)


def _field(content: memoryview, table: int, number: int) -> int:
    """Where a field of a table is; 0 if the table leaves it out."""
    fields = table - _number("<i", content, table)
    entry = 4 + 2 * number
    if entry + 2 > _number("<H", content, fields):
        return 0
    within = _number("<H", content, fields + entry)
    return table + within if within else 0


def _scalar(form: str, content: memoryview, table: int, number: int) -> int:
    at = _field(content, table, number)
    return _number(form, content, at) if at else 0


def _table(content: memoryview, table: int, number: int) -> int:
    at = _field(content, table, number)
    if not at:
        raise ValueError("a table is missing")
    return at + _number("<I", content, at)


def _vector(content: memoryview, table: int, number: int, dtype: np.dtype) -> np.ndarray:
    """A vector of structs."""
    if not _field(content, table, number):
        return np.empty(0, dtype)
    at = _table(content, table, number)
    return np.frombuffer(content, dtype, _number("<I", content, at), at + 4)
