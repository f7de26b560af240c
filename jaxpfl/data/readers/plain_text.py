"""Plain text: a file, or an archive of files; each file is a client.

Policy, the same on every platform:
- Files must be valid UTF-8 (a byte order mark at the start is skipped); lines end in \\n or \\r\\n.
  `readers.prose` makes them examples. A file without examples is a client without examples.
- .gz and .xz checksums are verified to the end of the file.
- An archive is read as a stream and never unpacked to disk. Of its files, those whose names end in
  .txt are read, except hidden ones, whose name or folder's name begins with a full stop. An archive
  is refused if it has a link, a device or a sparse file anywhere, or a name that is absolute, has a
  part "..", is not valid Unicode or occurs twice.
- Unpacked, a line has at most 16 MiB, a file 1 GiB, and an archive 16 GiB and 100,000 members.
- Errors name the file, the member by its number, and the byte, and never a value.
"""

import tarfile
from collections.abc import Iterator
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import IO, cast

import pyarrow as pa

from jaxpfl.data.columns import text_array
from jaxpfl.data.population import Population, offsets_of
from jaxpfl.data.readers.compressed import Forward, errors_of, lines, open_binary
from jaxpfl.data.readers.prose import pieces
from jaxpfl.errors import CorruptFile, InputError

ENDINGS = (".txt", ".txt.gz", ".tar.gz", ".tar.xz")
MAX_FILE_BYTES = 2**30
MAX_ARCHIVE_BYTES = 2**34
MAX_MEMBERS = 100_000

# Texts that are Python strings at any one time; the others are in Arrow buffers.
_BLOCK = 65_536
_TAR_BLOCK = 512


def read_plain_text(
    path: str | Path, *, split: str = "paragraphs", name: str | None = None
) -> Population:
    """Reads a .txt or .txt.gz file, or a .tar.gz or .tar.xz archive of .txt files.

    Args:
      path: the file.
      split: what an example is: "paragraphs", "sentences" or "lines".
      name: of the population; by default the path.

    Returns:
      Clients in the order of the archive, or one, with the column "text". A client's id is the
      name of its file, with the folders inside an archive.

    Raises:
      InputError: the content violates the policy, or there are no examples.
      CorruptFile: the compressed data or the archive is truncated or altered.
    """
    path = Path(path)
    blocks: list[pa.Array] = []
    client_ids: list[str] = []
    sizes: list[int] = []
    with errors_of(path):
        for client, where, stream in _files(path):
            texts = pieces(lines(stream, where, most=MAX_FILE_BYTES), split)
            client_ids.append(client)
            sizes.append(0)
            while block := list(islice(texts, _BLOCK)):
                blocks.append(text_array(block))
                sizes[-1] += len(block)
    if not blocks:
        raise InputError(f"{path} has no examples")
    columns = {"text": pa.concat_arrays(blocks)}
    return Population(columns, offsets_of(sizes), client_ids, name or str(path), "text file")


def _files(path: Path) -> Iterator[tuple[str, str, IO[bytes]]]:
    """Client ids, the files' names for errors, and the files' content."""
    if path.name.endswith((".tar.gz", ".tar.xz")):
        yield from _members(path)
    else:
        with open_binary(path) as stream:
            yield path.name.removesuffix(".gz"), str(path), stream


def _members(path: Path) -> Iterator[tuple[str, str, IO[bytes]]]:
    names: set[str] = set()
    total = 0
    with open_binary(path) as compressed:
        stream = Forward(compressed)
        with tarfile.open(fileobj=cast(IO[bytes], stream), mode="r:") as archive:
            for number, member in enumerate(iter(archive.next, None), 1):
                where = f"{path}, member {number}"
                total += member.size
                # With a negative size, tarfile would read the same member again and again.
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
                hidden = any(part.startswith(".") for part in PurePosixPath(name).parts)
                if member.isdir() or not name.endswith(".txt") or hidden:
                    continue
                if name in names:
                    raise InputError(f"{where}: its name occurs twice in the archive")
                names.add(name)
                if member.size > MAX_FILE_BYTES:
                    raise InputError(f"{where}: longer than the {MAX_FILE_BYTES} bytes of a file")
                content = archive.extractfile(member)
                assert content is not None  # a plain file has content
                yield name, where, content
        # tarfile takes an altered header for the end of the archive. To read to the real end also
        # verifies the checksums.
        if not _rest_is_zero(stream):
            raise CorruptFile(f"{path} is truncated or altered: it has no end mark of an archive")


def _rest_is_zero(stream: Forward, left: int = MAX_ARCHIVE_BYTES) -> bool:
    """Whether the last block read, and all that follows, is the archive's end mark."""
    if len(stream.last) != _TAR_BLOCK or any(stream.last):
        return False
    while block := stream.read(2**16):
        left -= len(block)
        if left < 0 or any(block):
            return False
    return True


def _checked_name(where: str, name: str) -> str:
    if any("\ud800" <= each <= "\udfff" for each in name):
        raise InputError(f"{where}: its name is not valid UTF-8")
    name = name.removeprefix("./")
    parts = PurePosixPath(name.replace("\\", "/")).parts
    if ".." in parts or name.startswith(("/", "\\")) or "\0" in name:
        raise InputError(f'{where}: its name must be relative and without ".."')
    return name
