"""CSV files: a header, then rows of fields separated by commas (.csv), as they are or gzipped.

Arrow parses the file in blocks. Only where it cannot, Python reads the file again, row by row, to
name the bad one.

Policy:
- RFC 4180: fields in double quotes may hold commas, line ends and doubled quotes. Rows are counted
  as in a spreadsheet: the header is row 1; blank lines are skipped and not counted.
- The fields that are read must be valid UTF-8 (a byte order mark is skipped). All rows have as many
  fields as the header, and at most 8 MiB. A quote that is never closed is refused.
- Client ids and texts are what is written. Of other fields, the first row says whether they are
  numbers, booleans (true, false) or strings, and later rows must agree; spaces around numbers are
  ignored. An empty text is an example; an empty number is refused.
"""

import csv
import io
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa
import pyarrow.csv as arrow_csv

from jaxpfl.data.readers.compressed import errors_of, open_binary
from jaxpfl.data.readers.fields import Fields, Rows
from jaxpfl.errors import CorruptFile, InputError

MAX_ROW_BYTES = 2**23


def read_csv(path: Path, fields: Fields) -> Iterator[Rows]:
    """The rows of a file, in blocks."""
    fields.require(str(path), _header(path, _rows(path)))
    first = 2
    with errors_of(path), open_binary(path) as opened:
        file = _Counting(opened)
        damaged = False
        try:
            for batch in _batches(file, fields.names):
                if len(batch):
                    numbers = range(first, first + len(batch))
                    found = {name: batch[name] for name in fields.names}
                    yield fields.of_strings(str(path), numbers, found)
                first += len(batch)
        except pa.ArrowInvalid:
            damaged = True
        # Not while Arrow's error is handled, whose message quotes the row.
        if damaged:
            raise _fault(path) or CorruptFile(f"{path}: damaged or no CSV")
        # Arrow takes the rest of the file for the field whose quote is not closed.
        if file.quotes % 2 and (fault := _fault(path)):
            raise fault


class _Counting(io.RawIOBase):
    """A file that counts the quotes in what is read of it."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.quotes = file, 0

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        block = self._file.read(size)
        self.quotes += block.count(b'"')
        return block


def _batches(file: io.RawIOBase, names: tuple[str, ...]) -> Iterator[pa.RecordBatch]:
    yield from arrow_csv.open_csv(
        pa.PythonFile(file, mode="r"),
        read_options=arrow_csv.ReadOptions(block_size=MAX_ROW_BYTES),
        parse_options=arrow_csv.ParseOptions(newlines_in_values=True),
        # As strings, because Arrow's errors about other types quote the value.
        convert_options=arrow_csv.ConvertOptions(
            include_columns=list(names),
            column_types=dict.fromkeys(names, pa.large_string()),
            strings_can_be_null=False,
        ),
    )


def _fault(path: Path) -> InputError | None:
    """The error of the first row that is not as the policy says."""
    try:
        for number, row in enumerate(_rows(path), 1):
            for place, field in enumerate(row, 1):
                if _has_surrogate(field):
                    return InputError(f"{path}, row {number}: field {place} is not valid UTF-8")
    except InputError as error:
        return error
    return None


def _rows(path: Path) -> Iterator[list[str]]:
    """The rows that are not blank, the header first; none is held that is too long.

    Bytes that are not UTF-8 become surrogates.
    """
    csv.field_size_limit(MAX_ROW_BYTES)
    number, left, width = 1, MAX_ROW_BYTES, None

    def lines() -> Iterator[str]:
        nonlocal left
        while line := text.readline(left + 1):
            left -= len(line)
            if left < 0:
                where = f"{path}, row {number}"
                raise InputError(f"{where}: longer than the {MAX_ROW_BYTES} bytes of a row")
            yield line

    with errors_of(path), open_binary(path) as file:
        text = io.TextIOWrapper(file, "utf-8-sig", "surrogateescape", newline="")
        try:
            for row in csv.reader(lines(), strict=True):
                left = MAX_ROW_BYTES
                if not row:
                    continue
                width = len(row) if width is None else width
                if len(row) != width:
                    raise InputError(
                        f"{path}, row {number}: expected {width} fields, as in the header, found "
                        f"{len(row)}; a field with a comma or line end must be in double quotes"
                    )
                yield row
                number += 1
        except csv.Error as error:
            where = f"{path}, row {number}"
            if "unexpected end" in str(error):
                raise CorruptFile(f"{where}: its quote is never closed; is it truncated?") from None
            raise InputError(f"{where}: a quote must end its field or be doubled") from None


def _header(path: Path, rows: Iterator[list[str]]) -> list[str]:
    names = next(rows, None)
    if names is None:
        raise InputError(f"{path}: expected a header, found an empty file")
    if any(map(_has_surrogate, names)):
        raise InputError(f"{path}, row 1: expected a header in CSV and UTF-8")
    return names


def _has_surrogate(text: str) -> bool:
    return not text.isascii() and any("\ud800" <= each <= "\udfff" for each in text)
