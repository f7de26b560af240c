"""TensorFlow Federated's data sets, .sqlite files, without TensorFlow Federated.

A file has the tables examples(split_name, client_id, serialized_example_proto) and
client_metadata(client_id, split_name, num_examples), as `save_to_sql_client_data` of
tensorflow-federated writes them; each example is a tf.train.Example (see `tff_examples`). Clients
come in the order of their ids, as TFF sorts them, a client's examples by rowid.

Policy:
- A file is opened read-only. It must have all the pages that its header counts, no journal next to
  it, texts in UTF-8, and both tables as plain tables.
- The two tables must have the same clients, each once, with the same numbers of examples.
- SQLite has no checksums: only the SHA-256 that `jaxpfl data get` compares can make sure that no
  value was altered. It also unpacks the files, which TFF publishes as .lzma.
- An example has at most 64 MiB. Texts and ids must be valid UTF-8.
- Errors name the file, the client by its index in the order above, and the row by its rowid, and
  never a value.
"""

import contextlib
import errno
import heapq
import itertools
import os
import sqlite3
from collections.abc import Iterator
from operator import itemgetter
from pathlib import Path

from jaxpfl import files
from jaxpfl.data.readers.compressed import decoded
from jaxpfl.data.readers.tff_examples import DefectError, Schema, decode
from jaxpfl.data.stream import Batch, Stream
from jaxpfl.errors import CorruptFile, InputError

MAX_VALUE_BYTES = 2**26

_BATCH_BYTES = 2**21
_TABLES = {
    "examples": (b"split_name", b"client_id", b"serialized_example_proto"),
    "client_metadata": (b"split_name", b"client_id", b"num_examples"),
}
_MAGIC = b"SQLite format 3\0"
_HEADER_BYTES = 100
_MACHINE_ERRORS = {sqlite3.SQLITE_FULL: errno.ENOSPC, sqlite3.SQLITE_IOERR: errno.EIO}


@contextlib.contextmanager
def stream_tff(
    path: Path, schema: Schema, split: str | None = None, name: str | None = None
) -> Iterator[Stream]:
    """One split of a file as a stream of batches of a few megabytes.

    Args:
      schema: one of `tff_examples.SCHEMAS`, or that of a file of your own.
      split: TFF's name of it, such as "all_train"; not needed if the file has only one.

    Raises:
      InputError: there is no such file or split, or the tables or examples do not follow the
        schema.
      CorruptFile: the file or an example in it is truncated or damaged.
    """
    if not path.is_file():
        raise InputError(f"{path}: {files.missing(path)}")
    with _errors_of(path):
        _check_pages(path)
        address = f"{path.absolute().as_uri()}?mode=ro&immutable=1"
        with contextlib.closing(sqlite3.connect(address, uri=True)) as connection:
            # Decoded here: sqlite3's own error would show the text.
            connection.text_factory = bytes
            connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_VALUE_BYTES)
            for setting in ("trusted_schema = OFF", "query_only = ON", "cache_size = -8192"):
                connection.execute(f"PRAGMA {setting}")
            for table in _TABLES:
                _check_table(path, connection, table)
            split = _choose_split(path, connection, split)
            query = "SELECT total(num_examples) FROM client_metadata WHERE split_name = ?"
            examples = int(connection.execute(query, (split,)).fetchone()[0])
            batches = _batches(path, connection, split, schema)
            described = (name or f"{path} [{split}]", schema.unit, schema.splitting)
            yield Stream(batches, examples, *described)


def _batches(
    path: Path, connection: sqlite3.Connection, split: str, schema: Schema
) -> Iterator[Batch]:
    """The examples; at least one batch, the last one perhaps without any."""
    size, before = 0, None
    # The next batch: messages, the place of each, and the clients that were read completely, with
    # their numbers of examples.
    messages: list[bytes] = []
    places: list[str] = []
    done: dict[str, int] = {}

    def batch() -> Batch:
        try:
            columns = schema.canonical(decode(schema.features, messages))
        except DefectError as error:
            kind = CorruptFile if error.corrupt else InputError
            raise kind(f"{places[error.index]}: {error.reason}") from None
        examples = Batch(columns, list(done), list(done.values()))
        for pending in (messages, places, done):
            pending.clear()
        return examples

    declared = _entries(path, connection, split, "client_metadata", "num_examples")
    rows = _entries(path, connection, split, "examples", "rowid")
    # By client; each client's first entry is that of client_metadata.
    entries = itertools.groupby(heapq.merge(declared, rows), itemgetter(0))
    for client, (id_, rows_of_client) in enumerate(entries):
        where, read, stated = f"{path}, client {client}", 0, 0
        twice = before is not None and id_ <= before
        for read, (_, table, number) in enumerate(rows_of_client):
            if twice or (table == "examples") != (read > 0):
                what = "client_metadata must name each client of the table examples once"
                raise CorruptFile(f"{where}: {what}")
            if not read:
                stated = number
                continue
            places.append(f"{where}, row {number}")
            messages.append(_message(places[-1], connection, number))
            size += len(messages[-1])
            if size >= _BATCH_BYTES:
                yield batch()
                size = 0
        if read != stated:
            raise CorruptFile(f"{where}: client_metadata states another number of examples")
        text, bad = decoded(id_)
        if bad:
            raise InputError(f"{where}: its id is not valid UTF-8")
        before, done[text] = id_, read
    yield batch()


def _entries(
    path: Path, connection: sqlite3.Connection, split: str, table: str, number: str
) -> Iterator[tuple[bytes, str, int]]:
    """Client id, table and number of each row, sorted: on the disk if there is no index."""
    query = f"SELECT client_id, {number} FROM {table} WHERE split_name = ? "
    query += f"ORDER BY client_id COLLATE BINARY, {number}"
    for id_, value in connection.execute(query, (split,)):
        if type(id_) is not bytes or type(value) is not int:
            raise InputError(f"{path}: table {table!r} must hold texts as ids, and whole numbers")
        yield id_, table, value


def _message(where: str, connection: sqlite3.Connection, row: int) -> bytes:
    """The message of a row. Each is read alone: none is read twice, and a bad one is named."""
    query = "SELECT serialized_example_proto FROM examples WHERE rowid = ?"
    try:
        record = connection.execute(query, (row,)).fetchone()
    except sqlite3.DataError:
        raise InputError(f"{where}: longer than {MAX_VALUE_BYTES} bytes") from None
    except sqlite3.DatabaseError as error:
        if _machine_error(error) is not None:
            raise
        record = None
    # An index, by which rows are found, may name one that the table does not have.
    if record is None:
        raise CorruptFile(f"{where}: its SQLite pages are damaged")
    if type(record[0]) is not bytes:
        raise InputError(f"{where}: serialized_example_proto must be a blob")
    return record[0]


def _choose_split(path: Path, connection: sqlite3.Connection, split: str | None) -> str:
    query = "SELECT DISTINCT split_name FROM client_metadata ORDER BY split_name LIMIT 50"
    names = [row[0] for row in connection.execute(query)]
    splits = [name.decode("utf-8", "replace") for name in names if type(name) is bytes]
    if not splits:
        raise InputError(f"{path} has no clients in its table 'client_metadata'")
    if split is None and len(splits) == 1:
        return splits[0]
    if split not in splits:
        problem = "no split is given" if split is None else f"there is no split {split!r}"
        raise InputError(f"{path}: {problem}; it has {', '.join(map(repr, splits))}")
    return split


def _check_pages(path: Path) -> None:
    size = path.stat().st_size
    with path.open("rb") as file:
        header = file.read(_HEADER_BYTES)
    if not header.startswith(_MAGIC) or len(header) < _HEADER_BYTES:
        raise CorruptFile(f"{path} is empty, truncated or not an SQLite file")
    page = int.from_bytes(header[16:18], "big")
    page = 65536 if page == 1 else page
    pages = int.from_bytes(header[28:32], "big")
    # Old writers do not update the number of pages; then these two counters differ.
    counted = header[24:28] == header[92:96] and pages > 0
    if page < 512 or page & (page - 1) or size % page or (counted and size != page * pages):
        raise CorruptFile(f"{path} has {size} bytes, its SQLite header counts {pages * page}")
    if header[56:60] != (1).to_bytes(4, "big"):
        raise InputError(f"{path} must hold its texts in UTF-8")
    for journal in ("-wal", "-journal"):
        beside = path.with_name(path.name + journal)
        if beside.exists() and beside.stat().st_size:
            raise InputError(f"{path} has unfinished writes in {beside}: open it with sqlite3 once")


def _check_table(path: Path, connection: sqlite3.Connection, table: str) -> None:
    query = "SELECT sql FROM sqlite_master WHERE type = 'table' AND name = ?"
    row = connection.execute(query, (table,)).fetchone()
    if row is None:
        raise InputError(f"{path} has no table {table!r}")
    made = bytes(row[0] or b"").upper()
    plain = made.startswith(b"CREATE TABLE") and b"WITHOUT ROWID" not in made
    rows = connection.execute("SELECT name FROM pragma_table_info(?)", (table,)) if plain else ()
    columns = {name for (name,) in rows}
    # Examples are ordered by rowid, which some tables lack, and a column of that name would hide.
    if not plain or columns & {b"rowid", b"_rowid_", b"oid"}:
        raise InputError(f"{path}: {table!r} must be a plain table with SQLite's own rowid")
    for column in _TABLES[table]:
        if column not in columns:
            raise InputError(f"{path}: table {table!r} has no column {column.decode()!r}")


@contextlib.contextmanager
def _errors_of(path: Path) -> Iterator[None]:
    """Turns SQLite's errors, which may show values, into ours."""
    try:
        yield
    except sqlite3.DataError:
        raise InputError(f"{path} has a row longer than {MAX_VALUE_BYTES} bytes") from None
    except UnicodeDecodeError:
        # Python's module decodes SQLite's message about a broken schema as UTF-8.
        raise CorruptFile(f"{path} is damaged: its schema is no valid UTF-8") from None
    except sqlite3.DatabaseError as error:
        code = _machine_error(error)
        if code is not None:
            raise OSError(code, os.strerror(code), str(path)) from None
        raise CorruptFile(f"{path} is damaged: SQLite cannot read all of its pages") from None


def _machine_error(error: sqlite3.DatabaseError) -> int | None:
    """The errno of a full or failing disk; None for an error of the file."""
    return _MACHINE_ERRORS.get((getattr(error, "sqlite_errorcode", None) or 0) & 0xFF)
