"""JSON lines: one example a line, an object with the client's id and its fields.

Policy, the same on every platform:
- A file is UTF-8, strictly (a byte order mark at its head is skipped); .gz is gzip, its checksum
  is verified. Lines end in \\n or \\r\\n; lines of blanks are skipped, but counted in row numbers.
- A line has at most 16 MiB. Texts are kept as they are (see `data.columns`): NUL stays, an empty
  text is an example, a lone surrogate escape becomes U+FFFD.
- A client's id is a non-empty string, or a whole number, which means its decimal digits. All lines
  of one id are one client, wherever they are in the file.
- Errors name the file and the row, from 1, and never a value.
"""

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
import pyarrow as pa

from jaxpfl.data.columns import text_array
from jaxpfl.data.population import Population, from_rows
from jaxpfl.data.readers.prose import pieces
from jaxpfl.errors import CorruptFile, InputError

MAX_LINE_BYTES = 2**24
EACH_LINE = "*"

# Rows that are Python strings at any one time; the others are in Arrow buffers.
_BLOCK = 65_536


def read_jsonl(
    path: str | Path,
    *,
    client: str = "client",
    text: str = "text",
    columns: tuple[str, ...] = (),
    split: str | None = None,
    name: str | None = None,
) -> Population:
    """Reads a .jsonl or .jsonl.gz file.

    Args:
      path: the file.
      client, text: names of the fields that hold the client's id and the text. "*" as the client
        makes each line a client of its own, called by its row number.
      columns: further fields to read, each all strings, all booleans or all numbers.
      split: "sentences", "paragraphs" or "lines": every row becomes as many examples as its text
        has of them (see `readers.prose`), each with the row's other columns. A client whose texts
        have none stays, without examples.
      name: what the population is called; by default the path.

    Returns:
      Clients in order of first appearance, with the columns "text" and `columns`.

    Raises:
      InputError: a row's encoding, JSON, field or type is not as expected.
      CorruptFile: the compressed data is truncated or altered.
    """
    path = Path(path)
    fields = (text, *columns)
    if len({client, *fields}) != len(fields) + 1:
        raise InputError(f"{path}: the fields client, text and columns must be different")
    index_of: dict[str, int] = {}
    clients_of_rows: list[int] = []
    parts = {name: _Column() for name in fields}
    for row, record in _records(path):
        identity = row if client == EACH_LINE else record.get(client)
        if type(identity) is int:
            identity = str(identity)
        if type(identity) is not str or not identity:
            raise _field_error(path, row, client, record, "a non-empty string or a whole number")
        index = index_of.setdefault(identity, len(index_of))
        values: dict[str, Any] = {field: record.get(field) for field in fields}
        for field, part in parts.items():
            if field == text and type(values[field]) is not str:
                raise _field_error(path, row, field, record, "a string")
            expected = part.check(values[field])
            if expected:
                raise _field_error(path, row, field, record, expected)
        texts = [values[text]]
        if split is not None:
            texts = list(pieces(values[text].split("\n"), split))
        for field, part in parts.items():
            part.extend(texts if field == text else [values[field]] * len(texts))
        clients_of_rows.extend([index] * len(texts))
    if not clients_of_rows:
        raise InputError(f"{path} has no examples")
    finished = {field: part.finish() for field, part in parts.items()}
    finished = {"text": finished.pop(text), **finished}
    return from_rows(
        np.array(clients_of_rows),
        list(index_of),
        finished,
        name=str(path) if name is None else name,
        unit="one line" if client == EACH_LINE else f'all lines with one "{client}"',
    )


class _Column:
    """The values of one field: all of the first one's kind."""

    def __init__(self) -> None:
        self._kind: type | None = None
        self._values: list[Any] = []
        self._blocks: list[pa.Array] = []

    def check(self, value: Any) -> str | None:
        """Says what was expected instead of a value, if it is not of the column's kind."""
        kind = type(value)
        if kind is not self._kind:
            if self._kind is None and kind in (str, bool, int, float):
                self._kind = kind
            elif {kind, self._kind} == {int, float}:
                self._kind = float
            else:
                return _EXPECTED.get(self._kind, "a string, number or boolean")
        if kind is int and not -(2**63) <= value < 2**63:
            return "a number of at most 64 bits"
        return None

    def extend(self, values: list[Any]) -> None:
        """Adds checked values."""
        self._values.extend(values)
        if self._kind is str and len(self._values) >= _BLOCK:
            self._flush()

    def _flush(self) -> None:
        self._blocks.append(text_array(self._values))
        self._values = []

    def finish(self) -> Any:
        if self._kind is not str:
            return np.array(
                self._values, {bool: bool, int: np.int64, float: np.float64}[self._kind]
            )
        self._flush()
        return pa.concat_arrays(self._blocks)


_EXPECTED: dict[type | None, str] = {
    str: "a string",
    bool: "a boolean",
    int: "a number",
    float: "a number",
}


def _records(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Row numbers, from 1, and the objects of a file."""
    decode = json.JSONDecoder(parse_constant=_refuse_constant).decode
    for row, line in _lines(path):
        try:
            # Decoded here and not by json: it would also take UTF-16.
            content = line.decode("utf-8")
        except UnicodeDecodeError as error:
            raise InputError(
                f"{path}, row {row}: byte {error.start + 1} is not valid UTF-8"
            ) from None
        try:
            record = decode(content)
        except json.JSONDecodeError as error:
            cut = "" if line.endswith(b"\n") else "; the file may be truncated"
            raise InputError(
                f"{path}, row {row}: not valid JSON at character {error.pos + 1}{cut}"
            ) from None
        except (ValueError, RecursionError):
            raise InputError(
                f"{path}, row {row}: expected JSON without NaN, infinities, numbers of thousands "
                "of digits and deep nesting"
            ) from None
        if type(record) is not dict:
            raise InputError(
                f"{path}, row {row}: expected a JSON object, found {type(record).__name__}"
            )
        yield row, record


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Row numbers and lines that are not blank."""
    row = 0
    try:
        with _open_binary(path) as file:
            while line := file.readline(MAX_LINE_BYTES + 1):
                row += 1
                if len(line) > MAX_LINE_BYTES:
                    raise InputError(
                        f"{path}, row {row}: longer than the {MAX_LINE_BYTES} bytes of a line"
                    )
                if row == 1:
                    line = line.removeprefix(b"\xef\xbb\xbf")
                if not line.isspace() and line:
                    yield row, line
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        what = "truncated" if isinstance(error, EOFError) else "not valid gzip"
        raise CorruptFile(f"{path} is {what} after row {row}") from None
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None


def _open_binary(path: Path) -> BinaryIO:
    if path.name.endswith(".gz"):
        return cast(BinaryIO, gzip.open(path, "rb"))
    return path.open("rb")


def _refuse_constant(constant: str) -> None:
    raise ValueError(constant)


def _field_error(
    path: Path, row: int, field: str, record: dict[str, Any], expected: str
) -> InputError:
    found = type(record[field]).__name__ if field in record else "no such field"
    return InputError(f'{path}, row {row}: field "{field}" must be {expected}, found {found}')
