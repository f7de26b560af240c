"""Files and archives that may be compressed, read in blocks; damage is an `InputError` with the
file's name."""

import bz2
import contextlib
import gzip
import io
import lzma
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, cast

from jaxpfl.errors import CorruptFile, InputError

MAX_AT_ONCE = 2**24

_PIECE = 2**16


def open_binary(path: Path) -> BinaryIO:
    """A file that may be compressed, opened for reading its unpacked bytes."""
    if path.name.endswith(".gz"):
        return cast(BinaryIO, gzip.open(path, "rb"))
    if path.name.endswith(".bz2"):
        return cast(BinaryIO, bz2.open(path, "rb"))
    if path.name.endswith(".xz"):
        return cast(BinaryIO, lzma.open(path, "rb"))
    return path.open("rb")


@contextlib.contextmanager
def errors_of(path: Path) -> Iterator[None]:
    """Names the file in errors of gzip and of the machine.

    Raises:
      CorruptFile: the compressed data is truncated or altered.
      InputError: the file cannot be read.
    """
    try:
        yield
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        what = "truncated" if isinstance(error, EOFError) else "not valid gzip"
        raise CorruptFile(f"{path} is {what}") from None
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from None


def blocks(path: Path, size: int) -> Iterator[bytes]:
    """The unpacked bytes of a file, in blocks of at most `size`."""
    with errors_of(path), open_binary(path) as file:
        while block := file.read(size):
            yield block


def lines_before_damage(path: Path) -> int:
    """How many lines of a damaged file can be read."""
    number = 0
    with contextlib.suppress(EOFError, zlib.error, OSError), open_binary(path) as file:
        # Of some damage, `read` would lose what it had until then; `read1` gives it.
        while piece := cast(io.BufferedReader, file).read1(_PIECE):
            number += piece.count(b"\n")
    return number


class Forward:
    """A stream for tarfile, whose headers cannot make it read much at once or go astray."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self.last = b""
        """The block that was read last."""

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= MAX_AT_ONCE:
            raise tarfile.ReadError("a header asks for too much")
        self.last = self._stream.read(size)
        return self.last

    def seek(self, position: int, whence: int = io.SEEK_SET) -> int:
        if not 0 <= position < 2**62:
            raise tarfile.ReadError("a header leads out of the archive")
        return self._stream.seek(position, whence)

    def tell(self) -> int:
        return self._stream.tell()
