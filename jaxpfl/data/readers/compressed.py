"""Files and archives that may be compressed, read in pieces; damage is an `InputError` with the
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
from typing import IO, BinaryIO, cast

from jaxpfl.errors import CorruptFile, InputError

MAX_AT_ONCE = 2**24
"""Bytes of the longest line, and of the most that is asked of an archive at once."""

_LZMA_MEMORY = 2**28
_PIECE = 2**20
_OPENERS = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
# Headers of an archive with long names that follow each other are read by recursion.
_DAMAGE = (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile, tarfile.TarError, RecursionError)


def open_binary(path: Path) -> BinaryIO:
    """A file that may be compressed, opened for reading its unpacked bytes."""
    return cast(BinaryIO, _OPENERS.get(path.suffix, open)(path, "rb"))


@contextlib.contextmanager
def errors_of(path: Path) -> Iterator[None]:
    """Names the file in errors of packers, archives and the machine."""
    try:
        yield
    except _DAMAGE as error:
        what = "truncated" if isinstance(error, EOFError) else "not valid"
        raise CorruptFile(f"{path} is {what}: its compressed data or archive is damaged") from None
    except FileNotFoundError:
        raise InputError(f"{path}: there is no such file") from None
    except OSError as error:
        if error.strerror is None:
            # As the module bz2 reports damaged data.
            raise CorruptFile(f"{path} is not valid: its compressed data is damaged") from None
        raise InputError(f"{path} cannot be read: {error.strerror}") from None


def decoded(content: bytes) -> tuple[str, int]:
    """A text in UTF-8, and 0; or "" and the number, from 1, of the first byte that is not valid.

    An error that is raised while Python's own is handled would hold the content.
    """
    try:
        return content.decode("utf-8"), 0
    except UnicodeDecodeError as error:
        return "", error.start + 1


def lines(
    stream: IO[bytes], where: str, called: str = "line", most: int | None = None
) -> Iterator[str]:
    """The lines of a text with their ends; a byte order mark at its start is skipped.

    Args:
      where, called: begin messages, as in "{where}, {called} 3".
      most: bytes of all lines together; a longer text is refused.
    """
    number = read = 0
    while line := stream.readline(MAX_AT_ONCE + 1):
        number += 1
        read += len(line)
        if len(line) > MAX_AT_ONCE:
            raise InputError(
                f"{where}, {called} {number}: longer than the {MAX_AT_ONCE} bytes of a line"
            )
        if most is not None and read > most:
            raise InputError(f"{where}: longer than the {most} bytes of a file")
        text, bad = decoded(line)
        if bad:
            raise InputError(f"{where}, {called} {number}: byte {bad} is not valid UTF-8")
        yield text.removeprefix("\ufeff") if number == 1 else text


def unpacked_pieces(path: Path) -> Iterator[bytes]:
    """The unpacked content of an .lzma or .xz file, some of it at a time."""
    unpacker, piece = lzma.LZMADecompressor(memlimit=_LZMA_MEMORY), b""
    try:
        with path.open("rb") as packed:
            while not unpacker.eof:
                if unpacker.needs_input and not (piece := packed.read(_PIECE)):
                    raise CorruptFile(f"{path} is truncated: its LZMA stream has no end")
                content = unpacker.decompress(piece, _PIECE)
                piece = b""
                yield content
            if unpacker.unused_data or packed.read(1):
                raise CorruptFile(f"{path} has more bytes behind the end of its LZMA stream")
    except lzma.LZMAError:
        raise CorruptFile(f"{path} is damaged, or no LZMA stream that 256 MiB can unpack") from None


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
