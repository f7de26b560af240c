"""JSON files: lines of objects (.jsonl), or one array of objects (.json), as they are or gzipped.

Policy, the same on every platform:
- A file must be valid UTF-8 (a byte order mark at its start is skipped); the checksum of .gz is
  verified. Lines end in \\n or \\r\\n; blank lines are skipped, but counted in row numbers. In an
  array, a row's number is that of the object. A .json file that begins with an object has lines.
- A line, or an object, has at most 16 MiB. Texts are not changed (see `data.columns`): NUL stays,
  an empty text is an example, and only a lone surrogate escape becomes U+FFFD.
"""

import codecs
import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from jaxpfl.data.readers import compressed
from jaxpfl.data.readers.compressed import errors_of, lines, open_binary
from jaxpfl.data.readers.fields import Fields, Rows
from jaxpfl.errors import CorruptFile, InputError

_BLOCK_CHARACTERS = 2**22
# A word, number or escape that a piece cuts is wrong at most so far before the end of the piece.
_CUT_CHARACTERS = 12
_SPACES = re.compile(r"[ \t\r\n]*")


def read_json(path: Path, fields: Fields) -> Iterator[Rows]:
    """The rows of a file, in blocks."""
    numbers: list[int] = []
    found: list[dict[str, Any]] = []
    left = _BLOCK_CHARACTERS
    for number, row, size in _rows(path):
        numbers.append(number)
        found.append(row)
        left -= size
        if left < 0:
            yield fields.of_mappings(str(path), numbers, found)
            numbers, found, left = [], [], _BLOCK_CHARACTERS
    if found:
        yield fields.of_mappings(str(path), numbers, found)


def _rows(path: Path) -> Iterator[tuple[int, dict[str, Any], int]]:
    """Numbers and objects, and the characters of each."""
    number = 0
    try:
        with errors_of(path), open_binary(path) as file:
            array = path.name.endswith((".json", ".json.gz")) and _begins_with_array(path)
            for number, row, size in _elements(path, file) if array else _lines(path, file):
                yield number, row, size
    except CorruptFile as error:
        raise CorruptFile(f"{error} after row {number}") from None


def _begins_with_array(path: Path) -> bool:
    with open_binary(path) as file:
        while block := file.read(2**16):
            if begin := block.removeprefix(codecs.BOM_UTF8).lstrip():
                return begin.startswith(b"[")
    return False


def _lines(path: Path, file: BinaryIO) -> Iterator[tuple[int, dict[str, Any], int]]:
    for number, line in enumerate(lines(file, str(path), "row"), 1):
        if text := line.strip(" \t\r\n"):
            decoded = _decoded(path, number, text, 0, True)
            assert decoded is not None  # Of a text that has ended.
            found, end = decoded
            if end < len(text):
                raise InputError(f"{path}, row {number}: not valid JSON at character {end + 1}")
            yield number, found, end


def _elements(path: Path, file: BinaryIO) -> Iterator[tuple[int, dict[str, Any], int]]:
    """The objects of one array, which is read piece by piece."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    text, at, number, ended = "", 0, 1, False

    def more() -> None:
        nonlocal text, at, ended
        piece = file.read(_BLOCK_CHARACTERS)
        ended = not piece
        new = None
        with contextlib.suppress(UnicodeDecodeError):
            new = decoder.decode(piece, ended)
        if new is None:
            raise InputError(f"{path}: not valid UTF-8 in row {number} or behind it")
        text, at = text[at:] + new, 0
        most = compressed.MAX_AT_ONCE
        if len(text) > most + _BLOCK_CHARACTERS:
            raise InputError(f"{path}, row {number}: longer than the {most} bytes of a row")

    def next_character() -> str:
        nonlocal at
        while True:
            at = _SPACES.match(text, at).end()  # pyright: ignore[reportOptionalMemberAccess]
            if at < len(text) or ended:
                return text[at : at + 1]
            more()

    next_character()
    at += 1
    while (character := next_character()) != "]" or number > 1:
        while (decoded := _decoded(path, number, text, at, ended)) is None:
            more()
        found, end = decoded
        yield number, found, end - at
        at = end
        if (character := next_character()) == "]":
            break
        if character != ",":
            problem = "not valid JSON behind it"
            if not character:
                problem = "the array has no end; the file may be truncated"
            raise InputError(f"{path}, row {number}: {problem}")
        at, number = at + 1, number + 1
    at += 1
    if next_character():
        raise InputError(f"{path}: expected nothing after the end of the array")


def _decoded(
    path: Path, number: int, text: str, at: int, ended: bool
) -> tuple[dict[str, Any], int] | None:
    """The object that begins at a character, and where it ends; None if the text has to go on."""
    try:
        found, end = _DECODE(text, at)
        if type(found) is dict:
            return found, end
        problem = f"expected a JSON object, found {type(found).__name__}"
    except json.JSONDecodeError as error:
        in_text = error.msg.startswith("Unterminated string")
        if not ended and (in_text or error.pos >= len(text) - _CUT_CHARACTERS):
            return None
        problem = f"not valid JSON at character {error.pos - at + 1}"
        if in_text or error.pos >= len(text) - 1:
            problem += "; the file may be truncated"
    except (ValueError, RecursionError):
        problem = (
            "expected JSON without NaN, infinities, numbers of thousands of digits and deep nesting"
        )
    raise InputError(f"{path}, row {number}: {problem}")


def _refuse_constant(constant: str) -> None:
    raise ValueError(constant)


_DECODE = json.JSONDecoder(parse_constant=_refuse_constant).raw_decode
