"""Reads one tf.train.Example message in any form that protocol buffers allow.

The wire format (protocol buffers, "Encoding"; tensorflow/core/example/{example,feature}.proto):

    Example  {1: Features}
    Features {repeated 1: map entry {1: key, 2: Feature}}
    Feature  {1: BytesList | 2: FloatList | 3: Int64List}, each {repeated 1: values}

Floats are packed little-endian float32, integers packed varints, negative ones as 64-bit two's
complement. As the format demands, unknown fields are skipped, unpacked values are read and the
parts of one message are merged. A feature that occurs twice, groups, lengths beyond the message and
varints of more than 64 bits are refused.
"""

import struct
from collections.abc import Iterator

BYTES, FLOATS, INTEGERS = 1, 2, 3
KIND_NAMES = {BYTES: "bytes", FLOATS: "floats", INTEGERS: "integers"}
MAX_VARINT_BYTES = 10

_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5


class WireError(Exception):
    """What is wrong with a message, without any of its values."""


def parse_example(message: bytes) -> dict[bytes, tuple[int, bytes]]:
    """The features of a message: key -> (kind, payload), a byte string or the packed values."""
    held: dict[bytes, tuple[int, bytes]] = {}
    for features in _messages(message, 1, "Features"):
        for entry in _messages(features, 1, "a feature's entry"):
            keys = list(_messages(entry, 1, "a feature's key"))
            # Of a field that must occur once, the last value counts; parts of a message are merged.
            key = keys[-1] if keys else b""
            feature = b"".join(_messages(entry, 2, "a feature"))
            if key in held:
                raise WireError("it has a feature twice")
            held[key] = _parse_feature(feature)
    return held


def _parse_feature(feature: bytes) -> tuple[int, bytes]:
    kind, lists = 0, b""
    for number, wire, value in _fields(feature):
        if number in KIND_NAMES:
            if wire != _LENGTH:
                raise WireError("a list of values has another wire type than a message")
            # Of the three kinds the last one counts, and its parts are merged.
            lists = lists + value if number == kind else value
            kind = number
    if not kind:
        raise WireError("a feature holds neither bytes, floats nor integers")
    if kind == BYTES:
        texts = list(_messages(lists, 1, "a byte string"))
        if len(texts) != 1:
            raise WireError("a feature does not hold one byte string")
        return kind, texts[0]
    single = _FIXED32 if kind == FLOATS else _VARINT
    values = []
    for number, wire, value in _fields(lists):
        if number == 1:
            if wire not in (single, _LENGTH):
                raise WireError(f"{KIND_NAMES[kind]} have another wire type than their own")
            values.append(value)
    return kind, b"".join(values)


def _messages(message: bytes, wanted: int, what: str) -> Iterator[bytes]:
    for number, wire, value in _fields(message):
        if number == wanted:
            if wire != _LENGTH:
                raise WireError(f"{what} has another wire type than a message")
            yield value


def _fields(message: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Number, wire type and content of the fields; a varint's content is its own bytes."""
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        number, wire = tag >> 3, tag & 7
        if not 0 < number < 2**29:
            raise WireError("a field has an invalid number")
        if wire == _VARINT:
            _, end = _varint(message, at)
        elif wire == _LENGTH:
            size, at = _varint(message, at)
            end = at + size
        elif wire in (_FIXED32, _FIXED64):
            end = at + (4 if wire == _FIXED32 else 8)
        else:
            raise WireError(f"a field has wire type {wire}, which is not in use")
        if end > len(message):
            raise WireError("a field ends beyond its message; it may be truncated")
        yield number, wire, message[at:end]
        at = end


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = 0
    for place, byte in enumerate(message[at : at + MAX_VARINT_BYTES]):
        value |= (byte & 127) << (7 * place)
        if byte < 128:
            if value >= 2**64:
                break
            return value, at + place + 1
    else:
        if len(message) - at < MAX_VARINT_BYTES:
            raise WireError("a number ends beyond its message; it may be truncated")
    raise WireError("it has a varint of more than 64 bits")


def field(number: int, content: bytes) -> bytes:
    """A field of variable length, as it is written."""
    size, left = b"", len(content)
    while left > 127:
        size += struct.pack("B", left & 127 | 128)
        left >>= 7
    return struct.pack("B", 8 * number + _LENGTH) + size + struct.pack("B", left) + content
