"""Rows with a client's id and a text, as JSON lines and the Hugging Face hub have them.

Policy:
- A client's id is a non-empty string, or a whole number, which means its decimal digits. All rows
  of one id are one client, wherever they are.
- Errors name the source, the row's number and the field, and never a value.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from jaxpfl.data.columns import text_array
from jaxpfl.data.population import Population, from_rows
from jaxpfl.data.readers.prose import pieces
from jaxpfl.errors import InputError

# Texts that are Python strings at any one time; the others are in Arrow buffers.
_BLOCK = 65_536
_EXPECTED = {str: "a string", bool: "a boolean", int: "a number", float: "a number"}


def read_rows(
    source: str | Path,
    rows: Iterable[tuple[int, Mapping[str, Any]]],
    *,
    client: str | None,
    text: str,
    columns: tuple[str, ...] = (),
    split: str | None,
    name: str,
    unit: str,
) -> Population:
    """Reads rows into memory.

    Args:
      source: names the rows in errors.
      rows: each row's number, from 1, and its fields.
      client: the field of the client's id; None makes each row a client, named by its number.
      text, columns, split: as for `read_jsonl`.
      name, unit: as in `Population`.

    Raises:
      InputError: two of the fields are the same, a row lacks one or has a value of another type,
        or there are no examples.
    """
    fields = (client, text, *columns)
    if len(set(fields)) != len(fields):
        found = ", ".join(map(repr, fields))
        raise InputError(
            f"{source}: the fields client, text and columns must be different, found {found}"
        )
    index_of: dict[str, int] = {}
    client_of_example: list[int] = []
    texts, others = Texts(), {field: _Values() for field in columns}
    for number, row in rows:
        identity = number if client is None else row.get(client)
        if type(identity) is int:
            identity = str(identity)
        if type(identity) is not str or not identity:
            expected = "a non-empty string or a whole number"
            raise _field_error(source, number, client, row, expected)
        if type(row.get(text)) is not str:
            raise _field_error(source, number, text, row, "a string")
        for field, values in others.items():
            if expected := values.what_is_wrong(row.get(field)):
                raise _field_error(source, number, field, row, expected)
        found = [row[text]] if split is None else list(pieces(row[text].split("\n"), split))
        texts.extend(found)
        for field, values in others.items():
            values.extend([row[field]] * len(found))
        index = index_of.setdefault(identity, len(index_of))
        client_of_example.extend([index] * len(found))
    if not client_of_example:
        raise InputError(f"{source} has no examples")
    held = {"text": texts.finish()} | {field: values.finish() for field, values in others.items()}
    return from_rows(np.array(client_of_example), list(index_of), held, name=name, unit=unit)


class Texts:
    """A growing column of texts, which are moved to Arrow buffers block by block."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._blocks: list[pa.Array] = []

    def __len__(self) -> int:
        return len(self._texts) + sum(map(len, self._blocks))

    def extend(self, texts: Iterable[str]) -> None:
        for text in texts:
            self._texts.append(text)
            if len(self._texts) == _BLOCK:
                self._flush()

    def finish(self) -> pa.Array:
        self._flush()
        return pa.concat_arrays(self._blocks)

    def _flush(self) -> None:
        self._blocks.append(text_array(self._texts))
        self._texts = []


class _Values:
    """A growing column of values that are all of the first one's type."""

    def __init__(self) -> None:
        self._kind: type | None = None
        self._values: list[Any] | Texts = []

    def what_is_wrong(self, value: Any) -> str | None:
        """What was expected in place of a value that the column cannot hold."""
        kind = type(value)
        if kind is not self._kind:
            if self._kind is None and kind in _EXPECTED:
                self._kind = kind
                self._values = Texts() if kind is str else []
            elif {kind, self._kind} == {int, float}:
                self._kind = float
            else:
                return _EXPECTED.get(self._kind, "a string, number or boolean")
        if kind is int and not -(2**63) <= value < 2**63:
            return "a number of at most 64 bits"
        return None

    def extend(self, values: list[Any]) -> None:
        self._values.extend(values)

    def finish(self) -> Any:
        if isinstance(self._values, Texts):
            return self._values.finish()
        kinds = {bool: bool, int: np.int64, float: np.float64}
        return np.array(self._values, kinds[self._kind])


def _field_error(
    source: str | Path, number: int, field: str | None, row: Mapping[str, Any], expected: str
) -> InputError:
    found = "no such field"
    if field is not None and field in row:
        found = "an empty string" if row[field] == "" else type(row[field]).__name__
    return InputError(f"{source}, row {number}: field {field!r} must be {expected}, found {found}")
