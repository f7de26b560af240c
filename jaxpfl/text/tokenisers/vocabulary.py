"""Word vocabularies made from PUBLIC text, and the conversion of text to their ids.

Normalisation is the same on every platform and Python version (the character tables are those of
Unicode 3.2, which Python includes unchanged; later characters count as symbols):

 1. Text is a sequence of code points; a lone surrogate becomes U+FFFD. Readers have decoded bytes
    as UTF-8 with U+FFFD for invalid ones.
 2. NFC, then lower case of the characters that are upper-case letters.
 3. White space and control characters (NUL too) separate tokens. Format characters (zero-width
    joiner, byte order mark, bidirectional marks) and variation selectors are removed.
 4. A token is a run of letters, marks and digits, with single apostrophes allowed inside, or one
    other character: punctuation, a symbol, an emoji (a joined emoji gives one token per part).

Ids are 0 unused, 1 beginning of sentence, 2 end of sentence, 3 out of vocabulary, then words by
falling count, ties by code point. In published vocabularies of this form id 0 is padding. Here rows
are padded with `jaxpfl.models.PAD`, and id 0 only keeps the numbers of ids and of parameters equal
to those of the papers: no text is encoded as 0, and it is never drawn.
"""

import json
import math
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import islice
from pathlib import Path

import numpy as np

from jaxpfl import files
from jaxpfl.checks import positive_int
from jaxpfl.data.columns import WORD_SEPARATOR, text_array
from jaxpfl.data.population import Population
from jaxpfl.errors import CorruptFile, InputError
from jaxpfl.models.base import PAD

UNUSED, BOS, EOS, OOV = 0, 1, 2, 3
SPECIALS = ("<unused>", "<bos>", "<eos>", "<oov>")

_FORMAT = "jaxpfl vocabulary 1"
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
    text = "".join("\ufffd" if "\ud800" <= c <= "\udfff" else c for c in text)
    pairs = [_classify(c) for c in _UNICODE.normalize("NFC", text)]
    characters = "".join(pair[0] for pair in pairs)
    classes = "".join(pair[1] for pair in pairs)
    for match in _CLASSED_TOKEN.finditer(classes):
        yield characters[match.start() : match.end()]


@dataclass(frozen=True)
class Vocabulary:
    """The words of a language model, with their public counts.

    Attributes:
      tokens: every token; the first four are the special ones.
      counts: how often each was a target in the public text: 0 for the unused id and beginning of
        sentence; the number of sentences for end of sentence.
      source: the public text from which it was made.
    """

    tokens: tuple[str, ...]
    counts: tuple[int, ...]
    source: str

    def __post_init__(self):
        if self.tokens[: len(SPECIALS)] != SPECIALS:
            raise InputError(f"tokens must begin with {', '.join(SPECIALS)}")
        if len(set(self.tokens)) != len(self.tokens):
            raise InputError("tokens must be distinct, found a duplicate")
        if len(self.counts) != len(self.tokens):
            raise InputError(
                f"counts must have one value per token ({len(self.tokens)}), "
                f"found {len(self.counts)}"
            )

    @classmethod
    def from_texts(cls, texts: Iterable[str], size: int, *, source: str) -> "Vocabulary":
        """The `size - 4` most frequent words of public texts, and the four special tokens.

        The vocabulary is smaller than `size` where the texts have fewer distinct words.
        """
        positive_int("size", size)
        if size <= len(SPECIALS):
            raise InputError(f"size must exceed the {len(SPECIALS)} special tokens, found {size}")
        counter: Counter[str] = Counter()
        sentences = 0
        for text in texts:
            counter.update(words(text))
            sentences += 1
        ranked = sorted(counter.items(), key=lambda item: (-item[1], item[0]))
        kept = ranked[: size - len(SPECIALS)]
        oov = sum(count for _, count in ranked[len(kept) :])
        return cls(
            tokens=SPECIALS + tuple(word for word, _ in kept),
            counts=(0, 0, sentences, oov) + tuple(count for _, count in kept),
            source=source,
        )

    @classmethod
    def from_public(cls, source: str | Path | Population, size: int) -> "Vocabulary":
        """The vocabulary of the "text" column of a population, or of a source of one.

        The texts must be public, because the counts are exact, without differential privacy.
        """
        import jaxpfl.data

        population = jaxpfl.data.open(source)
        return cls.from_texts(_texts(population), size, source=population.name)

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def _ids(self) -> dict[str, int]:
        return {word: i for i, word in enumerate(self.tokens) if i >= len(SPECIALS)}

    def encode_texts(self, texts: Iterable[str], sequence_length: int = 20) -> np.ndarray:
        """Token ids int32 [texts, sequence_length + 1], one text per row.

        A row is bos, at most `sequence_length` words, eos if there is room for it, then padding;
        a longer text is cut and has no eos.
        """
        rows = list(texts)
        return self._encode(map(words, rows), len(rows), sequence_length)

    def encode(self, population: Population, sequence_length: int = 20) -> Population:
        """The population with "tokens" int32 [examples, L + 1] as its only column.

        These encode the column "words" where there is one (`with_words`), else "text".
        """
        tokens = self._encode(word_lists(population), population.num_examples, sequence_length)
        return population.with_columns({"tokens": tokens})

    def _encode(
        self, rows: Iterable[Iterable[str]], number: int, sequence_length: int
    ) -> np.ndarray:
        positive_int("sequence_length", sequence_length)
        ids = np.full((number, sequence_length + 1), PAD, np.int32)
        ids[:, 0] = BOS
        for row, row_words in enumerate(rows):
            row_ids = [self._ids.get(word, OOV) for word in islice(row_words, sequence_length)]
            if len(row_ids) < sequence_length:
                row_ids.append(EOS)
            ids[row, 1 : len(row_ids) + 1] = row_ids
        return ids

    def __contains__(self, word: object) -> bool:
        """Whether a word of a text has an id of its own; never true of a special token."""
        return word in self._ids

    def decode(self, ids: Iterable[int]) -> str:
        """The words of one sequence, joined by spaces, up to the end of sentence or padding.

        Raises:
          InputError: an id is not in the vocabulary.
        """
        found = []
        for token in map(int, ids):
            if token in (PAD, EOS):
                break
            if not 0 <= token < len(self.tokens):
                raise InputError(f"ids must lie in 0 .. {len(self.tokens) - 1}, found {token}")
            if token != BOS:
                found.append(self.tokens[token])
        return " ".join(found)

    def log_prior(self, size: int | None = None) -> tuple[float, ...]:
        """Log frequencies of the tokens as targets, add-one smoothed, for `output_bias_prior`.

        The result is as long as the vocabulary, or has `size` entries; the additional ids count 0.
        """
        counts = list(self.counts) + [0] * ((size or len(self)) - len(self))
        total = sum(counts) + len(counts)
        return tuple(math.log((count + 1) / total) for count in counts)

    def save(self, path: str | Path) -> None:
        """Writes a JSON file completely or not at all."""
        record = {
            "format": _FORMAT,
            "source": self.source,
            "tokens": self.tokens[len(SPECIALS) :],
            "counts": self.counts,
        }
        files.write_atomically(Path(path), json.dumps(record, ensure_ascii=True) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> "Vocabulary":
        """Reads what `save` wrote.

        Raises:
          CorruptFile: the file is not a whole vocabulary of this format.
        """
        try:
            record = json.loads(Path(path).read_text(encoding="ascii"))
            tokens, counts, source = record["tokens"], record["counts"], record["source"]
            if not (
                record["format"] == _FORMAT
                and isinstance(source, str)
                and all(isinstance(token, str) for token in tokens)
                and all(type(count) is int and count >= 0 for count in counts)
            ):
                raise ValueError
            return cls(SPECIALS + tuple(tokens), tuple(counts), source)
        except (ValueError, KeyError, TypeError) as error:
            raise CorruptFile(f"{path} is not a vocabulary file ({_FORMAT})") from error


def with_words(population: Population) -> Population:
    """The same clients with a column "words": the normalised tokens of the column "text".

    The tokens of a text are joined by `jaxpfl.data.columns.WORD_SEPARATOR`, a control character and
    therefore in none of them. Other columns and the fingerprint do not change. An existing column
    "words" does not change either, because its words may have been altered on purpose.

    Raises:
      InputError: there is neither a column "words" nor a column "text".
    """
    if "words" in population.columns:
        return population
    joined = text_array([WORD_SEPARATOR.join(words(text)) for text in _texts(population)])
    return population.with_columns({**population.columns, "words": joined})


def word_lists(population: Population) -> Iterator[Iterable[str]]:
    """The words of each example, from the column "words" (without empty ones), else from "text".

    Raises:
      InputError: there is neither column, or it does not hold text.
    """
    if "words" not in population.columns:
        return map(words, _texts(population))
    rows = _texts(population, "words")
    return ([word for word in row.split(WORD_SEPARATOR) if word] for row in rows)


def _texts(population: Population, column_name: str = "text") -> Iterator[str]:
    """The rows of a column of text."""
    if column_name not in population.columns:
        found = ", ".join(sorted(population.columns)) or "none"
        raise InputError(
            f'population {population.name} needs a column "{column_name}", found {found}'
        )
    column = population.columns[column_name]
    if isinstance(column, np.ndarray):
        raise InputError(
            f'population {population.name}, column "{column_name}": expected text, '
            f"found {column.dtype}"
        )
    for start in range(0, len(column), 65_536):
        yield from column[start : start + 65_536].to_pylist()
