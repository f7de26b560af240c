"""Batches of tf.train.Example messages as columns, without TensorFlow.

A message stores neither the shapes nor the widths of its arrays, so they are declared (`Feature`).
Every declared feature must occur once, with its kind and number of values, and no other feature.
Integers that do not fit the declared width and texts that are not valid UTF-8 are refused.

Messages in the usual form, which every known writer makes, are decoded by numpy, a whole batch at a
time. Others, which the format also allows, are first rewritten one by one (see `example_wire`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from jaxpfl.data.columns import Column, text_buffers
from jaxpfl.data.readers.example_wire import (
    BYTES,
    FLOATS,
    INTEGERS,
    KIND_NAMES,
    MAX_VARINT_BYTES,
    WireError,
    field,
    parse_example,
)
from jaxpfl.errors import InputError

_INTEGER_TYPES = ("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64")
# A blob is limited to less than 2^28 bytes, so that no length has more bytes than this.
_MAX_LENGTH_BYTES = 4
_WORD = 8


@dataclass(frozen=True)
class Feature:
    """What one feature of every example holds.

    Attributes:
      dtype: "text" (one byte string of UTF-8), "float32", "bool", or "int64" or a smaller integer.
      shape: of an example's values; () is one value, the only shape of text.

    Raises:
      InputError: the dtype is unknown, or cannot have the shape.
    """

    dtype: str
    shape: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        known = ("text", "float32", *_INTEGER_TYPES)
        if self.dtype not in known:
            raise InputError(f"a feature's dtype must be one of {known}, found {self.dtype!r}")
        sizes_ok = all(type(size) is int and size > 0 for size in self.shape)
        if not sizes_ok or (self.dtype == "text" and self.shape):
            raise InputError(f"a feature of {self.dtype} cannot have the shape {self.shape}")

    @property
    def kind(self) -> int:
        """The field of the Feature message that holds it."""
        return {"text": BYTES, "float32": FLOATS}.get(self.dtype, INTEGERS)

    @property
    def size(self) -> int:
        """The number of an example's values."""
        return int(np.prod(self.shape, dtype=np.int64))


class DefectError(Exception):
    """A message that cannot be decoded.

    Attributes:
      index: of the message in its batch.
      reason: what is wrong with it, without any of its values.
      corrupt: whether the message is damaged, rather than of another schema.
    """

    def __init__(self, index: int, reason: str, corrupt: bool = False) -> None:
        super().__init__(reason)
        self.index, self.reason, self.corrupt = index, reason, corrupt


class ExampleDecoder:
    """Decodes batches of serialized tf.train.Example messages, all with these features."""

    def __init__(self, features: Mapping[str, Feature]) -> None:
        if not features:
            raise InputError("a schema needs at least one feature, found none")
        self._names = list(features)
        self._features = list(features.values())
        self._keys = [name.encode() for name in features]
        if not all(0 < len(key) < 128 for key in self._keys):
            raise InputError("a feature's name must have 1 to 127 bytes")
        # Keys are compared as words of 8 bytes.
        self._words = -(-max(map(len, self._keys)) // _WORD)
        padded = [key.ljust(self._words * _WORD, b"\0") for key in self._keys]
        self._key_words = [np.frombuffer(key, "<u8") for key in padded]
        # The order in which the last batch held the features: writers keep to one order.
        self._expected = list(range(len(self._keys)))

    def decode(self, messages: Sequence[bytes]) -> dict[str, Column]:
        """One column for each feature, in the schema's order.

        Returns:
          name -> array [messages, *shape] of the declared dtype, or large_string [messages].

        Raises:
          DefectError: a message does not follow the schema; it names the first one.
        """
        if not messages:
            return dict(zip(self._names, map(_empty, self._features), strict=True))
        buffer, starts_FxN, ends_FxN, usual_N = self._spans(messages)
        if not usual_N.all():
            rewritten = list(messages)
            for index in np.flatnonzero(~usual_N).tolist():
                rewritten[index] = self._rewrite(index, messages[index])
            buffer, starts_FxN, ends_FxN, usual_N = self._spans(rewritten)
            if not usual_N.all():
                raise AssertionError("a rewritten message must have the usual form")
        columns = {}
        for number, (name, feature) in enumerate(zip(self._names, self._features, strict=True)):
            payloads = _cut(buffer, starts_FxN[number], ends_FxN[number])
            columns[name] = _DECODE[feature.kind](name, feature, payloads)
        return columns

    def _spans(
        self, messages: Sequence[bytes]
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Where each feature's payload begins and ends, for messages of the usual form.

        The usual form holds only what the schema says, and every list in one packed piece.

        Returns:
          The joined messages uint8, with a margin; starts and ends int64 [features, messages];
          and bool [messages], whether a message has the usual form. Other spans mean nothing.
        """
        margin = bytes(self._words * _WORD + 2 * _MAX_LENGTH_BYTES)
        buffer = np.frombuffer(b"".join((*messages, margin)), np.uint8)
        last = len(buffer) - len(margin)
        words = np.ndarray(len(buffer) - _WORD + 1, "<u8", buffer.data, strides=(1,))
        end_N = np.cumsum(np.fromiter(map(len, messages), np.int64, len(messages)))
        at_N = np.concatenate([np.zeros(1, np.int64), end_N[:-1]])
        ok_N = np.ones(len(messages), bool)
        shape = (len(self._keys), len(messages))
        starts_FxN, ends_FxN = np.zeros(shape, np.int64), np.zeros(shape, np.int64)

        def into(at_N: np.ndarray, tag: int | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            """Begin and end of the content of a field at `at_N`, which must have this tag."""
            nonlocal ok_N
            at_N = np.minimum(at_N, last)
            ok_N &= buffer[at_N] == tag
            return length(at_N + 1)

        def length(at_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            nonlocal ok_N
            byte_N = buffer[at_N]
            length_N, at_N = (byte_N & 127).astype(np.int64), at_N + 1
            for place in range(1, _MAX_LENGTH_BYTES):
                more_N = byte_N > 127
                if not more_N.any():
                    break
                byte_N = np.where(more_N, buffer[at_N], np.uint8(0))
                length_N |= (byte_N & 127).astype(np.int64) << (7 * place)
                at_N = at_N + more_N
            ok_N &= byte_N <= 127
            return at_N, at_N + length_N

        at_N, features_end_N = into(at_N, 10)
        ok_N &= features_end_N == end_N
        seen_N = np.zeros(len(messages), np.int64)
        found_in_order = []
        for step in range(len(self._keys)):
            at_N, entry_end_N = into(at_N, 10)
            ok_N &= entry_end_N <= end_N
            key_N, key_end_N = into(at_N, 10)
            ok_N &= key_end_N <= entry_end_N
            key_N = np.minimum(key_N, last)
            feature_N = self._match(words, key_N, key_end_N - key_N, self._expected[step], ok_N)
            ok_N &= feature_N >= 0
            at_N, value_end_N = into(key_end_N, 18)
            ok_N &= value_end_N == entry_end_N
            kind_N = np.array([feature.kind for feature in self._features])[feature_N]
            at_N, list_end_N = into(at_N, (8 * kind_N + 2).astype(np.uint8))
            ok_N &= list_end_N == entry_end_N
            begin_N, payload_end_N = into(at_N, 10)
            ok_N &= payload_end_N == entry_end_N
            if (feature_N == feature_N[0]).all():
                starts_FxN[feature_N[0]], ends_FxN[feature_N[0]] = begin_N, payload_end_N
            else:
                row_N = np.arange(len(messages))
                starts_FxN[feature_N, row_N] = begin_N
                ends_FxN[feature_N, row_N] = payload_end_N
            seen_N += np.where(ok_N, feature_N == self._expected[step], False)
            found_in_order.append(feature_N)
            at_N = entry_end_N
        ok_N &= at_N == end_N
        order_FxN = np.array(found_in_order)
        if not (seen_N == len(self._keys)).all():
            # Not in the expected order: each feature must still occur once.
            every_Fx1 = np.arange(len(self._keys))[:, None]
            ok_N &= (np.sort(order_FxN, axis=0) == every_Fx1).all(axis=0)
            if ok_N.any():
                self._expected = order_FxN[:, int(np.argmax(ok_N))].tolist()
        return buffer, starts_FxN, ends_FxN, ok_N

    def _match(
        self,
        words: np.ndarray,
        key_N: np.ndarray,
        size_N: np.ndarray,
        expected: int,
        wanted_N: np.ndarray,
    ) -> np.ndarray:
        """The numbers of the features of the keys at `key_N`, int64 [messages]; -1 for none."""
        found_N = np.full(len(key_N), -1)
        others = [number for number in range(len(self._keys)) if number != expected]
        for number in (expected, *others):
            equal_N = size_N == len(self._keys[number])
            for place, word in enumerate(self._key_words[number]):
                inside = len(self._keys[number]) - place * _WORD
                if inside <= 0:
                    break
                read_N = words[key_N + place * _WORD]
                if inside < _WORD:
                    read_N = read_N & np.uint64(2 ** (8 * inside) - 1)
                equal_N &= read_N == word
            found_N[equal_N] = number
            if (found_N >= 0)[wanted_N].all():
                break
        return found_N

    def _rewrite(self, index: int, message: bytes) -> bytes:
        """The message in the usual form."""
        try:
            held = parse_example(message)
        except WireError as error:
            raise DefectError(index, str(error), corrupt=True) from None
        if not held.keys() <= set(self._keys):
            declared = ", ".join(self._names)
            reason = f"it has a feature that is not declared; declared are {declared}"
            raise DefectError(index, reason)
        entries = []
        for name, key, feature in zip(self._names, self._keys, self._features, strict=True):
            if key not in held:
                raise DefectError(index, f'it has no feature "{name}"')
            kind, values = held[key]
            if kind != feature.kind:
                found, expected = KIND_NAMES[kind], KIND_NAMES[feature.kind]
                raise DefectError(index, f'feature "{name}" holds {found}, expected {expected}')
            list_ = field(feature.kind, field(1, values))
            entries.append(field(1, field(1, key) + field(2, list_)))
        return field(1, b"".join(entries))


def _cut(buffer: np.ndarray, starts_N: np.ndarray, ends_N: np.ndarray) -> pa.Array:
    """The spans of `buffer`, as large_binary [spans]: copied by Arrow, not by Python."""
    edges = np.stack([starts_N, ends_N], axis=1).reshape(-1)
    arrays = pa.LargeBinaryArray.from_buffers(
        pa.large_binary(), len(edges) - 1, [None, pa.py_buffer(edges), pa.py_buffer(buffer)]
    )
    return arrays.take(pa.array(np.arange(0, len(edges), 2)))


def _parts(payloads: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    """The bytes of all payloads, and where each begins and ends, int64 [payloads + 1]."""
    edges, content = text_buffers(payloads)
    return np.frombuffer(content, np.uint8), edges - edges[0]


def _texts(name: str, feature: Feature, payloads: pa.Array) -> Column:
    try:
        return payloads.cast(pa.large_string())
    except pa.ArrowInvalid:
        for index, payload in enumerate(payloads.to_pylist()):
            try:
                payload.decode("utf-8")
            except UnicodeDecodeError as error:
                reason = f'feature "{name}": byte {error.start + 1} is not valid UTF-8'
                raise DefectError(index, reason) from None
        raise


def _floats(name: str, feature: Feature, payloads: pa.Array) -> Column:
    content, edges = _parts(payloads)
    sizes = np.diff(edges)
    _check_counts(name, feature, sizes % 4 == 0, sizes // 4)
    return content.view("<f4").reshape(len(payloads), *feature.shape)


def _integers(name: str, feature: Feature, payloads: pa.Array) -> Column:
    content, edges = _parts(payloads)
    final = content < 128
    before = np.concatenate([np.zeros(1, np.int64), np.cumsum(final)])
    counts = before[edges[1:]] - before[edges[:-1]]
    whole = np.diff(edges) > 0
    whole[whole] = final[edges[1:][whole] - 1]
    _check_counts(name, feature, whole, counts)
    last = np.flatnonzero(final)
    first = np.concatenate([np.zeros(1, np.int64), last[:-1] + 1])
    sizes = last - first + 1
    # The tenth byte has the 64th bit.
    long = (sizes > MAX_VARINT_BYTES) | ((sizes == MAX_VARINT_BYTES) & (content[last] > 1))
    if long.any():
        index = int(np.argmax(long)) // feature.size
        raise DefectError(index, f'feature "{name}" has a varint of more than 64 bits', True)
    values = (content[first] & 127).astype(np.uint64)
    for place in range(1, int(sizes.max())):
        longer = np.flatnonzero(sizes > place)
        septet = (content[first[longer] + place] & 127).astype(np.uint64)
        values[longer] |= septet << np.uint64(7 * place)
    values = values.view(np.int64).reshape(len(payloads), *feature.shape)
    limits = None if feature.dtype == "bool" else np.iinfo(feature.dtype)
    low, high = (int(limits.min), int(limits.max)) if limits else (0, 1)
    fits = (low <= values) & (values <= high)
    if not fits.all():
        index = int(np.argmin(fits.reshape(len(payloads), -1).all(axis=1)))
        raise DefectError(index, f'feature "{name}" has a value that does not fit {feature.dtype}')
    return values.astype(feature.dtype)


_DECODE = {BYTES: _texts, FLOATS: _floats, INTEGERS: _integers}


def _check_counts(name: str, feature: Feature, whole: np.ndarray, counts: np.ndarray) -> None:
    right = whole & (counts == feature.size)
    if not right.all():
        what = f"{feature.size} {KIND_NAMES[feature.kind]} of shape {list(feature.shape)}"
        raise DefectError(int(np.argmin(right)), f'feature "{name}" does not hold the {what}')


def _empty(feature: Feature) -> Column:
    if feature.dtype == "text":
        return pa.array([], pa.large_string())
    return np.zeros((0, *feature.shape), feature.dtype)
