"""Public counts of words, most frequent first: what vocabularies are made from.

TensorFlow Federated publishes such counts of its Stack Overflow data: lines of a word, white space
and a count, as they are or alone in an archive (.tar.bz2). Words are valid UTF-8, each of them
once; counts are whole numbers from 0 to 2^63 - 1. A file that would not fit the memory once it is
read is refused.
"""

from pathlib import Path
from typing import IO

from jaxpfl import checks
from jaxpfl.data.readers import compressed
from jaxpfl.data.readers.compressed import decoded, errors_of, members, open_binary
from jaxpfl.errors import InputError

_COMMON = 2**63
# Measured with files of short words and of characters of four bytes.
_BYTES_A_BYTE = 40
_PIECE = 2**20


def read_counts(path: str | Path) -> dict[str, int]:
    """The counts of a file by word, the largest first; words of one count in the file's order."""
    path = Path(path)
    with errors_of(path):
        if path.name.endswith(".tar.bz2"):
            contents = [_bounded(path, stream) for _, _, stream in members(path)]
        else:
            with open_binary(path) as stream:
                contents = [_bounded(path, stream)]
    if len(contents) != 1:
        raise InputError(f"{path}: must hold one file of counts, found {len(contents)} files")
    text, bad = decoded(contents[0])
    if bad:
        raise InputError(f"{path}: byte {bad} is not valid UTF-8")
    counts: dict[str, int] = {}
    for number, line in enumerate(text.removeprefix("\ufeff").split("\n"), 1):
        word, *digits = line.split() or [""]
        if not word:
            continue
        # Of another script, or of thousands of digits, is no count.
        is_count = len(digits) == 1 and len(digits[0]) < 20 and digits[0].isascii()
        count = int(digits[0]) if is_count and digits[0].isdecimal() else _COMMON
        if count >= _COMMON or word in counts:
            raise InputError(
                f"{path}, line {number}: must be a word and its count, a whole number below 2^63, "
                "and each word once"
            )
        counts[word] = count
    if not counts:
        raise InputError(f"{path}: holds no counts, expected words with their counts")
    return dict(sorted(counts.items(), key=lambda item: -item[1]))


def _bounded(path: Path, file: IO[bytes]) -> bytes:
    content = bytearray()
    while piece := file.read(_PIECE):
        content += piece
        if len(content) > (most := compressed.MAX_FILE_BYTES):
            raise InputError(f"{path}: counts must have at most {most} bytes, found more")
        checks.fits_memory(f"{path}: its counts, in memory,", _BYTES_A_BYTE * len(content))
    return bytes(content)
