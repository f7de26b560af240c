"""`read_table`: the rows of a table in any file format, some thousand at a time.

    .jsonl .json    `readers.json_files`, also .gz
    .csv            `readers.csv_files`, also .gz
    .parquet        `readers.arrow_files`
    .arrow          `readers.arrow_files`

A folder of shards is read file by file, in the order of their names, its folders included; all
files with these endings belong to it.
"""

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from jaxpfl.data.readers import arrow_files, csv_files, json_files
from jaxpfl.data.readers.fields import Fields, Rows
from jaxpfl.errors import InputError

ENDINGS = (*json_files.ENDINGS, *csv_files.ENDINGS, arrow_files.PARQUET, arrow_files.ARROW)

_ROWS = 2_048


def read_table(path: Path, fields: Fields) -> Iterator[Rows]:
    """The rows of a file, or of the shards of a folder, in bounded memory.

    Raises:
      InputError: a file cannot be read, lacks a field, or has a row that does not fit; the message
        names the file and the row, and no value.
      CorruptFile: a file is truncated or damaged.
    """
    for file in files_of(path):
        if file.name.endswith(json_files.ENDINGS):
            yield from json_files.read_json(file, fields)
        elif file.name.endswith(csv_files.ENDINGS):
            yield from csv_files.read_csv(file, fields)
        else:
            yield from arrow_files.read_arrow(file, fields)


def files_of(path: Path) -> list[Path]:
    """The shards of a folder, or the file itself.

    Raises:
      InputError: there is no such file, or the folder holds no shards.
    """
    if path.is_file():
        return [path]
    found = sorted(each for each in path.rglob("*") if each.name.endswith(ENDINGS))
    if not found:
        raise InputError(f"{path}: expected a folder of {', '.join(ENDINGS)} files, found none")
    return found


def read_mappings(source: str, rows: Iterable[Mapping[str, Any]], fields: Fields) -> Iterator[Rows]:
    """The rows of an iterable of mappings, such as a streamed data set of the hub.

    Raises:
      InputError: a row lacks a field or has another kind of value.
    """
    remaining, first = iter(rows), 1
    while found := list(islice(remaining, _ROWS)):
        yield fields.of_mappings(source, range(first, first + len(found)), found)
        first += len(found)
