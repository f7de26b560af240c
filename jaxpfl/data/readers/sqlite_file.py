"""Opens SQLite files from untrusted sources, read-only, and checks that they are complete.

A file must have all the pages that its header counts, no journal next to it, texts in UTF-8, and
the wanted tables as plain tables.
"""

import contextlib
import errno
import os
import sqlite3
from collections.abc import Iterator, Mapping
from pathlib import Path

from jaxpfl.errors import CorruptFile, InputError

MAX_IN_MEMORY_BYTES = 2**32
MAX_VALUE_BYTES = 2**26

_MAGIC = b"SQLite format 3\0"
_HEADER_BYTES = 100
_MACHINE_ERRORS = {sqlite3.SQLITE_FULL: errno.ENOSPC, sqlite3.SQLITE_IOERR: errno.EIO}


@contextlib.contextmanager
def opened(
    path: Path, tables: Mapping[str, set[str]], *, in_memory: bool = False
) -> Iterator[sqlite3.Connection]:
    """A connection to a file that returns texts as bytes.

    Args:
      tables: the columns that each table must have.
      in_memory: refuses a file that is too large to be read into memory.
    """
    if not path.is_file():
        raise InputError(f"{path}: there is no such file")
    with errors_of(path):
        if in_memory and path.stat().st_size > MAX_IN_MEMORY_BYTES:
            raise InputError(
                f"{path} has more than {MAX_IN_MEMORY_BYTES} bytes, too many for memory: convert "
                "it with `jaxpfl convert SOURCE FOLDER`, and open that folder"
            )
        _check_pages(path)
        with contextlib.closing(_connect(path)) as connection:
            for table, columns in tables.items():
                _check_table(path, connection, table, columns)
            yield connection


def _connect(path: Path) -> sqlite3.Connection:
    uri = f"{path.absolute().as_uri()}?mode=ro&immutable=1"
    connection = sqlite3.connect(uri, uri=True)
    try:
        # Decoded by the readers: sqlite3's own error would show the text.
        connection.text_factory = bytes
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_VALUE_BYTES)
        for setting in ("trusted_schema = OFF", "query_only = ON", "cache_size = -8192"):
            connection.execute(f"PRAGMA {setting}")
    except BaseException:
        connection.close()
        raise
    return connection


def _check_pages(path: Path) -> None:
    size = path.stat().st_size
    with path.open("rb") as file:
        header = file.read(_HEADER_BYTES)
    if not header.startswith(_MAGIC) or len(header) < _HEADER_BYTES:
        what = "is empty" if not size else "is not an SQLite file, or truncated"
        raise CorruptFile(f"{path} {what}")
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


def _check_table(path: Path, connection: sqlite3.Connection, table: str, columns: set[str]) -> None:
    query = "SELECT sql FROM sqlite_master WHERE type = 'table' AND name = ?"
    found = connection.execute(query, (table,)).fetchone()
    if found is None:
        raise InputError(f"{path} has no table {table!r}")
    if not bytes(found[0] or b"").upper().startswith(b"CREATE TABLE"):
        raise InputError(f"{path}: {table!r} is not a plain table")
    rows = connection.execute("SELECT name FROM pragma_table_info(?)", (table,))
    held = {name.decode("utf-8", "replace") for (name,) in rows}
    for column in sorted(columns - held):
        raise InputError(f"{path}: table {table!r} has no column {column!r}")
    # Examples are ordered by rowid, which some tables lack, and a column of that name would hide.
    without = "WITHOUT ROWID" in bytes(found[0]).decode("utf-8", "replace").upper()
    if without or held & {"rowid", "_rowid_", "oid"}:
        raise InputError(f"{path}: table {table!r} must have SQLite's own rowid")


@contextlib.contextmanager
def errors_of(path: Path) -> Iterator[None]:
    """Turns SQLite's errors, which may show values, into ours."""
    try:
        yield
    except sqlite3.DataError:
        raise InputError(f"{path} has a row longer than {MAX_VALUE_BYTES} bytes") from None
    except UnicodeDecodeError:
        # Python's module reads as UTF-8 what SQLite says of a schema that it cannot parse.
        raise CorruptFile(f"{path} is damaged: its schema is no valid UTF-8") from None
    except sqlite3.DatabaseError as error:
        code = machine_error(error)
        if code is not None:
            raise OSError(code, os.strerror(code), str(path)) from None
        raise CorruptFile(f"{path} is damaged: SQLite cannot read all of its pages") from None


def machine_error(error: sqlite3.DatabaseError) -> int | None:
    """The errno of a full or failing disk; None for an error of the file."""
    return _MACHINE_ERRORS.get((getattr(error, "sqlite_errorcode", None) or 0) & 0xFF)
