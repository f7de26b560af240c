"""Public counts of words or tags, most frequent first: what vocabularies are made from.

TensorFlow Federated publishes such counts of its Stack Overflow data as `stackoverflow.word_count`
and `stackoverflow.tag_count`, in archives of one file each. A file of counts is

    JSON        one object, {"word": count, ...}
    lines       a word and its count, separated by white space or one comma; in a .csv file the
                first line may be a heading
    archive     .tar.bz2, .tar.gz, .tar.xz or .tar with one such file; nothing is unpacked to disk

Words are valid UTF-8 without white space at their ends, each of them once; counts are whole numbers
from 0 to 2^63 - 1. A file that would not fit the memory once it is read is refused.
"""

import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, BinaryIO, cast

from jaxpfl import checks
from jaxpfl.data.readers.compressed import Forward, decoded, errors_of, open_binary
from jaxpfl.errors import CorruptFile, InputError
from jaxpfl.files import parse_json

MAX_BYTES = 2**30

_ARCHIVES = (".tar", ".tar.bz2", ".tar.gz", ".tar.xz")
_COMMON = 2**63
# Measured of files of short words, of empty lists in JSON, and of characters of four bytes.
_BYTES_A_BYTE = 40
_PIECE, _MOST_MEMBERS = 2**20, 1000


def read_counts(path: str | Path) -> dict[str, int]:
    """Reads a file of counts.

    Returns:
      Each word with its count, by falling count; words of one count in the file's order.

    Raises:
      InputError: there is no such file, or it does not hold counts as described above.
      CorruptFile: an archive is truncated or damaged.
    """
    path = Path(path)
    text, bad = decoded(_content(path))
    if bad:
        raise InputError(f"{path}: byte {bad} is not valid UTF-8")
    text = text.removeprefix("\ufeff")
    record = _json(text)
    pairs = _lines(path, text) if record is None else _entries(path, record)
    counts: dict[str, int] = {}
    for where, word, count in pairs:
        if word in counts:
            raise InputError(f"{where}: this word was counted before, expected each word once")
        counts[word] = count
    if not counts:
        raise InputError(f"{path}: holds no counts, expected words with their counts")
    return dict(sorted(counts.items(), key=lambda item: -item[1]))


def _content(path: Path) -> bytes:
    with errors_of(path), open_binary(path) as stream:
        return (_member if path.name.endswith(_ARCHIVES) else _bounded)(path, stream)


def _member(path: Path, stream: BinaryIO) -> bytes:
    """The content of the one file in an archive."""
    content, number = b"", 0
    with tarfile.open(fileobj=cast(IO[bytes], Forward(stream)), mode="r:") as archive:
        for place, member in enumerate(iter(archive.next, None)):
            # With a negative size, tarfile would read the same member again and again.
            sound = 0 <= member.size <= MAX_BYTES and not member.issparse()
            if place == _MOST_MEMBERS or not sound:
                raise CorruptFile(f"{path}: damaged, or no archive of counts")
            if member.isfile():
                number += 1
                file = archive.extractfile(member)
                assert file is not None
                content = content or _bounded(path, file)
    if number != 1:
        raise InputError(f"{path}: must hold one file of counts, found {number} files")
    return content


def _bounded(path: Path, file: IO[bytes]) -> bytes:
    pieces, left = [], MAX_BYTES
    while piece := file.read(_PIECE):
        pieces.append(piece)
        left -= len(piece)
        if left < 0:
            raise InputError(f"{path}: counts must have at most {MAX_BYTES} bytes, found more")
        size = _BYTES_A_BYTE * (MAX_BYTES - left)
        checks.fits_memory(f"{path}: its counts, in memory,", size)
    return b"".join(pieces)


def _json(text: str) -> dict[str, object] | None:
    """The object in the text; None if it is not JSON, since "{" may also be the first word."""
    if not text.lstrip().startswith("{"):
        return None
    try:
        return parse_json(text.encode())
    except ValueError:
        return None


def _entries(path: Path, record: dict[str, object]) -> Iterator[tuple[str, str, int]]:
    for number, (word, count) in enumerate(record.items(), 1):
        where = f"{path}, entry {number}"
        if not word.strip() or type(count) is not int or not 0 <= count < _COMMON:
            raise InputError(f"{where}: must be a word and its count, a whole number")
        yield where, word, count


def _lines(path: Path, text: str) -> Iterator[tuple[str, str, int]]:
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        word, digits = _divided(line.strip())
        if not word:
            if number == 1 and path.suffix == ".csv":
                continue
            raise InputError(f"{where}: must be a word and its count, separated by white space")
        count = int(digits)
        if count >= _COMMON:
            raise InputError(f"{where}: the count must be below 2^63, found more")
        yield where, word, count


def _divided(line: str) -> tuple[str, str]:
    """The word and the digits of a line; no word if it is not of this form.

    Without a regular expression, which would take hours for a line of a million spaces.
    """
    before = line.rstrip("0123456789")
    digits, word = line[len(before) :], before.rstrip()
    divided = len(word) < len(before)
    # A comma may also be the word.
    if word.endswith(",") and (shorter := word[:-1].rstrip()):
        word, divided = shorter, True
    return (word if divided and 0 < len(digits) < 20 else ""), digits
