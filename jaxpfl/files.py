"""Files that survive a crash: whole or absent, and on the disk before anything goes on.

The one place that syncs, renames, hashes and locks files; only the ledger's chain syncs its own
open file as it appends.
"""

import fcntl
import hashlib
import io
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np

from jaxpfl.errors import CorruptFile, RunLocked


def sync(file: IO[Any]) -> None:
    """Returns when what was written to an open file is on the disk."""
    file.flush()
    os.fsync(file.fileno())


def fsync_directory(directory: Path) -> None:
    """Makes the names inside `directory` durable (a rename is not, until this returns)."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_tree(directory: Path) -> None:
    """Makes every file and name below `directory` durable."""
    for folder, _, names in os.walk(directory):
        for name in names:
            descriptor = os.open(Path(folder, name), os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        fsync_directory(Path(folder))


def write_atomically(path: Path, data: str | bytes, *, mode: int = 0o644) -> None:
    """Writes a whole file: a reader, and a crash, sees the old content or the new one.

    Args:
      mode: of the file, from its first byte on; 0o600 for what its owner alone may read.
    """
    content = data.encode() if isinstance(data, str) else data
    temporary = path.with_name(f".{path.name}.tmp")
    # What a crash left may have another mode.
    temporary.unlink(missing_ok=True)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        sync(file)
    os.replace(temporary, path)
    fsync_directory(path.parent)


def npz(arrays: dict[str, Any]) -> bytes:
    """The content of an .npz file with these arrays."""
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    return buffer.getvalue()


def read_json(path: Path) -> Any:
    """Reads a JSON file; `CorruptFile` names the file that is missing or broken."""
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
    """Makes `directory` readable by its owner only, also where it existed before."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    directory.chmod(0o700)
    return directory


@contextmanager
def exclusive(directory: Path) -> Iterator[None]:
    """Holds the run directory while the context is open.

    The lock is the kernel's, on an open file: it ends with the process, however that ends, so no
    stale lock outlives a crash and no clock is involved.

    Raises:
      RunLocked: another process holds it.
    """
    path = directory / "run.lock"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RunLocked(
                f"{directory}: another process is using this run directory; wait for it or "
                "choose another --out"
            ) from error
        yield
    finally:
        os.close(descriptor)
