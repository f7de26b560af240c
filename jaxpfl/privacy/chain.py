"""An append-only file of JSON objects, one per line, each bound to the line before it by a hash.

    {"bytes":B, then B bytes: the object's fields in the order of their names, among them
    "hash" and "previous", and its closing brace; then a newline

"previous" is the "hash" of the line before, and "hash" the SHA-256 of the object without it. A line
is valid only in this one spelling, so that no byte of it can change unnoticed.

Guarantees:
- An edited, reordered, inserted or deleted line, and any flipped bit, is refused; the error names
  file and line.
- A crash in the middle of a write leaves a last line without its newline. If "bytes" says that only
  that is missing, the line is kept; if more is, it is removed, because it was never synced; if
  nothing is, something else was damaged, and the file is refused.
- Lines that are cut off the END leave a valid chain, and whoever may write the file can replace it
  by another valid one. While the chain is open, both are noticed before the next line is written;
  afterwards only by a caller that keeps `head` elsewhere and passes it to `verify`.
- Only one process at a time: the kernel's lock is held from opening to `close`.
- A line is on the disk (fsync) when `append` returns.
"""

import fcntl
import hashlib
import json
import os
import re
import weakref
from pathlib import Path
from typing import Any, Self

from jaxpfl import checks, files
from jaxpfl.errors import CorruptFile, InputError, RunLocked

_NO_LINE = "0" * 64
_START = re.compile(rb'\{"bytes":([1-9][0-9]{0,8}),')
_PART_OF_START = re.compile(rb'\{"bytes":([1-9][0-9]{0,8})?')


class Chain:
    """The lines of one file, open for appending, or for reading after `Chain.read`.

    `lines` holds their fields, without "bytes", "hash" and "previous". An absent file is made, with
    its folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        # It stays the same file if the process changes its directory.
        self._place = path.absolute()
        _require_file(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        # Also releases the lock of a chain that is garbage-collected without `close`.
        self._closer = weakref.finalize(self, os.close, descriptor)
        self._descriptor: int | None = descriptor
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.close()
            raise RunLocked(f"{path}: another run holds this ledger; wait for it") from None
        try:
            end = self._load()
            if os.fstat(descriptor).st_size > end:
                os.ftruncate(descriptor, end)
            elif os.fstat(descriptor).st_size < end:
                os.write(descriptor, b"\n")
            # A killed process may have left lines that it did not sync.
            os.fsync(descriptor)
            if not self.lines:
                files.fsync_path(path.parent)
        except BaseException:
            self.close()
            raise

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """Returns a chain that cannot be appended to, without a lock.

        Raises:
          InputError: there is no such file, or `path` is a directory.
          CorruptFile: a line was altered.
        """
        checks.instance("path", path, (str, Path), "the path of a ledger")
        chain = cls.__new__(cls)
        chain.path, chain._descriptor = files.user_path(path), None
        _require_file(chain.path)
        if not chain.path.exists():
            raise InputError(f"{path}: there is no such ledger{files.where(chain.path)}")
        chain._load()
        return chain

    def close(self) -> None:
        """Closes the file, and releases its lock; `lines` stay."""
        if self._descriptor is not None:
            self._descriptor = None
            self._closer()

    @property
    def head(self) -> str:
        """SHA-256 of the last line."""
        return next(reversed(self._hashes), _NO_LINE)

    def contains(self, head: str) -> bool:
        """Returns whether `head` is or was this chain's head."""
        return head in self._hashes

    def require_unchanged(self) -> None:
        """Refuses to go on if the file, or a run directory that this process holds, was changed."""
        if self._descriptor is None:
            raise InputError(f"{self.path}: the ledger is closed or was opened for reading")
        try:
            files.require_locks()
            files.require_unchanged(self._place, self._descriptor, self._size, self._end)
        except CorruptFile:
            self.close()
            raise

    def append(self, fields: dict[str, Any]) -> None:
        """Adds a line, which is on the disk on return.

        Raises:
          InputError, CorruptFile: as `require_unchanged`. Nothing is written.
          OSError: the line cannot be written. After this or any other exception, such as
            KeyboardInterrupt, the line is removed again, and the chain is closed.
        """
        line, digest = _seal(fields, self.head)
        self.require_unchanged()
        assert self._descriptor is not None
        start = self._size
        try:
            written = os.write(self._descriptor, line)
            if written != len(line):
                raise OSError(f"only {written} of {len(line)} bytes were written")
            files.without_times(self.path)
            os.fsync(self._descriptor)
            self._add(line, fields, digest)
        except BaseException as error:
            # Remove what was written of the line, and refuse further lines. A line that stayed in
            # the file, but not here, would be followed by one that does not continue it.
            try:
                os.ftruncate(self._descriptor, start)
            finally:
                self.close()
            if not isinstance(error, OSError):
                raise
            message = f"the ledger cannot be written: {error}"
            raise OSError(error.errno, message, str(self.path)) from error

    def verify(self, expected_head: str | None = None) -> None:
        """Reads the file again and checks every line.

        Raises:
          CorruptFile: a line was altered, or `expected_head` is not in the chain.
        """
        hashes = [*self._hashes]
        try:
            self._load()
        except BaseException:
            self.close()  # nothing may be appended to lines that could not be read
            raise
        if [*self._hashes][: len(hashes)] != hashes:
            self.close()
            raise CorruptFile(f"{self.path}: the ledger was altered while it was open")
        if expected_head is not None and not self.contains(expected_head):
            raise CorruptFile(
                f"{self.path}: the ledger was cut off or replaced: it does not contain the line "
                "that it once ended with"
            )

    def _add(self, line: bytes, fields: dict[str, Any], digest: str) -> None:
        self._size, self._end = self._size + len(line), line
        self.lines.append(fields)
        self._hashes[digest] = None

    def _load(self) -> int:
        """Reads and checks the file; returns the size of its complete lines."""
        self.lines: list[dict[str, Any]] = []
        self._hashes: dict[str, None] = {}  # in the order of the lines
        self._size, self._end = 0, b""
        *lines, last = self.path.read_bytes().split(b"\n")
        if last and not _is_torn(last):
            # It only lacks its newline, or is refused below like any other line.
            lines.append(last)
        for number, line in enumerate(lines, 1):
            whole = line + b"\n"
            try:
                self._add(whole, *_open(whole, self.head))
            except InputError as error:
                raise altered(self.path, number, str(error)) from None
        return self._size


def _require_file(path: Path) -> None:
    if path.exists() and not path.is_file():
        what = "a directory" if path.is_dir() else "a device"
        raise InputError(f"{path}: is {what}, expected the file of a ledger")


def altered(path: Path, number: int, reason: str) -> CorruptFile:
    """Returns the error about a line, counted from 1."""
    return CorruptFile(f"{path}: line {number} was altered: {reason}")


def _is_torn(last: bytes) -> bool:
    """Whether the last line lacks more than its newline."""
    start = _START.match(last)
    if start is None:
        begun = b'{"bytes":'.startswith(last)
        return begun or _PART_OF_START.fullmatch(last) is not None
    missing = int(start[1]) - (len(last) - start.end())
    if missing <= 0 or last[start.end() : start.end() + 1] not in (b"", b'"'):
        return False
    # If it has a complete object, its length was damaged.
    try:
        json.JSONDecoder().raw_decode(last.decode("ascii"))
    except (ValueError, RecursionError) as error:
        return not isinstance(error, UnicodeDecodeError | RecursionError)
    return False


def _open(line: bytes, previous: str) -> tuple[dict[str, Any], str]:
    """Returns the fields of a line after the line with hash `previous`, and its own hash."""
    start = _START.match(line)
    try:
        fields = json.loads(b"{" + line[start.end() :]) if start else None
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict) or not isinstance(fields.get("hash"), str):
        raise InputError("it is not a complete line of this format")
    digest = fields.pop("hash")
    if fields.pop("previous", None) != previous:
        raise InputError("it does not follow the line before it")
    try:
        sealed = _seal(fields, previous)
    except (ValueError, RecursionError):
        sealed = None
    if sealed != (line, digest):
        raise InputError("its hash is not that of its content")
    return fields, digest


def _seal(fields: dict[str, Any], previous: str) -> tuple[bytes, str]:
    """Returns the line of `fields` after the line with hash `previous`, and its own hash."""
    body = {**fields, "previous": previous}
    digest = hashlib.sha256(_canonical(body)).hexdigest()
    rest = _canonical({**body, "hash": digest})[1:]
    return b'{"bytes":%d,%s\n' % (len(rest), rest), digest


def _canonical(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
