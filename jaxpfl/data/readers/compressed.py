"""Files and archives that may be compressed, read in pieces; `InputError` names a damaged one."""

import bz2
import codecs
import contextlib
import gzip
import io
import lzma
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO, Any, BinaryIO, Literal, cast

from jaxpfl import files
from jaxpfl.errors import CorruptFile, InputError

MAX_AT_ONCE = 2**24
"""Bytes of the longest line, and of the most that is asked of an archive at once."""

MAX_FILE_BYTES = 2**30
"""Bytes of the longest file that is read as text."""

MAX_ARCHIVE_BYTES = 2**34
MAX_MEMBERS = 100_000
_TAR_BLOCK = 512
PACKED = (".gz", ".bz2", ".xz", ".zip")
"""Endings of the names of packed files."""
_UNPACKED = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA)
# Headers of an archive with long names that follow each other are read by recursion.
_DAMAGE = (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile, RecursionError)
_DAMAGE += (tarfile.TarError, zipfile.BadZipFile)


def _open_zip(path: Path, mode: Literal["rb"]) -> IO[bytes]:
    """The only file of a zip archive, but for those that macOS adds."""
    try:
        archive = zipfile.ZipFile(path)
        inner = [entry for entry in archive.infolist() if not entry.is_dir()]
        inner = [entry for entry in inner if not entry.filename.startswith("__MACOSX/")]
        if len(inner) != 1 or inner[0].flag_bits & 1 or inner[0].compress_type not in _UNPACKED:
            found = "one with a password, or packed by Deflate64" if len(inner) == 1 else len(inner)
            raise InputError(f"{path}: expected one packed file, found {found}: unpack it yourself")
        return archive.open(inner[0])
    except (NotImplementedError, UnicodeDecodeError, IndexError):
        # Of a damaged directory of the archive, or of a newer format.
        raise zipfile.BadZipFile from None


def _open_streams(path: Path, mode: Literal["rb"]) -> IO[bytes]:
    """All streams of a .bz2 or .xz file, which Python reads up to the first damaged one."""
    opened: Any = bz2.open(path, mode) if path.suffix.lower() == ".bz2" else lzma.open(path, mode)
    opened._buffer.raw._trailing_error = ()
    return opened


_OPENERS = {".gz": gzip.open, ".bz2": _open_streams, ".xz": _open_streams, ".zip": _open_zip}


def open_binary(path: Path) -> BinaryIO:
    """A file that may be compressed, opened for reading its unpacked bytes."""
    return cast(BinaryIO, _OPENERS.get(path.suffix.lower(), open)(path, "rb"))


@contextlib.contextmanager
def errors_of(path: Path) -> Iterator[None]:
    """Names the file in errors of packers, archives and the machine."""
    try:
        yield
    except _DAMAGE as error:
        what = "truncated" if isinstance(error, EOFError) else "not valid"
        raise CorruptFile(f"{path} is {what}: its compressed data or archive is damaged") from None
    except FileNotFoundError:
        raise InputError(f"{path}: {files.missing(path)}") from None
    except OSError as error:
        if error.strerror is None:
            # The module bz2 reports damaged data so.
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
    stream: Any,
    where: str,
    called: str = "line",
    most: int | None = None,
    encoding: str | None = None,
    piece: int | None = None,
) -> Iterator[str]:
    """The lines of a text with their ends; a byte order mark at its start is skipped.

    The stream is closed at the end.

    Args:
      stream: bytes, of which some can be seen before they are read (`peek`).
      where, called: begin messages, as in "{where}, {called} 3".
      most: bytes of all lines together; a longer text is refused.
      piece: gives pieces of so many characters in place of lines.
    """
    if encoding is None and stream.peek(2)[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
        encoding = "utf-16"
    # Bytes that are not valid UTF-8 become lone surrogates, so that their line is known.
    errors = "strict" if encoding else "surrogateescape"
    opened = io.TextIOWrapper(stream, encoding or "utf-8", errors, newline="")
    number = read = 0
    with contextlib.suppress(UnicodeError), opened as text:  # whose error holds the content
        while line := text.read(piece) if piece else text.readline(MAX_AT_ONCE + 1):
            number, size, bad = number + 1, len(line), 0
            if encoding is None and not line.isascii():
                content = line.encode(errors=errors)
                size, (_, bad) = len(content), decoded(content)
            read += size
            if size > MAX_AT_ONCE:
                what = f"longer than the {MAX_AT_ONCE} bytes of a line"
                raise InputError(f"{where}, {called} {number}: {what}")
            if most is not None and read > most:
                raise InputError(f"{where}: longer than the {most} bytes of a file")
            if bad:
                hint = "of another encoding, name it, as in FILE?encoding=latin-1"
                what = f"byte {bad} is not valid UTF-8; if it is {hint}"
                raise InputError(f"{where}, {called} {number}: {what}")
            yield line.removeprefix("\ufeff") if number == 1 else line
        return
    raise InputError(f"{where}, {called} {number + 1} or a later one is not valid {encoding}")


class _Forward:
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

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._stream.tell()


def members(path: Path) -> Iterator[tuple[str, str, IO[bytes]]]:
    """The plain files of an archive: what names each in messages, its name, and its content.

    The archive is read as a stream and never unpacked to disk. Hidden files, whose name or folder's
    name begins with a full stop, are left out. An archive is refused if it has a link, a device or
    a sparse file, more than 16 GiB or 100,000 members, or a name that is absolute, has a part "..",
    is not valid Unicode or occurs twice.
    """
    names: set[str] = set()
    total = 0
    with open_binary(path) as compressed:
        stream = _Forward(compressed)
        with tarfile.open(fileobj=cast(IO[bytes], stream), mode="r:") as archive:
            for number, member in enumerate(iter(archive.next, None), 1):
                where = f"{path}, member {number}"
                total += member.size
                # With a negative size, tarfile would read the same member again and again.
                if member.size < 0:
                    raise CorruptFile(f"{where}: its size is negative")
                if number > MAX_MEMBERS or total > MAX_ARCHIVE_BYTES:
                    most = f"{MAX_MEMBERS} members or {MAX_ARCHIVE_BYTES} bytes"
                    raise InputError(f"{where}: the archive is larger than {most}")
                if not (member.isdir() or member.isreg()) or member.issparse():
                    what = "a link, device or sparse file"
                    raise InputError(f"{where}: expected a plain file or folder, found {what}")
                name = _checked_name(where, member.name)
                hidden = any(part.startswith(".") for part in PurePosixPath(name).parts)
                if member.isdir() or hidden:
                    continue
                if name in names:
                    raise InputError(f"{where}: its name occurs twice in the archive")
                names.add(name)
                if member.size > MAX_FILE_BYTES:
                    raise InputError(f"{where}: longer than the {MAX_FILE_BYTES} bytes of a file")
                content = archive.extractfile(member)
                assert content is not None  # a plain file has content
                yield where, name, content
        # tarfile takes an altered header for the end of the archive. To read to the real end also
        # verifies the checksums.
        if not _rest_is_zero(stream):
            raise CorruptFile(f"{path} is truncated or altered: it has no end mark of an archive")


def _rest_is_zero(stream: _Forward) -> bool:
    """Whether the last block read, and all that follows, is the archive's end mark."""
    if len(stream.last) != _TAR_BLOCK or any(stream.last):
        return False
    left = MAX_ARCHIVE_BYTES
    while block := stream.read(2**16):
        left -= len(block)
        if left < 0 or any(block):
            return False
    return True


def _checked_name(where: str, name: str) -> str:
    if any("\ud800" <= character <= "\udfff" for character in name):
        raise InputError(f"{where}: its name is not valid UTF-8")
    name = name.removeprefix("./")
    parts = PurePosixPath(name.replace("\\", "/")).parts
    if ".." in parts or name.startswith(("/", "\\")) or "\0" in name:
        raise InputError(f'{where}: its name must be relative and without ".."')
    return name
