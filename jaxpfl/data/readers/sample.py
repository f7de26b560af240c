"""The first rows of a table, in any of its formats: enough to see which columns there are."""

import csv
import io
import itertools
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet

from jaxpfl.data.readers import arrow_files, csv_files, json_files, table
from jaxpfl.data.readers.compressed import errors_of, open_binary
from jaxpfl.errors import CorruptFile, InputError


def first_rows(path: Path, number: int) -> dict[str, list[Any]]:
    """The values of at most `number` rows by column, None where a row has none.

    Values of CSV are numbers or booleans where all of a column's are. PRIVATE.

    Raises:
      InputError: there is no such file, or it is no table.
      CorruptFile: the file is damaged.
    """
    if not path.is_file():
        raise InputError(f"{path}: there is no such file")
    if not path.name.endswith(table.ENDINGS):
        endings = ", ".join(table.ENDINGS)
        raise InputError(f"{path}: expected a table, a name ending in {endings}")
    if path.name.endswith(csv_files.ENDINGS):
        return _of_csv(path, number)
    in_json = path.name.endswith(json_files.ENDINGS)
    rows = json_files.objects(path) if in_json else _of_arrow(path, number)
    found = list(itertools.islice(rows, number))
    names = dict.fromkeys(name for row in found for name in row)
    return {name: [row.get(name) for row in found] for name in names}


def _of_csv(path: Path, number: int) -> dict[str, list[Any]]:
    names = csv_files.header(path)
    with errors_of(path), open_binary(path) as file:
        text = io.TextIOWrapper(file, "utf-8-sig", "replace", newline="")
        try:
            rows = list(itertools.islice(csv_files.rows_of(path, text, False), 1, number + 1))
        except csv.Error:
            raise CorruptFile(f"{path}: damaged or no CSV") from None
    # Rows of another length are refused, by their number, when all are read.
    columns = zip(*(row for row in rows if len(row) == len(names)), strict=True)
    return dict(zip(names, map(_typed, columns), strict=False)) or {name: [] for name in names}


def _typed(strings: Iterable[str]) -> list[Any]:
    values = [each.strip() for each in strings]
    if all(each.lower() in ("true", "false") for each in values):
        return [each.lower() == "true" for each in values]
    for kind in (int, float):
        try:
            return [kind(each) for each in values]
        except ValueError:
            continue
    return values


def _of_arrow(path: Path, number: int) -> Iterator[Mapping[str, Any]]:
    try:
        if path.name.endswith(arrow_files.PARQUET):
            with parquet.ParquetFile(path) as file:
                for batch in file.iter_batches(number):
                    yield from batch.to_pylist()
        else:
            with pa.memory_map(str(path)) as mapped:
                for batch in arrow_files.batches(path, mapped):
                    yield from batch.slice(0, number).to_pylist()
    except (pa.ArrowException, OSError, ValueError):
        raise CorruptFile(f"{path}: truncated, damaged or no Parquet or Arrow file") from None
