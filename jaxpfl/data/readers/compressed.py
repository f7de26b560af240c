"""Files that may be gzipped, read in blocks; damage is an `InputError` with the file's name."""

import contextlib
import gzip
import lzma
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, cast

from jaxpfl.errors import CorruptFile, InputError


def open_binary(path: Path) -> BinaryIO:
    """A file that may be compressed, opened for reading its unpacked bytes."""
    if path.name.endswith(".gz"):
        return cast(BinaryIO, gzip.open(path, "rb"))
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
        for _ in file:
            number += 1
    return number
