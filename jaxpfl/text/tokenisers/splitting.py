"""How texts are split into words: `SPLITTINGS` by name.

`words`, for text as people write it. The result is the same on every platform and Python version
(the character tables are those of Unicode 3.2, which Python includes unchanged; later characters
count as symbols):

 1. Text is a sequence of code points; a lone surrogate becomes U+FFFD. Readers have decoded bytes
    as UTF-8 with U+FFFD for invalid ones.
 2. NFC, then lower case of the characters that are upper-case letters.
 3. White space and control characters (NUL too) separate tokens. Format characters (zero-width
    joiner, byte order mark, bidirectional marks) and variation selectors are removed.
 4. A token is a run of letters, marks and digits, with single apostrophes allowed inside, or one
    other character: punctuation, a symbol, an emoji (a joined emoji gives one token per part).

`spaces`, for text that came split into words: they are what stands between its spaces, unchanged,
but without control characters, as TensorFlow Federated's baselines split their Stack Overflow. No
word is empty.
"""

import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from types import MappingProxyType

from jaxpfl.data.columns import without_surrogates

Split = Callable[[str], Iterable[str]]

CONTROL = "[\x00-\x1f\x7f]"
"""A regular expression of the characters that no word contains."""

_CONTROL = re.compile(CONTROL)
_UNICODE = unicodedata.ucd_3_2_0
_ASCII_TOKEN = re.compile(r"[a-z0-9]+(?:'[a-z0-9]+)*|[!-/:-@\[-`{-~]")
_CLASSED_TOKEN = re.compile(r"w+(?:'w+)*|['s]")
_LINE_CHARACTERS = 65_536


@lru_cache(maxsize=65_536)
def _classify(character: str) -> tuple[str, str]:
    """The lower-case form, and its class: w word, s symbol, ' apostrophe, space, or "" removed."""
    if character == "'":
        return character, "'"
    if "\ufe00" <= character <= "\ufe0f":
        return "", ""
    category = _UNICODE.category(character)
    if category == "Cf":
        return "", ""
    if category == "Cc" or category[0] == "Z":
        return " ", " "
    if category == "Lu":
        lower = character.lower()
        return (lower, "w") if len(lower) == 1 else (character, "w")
    return character, "w" if category[0] in "LMN" else "s"


def words(text: str) -> Iterator[str]:
    """Yields the normalised tokens of a text, which is cut after 65,536 code points."""
    text = text[:_LINE_CHARACTERS]
    if text.isascii():
        for match in _ASCII_TOKEN.finditer(text.lower()):
            yield match.group()
        return
    pairs = [_classify(c) for c in _UNICODE.normalize("NFC", without_surrogates(text))]
    characters = "".join(pair[0] for pair in pairs)
    classes = "".join(pair[1] for pair in pairs)
    for match in _CLASSED_TOKEN.finditer(classes):
        yield characters[match.start() : match.end()]


def spaces(text: str) -> list[str]:
    """The words between a text's spaces."""
    text = without_surrogates(_CONTROL.sub("", text))
    return [word for word in text.split(" ") if word]


SPLITTINGS = MappingProxyType({"words": words, "spaces": spaces})
"""The ways to split a text, by name."""
