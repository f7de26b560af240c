"""Opens SQLite files from untrusted sources, read-only, and checks that they are complete.

A file must have all the pages that its header counts, no journal next to it, texts in UTF-8, and
the wanted tables as plain tables. A compressed file must be complete; it is unpacked to a temporary
file of mode 0600, which is always removed.
"""

import contextlib
import errno
import os
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from jaxpfl import files
from jaxpfl.data.readers.compressed import unpacked_pieces
from jaxpfl.errors import CorruptFile, InputError

MAX_UNPACKED_BYTES = 2**38
MAX_IN_MEMORY_BYTES = 2**32
MAX_VALUE_BYTES = 2**26

_MAGIC = b"SQLite format 3\0"
_HEADER_BYTES = 100
_MACHINE_ERRORS = {sqlite3.SQLITE_FULL: errno.ENOSPC, sqlite3.SQLITE_IOERR: errno.EIO}


@contextlib.contextmanager
def opened(
    path: Path,
    tables: Mapping[str, set[str]],
    *,
    sha256: str | None = None,
    in_memory: bool = False,
    folder: str | Path | None = None,
) -> Iterator[sqlite3.Connection]:
    """A connection to a file that returns texts as bytes.

    Args:
      path: the file; one that ends in .lzma or .xz is unpacked.
      tables: the columns that each table must have.
      sha256: of the file before it is unpacked, in hexadecimal; checked before anything else.
      in_memory: refuses a file that is too large to be read into memory.
      folder: for the temporary file; by default the system's folder of temporary files.
    """
    if not path.is_file():
        raise InputError(f"{path}: there is no such file")
    with errors_of(path), contextlib.ExitStack() as stack:
        if sha256 is not None and (found := files.sha256_file(path)) != sha256.lower():
            raise CorruptFile(f"{path} has the SHA-256 {found}, expected {sha256}")
        unpacked = path
        if path.name.endswith((".lzma", ".xz")):
            unpacked = stack.enter_context(_unpacked(path, folder, in_memory))
        else:
            _check_size(path, path.stat().st_size, in_memory)
        _check_pages(path, unpacked)
        connection = stack.enter_context(contextlib.closing(_connect(unpacked)))
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


def _check_pages(path: Path, unpacked: Path) -> None:
    """Refuses a file that is not a complete SQLite file."""
    size = unpacked.stat().st_size
    with unpacked.open("rb") as file:
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
        beside = unpacked.with_name(unpacked.name + journal)
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


def _check_size(path: Path, size: int, in_memory: bool) -> None:
    if in_memory and size > MAX_IN_MEMORY_BYTES:
        raise InputError(
            f"{path} has more than {MAX_IN_MEMORY_BYTES} bytes when unpacked, too many for memory: "
            "convert it with `jaxpfl convert SOURCE FOLDER`, and open that folder"
        )
    if size > MAX_UNPACKED_BYTES:
        raise InputError(f"{path} has more than the {MAX_UNPACKED_BYTES} bytes that are allowed")


@contextlib.contextmanager
def _unpacked(path: Path, folder: str | Path | None, in_memory: bool) -> Iterator[Path]:
    """The path of a temporary file with the unpacked content of `path`."""
    temporary = Path(tempfile.mkdtemp(prefix=".tff-", dir=folder))
    try:
        target = temporary / "unpacked.sqlite"
        descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            written = 0
            for content in unpacked_pieces(path):
                written += len(content)
                _check_size(path, written, in_memory)
                file.write(content)
        yield target
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


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
