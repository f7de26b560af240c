"""Files that survive a crash: a file is written whole or not at all, and synced before use.

All syncing, renaming, hashing and locking of files is here, except that the ledger's chain syncs
its own open file when it appends. JSON and .npz files are read here, too, whoever wrote them:
types, depth and sizes are checked before anything is made of them. A file that another one has
replaced while it was open is not written any further: see `require_unchanged`.
"""

import fcntl
import hashlib
import io
import itertools
import json
import math
import os
import re
import typing
import zipfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import numpy as np

from jaxpfl import checks
from jaxpfl.errors import CorruptFile, InputError, RunLocked

# For the run.lock of each run directory of this process: its descriptor, and the line it wrote.
_LOCKS: dict[Path, tuple[int, bytes]] = {}
_MOST_JSON_BYTES = 2**28
_DEEPEST = 64
_PIECE = 2**20
_NO_TIME = 315532800  # 1980 in UTC, the earliest that a zip archive can hold
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")
JSON_NAMES: dict[Any, str] = {
    dict: "an object",
    list: "a list",
    str: "text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    type(None): "null",
}


def user_path(path: str | Path) -> Path:
    """Returns a path as its user means it: a leading ~ and environment variables are replaced.

    Else one ledger would be another file in each working folder. An absolute path keeps variables
    that are not set. `InputError`: a relative one has one, there is no such home, or an address.
    """
    if str(path) != str(path).encode("utf-8", "replace").decode():
        how = "where its name is, Python takes another encoding: set PYTHONUTF8=1"
        raise InputError(f"{path}: expected a path in UTF-8; {how}")
    if "://" in str(path):
        raise InputError(f"{path}: expected a path on this machine, found an address")
    expanded = VARIABLE.sub(lambda name: os.environ.get(name[1] or name[2]) or name[0], str(path))
    expanded = os.path.expanduser(expanded)
    if not os.path.isabs(expanded) and (expanded.startswith("~") or VARIABLE.search(expanded)):
        other = "what is named so is ./~NAME, or an absolute path"
        raise InputError(f"{path}: expected its home and environment variables to be set; {other}")
    return Path(expanded)


def missing(path: Path) -> str:
    """Says that there is no such file, and where a relative path was looked for."""
    return f"there is no such file{where(path)}"


def where(path: str | Path) -> str:
    """Says of a path that is not there which folder it was looked for in, if it is relative."""
    return "" if os.path.isabs(path) else f" in {os.getcwd()}"


def sync(file: IO[Any]) -> None:
    """Blocks until everything written to an open file is on the disk."""
    file.flush()
    os.fsync(file.fileno())


def fsync_path(path: Path) -> None:
    """Makes a file's content, or the names in a directory, durable; a rename needs the latter."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_tree(directory: Path) -> None:
    """Makes every file and name below `directory` durable."""
    for path in (*directory.rglob("*"), directory):
        fsync_path(path)


def without_times(path: Path, *, since: int = 0) -> None:
    """Gives a file or folder, and all below it, one constant time; not what is older than `since`.

    The time at which a round ended is private, because it depends on how much the sampled clients
    hold. Another user's files keep theirs; the time of the last change of an entry (ctime) cannot
    be set, and no copy has it. `since` is in nanoseconds, as `st_mtime_ns`.
    """
    for entry in (*path.rglob("*"), path):
        with suppress(FileNotFoundError, PermissionError):
            if entry.lstat().st_mtime_ns < since:
                continue
            os.utime(entry, (_NO_TIME, _NO_TIME), follow_symlinks=False)


def require_unchanged(path: Path, descriptor: int, size: int, end: bytes) -> None:
    """Refuses to go on with an open file that is not at its path any more, or was changed there.

    A lock is on the file and not on its name: its holder does not learn that another file has the
    name. `size` and `end`, its last bytes, are those that this process left.
    """
    at_path, opened = None, os.fstat(descriptor)
    with suppress(FileNotFoundError, NotADirectoryError):
        at_path = os.stat(path)
    if at_path is None:
        change = "it is not there any more"
    elif (at_path.st_dev, at_path.st_ino) != (opened.st_dev, opened.st_ino):
        change = "another file has taken its place"
    elif at_path.st_size != size:
        change = f"it has {at_path.st_size} bytes, expected {size}"
    elif os.pread(descriptor, len(end), size - len(end)) != end:
        change = "its last line is not the one that was written"
    else:
        return
    what = f"was changed from outside while this process held it: {change}"
    raise CorruptFile(f"{path}: {what}; nothing more is charged, released or saved")


def require_locks() -> None:
    """Refuses to go on if a run directory that this process holds is no longer its own."""
    for path, (descriptor, content) in list(_LOCKS.items()):
        require_unchanged(path, descriptor, len(content), content)


def write_atomically(path: Path, data: str | bytes, *, mode: int = 0o644) -> None:
    """Replaces a file atomically: a reader sees the old content or the new, even after a crash.

    The file has the permissions `mode` from its first byte on, such as 0o600 for a secret. If
    `require_locks` raises, nothing was replaced.
    """
    require_locks()
    content = data.encode() if isinstance(data, str) else data
    temporary = path.with_name(f".{path.name}.tmp")
    # A temporary file left by a crash may have other permissions.
    temporary.unlink(missing_ok=True)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            sync(file)
    except OSError as error:
        # A failed write does not name its file.
        raise OSError(error.errno, error.strerror, str(path)) from error
    require_locks()
    os.replace(temporary, path)
    fsync_path(path.parent)


def publish(temporary: Path, path: Path) -> None:
    """Gives a file that is complete its name; another of that name is replaced."""
    fsync_path(temporary)
    os.replace(temporary, path)
    fsync_path(path.parent)


def write_json(path: Path, record: Any, *, mode: int = 0o644) -> None:
    """Writes `json_text(record)`; see `write_atomically`."""
    write_atomically(path, json_text(record), mode=mode)


def json_text(record: Any) -> str:
    """The content of a JSON file with `jsonable(record)`."""
    return json.dumps(jsonable(record), indent=1) + "\n"


def jsonable(value: Any) -> Any:
    """`value` in JSON's types: arrays and numpy scalars unpacked, non-finite numbers as None."""
    if isinstance(value, Mapping):
        return {str(key): jsonable(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [jsonable(inner) for inner in value]
    if hasattr(value, "dtype"):
        return jsonable(np.asarray(value).tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def npz(arrays: dict[str, Any]) -> bytes:
    """The content of an .npz file with these arrays."""
    np.savez(buffer := io.BytesIO(), **arrays)
    return buffer.getvalue()


def read_json(path: Path) -> Any:
    """Reads a JSON file that anybody may have written.

    `CorruptFile`: it is missing, has more than 256 MiB, or is not what `parse_json` reads.
    """
    try:
        if (size := path.stat().st_size) > _MOST_JSON_BYTES:
            most = f"at most {_MOST_JSON_BYTES} bytes, found {size}"
            raise CorruptFile(f"{path}: a JSON file must have {most}")
        content = path.read_bytes()
    except OSError as error:
        raise CorruptFile(f"{path}: cannot be read: {error.strerror}{where(path)}") from error
    try:
        return parse_json(content)
    except ValueError as error:
        raise CorruptFile(f"{path}: is not a JSON file; it has {size} bytes") from error


def parse_json(content: bytes) -> Any:
    """The value that JSON in UTF-8 holds; it can be walked by recursion and written again."""
    text = content.decode("utf-8")
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    level, depth = [value], 0
    while level := [node for node in level if isinstance(node, dict | list)]:
        depth += 1
        if depth > _DEEPEST:
            raise ValueError("it is nested too deeply")
        children = (node.values() if isinstance(node, dict) else node for node in level)
        level = list(itertools.chain.from_iterable(children))
    if _SURROGATE.search(text):
        json.dumps(value, ensure_ascii=False).encode()
    return value


def read_record(path: Path, fields: Mapping[str, Any] = {}) -> dict[str, Any]:
    """Reads a JSON file that must hold an object with these fields; see `record_of`."""
    return record_of(read_json(path), str(path), fields)


def record_of(value: Any, where: str, fields: Mapping[str, Any] = {}) -> dict[str, Any]:
    """Returns `value`, read from JSON, which must be an object with fields of these types.

    A type is such as `int` or `str | None`. As in JSON, `true` is no number; a whole number is a
    `float`, too. Messages begin with `where`, such as the file's path.
    """
    if not isinstance(value, dict):
        raise CorruptFile(f"{where}: must hold a JSON object, found {JSON_NAMES[type(value)]}")
    for name, kind in fields.items():
        kinds = typing.get_args(kind) or (kind,)
        expected = " or ".join(JSON_NAMES[option] for option in kinds)
        if name not in value:
            raise CorruptFile(f"{where}: the field {name!r} is missing, expected {expected}")
        kind = type(value[name])
        if kind not in kinds and not (kind is int and float in kinds):
            both = f"{expected}, found {JSON_NAMES[kind]}"
            raise CorruptFile(f"{where}: the field {name!r} must be {both}")
    return value


def read_npz(path: Path, names: Collection[str] = ()) -> dict[str, np.ndarray]:
    """Reads arrays of numbers and texts, each after a check of its size against the bytes there.

    With `names`, these arrays, which may be compressed, and fit the memory with a copy. Without,
    all of what `npz` wrote, which compresses nothing.

    Raises:
      InputError: there is no array of a name, or the memory is too small.
      CorruptFile: the file is missing, or is no archive of such arrays.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            entries, arrays = archive.infolist(), {}
            sizes = {entry.filename.removesuffix(".npy"): entry.file_size for entry in entries}
            for name in names:
                if name not in sizes:
                    raise InputError(f"{path} has no array {name!r}: expected one of {[*sizes]}")
            # Checked before anything is allocated: a small file may claim any size.
            size = 2 * sum(sizes[name] for name in {*names})
            checks.fits_memory(f"{path}: its arrays, read and copied once,", size)
            stored = all(entry.compress_type == zipfile.ZIP_STORED for entry in entries)
            larger = sum(entry.file_size for entry in entries) > path.stat().st_size
            if not names and (larger or not stored):
                raise ValueError("arrays must be stored without compression")
            for entry in entries:
                name = entry.filename.removesuffix(".npy")
                if name in arrays:
                    raise ValueError("two arrays have one name")
                if not names or name in names:
                    with archive.open(entry) as file:
                        arrays[name] = _array(file, entry.file_size)
            return arrays
    except InputError:
        raise
    # zipfile raises a dozen classes for damaged archives.
    except Exception as error:
        if isinstance(error, OSError) and error.strerror:
            raise CorruptFile(f"{path}: cannot be read: {error.strerror}") from error
        raise CorruptFile(f"{path}: is not an .npz file of numbers and texts") from error


def _array(file: IO[bytes], size: int) -> np.ndarray:
    if np.lib.format.read_magic(file) != (1, 0):
        raise ValueError("not the header that NumPy writes")
    shape, by_columns, dtype = np.lib.format.read_array_header_1_0(file)
    plain = not dtype.hasobject and dtype.names is None
    if not plain or math.prod(shape) * dtype.itemsize != size - file.tell():
        raise ValueError("no numbers or texts, or another size than the header says")
    values, at = np.empty(size - file.tell(), np.uint8), 0
    while piece := file.read(_PIECE):
        values[at : at + len(piece)] = np.frombuffer(piece, np.uint8)
        at += len(piece)
    if at != len(values):
        raise ValueError("the array ends before its end")
    return values.view(dtype).reshape(shape, order="F" if by_columns else "C")


def sha256_file(path: Path) -> str:
    """The SHA-256 of a file's content, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def private_directory(directory: Path) -> Path:
    """Creates `directory` if needed and lets its owner alone read it."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    directory.chmod(0o700)
    return directory


def make_directory(directory: Path) -> None:
    """Makes a directory that a user named, if absent, with its parents."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise InputError(f"{directory}: is a file, expected a directory or a new name") from error
    except OSError as error:
        raise InputError(f"{directory}: cannot be made: {error.strerror}") from error


@contextmanager
def exclusive(directory: Path) -> Iterator[None]:
    """Makes the run directory, if absent, and locks it while the context is open, see `lock`.

    At the end all files that were written in it get one constant time, see `without_times`. Each
    holder writes a line of its own into the lock, for `require_locks`. If an exception leaves the
    context before anything else was written, the directories that were made are removed.
    """
    made = [folder for folder in (directory, *directory.parents) if not folder.exists()]
    make_directory(directory)
    path = directory.absolute() / "run.lock"
    with lock(path) as file:
        if file is None:
            how = "wait for it or choose another --out"
            raise RunLocked(f"{directory}: another process is using this run directory; {how}")
        content = f"{os.urandom(8).hex()}\n".encode()
        _LOCKS[path] = file.fileno(), content
        began = 2**63
        try:
            file.write(content)
            file.truncate()
            began = os.fstat(file.fileno()).st_mtime_ns
            yield
        except BaseException:
            with suppress(CorruptFile, OSError):  # another process's directory stays
                require_locks()
                if made and os.listdir(directory) == [path.name]:
                    path.unlink()
                    for folder in made:
                        folder.rmdir()
            raise
        finally:
            try:
                # Not in the directory of a successor, if this one was deleted meanwhile.
                with suppress(CorruptFile):
                    require_locks()
                    without_times(directory, since=began)
            finally:
                del _LOCKS[path]


@contextmanager
def lock(path: Path, *, wait: bool = False) -> Iterator[IO[bytes] | None]:
    """Locks the file `path`, made if absent; yields it, or None if another process has it.

    The kernel releases the lock when the process ends, however it ends.
    """
    with open(os.open(path, os.O_RDWR | os.O_CREAT, 0o644), "r+b", buffering=0) as file:
        locked: IO[bytes] | None = file
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            locked = None
        yield locked
