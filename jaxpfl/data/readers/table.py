"""Tables: the rows of a file in any format, some thousand at a time, by the ending of its name.

A new format is a function that gives the rows with some fields, and a line of `_READERS`. A folder
of shards is read file by file, in the order of their names, its folders included; all files with
these endings, in letters of any case, belong to it, except hidden ones and .json. A path with *
stands for all that it fits, ** for folders in folders; other characters mean themselves. A folder
of shards that is called FIELD=VALUE states a field of all rows in it, as Hive's and Spark's do: as
text that may stand for a number, percent-encoded.

Parquet files, as `datasets`, pandas and polars write them:
- Only the columns that are wanted are read. Their content is validated: offsets, UTF-8, and the
  checksums of pages where a file has them.
- A file is refused whose row groups would not fit the memory once they are unpacked, before they
  are. Where a file may hold a long text once and refer to it often, it is read in batches of fewer
  rows.
"""

import glob
import importlib
import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as parquet

from jaxpfl import checks
from jaxpfl.data.readers import text_tables
from jaxpfl.data.readers.compressed import PACKED
from jaxpfl.data.readers.fields import Fields, Rows
from jaxpfl.errors import CorruptFile, InputError
from jaxpfl.files import sha256_file

_ROWS = 2**15
_BATCH_BYTES = 2**28


def read_parquet(path: Path, fields: Fields) -> Iterator[Rows]:
    """The rows of a Parquet file, in blocks."""
    first = 1
    try:
        with parquet.ParquetFile(path, page_checksum_verification=True) as file:
            fields.require_schema(str(path), file.schema_arrow)
            for batch in _parquet_batches(path, file, fields.names):
                batch.validate(full=True)
                numbers = range(first, first + len(batch))
                if len(batch):
                    columns = fields.columns(str(path), batch)
                    yield fields.rows(str(path), numbers, columns)
                first += len(batch)
    except InputError:
        raise
    except (pa.ArrowException, OSError, ValueError) as error:
        if isinstance(error, OSError) and error.strerror:
            raise InputError(f"{path} cannot be read: {error.strerror}") from None
        # Arrow's own message may quote values.
        raise CorruptFile(f"{path}: truncated, damaged or no Parquet file") from None


def _parquet_batches(
    path: Path, file: parquet.ParquetFile, names: tuple[str, ...]
) -> Iterator[pa.RecordBatch]:
    columns = range(len(file.schema))
    paths = {index: f"{file.schema.column(index).path}." for index in columns}
    heads = tuple(f"{name}." for name in names)
    wanted = [index for index in columns if paths[index].startswith(heads)]
    texts = [i for i in wanted if file.schema.column(i).physical_type == "BYTE_ARRAY"]
    read_dictionary = [file.schema.column(index).path for index in texts]
    with parquet.ParquetFile(path, read_dictionary=read_dictionary) as dictionaries:
        for group in range(file.metadata.num_row_groups):
            # The first row comes first: `RowGroupMetaData.column` ends the process where the
            # footer is damaged, while reading raises an error. Its dictionaries are the group's.
            first = next(
                dictionaries.iter_batches(1, row_groups=[group], columns=list(names)), None
            )
            if first is None:
                continue
            chunks = [file.metadata.row_group(group).column(index) for index in wanted]
            # Numbers that are repeated take less than a bit each, and eight bytes once unpacked.
            size = sum(max(chunk.total_uncompressed_size, 8 * chunk.num_values) for chunk in chunks)
            checks.fits_memory(f"{path}: row group {group + 1}, unpacked,", size)
            rows = min(_ROWS, max(1, _BATCH_BYTES // max(1, *map(_longest, first.columns))))
            yield from file.iter_batches(rows, row_groups=[group], columns=list(names))


def _longest(column: pa.Array) -> int:
    """The bytes of the longest text that rows of a column may refer to."""
    if not isinstance(column, pa.DictionaryArray) or pa.types.is_integer(column.dictionary.type):
        return 1
    lengths = pc.call_function("binary_length", [column.dictionary])
    return pc.call_function("max", [lengths]).as_py() or 1


def _read_excel(path: Path, fields: Fields, _: str | None) -> Iterator[Rows]:
    """The rows of the first sheet, below its header, which is row 1."""
    try:
        pandas = importlib.import_module("pandas")
        # Else NA, None and null would be no values, and a second column of a name another one.
        given = {"header": None, "keep_default_na": False, "na_values": [""]}
        frame = pandas.read_excel(path, dtype=object, **given)
    except ImportError:
        raise InputError(f"{path}: pip install pandas openpyxl, or save it as CSV") from None
    # pandas passes on whatever its parser raises, which may quote a value.
    except Exception:
        raise CorruptFile(f"{path}: damaged, locked by a password or no Excel file") from None
    names = list(map(str, frame.iloc[0])) if len(frame) else []
    fields.require(str(path), names)
    cells = {name: frame[names.index(name)][1:] for name in fields.names}
    columns = {name: list(map(_cell, values)) for name, values in cells.items()}
    if len(frame) > 1:
        yield fields.rows(str(path), range(2, len(frame) + 1), columns)


def _cell(value: Any) -> Any:
    # An empty cell is NaN, which does not equal itself. Excel rounds numbers to 15 digits, so that
    # a longer one is no whole number, and nobody's id.
    long = type(value) is int and abs(value) >= 10**15
    return None if value != value else float(value) if long else value


_READERS: dict[str, Callable[[Path, Fields, str | None], Iterator[Rows]]] = {
    **dict.fromkeys(text_tables.ENDINGS, text_tables.read_text),
    ".parquet": lambda path, fields, _: read_parquet(path, fields),
    ".xlsx": _read_excel,
}

ENDINGS = tuple(_READERS)
PLAIN = ", ".join(end for end in ENDINGS if not end.endswith(PACKED))
"""For messages: the endings of what is not packed."""
# In a folder, a .json is mostly about the tables beside it.
SHARDS = tuple(ending for ending in ENDINGS if ending.split(".")[1] != "json")
_NO_VALUE = "__HIVE_DEFAULT_PARTITION__"
# What tools leave beside the files: copies, locks, small pictures.
_HIDDEN = (".", "~$", "__macosx", "thumbs.db", "desktop.ini", "@eadir", "#recycle", "_temporary")
# Of table formats whose log says which files count, old ones are there, too.
_LOGS = {"Delta": "_delta_log", "Hudi": ".hoodie", "Iceberg": "metadata/*.metadata.json"}


def read_table(path: Path, fields: Fields, *, encoding: str | None = None) -> Iterator[Rows]:
    """The rows of a file, or of the shards of a folder, in bounded memory.

    `encoding` is that of files of text; None: UTF-8, or UTF-16 with a byte order mark.
    """
    for number, file in enumerate(_once(path, files_of(path)), 1):
        parts = (part.partition("=") for part in _below(file, path)[:-1])
        stated = {unquote(name): unquote(value) for name, is_stated, value in parts if is_stated}
        fields.begin({name: "" if value == _NO_VALUE else value for name, value in stated.items()})
        name = file.name.lower()
        read = next((reader for end, reader in _READERS.items() if name.endswith(end)), None)
        if read is None:
            raise InputError(f"{file}: expected a table, a name ending in {PLAIN}")
        try:
            yield from read(file, fields, encoding)
        except InputError as error:
            if not stated:
                raise
            # A folder's name may be a client's id.
            message = str(error).replace(str(file), f"{path}, file {number}")
            raise type(error)(message) from None


def files_of(path: Path) -> list[Path]:
    """The shards of a folder, the files that a path with * fits, or the file itself."""
    if path.is_file():
        return [path]
    if not path.exists():
        pattern = re.sub(r"[?[]", r"[\g<0>]", str(path))
        places = sorted(map(Path, glob.glob(pattern, recursive=True)))
        places = [place for place in places if not is_hidden(place, path)]
        # A folder may fit as well as what is in it.
        tables = list(dict.fromkeys(file for place in places for file in files_of(place)))
        _require_no_log({up for file in tables for up in [*file.parents][:2]})
        return tables
    shards = (file for file in path.rglob("*") if file.name.lower().endswith(SHARDS))
    shards = sorted(file for file in shards if file.is_file() and not is_hidden(file, path))
    if not shards:
        raise InputError(f"{path}: expected a folder of {PLAIN} files, found none")
    _require_no_log({path, *(up for file in shards for up in file.parents if path in up.parents)})
    return shards


def _require_no_log(folders: Iterable[Path]) -> None:
    """Refuses tables of formats in which a log says which files count."""
    for folder in sorted(folders):
        for kind, log in _LOGS.items():
            if any(folder.glob(log)):
                hint = "read it with its own library, and give the frame to from_dataframe"
                raise InputError(f"{folder}: a table of {kind}, with its old files: {hint}")


def _once(path: Path, files: list[Path]) -> list[Path]:
    """The files; refuses a table that lies there in two formats, and warns of equal files."""
    by_name: dict[tuple[Path, str], Path] = {}
    by_size: dict[tuple[Path, int], list[Path]] = {}
    for file in files:
        name = file.name.lower()
        stem = name.removesuffix(max(filter(name.endswith, ENDINGS), key=len, default=""))
        other = by_name.setdefault((file.parent, stem), file)
        if other is not file:
            both = f"{other.name} and {file.name}"
            raise InputError(f"{path}: {both} seem to be one table: name one, as in FOLDER/*.csv")
        by_size.setdefault((file.parent, file.stat().st_size), []).append(file)
    for alike in by_size.values():
        if len(alike) > 1 and len({sha256_file(file) for file in alike}) < len(alike):
            warnings.warn(f"{path}: files in it are equal, so that rows count twice", stacklevel=3)
    return files


def _below(file: Path, path: Path) -> tuple[str, ...]:
    """The parts of a file's path below a folder, or below what stands before the first *."""
    above = path if path.exists() else Path(str(path).partition("*")[0] + "*").parent
    return file.relative_to(above).parts


def is_hidden(file: Path, folder: Path) -> bool:
    """Whether a file in a folder, or a folder that it is in there, is a tool's and no data."""
    return any(part.lower().startswith(_HIDDEN) for part in _below(file, folder))
