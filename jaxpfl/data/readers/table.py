"""Tables: the rows of a file in any format, some thousand at a time, by the ending of its name.

A new format is a function that reads rows, as `read_table` does, and a line of `FORMATS`. A folder
of shards is read file by file, in the order of their names, its folders included; all files with
these endings belong to it.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from jaxpfl.data.readers import arrow_files, csv_files, json_files
from jaxpfl.data.readers.fields import Fields, Rows
from jaxpfl.errors import InputError

_ROWS = 2_048


Format = Callable[[Path, Fields], Iterator[Rows]]

FORMATS: dict[str, Format] = {
    ".jsonl": json_files.read_json,
    ".jsonl.gz": json_files.read_json,
    ".json": json_files.read_json,
    ".json.gz": json_files.read_json,
    ".csv": csv_files.read_csv,
    ".csv.gz": csv_files.read_csv,
    ".parquet": arrow_files.read_arrow,
    ".arrow": arrow_files.read_arrow,
}
"""The formats by the ending of a file's name."""

ENDINGS = tuple(FORMATS)


def read_table(path: Path, fields: Fields) -> Iterator[Rows]:
    """The rows of a file, or of the shards of a folder, in bounded memory."""
    for file in files_of(path):
        yield from _format_of(file)(file, fields)


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
