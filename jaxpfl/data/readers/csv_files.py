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
from typing import BinaryIO, TextIO

import pyarrow as pa
import pyarrow.csv as arrow_csv

from jaxpfl.data.readers.compressed import errors_of, open_binary
from jaxpfl.data.readers.fields import Fields, Rows
from jaxpfl.errors import CorruptFile, InputError

ENDINGS = (".csv", ".csv.gz")
MAX_ROW_BYTES = 2**23

# Bytes that are not UTF-8 become these characters.
_UNDECODED, _SURROGATE = "surrogateescape", "\udc80"


def read_csv(path: Path, fields: Fields) -> Iterator[Rows]:
    """The rows of a file, in blocks.

    Raises:
      InputError: a row has another number of fields or is not UTF-8, or a field is missing or of
        another kind.
      CorruptFile: the compressed data is truncated or altered, or a quote is never closed.
    """
    names = header(path)
    fields.require(str(path), names)
    first = 2
    with errors_of(path), open_binary(path) as opened:
        file = _Counting(opened)
        try:
            for batch in _batches(file, fields.names):
                if len(batch):
                    numbers = range(first, first + len(batch))
                    found = {name: batch[name] for name in fields.names}
                    yield fields.of_strings(str(path), numbers, found)
                first += len(batch)
        except pa.ArrowInvalid:
            fault = _first_fault(path, len(names))
            raise fault or CorruptFile(f"{path}: damaged or no CSV") from None
        # Arrow takes the rest of the file for the field whose quote is not closed.
        if file.quotes % 2 and (fault := _first_fault(path, len(names))) is not None:
            raise fault


def header(path: Path) -> list[str]:
    """The names of a file's columns.

    Raises:
      InputError: there is no header.
    """
    with errors_of(path), open_binary(path) as file:
        text = io.TextIOWrapper(file, "utf-8-sig", _UNDECODED, newline="")
        try:
            names = next(rows_of(path, text), None)
        except csv.Error:
            names = [_SURROGATE]
    if names is None:
        raise InputError(f"{path}: expected a header, found an empty file")
    if any(_undecoded(name) for name in names):
        raise InputError(f"{path}, row 1: expected a header in CSV and UTF-8")
    return names


def rows_of(path: Path, text: TextIO, strict: bool = True) -> Iterator[list[str]]:
    """The rows that are not blank, the header first; none is held that is too long.

    Args:
      strict: whether a quote may only end its field or be doubled.

    Raises:
      csv.Error: a quote is not as it must be.
      InputError: a row is longer than MAX_ROW_BYTES.
    """
    csv.field_size_limit(MAX_ROW_BYTES)
    number, left = 1, MAX_ROW_BYTES

    def lines() -> Iterator[str]:
        nonlocal left
        while line := text.readline(left + 1):
            left -= len(line)
            if left < 0:
                where = f"{path}, row {number}"
                raise InputError(f"{where}: longer than the {MAX_ROW_BYTES} bytes of a row")
            yield line

    for row in csv.reader(lines(), strict=strict):
        left = MAX_ROW_BYTES
        if row:
            yield row
            number += 1


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


def _first_fault(path: Path, expected: int) -> InputError | None:
    """The error of the first row that is not as the policy says."""
    with open_binary(path) as file:
        text = io.TextIOWrapper(file, "utf-8", _UNDECODED, newline="")
        rows = rows_of(path, text)
        number = 0
        while True:
            number += 1
            where = f"{path}, row {number}"
            try:
                row = next(rows, None)
            except InputError as error:
                return error
            except csv.Error as error:
                if "unexpected end" in str(error):
                    return CorruptFile(f"{where}: its quote is never closed; is it truncated?")
                # A quote that ends within a field, which Arrow can read.
                return InputError(f"{where}: a quote must end its field or be doubled")
            if row is None:
                return None
            if len(row) != expected:
                return InputError(
                    f"{where}: expected {expected} fields, as in the header, found {len(row)}; a "
                    "field with a comma or line end must be in double quotes"
                )
            for place, field in enumerate(row, 1):
                if _undecoded(field):
                    return InputError(f"{where}: field {place} is not valid UTF-8")


def _undecoded(field: str) -> bool:
    return not field.isascii() and any(_SURROGATE <= each <= "\udcff" for each in field)
