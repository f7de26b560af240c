"""Where a sentence of running text ends."""

import re

# A full stop ends a sentence before a capital, a digit, a quote or an opening bracket ...
_END = re.compile(r"(?<=[.!?])[)\"'”]*\s+(?=[\"'“(\[]?[A-Z0-9_])")
# ... but not after these.
_ABBREVIATION = re.compile(
    r"(?:^|[\s(])(?:e\.g|i\.e|etc|vs|cf|al|fig|eq|eqs|eqn|no|ref|refs|sec|resp|approx|dr|prof|p|pp"
    r"|vol|ed|mr|mrs|ms|messrs|mme|st|jr|sr|gen|col|capt|hon|rev|[A-Z])\.$",
    re.IGNORECASE,
)


def split_sentences(text: str) -> list[str]:
    """The sentences of a paragraph without line breaks, in order, without the space between them.

    A sentence ends at a full stop, question or exclamation mark before a capital, a digit, a quote
    or an opening bracket, but not after common abbreviations and single letters. The rules are
    those of English.
    """
    pieces, start = [], 0
    for match in _END.finditer(text):
        before = text[start : match.start()]
        if not _ABBREVIATION.search(before[-12:]):
            pieces.append(text[start : match.end()].strip())
            start = match.end()
    pieces.append(text[start:].strip())
    return pieces
