"""A file of sealed lines that only grows: JSON objects, each bound to the one before it.

    {"bytes":B, then B bytes: the object's fields in the order of their names, among them
    "hash" and "previous", and its closing brace; then a newline

"previous" is the "hash" of the line before, and "hash" the SHA-256 of the object without it. A line
is valid only in this one spelling, so that no byte of it can change unnoticed.

What is guaranteed, and against what:
- An edited, reordered, inserted or deleted line, and any flipped bit, is refused with file and
  line: by its newline a line was written whole, and a whole line keeps its seal.
- A last line without its newline is what a crash in the middle of a write leaves. Its length, which
  stands in front, says how much is missing. Only the newline: the line is kept. More: it was never
  synced, nobody was answered, and it is removed. Nothing: something else was damaged (a flipped bit
  in the newline, say), and the file is refused.
- A cut-off END leaves a valid chain. Who must notice it keeps `head` elsewhere and asks `verify`.
- Whoever may write the file can write another one, with seals: `head`, kept elsewhere, tells.
- One process at a time: the kernel's lock is held from opening to `close`.
- What was read or appended is on the disk (fsync) when `head` or a synced `append` returns.
"""

import fcntl
import hashlib
import json
import os
import re
import weakref
from pathlib import Path
from typing import Any, Self

from jaxpfl import files
from jaxpfl.errors import CorruptFile, InputError, RunLocked

_NO_LINE = "0" * 64
_START = re.compile(rb'\{"bytes":([1-9][0-9]{0,8}),')
_PART_OF_START = re.compile(rb'\{"bytes":([1-9][0-9]{0,8})?')


class Chain:
    """The lines of one file, open for appending, or for reading after `Chain.read`.

    Attributes:
      path: the file.
      lines: the fields of every line, without seals.

    Args:
      path: made, with its folder, if absent.

    Raises:
      CorruptFile: a line is not as it was written; names it.
      RunLocked: another process, or another open `Chain`, holds the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        # Ends the lock also where a chain is forgotten instead of closed.
        self._closer = weakref.finalize(self, os.close, descriptor)
        self._descriptor: int | None = descriptor
        self._synced = True
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
            # A killed process may have left lines that no fsync followed.
            os.fsync(descriptor)
            if not self.lines:
                files.fsync_path(path.parent)
        except BaseException:
            self.close()
            raise

    @classmethod
    def read(cls, path: Path) -> Self:
        """Returns a chain that cannot be appended to; takes no lock.

        Raises:
          CorruptFile: a line is not as it was written; names it.
        """
        chain = cls.__new__(cls)
        chain.path, chain._descriptor, chain._synced = path, None, True
        chain._load()
        return chain

    @property
    def closed(self) -> bool:
        """Whether nothing can be appended."""
        return self._descriptor is None

    def close(self) -> None:
        """Syncs, gives up the file and its lock; what was read stays."""
        if self._descriptor is None:
            return
        try:
            self._sync()
        finally:
            self._descriptor = None
            self._closer()

    @property
    def head(self) -> str:
        """SHA-256 of the last line; it is on the disk when this returns."""
        self._sync()
        return self._hashes[-1] if self._hashes else _NO_LINE

    def contains(self, head: str) -> bool:
        """Returns whether `head` was this chain's head at some time."""
        return head in self._known

    def append(self, fields: dict[str, Any], *, sync: bool = True) -> None:
        """Adds a line; with `sync`, it and all before it are on the disk on return.

        Raises:
          OSError: it cannot be written; the file is as it was, and the chain is closed.
        """
        if self._descriptor is None:
            raise InputError(f"{self.path}: the ledger is closed or was opened for reading")
        line, digest = _seal(fields, self._hashes[-1] if self._hashes else _NO_LINE)
        start = os.fstat(self._descriptor).st_size
        try:
            written = os.write(self._descriptor, line)
            if written != len(line):
                raise OSError(f"only {written} of {len(line)} bytes were written")
            if sync:
                os.fsync(self._descriptor)
        except OSError as error:
            # It did not happen: leave no trace, and let nobody go on.
            try:
                os.ftruncate(self._descriptor, start)
            finally:
                self._give_up(error)
        self._synced = sync
        self._add(fields, digest)

    def verify(self, expected_head: str | None = None) -> None:
        """Reads the file again and checks every line.

        Raises:
          CorruptFile: a line was altered, or `expected_head` is not in the chain.
        """
        known = self._hashes
        try:
            self._load()
        except BaseException:
            self.close()  # nothing may be added to what could not be read
            raise
        if self._hashes[: len(known)] != known:
            self.close()
            raise CorruptFile(f"{self.path}: the ledger was altered while it was open")
        if expected_head is not None and not self.contains(expected_head):
            raise CorruptFile(
                f"{self.path}: does not contain the line that it once ended with: the ledger was "
                "cut off or replaced"
            )

    def _sync(self) -> None:
        if self._synced or self._descriptor is None:
            return
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            self._give_up(error)
        self._synced = True

    def _give_up(self, error: OSError) -> None:
        self._synced = True  # what cannot be synced is not tried again
        self.close()
        message = f"the ledger cannot be written: {error}"
        raise OSError(error.errno, message, str(self.path)) from error

    def _add(self, fields: dict[str, Any], digest: str) -> None:
        self.lines.append(fields)
        self._hashes.append(digest)
        self._known.add(digest)

    def _load(self) -> int:
        """Reads and checks the file; returns the size that its whole lines have."""
        self.lines: list[dict[str, Any]] = []
        self._hashes: list[str] = []
        self._known: set[str] = set()
        *lines, last = self.path.read_bytes().split(b"\n")
        if last and not _is_torn(last):
            # Whole but for its newline, or else refused like any line.
            lines.append(last)
        for number, line in enumerate(lines, 1):
            previous = self._hashes[-1] if self._hashes else _NO_LINE
            try:
                self._add(*_open(line + b"\n", previous))
            except InputError as error:
                raise altered(self.path, number, str(error)) from None
        return sum(len(line) + 1 for line in lines)


def altered(path: Path, number: int, reason: str) -> CorruptFile:
    """Returns the error about a line, counted from 1."""
    return CorruptFile(f"{path}: line {number} was altered: {reason}")


def _is_torn(last: bytes) -> bool:
    """Whether a last line, which has no newline, lacks more than that."""
    start = _START.match(last)
    if start is None:
        begun = b'{"bytes":'.startswith(last)
        return begun or _PART_OF_START.fullmatch(last) is not None
    missing = int(start[1]) - (len(last) - start.end())
    if missing <= 0 or last[start.end() : start.end() + 1] not in (b"", b'"'):
        return False
    # A whole object in it means that its length was damaged.
    try:
        json.JSONDecoder().raw_decode(last.decode("ascii"))
    except (ValueError, RecursionError) as error:
        return not isinstance(error, UnicodeDecodeError | RecursionError)
    return False


def _open(line: bytes, previous: str) -> tuple[dict[str, Any], str]:
    """Returns the fields of a line after the line with hash `previous`, and its own hash.

    Raises:
      InputError: the line is not what `_seal` wrote.
    """
    start = _START.match(line)
    try:
        fields = json.loads(b"{" + line[start.end() :]) if start else None
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict) or not isinstance(fields.get("hash"), str):
        raise InputError("it is not a whole line of this format")
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
