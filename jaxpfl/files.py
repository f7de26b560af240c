"""Files that survive a crash: a file is written whole or not at all, and synced before use.

All syncing, renaming, hashing and locking of files is here, except that the ledger's chain syncs
its own open file when it appends.
"""

import fcntl
import hashlib
import io
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import numpy as np

from jaxpfl.errors import CorruptFile, InputError, RunLocked


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


def write_atomically(path: Path, data: str | bytes, *, mode: int = 0o644) -> None:
    """Replaces a file atomically: a reader sees the old content or the new, even after a crash.

    Args:
      mode: permissions that the file has from its first byte on, such as 0o600 for a secret.
    """
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
    os.replace(temporary, path)
    fsync_path(path.parent)


def publish(temporary: Path, path: Path) -> None:
    """Gives a file that is complete its name; another of that name is replaced."""
    fsync_path(temporary)
    os.replace(temporary, path)
    fsync_path(path.parent)


@contextmanager
def alone(path: Path) -> Iterator[IO[bytes]]:
    """Opens a file for writing at its end, which only one process can do at a time.

    Raises:
      RunLocked: another process has it open.
    """
    with open(path, "ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RunLocked(f"{path}: another process is writing it; wait for it") from error
        yield file


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
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    return buffer.getvalue()


def read_json(path: Path) -> Any:
    """Reads a JSON file; raises `CorruptFile`, which names it, if it is missing or damaged."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CorruptFile(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        size = path.stat().st_size
        raise CorruptFile(f"{path}: is not a JSON file; it has {size} bytes") from error


def sha256_file(path: Path) -> str:
    """The SHA-256 of a file's content, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def private_directory(directory: Path) -> Path:
    """Creates `directory` if needed and lets its owner alone read it."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    directory.chmod(0o700)
    return directory


def empty_directory(directory: Path) -> None:
    """Removes everything in `directory`."""
    for path in directory.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


@contextmanager
def exclusive(directory: Path) -> Iterator[None]:
    """Makes the run directory, if absent, and locks it while the context is open.

    The kernel releases the lock when the process ends, however it ends: a crash leaves no lock. If
    an exception leaves the context before anything was written, the directories that were made are
    removed.

    Raises:
      InputError: the directory cannot be made.
      RunLocked: another process holds the lock.
    """
    made = [each for each in (directory, *directory.parents) if not each.exists()]
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise InputError(f"{directory}: is a file, expected a directory or a new name") from error
    except OSError as error:
        raise InputError(f"{directory}: cannot be made: {error.strerror}") from error
    path = directory / "run.lock"
    with lock(path) as held:
        if not held:
            raise RunLocked(
                f"{directory}: another process is using this run directory; wait for it or "
                "choose another --out"
            )
        try:
            yield
        except BaseException:
            if made and list(directory.iterdir()) == [path]:
                path.unlink()
                with suppress(OSError):  # a parent that something else uses by now
                    for each in made:
                        each.rmdir()
            raise


@contextmanager
def lock(path: Path, *, wait: bool = False) -> Iterator[bool]:
    """Locks the file `path`, which is made if absent; yields whether this process holds the lock.

    The kernel releases the lock when the process ends, however it ends.

    Args:
      wait: waits until no other process holds the lock, so that True is yielded.
    """
    with open(path, "ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            held = True
        except BlockingIOError:
            held = False
        yield held
