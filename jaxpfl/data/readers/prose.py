"""Splits running text into lines, paragraphs or sentences.

Policy:
- A paragraph is a run of lines between blank ones. A line of more than 200 characters is not part
  of a wrapped text, and so a paragraph by itself. A run of more than 2^20 characters is cut between
  lines, which bounds the memory.
- Sentences are found within a paragraph, see `split_sentences`; a sentence without any letter or
  digit is left out.
- Runs of white space become one space; a line, as an example, is only stripped.
"""

import re
from collections.abc import Iterable, Iterator

from jaxpfl import checks

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
