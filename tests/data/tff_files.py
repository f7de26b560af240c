"""Files as TensorFlow Federated writes them, made without it; and defects to plant in them.

The encoder here knows nothing of the reader: it follows the wire format's description alone.
"""

import sqlite3
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxpfl.data.population import Population, collect
from jaxpfl.data.readers.tff_examples import Feature, Schema
from jaxpfl.data.readers.tff_sqlite import stream_tff


def varint(value: int) -> bytes:
    """Negative numbers as 64-bit two's complement."""
    value %= 2**64
    out = bytearray()
    while True:
        value, low = divmod(value, 128)
        out.append(low + 128 * bool(value))
        if not value:
            return bytes(out)


def message(number: int, content: bytes) -> bytes:
    return varint(8 * number + 2) + varint(len(content)) + content


def feature(value: Any, *, packed: bool = True) -> bytes:
    """A Feature of bytes, of floats (a float array) or of integers (any other array)."""
    if isinstance(value, bytes):
        return message(1, message(1, value))
    flat = np.asarray(value).reshape(-1)
    if flat.dtype.kind == "f":
        pieces = [struct.pack("<f", number) for number in flat]
        tag, kind = 13, 2
    else:
        pieces = [varint(int(number)) for number in flat]
        tag, kind = 8, 3
    if packed:
        return message(kind, message(1, b"".join(pieces)))
    return message(kind, b"".join(varint(tag) + piece for piece in pieces))


def entry(name: str, encoded: bytes) -> bytes:
    return message(1, message(1, name.encode()) + message(2, encoded))


def example(values: Mapping[str, Any], *, packed: bool = True) -> bytes:
    """A serialized tf.train.Example."""
    entries = [entry(name, feature(value, packed=packed)) for name, value in values.items()]
    return message(1, b"".join(entries))


EXAMPLES = "CREATE TABLE examples (split_name TEXT NOT NULL, client_id TEXT NOT NULL, "
EXAMPLES += "serialized_example_proto BLOB NOT NULL)"
METADATA = "CREATE TABLE client_metadata (client_id TEXT NOT NULL, split_name TEXT NOT NULL, "
METADATA += "num_examples INTEGER NOT NULL)"


def write_file(
    path: Path,
    clients: Mapping[str, Sequence[bytes]],
    *,
    split: str = "train",
    tables: tuple[str, str] = (EXAMPLES, METADATA),
    after: Sequence[tuple[str, tuple]] = (),
) -> Path:
    """Writes {client id: messages}, then carries out the statements `after`."""
    with sqlite3.connect(path) as connection:
        for table in tables:
            connection.execute(table)
        for client, messages in clients.items():
            connection.executemany(
                "INSERT INTO examples (split_name, client_id, serialized_example_proto) "
                "VALUES (?, ?, ?)",
                [(split, client, blob) for blob in messages],
            )
            connection.execute(
                "INSERT INTO client_metadata (client_id, split_name, num_examples) "
                "VALUES (?, ?, ?)",
                (client, split, len(messages)),
            )
        for statement, values in after:
            connection.execute(statement, values)
    connection.close()
    return path


SCHEMA = Schema({"x": Feature("int64"), "t": Feature("text")}, "client")
SECRET = "rosebud"
FOUR = {"d": 3, "b": 0, f"{SECRET} c": 2, "a": 4}


def row(x: int, text: str = SECRET) -> bytes:
    return example({"x": x, "t": text.encode()})


def clients(sizes: Mapping[str, int]) -> dict[str, list[bytes]]:
    return {name: [row(100 * i + k) for k in range(n)] for i, (name, n) in enumerate(sizes.items())}


def read(path: Path, **more: Any) -> Population:
    with stream_tff(path, more.pop("schema", SCHEMA), **more) as stream:
        return collect(stream)
