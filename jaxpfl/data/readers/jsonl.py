"""JSON lines: each line is an object with a client's id and the fields of one example.

Policy, the same on every platform; what ids may be, and what errors say, is in `readers.rows`:
- A file must be valid UTF-8 (a byte order mark at its start is skipped); the checksum of .gz is
  verified. Lines end in \\n or \\r\\n; blank lines are skipped, but counted in row numbers.
- A line has at most 16 MiB. Texts are not changed (see `data.columns`): NUL stays, an empty text is
  an example, and only a lone surrogate escape becomes U+FFFD.
"""

import contextlib
import gzip
import json
import zlib
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

from jaxpfl.data.population import Population
from jaxpfl.data.readers.plain_text import open_binary
from jaxpfl.data.readers.rows import read_rows
from jaxpfl.errors import CorruptFile, InputError

MAX_LINE_BYTES = 2**24
EACH_LINE = "*"


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
      client, text: the fields of the client's id and the text. "*" as the client makes each line
        a client, named by its row number.
      columns: further fields to read; each must hold only strings, only booleans or only numbers.
      split: "sentences", "paragraphs" or "lines" makes each of them in a text an example (see
        `readers.prose`) with the row's other fields. A client whose texts have none has no
        examples. None makes each text one example.
      name: of the population; by default the path.

    Returns:
      Clients in order of first appearance, with the columns "text" and `columns`.

    Raises:
      InputError: a row is not UTF-8 or JSON, or a field is missing or of another type.
      CorruptFile: the compressed data is truncated or altered.
    """
    path = Path(path)
    each_line = client == EACH_LINE
    with contextlib.closing(records(path)) as rows:
        return read_rows(
            path,
            rows,
            client=None if each_line else client,
            text=text,
            columns=columns,
            split=split,
            name=name or str(path),
            unit="one line" if each_line else f'all lines with one "{client}"',
        )


def records(path: Path) -> Generator[tuple[int, dict[str, Any]]]:
    """Row numbers, from 1, and objects."""
    decode = json.JSONDecoder(parse_constant=_refuse_constant).decode
    for row, line in _lines(path):
        try:
            # Not left to json, which would also accept UTF-16.
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
            found = type(record).__name__
            raise InputError(f"{path}, row {row}: expected a JSON object, found {found}")
        yield row, record


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Row numbers and lines that are not blank."""
    row = 0
    try:
        with open_binary(path) as file:
            while line := file.readline(MAX_LINE_BYTES + 1):
                row += 1
                if len(line) > MAX_LINE_BYTES:
                    where = f"{path}, row {row}"
                    raise InputError(f"{where}: longer than the {MAX_LINE_BYTES} bytes of a line")
                if row == 1:
                    line = line.removeprefix(b"\xef\xbb\xbf")
                if not line.isspace() and line:
                    yield row, line
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        what = "truncated" if isinstance(error, EOFError) else "not valid gzip"
        raise CorruptFile(f"{path} is {what} after row {row}") from None
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None


def _refuse_constant(constant: str) -> None:
    raise ValueError(constant)
