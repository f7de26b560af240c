"""Batches of tf.train.Example messages as columns, without TensorFlow.

A message stores neither the shapes nor the widths of its arrays, so they are declared (`Feature`).
Every declared feature must occur once, with its kind and number of values, and no other feature.
Integers that do not fit the declared width and texts that are not valid UTF-8 are refused.

    Example  {1: Features}
    Features {repeated 1: map entry {1: key, 2: Feature}}
    Feature  {1: BytesList | 2: FloatList | 3: Int64List}, each {repeated 1: values}

(tensorflow/core/example/{example,feature}.proto.) Lists of floats are packed, as every known
writer makes them. Protocol buffers takes them as bytes here, and numpy makes arrays of them.

The features of `SCHEMAS` have the names, types and shapes that the loaders of
tensorflow-federated 0.87 (tff.simulation.datasets) give them. The canonical columns are those that
this library's models read:

| data set | canonical columns |
|---|---|
| emnist | image float32 [28, 28, 1], 0 = paper (the file has 1 = paper), label int32 |
| cifar100 | image uint8 [32, 32, 3], label int32, coarse_label int32 |
| shakespeare | text (the file's snippets) |
| stackoverflow | text (the file's tokens), and the others as they are |
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import pyarrow as pa
from google.protobuf import descriptor_pb2, descriptor_pool, message, message_factory

from jaxpfl.data.columns import Column
from jaxpfl.data.readers.compressed import decoded

_BYTES, _FLOATS, _INTEGERS = "bytes", "floats", "integers"


@dataclass(frozen=True)
class Feature:
    """The type and the shape of one feature, the same in every example.

    Attributes:
      dtype: "text" (one byte string of UTF-8), "float32", "bool", or "int64" or a smaller integer.
      shape: of an example's values; () is one value, the only shape of text.
    """

    dtype: str
    shape: tuple[int, ...] = ()

    @property
    def kind(self) -> str:
        """The field of the Feature message that holds it."""
        return {"text": _BYTES, "float32": _FLOATS}.get(self.dtype, _INTEGERS)

    @property
    def size(self) -> int:
        """The number of an example's values."""
        return int(np.prod(self.shape, dtype=np.int64))


Columns = dict[str, Column]


@dataclass(frozen=True)
class Schema:
    """The features of one data set's examples; `canonical` maps them to canonical columns."""

    features: dict[str, Feature]
    unit: str
    canonical: Callable[[Columns], Columns] = dict
    splitting: str = "words"


def _emnist(columns: Columns) -> Columns:
    return {"image": np.float32(1) - columns["pixels"][..., None], "label": columns["label"]}


def _emnist_36(columns: Columns) -> Columns:
    # 10 digits, 26 capitals, 26 small letters: a small letter has the label of its capital.
    digits = _emnist(columns)
    label = digits["label"]
    return {**digits, "label": np.where(label < 36, label, label - 26).astype(label.dtype)}


def _cifar100(columns: Columns) -> Columns:
    labels = {name: columns[name].astype(np.int32) for name in ("label", "coarse_label")}
    return {"image": columns["image"], **labels}


def _text_of(name: str) -> Callable[[Columns], Columns]:
    return lambda columns: {"text": columns.pop(name), **columns}


_TEXT, _INT64 = Feature("text"), Feature("int64")
_EMNIST = {"label": Feature("int32"), "pixels": Feature("float32", (28, 28))}
_STACKOVERFLOW = ("creation_date", "score", "tags", "title", "tokens", "type")

SCHEMAS = MappingProxyType(
    {
        "cifar100": Schema(
            {"coarse_label": _INT64, "image": Feature("uint8", (32, 32, 3)), "label": _INT64},
            "dealt share of CIFAR-100",
            _cifar100,
        ),
        "emnist": Schema(_EMNIST, "writer", _emnist),
        "emnist_36": Schema(_EMNIST, "writer", _emnist_36),
        "shakespeare": Schema({"snippets": _TEXT}, "role in a play", _text_of("snippets")),
        "stackoverflow": Schema(
            {**dict.fromkeys(_STACKOVERFLOW, _TEXT), "score": _INT64},
            "user of Stack Overflow",
            _text_of("tokens"),
            # TFF's own preparation splits its tokens on spaces: `jquery-1.9` is one of them.
            splitting="spaces",
        ),
    }
)
"""The schemas by the data sets' names in `data.open`."""


class DefectError(Exception):
    """A message that cannot be decoded: its index, why (no value), and whether it is damaged."""

    def __init__(self, index: int, reason: str, corrupt: bool = False) -> None:
        super().__init__(reason)
        self.index, self.reason, self.corrupt = index, reason, corrupt


def decode(features: Mapping[str, Feature], messages: Sequence[bytes]) -> dict[str, Column]:
    """One column for each feature, in their order, of serialized tf.train.Example messages.

    It is an array [messages, *shape] of the declared dtype, or large_string [messages].
    """
    kinds = {name.encode(): feature.kind for name, feature in features.items()}
    payloads: dict[bytes, list[Any]] = {key: [] for key in kinds}
    for index, content in enumerate(messages):
        try:
            entries = _EXAMPLE.FromString(content).features.entries
        except message.DecodeError:
            reason = "it is truncated, damaged or no tf.train.Example"
            raise DefectError(index, reason, corrupt=True) from None
        # Counted before they are read: a few bytes may hold millions of entries.
        few = len(entries) == len(kinds)
        values_of = {entry.key: entry.value for entry in entries} if few else {}
        if not few or values_of.keys() != kinds.keys():
            raise DefectError(index, _other_features(features, entries))
        for key, kind in kinds.items():
            if values_of[key].WhichOneof("kind") != kind:
                actual = values_of[key].WhichOneof("kind") or "nothing"
                reason = f'feature "{key.decode()}" holds {actual}, expected {kind}'
                raise DefectError(index, reason)
            values = getattr(values_of[key], kind).values
            if len(values) != 1 and kind == _BYTES:
                reason = f'feature "{key.decode()}" does not hold one byte string'
                raise DefectError(index, reason)
            payloads[key].append(values if kind == _INTEGERS else b"".join(values))
    return {
        name: _DECODE[feature.kind](name, feature, payloads[name.encode()])
        for name, feature in features.items()
    }


def _other_features(features: Mapping[str, Feature], entries: Any) -> str:
    """The fault in a message's features; it quotes no name that the message itself gives."""
    keys = [entry.key for entry in entries[: len(features) + 1]]
    if {*keys} <= {name.encode() for name in features}:
        numbers = {name: keys.count(name.encode()) for name in features}
        name = max(numbers, key=lambda name: (numbers[name] > 1, not numbers[name]))
        twice = numbers[name] > 1
        return f'it has feature "{name}" twice' if twice else f'it has no feature "{name}"'
    return f"it has a feature that is not declared; declared are {', '.join(features)}"


def _example_type() -> Any:
    """The message Example, whose lists of floats are byte strings, as they lie there packed."""
    file = descriptor_pb2.FileDescriptorProto(name="jaxpfl_example.proto", syntax="proto3")
    types = descriptor_pb2.FieldDescriptorProto

    def field(of: Any, name: str, number: int, kind: str = "", **more: Any) -> None:
        more.setdefault("type", types.TYPE_MESSAGE if kind else types.TYPE_BYTES)
        of.field.add(name=name, number=number, type_name=kind or None, **more)

    for kind, type_ in (("List", types.TYPE_BYTES), ("Int64List", types.TYPE_INT64)):
        repeated = {"label": types.LABEL_REPEATED, "type": type_}
        field(file.message_type.add(name=kind), "values", 1, **repeated)
    feature = file.message_type.add(name="Feature")
    feature.oneof_decl.add(name="kind")
    for number, kind in enumerate((_BYTES, _FLOATS, _INTEGERS), 1):
        list_of = "Int64List" if kind == _INTEGERS else "List"
        field(feature, kind, number, list_of, oneof_index=0)
    entry = file.message_type.add(name="Entry")
    field(entry, "key", 1)
    field(entry, "value", 2, "Feature")
    features = file.message_type.add(name="Features")
    field(features, "entries", 1, "Entry", label=types.LABEL_REPEATED)
    field(file.message_type.add(name="Example"), "features", 1, "Features")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("Example"))


_EXAMPLE = _example_type()


def _texts(name: str, feature: Feature, payloads: list[bytes]) -> Column:
    try:
        return pa.array(payloads, pa.large_binary()).cast(pa.large_string())
    except pa.ArrowInvalid:
        bad = [decoded(payload)[1] for payload in payloads]
        if not any(bad):
            raise
    index, place = next((index, place) for index, place in enumerate(bad) if place)
    raise DefectError(index, f'feature "{name}": byte {place} is not valid UTF-8')


def _floats(name: str, feature: Feature, payloads: list[bytes]) -> Column:
    sizes = np.array([len(payload) for payload in payloads], np.int64)
    _check_counts(name, feature, sizes == 4 * feature.size)
    return np.frombuffer(b"".join(payloads), "<f4").reshape(len(payloads), *feature.shape)


def _integers(name: str, feature: Feature, payloads: list[Sequence[int]]) -> Column:
    _check_counts(name, feature, np.array([len(values) == feature.size for values in payloads]))
    values = np.array([np.array(values, np.int64) for values in payloads], np.int64)
    values = values.reshape(len(payloads), *feature.shape)
    limits = None if feature.dtype == "bool" else np.iinfo(feature.dtype)
    low, high = (int(limits.min), int(limits.max)) if limits else (0, 1)
    fits = (low <= values) & (values <= high)
    if not fits.all():
        index = int(np.argmin(fits.reshape(len(payloads), -1).all(axis=1)))
        raise DefectError(index, f'feature "{name}" has a value that does not fit {feature.dtype}')
    return values.astype(feature.dtype)


_DECODE = {_BYTES: _texts, _FLOATS: _floats, _INTEGERS: _integers}


def _check_counts(name: str, feature: Feature, right: np.ndarray) -> None:
    if not right.all():
        what = f"{feature.size} {feature.kind} of shape {list(feature.shape)}, packed"
        raise DefectError(int(np.argmin(right)), f'feature "{name}" does not hold the {what}')
