"""Rows of large tables, some thousand at a time: Parquet, JSON lines, the Hugging Face hub.

A folder of shards is read file by file, in the order of their names, its folders included; all of
its .parquet, .jsonl and .jsonl.gz files belong to it. Only the columns that are asked for are read
from Parquet. Errors name the file and the row, from 1, and never a value.
"""

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as parquet

from jaxpfl.data.readers.jsonl import records
from jaxpfl.errors import CorruptFile, InputError

ENDINGS = (".parquet", ".jsonl", ".jsonl.gz")
_ROWS = 2_048


class Rows(NamedTuple):
    """Some rows of one file.

    Attributes:
      source: the file or data set.
      numbers: of the rows in it, from 1.
      values: a list of Python values for each column; None where a row has none.
    """

    source: str
    numbers: Sequence[int]
    values: Mapping[str, list[Any]]


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


def read_shards(path: Path, columns: tuple[str, ...]) -> Iterator[Rows]:
    """The rows of a file, or of the shards of a folder.

    Raises:
      InputError: a file lacks a column, or cannot be read.
      CorruptFile: a file is truncated or damaged.
    """
    for file in files_of(path):
        if file.name.endswith(".parquet"):
            yield from _parquet(file, columns)
        else:
            with contextlib.closing(records(file)) as rows:
                yield from _blocks(str(file), rows, columns)


def _parquet(path: Path, columns: tuple[str, ...]) -> Iterator[Rows]:
    try:
        with parquet.ParquetFile(path) as file:
            _require(str(path), columns, file.schema_arrow.names)
            first = 1
            for batch in file.iter_batches(_ROWS, columns=list(columns)):
                numbers = range(first, first + len(batch))
                yield Rows(str(path), numbers, {name: batch[name].to_pylist() for name in columns})
                first += len(batch)
    except (pa.ArrowInvalid, OSError) as error:
        if isinstance(error, OSError) and error.strerror:
            raise InputError(f"{path} cannot be read: {error.strerror}") from None
        raise CorruptFile(f"{path}: truncated, damaged or no Parquet file") from None


def read_mappings(
    source: str, rows: Iterable[Mapping[str, Any]], columns: tuple[str, ...]
) -> Iterator[Rows]:
    """The rows of an iterable of mappings, such as a streamed data set of the hub.

    Raises:
      InputError: a row lacks a column.
    """
    return _blocks(source, enumerate(rows, 1), columns)


def _blocks(
    source: str, rows: Iterable[tuple[int, Mapping[str, Any]]], columns: tuple[str, ...]
) -> Iterator[Rows]:
    remaining = iter(rows)
    while found := list(islice(remaining, _ROWS)):
        for number, row in found:
            for name in columns:
                if name not in row:
                    raise InputError(f"{source}, row {number}: there is no field {name!r}")
        numbers = [number for number, _ in found]
        yield Rows(source, numbers, {name: [row[name] for _, row in found] for name in columns})


def _require(source: str, columns: Iterable[str], known: Iterable[str]) -> None:
    """Refuses a table that lacks one of the columns."""
    known = list(known)
    for name in columns:
        if name not in known:
            found = ", ".join(map(repr, known))
            raise InputError(f"{source}: there is no field {name!r}, found {found}")
