"""Public counts of words or tags, most frequent first: what vocabularies are made from.

TensorFlow Federated publishes such counts of its Stack Overflow data as `stackoverflow.word_count`
and `stackoverflow.tag_count`, in archives of one file each. A file of counts is

    JSON        one object, {"word": count, ...}
    lines       a word and its count, separated by white space or one comma; in a .csv file the
                first line may be a heading
    archive     .tar.bz2, .tar.gz, .tar.xz or .tar with one such file; nothing is unpacked to disk

Words are valid UTF-8 without white space at their ends, each of them once; counts are whole numbers
from 0 to 2^63 - 1.
"""

import json
import re
import tarfile
import zlib
from collections.abc import Iterator
from lzma import LZMAError
from pathlib import Path

from jaxpfl.errors import CorruptFile, InputError

MAX_BYTES = 2**30

_LINE = re.compile(r"(\S.*?)(?:\s*,\s*|\s+)([0-9]{1,19})")
_ARCHIVES = (".tar", ".tar.bz2", ".tar.gz", ".tar.xz")
_COMMON = 2**63


def read_counts(path: str | Path) -> dict[str, int]:
    """Reads a file of counts.

    Returns:
      Each word with its count, by falling count; words of one count in the file's order.

    Raises:
      InputError: there is no such file, or it does not hold counts as described above.
      CorruptFile: an archive is truncated or damaged.
    """
    path = Path(path)
    content = _content(path)
    try:
        text = content.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: byte {error.start + 1} is not valid UTF-8") from None
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
    try:
        if not path.name.endswith(_ARCHIVES):
            with path.open("rb") as file:
                return _bounded(path, file.read(MAX_BYTES + 1))
        with tarfile.open(path) as archive:
            held = [entry for entry in archive if entry.isfile()]
            if len(held) != 1:
                raise InputError(f"{path}: must hold one file of counts, found {len(held)} files")
            file = archive.extractfile(held[0])
            assert file is not None
            return _bounded(path, file.read(MAX_BYTES + 1))
    except FileNotFoundError:
        raise InputError(f"{path}: there is no such file of counts") from None
    except (tarfile.TarError, EOFError, LZMAError, zlib.error) as error:
        reason = type(error).__name__
        raise CorruptFile(f"{path}: truncated, damaged or no archive ({reason})") from None
    except OSError as error:
        if error.strerror is None:
            # As the module bz2 reports damaged data.
            raise CorruptFile(f"{path}: truncated, damaged or no archive") from None
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None


def _bounded(path: Path, content: bytes) -> bytes:
    if len(content) > MAX_BYTES:
        raise InputError(f"{path}: counts must have at most {MAX_BYTES} bytes, found more")
    return content


def _json(text: str) -> dict[str, object] | None:
    """The object in the text; None if it is not JSON, since "{" may also be the first word."""
    if not text.lstrip().startswith("{"):
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
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
        found = _LINE.fullmatch(line.strip())
        if found is None:
            if number == 1 and path.suffix == ".csv":
                continue
            raise InputError(f"{where}: must be a word and its count, separated by white space")
        count = int(found[2])
        if count >= _COMMON:
            raise InputError(f"{where}: the count must be below 2^63, found more")
        yield where, found[1], count
