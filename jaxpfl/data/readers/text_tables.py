"""JSON (.jsonl, .ndjson, .json), CSV (.csv) and TSV (.tsv), as they are or packed.

Policy, the same on every platform:
- A file is in UTF-8, in UTF-16 with a byte order mark, or in the encoding that a user names; no
  other is guessed, and invalid bytes are refused. Checksums of packed files are verified. Lines
  end in \\n, \\r\\n or \\r. A row has at most 16 MiB.
- JSON: an object a line, or an array of objects. Blank lines are skipped, but counted in row
  numbers. An object with a key twice is refused. Texts are not changed (see `data.columns`): NUL
  stays, an empty text is an example, and only a lone surrogate escape becomes U+FFFD.
- CSV (RFC 4180): a header, then as many fields in each row. The separator is the comma, semicolon,
  tab or bar that gives a header with the wanted fields; in .tsv it is the tab, and a line `sep=;`
  above the header names another. Neither that nor lines above it that begin with # and have none
  of the wanted fields are counted. Fields in double quotes may hold separators, line ends and
  doubled quotes. Rows are counted as in a spreadsheet: the header is row 1; blank lines are skipped
  and not counted. Client ids and texts are read as they are written (`fields` says which ids are
  refused). The first row decides whether another field holds numbers, booleans (true, false) or
  strings, and later rows must agree; spaces around numbers are ignored. An empty text is an
  example, an empty number and NaN are refused; with missing=drop, none of these rows is kept.
"""

import csv
import itertools
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, cast

from jaxpfl.data.readers import compressed
from jaxpfl.data.readers.cells import ABSENT
from jaxpfl.data.readers.compressed import errors_of, lines, open_binary
from jaxpfl.data.readers.fields import Fields, Rows
from jaxpfl.errors import CorruptFile, InputError

_BLOCK_CHARACTERS = 2**22
PLAIN_ENDINGS = (".jsonl", ".ndjson", ".json", ".csv", ".tsv")
ENDINGS = tuple(end + packed for end in PLAIN_ENDINGS for packed in ("", *compressed.PACKED))
_BEFORE = b"\xef\xbb\xbf\xff\xfe\0 \t\r\n"  # a mark of byte order, and spaces, of any encoding
_PIECE = 2**20  # characters of an array that are read at once
_NEXT = re.compile(r"[ \t\r\n]*([][,]?)[ \t\r\n]*")
_NAMES_SEPARATOR = re.compile(r'"?sep=(.)"?\s*', re.IGNORECASE)

# The number of a row in its file, its values of the wanted fields, and its characters.
_Row = tuple[int, list[Any], int]


def read_text(path: Path, fields: Fields, encoding: str | None) -> Iterator[Rows]:
    """The rows of a file, in blocks."""
    numbers: list[int] = []
    rows: list[list[Any]] = []
    number, left = 0, _BLOCK_CHARACTERS
    is_csv = _ending(path) in (".csv", ".tsv")

    def block() -> Rows:
        columns = dict(zip(fields.names, map(list, zip(*rows, strict=True)), strict=True))
        return fields.rows(str(path), numbers, columns, typed=not is_csv)

    try:
        with errors_of(path), open_binary(path) as file:
            read = _csv_rows if is_csv else _json_rows
            for number, row, size in read(path, file, fields, encoding):
                numbers.append(number)
                rows.append(row)
                left -= size
                if left < 0:
                    yield block()
                    numbers, rows, left = [], [], _BLOCK_CHARACTERS
    except CorruptFile as error:
        behind = f" after row {number}" if number else ""
        raise CorruptFile(f"{error}{behind}") from None
    if rows:
        yield block()


def _json_rows(path: Path, file: BinaryIO, fields: Fields, encoding: str | None) -> Iterator[_Row]:
    is_array = cast(Any, file).peek(64).lstrip(_BEFORE).startswith(b"[")
    for number, row, size in (_elements if is_array else _objects)(path, file, encoding):
        fields.require_unstated(str(path), row)
        values = fields.values(row)
        if ABSENT in values:
            for name, value in zip(fields.names, values, strict=True):
                # The message leaves the row's own names out: they may be values of clients.
                if value is ABSENT and not fields.drop and name not in fields.parts:
                    raise InputError(f"{path}, row {number}: there is no field {name!r}")
            values = [None if value is ABSENT else value for value in values]
        yield number, values, size


# The number of a row, its object, and its characters.
_Object = tuple[int, dict[str, Any], int]


def _objects(path: Path, file: BinaryIO, encoding: str | None) -> Iterator[_Object]:
    """Those of lines."""
    for number, line in enumerate(lines(file, str(path), "row", encoding=encoding), 1):
        if text := line.strip(" \t\r\n"):
            yield number, _object(f"{path}, row {number}", text), len(text)


def _elements(path: Path, file: BinaryIO, encoding: str | None) -> Iterator[_Object]:
    """Those of an array, of which a piece is in memory."""
    text, at, number = "", 0, 0
    pieces = lines(file, str(path), "piece", encoding=encoding, piece=_PIECE)
    for piece in itertools.chain(pieces, [None]):
        text, at = text[at:] + (piece or ""), 0
        while match := _NEXT.match(text, at):
            where, mark, start = f"{path}, row {number + 1}", match[1], match.end()
            if mark == "]" or (mark == "[" and text[start : start + 1] == "]"):
                rest = itertools.chain([text[start + (mark == "[") :]], pieces)
                if any(map(str.strip, rest)):
                    raise InputError(f"{path}: expected nothing behind its array of objects")
                return
            try:
                value, end = _DECODER.raw_decode(text, start)
            except (ValueError, RecursionError):
                value, end = None, len(text)
            if type(value) is not dict or mark != ("," if number else "["):
                if piece is not None and end == len(text) and end - at <= compressed.MAX_AT_ONCE:
                    break  # It may go on in the next piece.
                _object(where, text[start:end])
                raise InputError(f"{where}: expected a comma before it, in an array of objects")
            number, at = number + 1, end
            yield number, value, end - match.start()


def _object(where: str, text: str) -> dict[str, Any]:
    try:
        value = _DECODER.decode(text)
        if type(value) is dict:
            return value
        problem = f"expected a JSON object, found {type(value).__name__}"
    except _TwiceError:
        problem = "expected each key of an object once, found one twice"
    except json.JSONDecodeError as error:
        problem = f"not valid JSON at character {error.pos + 1}, expected an object on each line"
        if error.pos >= len(text) - 1 or error.msg.startswith("Unterminated string"):
            problem += "; the file may be truncated"
    except (ValueError, RecursionError):
        problem = "expected JSON without NaN, infinities, numbers of thousands of digits and "
        problem += "deep nesting"
    # Raised outside of `except`, because Python's error holds the text.
    raise InputError(f"{where}: {problem}")


def _refuse_constant(constant: str) -> None:
    raise ValueError(constant)


class _TwiceError(ValueError):
    """A key stands twice in an object."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        raise _TwiceError
    return made


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant, object_pairs_hook=_unique)


def _csv_rows(path: Path, file: BinaryIO, fields: Fields, encoding: str | None) -> Iterator[_Row]:
    most = compressed.MAX_AT_ONCE
    csv.field_size_limit(most)
    number, left, names, places = 1, most, None, []

    def counted() -> Iterator[str]:
        nonlocal left
        for line in lines(file, str(path), encoding=encoding):
            left -= len(line)
            if left < 0:
                raise InputError(f"{path}, row {number}: longer than the {most} bytes of a row")
            yield line

    try:
        text = counted()
        header = next(filter(str.strip, text), "")
        if "\0" in header:
            hint = f"if it is in UTF-16, write {path}?encoding=utf-16-le"
            raise InputError(f"{path}: its header has zero bytes; {hint}")
        if named := _NAMES_SEPARATOR.fullmatch(header):
            header = next(filter(str.strip, text), "")
        first = header
        while header.startswith("#") and not _has_a_field(header, fields):
            header = next(filter(str.strip, text), "")
        if not _has_a_field(header, fields):
            # No comment stood above a header: what follows may be a client's row.
            header = first
        separator = named[1] if named else _separator(path, header, fields)
        for row in csv.reader(itertools.chain([header], text), delimiter=separator, strict=True):
            size, left = most - left, most
            if not row:
                continue
            if names is None:
                names = row
                fields.require(str(path), names)
                places = [names.index(name) for name in fields.names]
            elif len(row) != len(names):
                what = f"expected {len(names)} fields, as in the header, found {len(row)}"
                hint = "a field with a separator or line end must be in double quotes"
                raise InputError(f"{path}, row {number}: {what}; {hint}")
            else:
                yield number, [row[place] for place in places], size
            number += 1
    except csv.Error as error:
        where = f"{path}, row {number}"
        if "unexpected end" in str(error):
            raise InputError(f"{where}: its quote is never closed; is it truncated?") from None
        raise InputError(f"{where}: a quote must end its field or be doubled") from None
    if names is None:
        raise InputError(f"{path}: expected a header, found an empty file")


def _separator(path: Path, header: str, fields: Fields) -> str:
    """The separator whose header has the wanted fields, or else the most fields."""
    if _ending(path) == ".tsv":
        return "\t"
    names = _names_by_separator(header)
    return max(names, key=lambda mark: ({*fields.names} <= {*names[mark]}, len(names[mark])))


def _has_a_field(comment: str, fields: Fields) -> bool:
    """Whether a line behind # is a header all the same: it has a wanted field, as #client does."""
    headers = _names_by_separator(comment.lstrip("# ")).values()
    return any({*fields.names} & {name.strip() for name in header} for header in headers)


def _names_by_separator(header: str) -> dict[str, Sequence[str]]:
    return {mark: next(csv.reader([header], delimiter=mark), ()) for mark in ",;\t|"}


def _ending(path: Path) -> str:
    """The ending of a file's name, without that of its packing."""
    name = path.name.lower()
    return Path(name.removesuffix(next(filter(name.endswith, compressed.PACKED), ""))).suffix
