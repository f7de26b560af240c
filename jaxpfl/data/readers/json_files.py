"""JSON files: lines of objects (.jsonl), or one array of objects (.json), as they are or gzipped.

Arrow parses blocks of a few megabytes. A block that it cannot read is read line by line in Python,
which names the bad row, or finds that the block is only unusual: ids of two kinds, blank lines, a
lone surrogate.

Policy, the same on every platform:
- A file must be valid UTF-8 (a byte order mark at its start is skipped); the checksum of .gz is
  verified. Lines end in \\n or \\r\\n; blank lines are skipped, but counted in row numbers. In an
  array, a row's number is that of the object. A .json file that begins with an object has lines.
- A line, or an object, has at most 16 MiB. Texts are not changed (see `data.columns`): NUL stays,
  an empty text is an example, and only a lone surrogate escape becomes U+FFFD.
- Of fields that nobody asked for, Arrow only checks that they are JSON.
"""

import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.json as arrow_json

from jaxpfl.data.readers.compressed import blocks, lines_before_damage
from jaxpfl.data.readers.fields import Fields, Rows
from jaxpfl.errors import CorruptFile, InputError

LINES = (".jsonl", ".jsonl.gz")
ENDINGS = (*LINES, ".json", ".json.gz")
MAX_LINE_BYTES = 2**24

_BLOCK_BYTES = 2**22
_MARK = b"\xef\xbb\xbf"
_BETWEEN = re.compile(rb"\}[ \t\r]*\n[ \t]*\{")
# What Arrow takes for numbers, and JSON does not.
_CONSTANT = re.compile(rb"(?:NaN|Inf(?:inity)?)\s*[,}\]]")
_ESCAPE = re.compile(rb"\\.", re.DOTALL)


def read_json(path: Path, fields: Fields) -> Iterator[Rows]:
    """The rows of a file, in blocks.

    Raises:
      InputError: a row is not UTF-8 or JSON, or a field is missing or of another kind.
      CorruptFile: the compressed data is truncated or altered.
    """
    array = not path.name.endswith(LINES) and _begins_with_array(path)
    first = 1
    try:
        for block in _array_blocks(path) if array else _line_blocks(path):
            number = block.count(b"\n") + (not block.endswith(b"\n"))
            columns = _fast(block, number, fields)
            rows = Rows(str(path), range(first, first + number), columns or {})
            if columns is None:
                rows = _slow(path, block, first, fields, array)
            if len(rows.numbers):
                yield rows
            first += number
    except CorruptFile as error:
        if array:
            raise
        raise CorruptFile(f"{error} after row {lines_before_damage(path)}") from None


def objects(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a file, one by one.

    Raises:
      InputError, CorruptFile: as for `read_json`.
    """
    array = not path.name.endswith(LINES) and _begins_with_array(path)
    first = 1
    for block in _array_blocks(path) if array else _line_blocks(path):
        yield from (row for _, row in _parsed(path, block, first, array))
        first += block.count(b"\n")


def _begins_with_array(path: Path) -> bool:
    for block in blocks(path, 2**16):
        if begin := block.removeprefix(_MARK).lstrip():
            return begin.startswith(b"[")
    return False


def _line_blocks(path: Path) -> Iterator[bytes]:
    """Some megabytes of whole lines each."""
    row, rest = 1, b""
    for index, piece in enumerate(itertools.chain(blocks(path, _BLOCK_BYTES), [None])):
        if index == 0 and piece is not None:
            piece = piece.removeprefix(_MARK)
        data = rest if piece is None else rest + piece
        end = len(data) if piece is None else data.rfind(b"\n") + 1
        block, rest = data[:end], data[end:]
        if len(data) > MAX_LINE_BYTES:
            for number, line in enumerate(data.split(b"\n"), row):
                if len(line) > MAX_LINE_BYTES:
                    raise _too_long(path, number)
        if block:
            yield block
        row += block.count(b"\n")


def _array_blocks(path: Path) -> Iterator[bytes]:
    """The same of an array of objects: each object becomes a line."""
    row, rest, begun = 1, b"", False
    pieces = blocks(path, _BLOCK_BYTES)
    for piece in pieces:
        rest += piece
        if not begun:
            rest, begun = rest.removeprefix(_MARK).lstrip()[1:], True
        lines, commas, end = _array_as_lines(rest)
        cut = int(commas[-1]) + 1 if len(commas) else 0
        if end is not None:
            if any(each.strip() for each in itertools.chain([rest[end + 1 :]], pieces)):
                raise InputError(f"{path}: expected nothing after the end of the array")
            if lines[cut:end].strip():
                yield lines[:end]
            elif row + len(commas) > 1:
                where = f"{path}, row {row + len(commas)}"
                raise InputError(f"{where}: not valid JSON, expected an object after the comma")
            return
        if len(rest) - cut > MAX_LINE_BYTES:
            raise _too_long(path, row + len(commas))
        if cut:
            yield lines[:cut]
        rest = rest[cut:]
        row += len(commas)
    raise InputError(f"{path}, row {row}: the array has no end; the file may be truncated")


def _array_as_lines(data: bytes) -> tuple[bytes, np.ndarray, int | None]:
    """The elements of an array, which begin with `data`, as lines.

    Returns:
      The lines, equally long; where the commas between elements were; where the array ends, or
      None.
    """
    masked = _ESCAPE.sub(b"__", data) if b"\\" in data else data
    byte = np.frombuffer(masked, np.uint8)
    outside = np.cumsum(byte == ord('"'), dtype=np.int32) % 2 == 0
    opened = (byte == ord("{")) | (byte == ord("["))
    closed = (byte == ord("}")) | (byte == ord("]"))
    step = (opened & outside).astype(np.int8) - (closed & outside).astype(np.int8)
    depth = np.cumsum(step, dtype=np.int32)
    commas = np.flatnonzero((byte == ord(",")) & outside & (depth == 0))
    end = int(np.argmax(depth < 0)) if (depth < 0).any() else None
    if end is not None:
        commas = commas[commas < end]
    lines = np.frombuffer(data, np.uint8).copy()
    lines[((byte == ord("\n")) | (byte == ord("\r"))) & outside] = ord(" ")
    lines[commas] = ord("\n")
    return lines.tobytes(), commas, end


def _fast(block: bytes, number: int, fields: Fields) -> dict[str, pa.Array] | None:
    """The columns of a block, by Arrow; None if it must be read line by line."""
    if not _one_object_a_line(block, number):
        return None
    if _has_constant(block):
        return None
    try:
        # Arrow does not look at the bytes of fields that it ignores.
        block.decode("utf-8")
        if not fields.types.keys() >= set(fields.names):
            end = block.find(b"\n")
            if not fields.note_first(json.loads(block if end < 0 else block[:end])):
                return None
        schema = pa.schema([(name, _parsed_as(fields.types[name])) for name in fields.names])
        table = arrow_json.read_json(
            pa.BufferReader(block),
            parse_options=arrow_json.ParseOptions(
                explicit_schema=schema, unexpected_field_behavior="ignore"
            ),
        )
    except (ValueError, RecursionError, pa.ArrowException):
        return None
    return fields.fits(table) if len(table) == number else None


def _one_object_a_line(block: bytes, number: int) -> bool:
    """Whether every line begins with { and ends with }: then Arrow's rows are the lines."""
    if not (block.lstrip()[:1] == b"{" and block.rstrip()[-1:] == b"}"):
        return False
    between = block.count(b"}\n{")
    return between == number - 1 or len(_BETWEEN.findall(block)) == number - 1


def _has_constant(block: bytes) -> bool:
    """Whether a value may be NaN or infinite; the words may also be in a text."""
    for word in (b"NaN", b"Inf"):
        at = block.find(word)
        while at >= 0:
            before = block[max(0, at - 16) : at].rstrip(b"- \t")[-1:]
            if before in (b":", b"[", b",") and _CONSTANT.match(block, at):
                return True
            at = block.find(word, at + 1)
    return False


def _parsed_as(type_: pa.DataType) -> pa.DataType:
    """Arrow's parser knows lists of any length only."""
    if pa.types.is_fixed_size_list(type_):
        return pa.list_(_parsed_as(type_.value_type))
    return type_


def _slow(path: Path, block: bytes, first: int, fields: Fields, array: bool) -> Rows:
    found = list(_parsed(path, block, first, array))
    numbers = [number for number, _ in found]
    return fields.of_mappings(str(path), numbers, [row for _, row in found])


def _parsed(
    path: Path, block: bytes, first: int, array: bool
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Row numbers and objects of a block."""
    lines = block.removesuffix(b"\n").split(b"\n")
    for number, line in enumerate(lines, first):
        if array or (line and not line.isspace()):
            cut = number == first + len(lines) - 1 and not block.endswith(b"\n") and not array
            yield number, _object(f"{path}, row {number}", line, cut)


def _object(where: str, line: bytes, at_end: bool) -> dict[str, Any]:
    try:
        # Not left to json, which would also accept UTF-16.
        content = line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{where}: byte {error.start + 1} is not valid UTF-8") from None
    try:
        found = _DECODE(content)
    except json.JSONDecodeError as error:
        cut = "; the file may be truncated" if at_end else ""
        raise InputError(f"{where}: not valid JSON at character {error.pos + 1}{cut}") from None
    except (ValueError, RecursionError):
        raise InputError(
            f"{where}: expected JSON without NaN, infinities, numbers of thousands of digits and "
            "deep nesting"
        ) from None
    if type(found) is not dict:
        raise InputError(f"{where}: expected a JSON object, found {type(found).__name__}")
    return found


def _too_long(path: Path, row: int) -> InputError:
    return InputError(f"{path}, row {row}: longer than the {MAX_LINE_BYTES} bytes of a line")


def _refuse_constant(constant: str) -> None:
    raise ValueError(constant)


_DECODE = json.JSONDecoder(parse_constant=_refuse_constant).decode
