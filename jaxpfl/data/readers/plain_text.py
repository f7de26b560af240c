"""Plain text: a file, or an archive of files; a client is a file.

Policy, the same on every platform:
- Files are UTF-8, strictly (a byte order mark at the head is skipped); lines end in \\n or \\r\\n.
  What an example is says `readers.prose`. A file without any is a client without examples.
- .gz and .xz checksums are verified to the end of the file.
- An archive is read as a stream and never unpacked to disk. Read are its members whose names end in
  .txt, not in any case hidden ones (names that begin with a full stop); folders and other files are
  skipped. Refused are links, devices and sparse files anywhere in it, names that are absolute,
  have a part "..", are no Unicode or occur twice.
- A line has at most 16 MiB, a file 1 GiB, an archive 16 GiB and 100,000 members, all unpacked.
- Errors name the file, the member by its number, and the byte, and never a value.
"""

import contextlib
import gzip
import io
import lzma
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO, BinaryIO, cast

import numpy as np
import pyarrow as pa

from jaxpfl.data.columns import text_array
from jaxpfl.data.population import Population, from_rows
from jaxpfl.data.readers.prose import pieces
from jaxpfl.errors import CorruptFile, InputError

ENDINGS = (".txt", ".txt.gz", ".tar.gz", ".tar.xz")
MAX_LINE_BYTES = 2**24
MAX_FILE_BYTES = 2**30
MAX_ARCHIVE_BYTES = 2**34
MAX_MEMBERS = 100_000

# Texts that are Python strings at any one time; the others are in Arrow buffers.
_BLOCK = 65_536
_TAR_BLOCK = 512
_CORRUPT = (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile, tarfile.TarError)


def read_plain_text(
    path: str | Path, *, split: str = "paragraphs", name: str | None = None
) -> Population:
    """Reads a .txt or .txt.gz file, or a .tar.gz or .tar.xz archive of .txt files.

    Args:
      path: the file.
      split: what an example is: "paragraphs", "sentences" or "lines".
      name: what the population is called; by default the path.

    Returns:
      Clients in the order of the archive, or one, with the column "text". A client's id is the
      file's name, in an archive with the folders in it.

    Raises:
      InputError: the text is not as the policy says, or there is none.
      CorruptFile: the compressed data or the archive is truncated or altered.
    """
    path = Path(path)
    examples = _Texts()
    client_ids: list[str] = []
    sizes: list[int] = []
    with _errors_of(path):
        for client, where, stream in _files(path):
            before = examples.count
            for text in pieces(_lines(stream, where), split):
                examples.append(text)
            client_ids.append(client)
            sizes.append(examples.count - before)
    if not examples.count:
        raise InputError(f"{path} has no examples")
    return from_rows(
        np.repeat(np.arange(len(sizes)), sizes),
        client_ids,
        {"text": examples.finish()},
        name=str(path) if name is None else name,
        unit="text file",
    )


class _Texts:
    """Strings that are moved to Arrow buffers block by block."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._blocks: list[pa.Array] = []

    @property
    def count(self) -> int:
        return len(self._texts) + sum(map(len, self._blocks))

    def append(self, text: str) -> None:
        self._texts.append(text)
        if len(self._texts) == _BLOCK:
            self._flush()

    def finish(self) -> pa.Array:
        self._flush()
        return pa.concat_arrays(self._blocks)

    def _flush(self) -> None:
        self._blocks.append(text_array(self._texts))
        self._texts = []


@contextlib.contextmanager
def _errors_of(path: Path) -> Iterator[None]:
    try:
        yield
    except _CORRUPT as error:
        what = "truncated" if isinstance(error, EOFError) else "not valid"
        raise CorruptFile(f"{path} is {what}: its compressed data or archive is damaged") from None
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None


def _files(path: Path) -> Iterator[tuple[str, str, IO[bytes]]]:
    """Client ids, how errors call the files, and their bytes."""
    if path.name.endswith((".tar.gz", ".tar.xz")):
        yield from _members(path)
    else:
        with _open_binary(path) as stream:
            yield path.name.removesuffix(".gz"), str(path), stream


def _members(path: Path) -> Iterator[tuple[str, str, IO[bytes]]]:
    names: set[str] = set()
    total = 0
    with _open_binary(path) as compressed:
        stream = _Forward(compressed)
        with tarfile.open(fileobj=cast(IO[bytes], stream), mode="r:") as archive:
            for number, member in enumerate(iter(archive.next, None), 1):
                where = f"{path}, member {number}"
                total += member.size
                # A negative size would have tarfile go back and read the same again, for ever.
                if member.size < 0:
                    raise CorruptFile(f"{where}: its size is negative")
                if number > MAX_MEMBERS or total > MAX_ARCHIVE_BYTES:
                    raise InputError(
                        f"{where}: the archive is larger than {MAX_MEMBERS} members or "
                        f"{MAX_ARCHIVE_BYTES} bytes"
                    )
                if not (member.isdir() or member.isreg()) or member.issparse():
                    raise InputError(
                        f"{where}: expected a plain file or folder, found a link, device or "
                        "sparse file"
                    )
                name = _checked_name(where, member.name)
                if member.isdir() or not name.endswith(".txt") or _hidden(name):
                    continue
                if name in names:
                    raise InputError(f"{where}: its name occurs twice in the archive")
                names.add(name)
                if member.size > MAX_FILE_BYTES:
                    raise InputError(f"{where}: longer than the {MAX_FILE_BYTES} bytes of a file")
                content = archive.extractfile(member)
                assert content is not None  # a plain file has content
                yield name, where, content
        # tarfile takes an altered header for the end, so the end is looked at here; reading on
        # also has the checksums verified.
        if not stream.rest_is_zero():
            raise CorruptFile(f"{path} is truncated or altered: it does not end as archives do")


class _Forward:
    """A decompressed stream for tarfile that never reads much at once, whatever a header says."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._last = b""

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= MAX_LINE_BYTES:
            raise tarfile.ReadError("a header asks for too much")
        self._last = self._stream.read(size)
        return self._last

    def seek(self, position: int, whence: int = io.SEEK_SET) -> int:
        return self._stream.seek(position, whence)

    def tell(self) -> int:
        return self._stream.tell()

    def rest_is_zero(self) -> bool:
        """Whether the last block read, and all that follows, is the archive's end mark."""
        if len(self._last) != _TAR_BLOCK or any(self._last):
            return False
        left = MAX_ARCHIVE_BYTES
        while block := self._stream.read(2**16):
            left -= len(block)
            if left < 0 or any(block):
                return False
        return True


def _checked_name(where: str, name: str) -> str:
    try:
        name.encode()
    except UnicodeEncodeError:
        raise InputError(f"{where}: its name is not valid UTF-8") from None
    name = name.removeprefix("./")
    parts = PurePosixPath(name.replace("\\", "/")).parts
    if ".." in parts or name.startswith(("/", "\\")) or "\0" in name:
        raise InputError(f'{where}: its name must be relative and without ".."')
    return name


def _hidden(name: str) -> bool:
    return any(part.startswith(".") for part in PurePosixPath(name).parts)


def _lines(stream: IO[bytes], where: str) -> Iterator[str]:
    position = 0
    while line := stream.readline(MAX_LINE_BYTES + 1):
        if len(line) > MAX_LINE_BYTES:
            raise InputError(
                f"{where}: the line at byte {position + 1} is longer than {MAX_LINE_BYTES} bytes"
            )
        if position + len(line) > MAX_FILE_BYTES:
            raise InputError(f"{where}: longer than the {MAX_FILE_BYTES} bytes of a file")
        try:
            text = line.decode("utf-8")
        except UnicodeDecodeError as error:
            raise InputError(
                f"{where}: byte {position + error.start + 1} is not valid UTF-8"
            ) from None
        yield text.removeprefix("\ufeff") if position == 0 else text
        position += len(line)


def _open_binary(path: Path) -> BinaryIO:
    if path.name.endswith(".gz"):
        return cast(BinaryIO, gzip.open(path, "rb"))
    if path.name.endswith(".xz"):
        return cast(BinaryIO, lzma.open(path, "rb"))
    return path.open("rb")
