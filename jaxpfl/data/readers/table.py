"""Tables: the rows of a file in any format, some thousand at a time, by the ending of its name.

A new format is a module with two functions, one that reads rows (`Format.read`) and one that shows
what columns there are (`Format.first_rows`), and a line of `FORMATS`. A folder of shards is read
file by file, in the order of their names, its folders included; all files with these endings
belong to it.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from jaxpfl.data.readers import arrow_files, csv_files, json_files
from jaxpfl.data.readers.fields import Fields, Rows
from jaxpfl.errors import InputError

_ROWS = 2_048


class Format(NamedTuple):
    """How a kind of file is read.

    Attributes:
      read: gives the rows with these fields; raises as `read_table`.
      first_rows: gives the values of at most so many rows by column, as `first_rows`.
    """

    read: Callable[[Path, Fields], Iterator[Rows]]
    first_rows: Callable[[Path, int], dict[str, list[Any]]]


_JSON = Format(json_files.read_json, json_files.first_rows)
_CSV = Format(csv_files.read_csv, csv_files.first_rows)
_ARROW = Format(arrow_files.read_arrow, arrow_files.first_rows)

FORMATS: dict[str, Format] = {
    ".jsonl": _JSON,
    ".jsonl.gz": _JSON,
    ".json": _JSON,
    ".json.gz": _JSON,
    ".csv": _CSV,
    ".csv.gz": _CSV,
    ".parquet": _ARROW,
    ".arrow": _ARROW,
}
"""The formats by the ending of a file's name."""

ENDINGS = tuple(FORMATS)


def read_table(path: Path, fields: Fields) -> Iterator[Rows]:
    """The rows of a file, or of the shards of a folder, in bounded memory."""
    for file in files_of(path):
        yield from _format_of(file).read(file, fields)


def first_rows(path: Path, number: int) -> dict[str, list[Any]]:
    """The values of at most `number` rows by column, None where a row has none.

    Values of CSV are numbers or booleans where all of a column's are. PRIVATE.
    """
    if not path.is_file():
        raise InputError(f"{path}: there is no such file")
    return _format_of(path).first_rows(path, number)


def files_of(path: Path) -> list[Path]:
    """The shards of a folder, or the file itself."""
    if path.is_file():
        return [path]
    found = sorted(each for each in path.rglob("*") if each.name.endswith(ENDINGS))
    if not found:
        raise InputError(f"{path}: expected a folder of {', '.join(ENDINGS)} files, found none")
    return found


def read_mappings(source: str, rows: Iterable[Mapping[str, Any]], fields: Fields) -> Iterator[Rows]:
    """The rows of an iterable of mappings, such as a streamed data set of the hub."""
    remaining, first = iter(rows), 1
    while found := list(islice(remaining, _ROWS)):
        yield fields.of_mappings(source, range(first, first + len(found)), found)
        first += len(found)


def _format_of(path: Path) -> Format:
    for ending, format_ in FORMATS.items():
        if path.name.endswith(ending):
            return format_
    raise InputError(f"{path}: expected a table, a name ending in {', '.join(ENDINGS)}")
