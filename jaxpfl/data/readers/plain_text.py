"""Plain text: files that are clients, their lines and sentences; and files of counts of words.

Policy, the same on every platform:
- A file is in UTF-8, in UTF-16 with a byte order mark, or in the encoding that a user names;
  invalid bytes are refused. Lines end in \\n, \\r\\n or \\r. A file without examples
  is a client without examples.
- .gz and .xz checksums are verified to the end of the file.
- An archive's files (see `compressed.members`) are read if their names end in .txt, except hidden
  ones.
- Unpacked, a line has at most 16 MiB, a file 1 GiB.
- Errors name the file, the member by its number, and the byte, and never a value.
- A paragraph is a run of lines between blank ones. A line of more than 200 characters is not part
  of a wrapped text, and so a paragraph by itself. A run of more than 2^20 characters is cut between
  lines, which bounds the memory.
- Sentences are found within a paragraph, see `split_sentences`; a sentence without any letter or
  digit is left out.
- Runs of white space become one space; a line, as an example, is only stripped.

Counts of words are public, such as TensorFlow Federated publishes of its Stack Overflow data: lines
of a word, white space and a count, as they are or alone in an archive (.tar.bz2). Words are valid
UTF-8, each of them once; counts are whole numbers from 0 to 2^63 - 1.
"""

import re
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import IO

import pyarrow as pa

from jaxpfl import checks
from jaxpfl.data.columns import text_array
from jaxpfl.data.population import Population, offsets_of
from jaxpfl.data.readers import compressed
from jaxpfl.data.readers.compressed import decoded, errors_of, lines, members, open_binary
from jaxpfl.errors import InputError

ENDINGS = (".txt", ".txt.gz", ".tar.gz", ".tar.xz")

# Texts that are Python strings at any one time; the others are in Arrow buffers.
_BLOCK = 65_536

PIECES = ("paragraphs", "sentences", "lines")

_LONGEST_WRAPPED_LINE = 200
_LONGEST_PARAGRAPH = 2**20
_SPACES = re.compile(r"\s+")
_LETTER_OR_DIGIT = re.compile(r"[^\W_]")
# A full stop ends a sentence before a capital, a digit, a quote or an opening bracket ...
_END = re.compile(r"(?<=[.!?])[)\"'”]*\s+(?=[\"'“(\[]?[A-Z0-9_])")
# ... but not after these.
_ABBREVIATION = re.compile(
    r"(?:^|[\s(])(?:e\.g|i\.e|etc|vs|cf|al|fig|eq|eqs|eqn|no|ref|refs|sec|resp|approx|dr|prof|p|pp"
    r"|vol|ed|mr|mrs|ms|messrs|mme|st|jr|sr|gen|col|capt|hon|rev|[A-Z])\.$",
    re.IGNORECASE,
)

_COMMON = 2**63
# Measured with files of short words and of characters of four bytes.
_BYTES_A_BYTE = 40
_PIECE = 2**20


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


def pieces(lines: Iterable[str], split: str) -> Iterator[str]:
    """The paragraphs, sentences or lines (`split`, one of `PIECES`) of a text, in order.

    None is empty. The text's lines, with or without their ends, are read one by one.
    """
    checks.one_of("split", split, PIECES)
    if split == "lines":
        return (text for line in lines if (text := line.strip()))
    if split == "paragraphs":
        return _paragraphs(lines)
    return (
        sentence
        for paragraph in _paragraphs(lines)
        for sentence in split_sentences(paragraph)
        if _LETTER_OR_DIGIT.search(sentence)
    )


def split_sentences(text: str) -> list[str]:
    """The sentences of a paragraph without line breaks, in order and stripped, by English rules.

    A sentence ends at a full stop, question or exclamation mark before a capital, a digit, a quote
    or an opening bracket, but not after common abbreviations and single letters.
    """
    pieces, start = [], 0
    for match in _END.finditer(text):
        before = text[start : match.start()]
        if not _ABBREVIATION.search(before[-12:]):
            pieces.append(text[start : match.end()].strip())
            start = match.end()
    pieces.append(text[start:].strip())
    return pieces


def _paragraphs(lines: Iterable[str]) -> Iterator[str]:
    current: list[str] = []
    characters = 0
    for line in lines:
        text = _SPACES.sub(" ", line).strip()
        alone = len(text) > _LONGEST_WRAPPED_LINE
        if current and (not text or alone or characters + len(text) > _LONGEST_PARAGRAPH):
            yield " ".join(current)
            current, characters = [], 0
        if alone:
            yield text
        elif text:
            current.append(text)
            characters += len(text) + 1
    if current:
        yield " ".join(current)


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
            what = "must be a word and its count, a whole number below 2^63, and each word once"
            raise InputError(f"{path}, line {number}: {what}")
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
