"""Plain text: a file, or an archive of files; each file is a client.

Policy, the same on every platform:
- A file is in UTF-8, in UTF-16 with a byte order mark, or in the encoding that a user names;
  invalid bytes are refused. Lines end in \\n, \\r\\n or \\r, and `readers.prose` makes them
  examples. A file without examples is a client without examples.
- .gz and .xz checksums are verified to the end of the file.
- An archive's files (see `compressed.members`) are read if their names end in .txt, except hidden
  ones.
- Unpacked, a line has at most 16 MiB, a file 1 GiB.
- Errors name the file, the member by its number, and the byte, and never a value.
"""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import IO

import pyarrow as pa

from jaxpfl.data.columns import text_array
from jaxpfl.data.population import Population, offsets_of
from jaxpfl.data.readers import compressed
from jaxpfl.data.readers.compressed import errors_of, lines, members, open_binary
from jaxpfl.data.readers.prose import pieces
from jaxpfl.errors import InputError

ENDINGS = (".txt", ".txt.gz", ".tar.gz", ".tar.xz")

# Texts that are Python strings at any one time; the others are in Arrow buffers.
_BLOCK = 65_536


def read_plain_text(
    path: Path, *, split: str = "paragraphs", encoding: str | None = None, name: str | None = None
) -> Population:
    """Reads a .txt or .txt.gz file, or a .tar.gz or .tar.xz archive of .txt files.

    Args:
      split: what an example is: "paragraphs", "sentences" or "lines".
      encoding: None: UTF-8, or UTF-16 where its byte order mark is at the start.

    Returns:
      Clients in the order of the archive, or one, with the column "text". A client's id is the
      name of its file, with the folders inside an archive.

    Raises:
      InputError: the content violates the policy, or there are no examples.
      CorruptFile: the compressed data or the archive is truncated or altered.
    """
    blocks: list[pa.Array] = []
    client_ids: list[str] = []
    sizes: list[int] = []
    with errors_of(path):
        for client, where, stream in _files(path):
            most = compressed.MAX_FILE_BYTES
            texts = pieces(lines(stream, where, most=most, encoding=encoding), split)
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
    if path.name.lower().endswith((".tar.gz", ".tar.xz")):
        for where, name, stream in members(path):
            if name.lower().endswith(".txt"):
                yield name, where, stream
    else:
        with open_binary(path) as stream:
            yield path.name.removesuffix(".gz"), str(path), stream
