"""Word vocabularies made from PUBLIC text, and the conversion of text to their ids.

How texts are split into words belongs to the vocabulary: texts are split as those were whose words
it counts, in one of two ways (`SPLITTINGS`).

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

On the disk (`jaxpfl convert SOURCE OUT --vocabulary ...`) a text becomes beginning of sentence, the
ids of ALL its words, and end of sentence. The row that a model of any sequence length reads is the
beginning of that, padded; `Vocabulary.encode` makes it.

Ids are 0 unused, 1 beginning of sentence, 2 end of sentence, 3 out of vocabulary, then words by
falling count, ties by code point. In published vocabularies of this form id 0 is padding. Here rows
are padded with `jaxpfl.models.PAD`, and id 0 only keeps the numbers of ids and of parameters equal
to those of the papers: no text is encoded as 0, and it is never drawn.
"""

import array
import hashlib
import json
import math
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from jaxpfl import files
from jaxpfl.checks import instance, one_of, positive_int
from jaxpfl.data.columns import WORD_SEPARATOR, text_array, text_buffers, without_surrogates
from jaxpfl.data.population import Population
from jaxpfl.data.sequences import Padded, Sequences
from jaxpfl.errors import CorruptFile, InputError, named
from jaxpfl.models.base import OOV as OOV
from jaxpfl.models.base import PAD
from jaxpfl.text.columns import texts_of

UNUSED, BOS, EOS = 0, 1, 2
SPECIALS = ("<unused>", "<bos>", "<eos>", "<oov>")

_FORMAT = "jaxpfl vocabulary 2"
_FIELDS = {"format": str, "source": str, "splitting": str, "tokens": list, "counts": list}


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


@dataclass(frozen=True)
class Vocabulary:
    """The words of a language model, with their public counts; a `data.stream.Encoder`.

    Attributes:
      tokens: every token; the first four are the special ones.
      counts: how often each was a target in the public text: 0 for the unused id and beginning of
        sentence; the number of sentences for end of sentence.
      source: the public text from which it was made.
      splitting: how texts are split into its words, one of `SPLITTINGS`.
    """

    tokens: tuple[str, ...]
    counts: tuple[int, ...]
    source: str
    splitting: str = "words"

    def __post_init__(self):
        one_of("splitting", self.splitting, tuple(SPLITTINGS))
        if self.tokens[: len(SPECIALS)] != SPECIALS:
            raise InputError(f"tokens must begin with {', '.join(SPECIALS)}")
        if len(set(self.tokens)) != len(self.tokens):
            raise InputError("tokens must be distinct, found a duplicate")
        if len(self.counts) != len(self.tokens):
            raise InputError(f"there must be {len(self.tokens)} counts, found {len(self.counts)}")

    @classmethod
    def from_texts(
        cls, texts: Iterable[str], size: int, *, source: str, splitting: str = "words"
    ) -> "Vocabulary":
        """The `size - 4` most frequent words of public texts, and the four special tokens.

        The vocabulary is smaller than `size` where the texts have fewer distinct words.
        """
        split = SPLITTINGS[one_of("splitting", splitting, tuple(SPLITTINGS))]
        counter: Counter[str] = Counter()
        sentences = 0
        for text in texts:
            counter.update(split(text))
            sentences += 1
        ranked = sorted(counter.items(), key=lambda item: (-item[1], item[0]))
        return cls.from_ranked(ranked, size, sentences, source=source, splitting=splitting)

    @classmethod
    def from_ranked(
        cls,
        ranked: Sequence[tuple[str, int]],
        size: int,
        sentences: int,
        *,
        source: str,
        splitting: str,
    ) -> "Vocabulary":
        """The first `size - 4` ranked words, and four special tokens; `sentences` counted, or 0."""
        positive_int("size", size)
        if size <= len(SPECIALS):
            raise InputError(f"size must exceed the {len(SPECIALS)} special tokens, found {size}")
        ranked, others = ranked[: size - len(SPECIALS)], ranked[size - len(SPECIALS) :]
        oov = sum(count for _, count in others)
        tokens = SPECIALS + tuple(word for word, _ in ranked)
        counts = (0, 0, sentences, oov) + tuple(count for _, count in ranked)
        return cls(tokens, counts, source, splitting)

    @classmethod
    def from_public(cls, source: str | Path | Population, size: int) -> "Vocabulary":
        """The vocabulary of the "text" column of a population, or of a source of one.

        The texts must be public, because the counts are exact, without differential privacy.
        """
        import jaxpfl.data

        population = jaxpfl.data.open(source)
        described = {"source": population.name, "splitting": population.splitting}
        return cls.from_texts(texts_of(population), size, **described)

    @cached_property
    def split(self) -> Split:
        """Splits a text into words."""
        return SPLITTINGS[self.splitting]

    @cached_property
    def sha256(self) -> str:
        """SHA-256 (hex) of the words in their order, and of how texts are split into them."""
        content = json.dumps([self.splitting, self.tokens], ensure_ascii=True)
        return hashlib.sha256(content.encode()).hexdigest()

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def ids(self) -> dict[str, int]:
        """The ids of the words, without the special tokens."""
        return {word: i for i, word in enumerate(self.tokens) if i >= len(SPECIALS)}

    def encode(self, population: Population, sequence_length: int = 20) -> Population:
        """The population with "tokens" int32 [examples, sequence_length + 1] as its only column.

        A row is bos, at most `sequence_length` words, eos if there is room for it, then padding;
        a longer text is cut and has no eos.

        These encode the column "words" where there is one (`with_words`), else "text". Clients that
        were tokenised on the disk (`jaxpfl convert --vocabulary`) have the ids already; their rows
        are made when they are read.
        """
        instance("what is encoded", population, Population, "a Population")
        positive_int("sequence_length", sequence_length)
        tokens = population.columns.get("tokens")
        if isinstance(tokens, Sequences):
            encoding = tokens.encoding
            if encoding.get("vocabulary_sha256") != self.sha256:
                ours = f"{len(self)} words of {self.source}, split as {self.splitting!r}"
                theirs = f"{encoding.get('vocabulary_size')} words of {encoding.get('vocabulary')}"
                theirs += f", split as {encoding.get('splitting')!r}"
                advice = "set data.vocabulary to the folder with the tokens, or convert again"
                expected = f"but the model's vocabulary is the {ours}: {advice}"
                raise InputError(f"{population.name} was tokenised with the {theirs}, {expected}")
            return population.with_columns({"tokens": Padded(tokens, sequence_length + 1)})
        ids = np.full((population.num_examples, sequence_length + 1), PAD, np.int32)
        ids[:, 0] = BOS
        for row, row_words in enumerate(word_lists(population, self.split)):
            row_ids = [self.ids.get(word, OOV) for word in islice(row_words, sequence_length)]
            if len(row_ids) < sequence_length:
                row_ids.append(EOS)
            ids[row, 1 : len(row_ids) + 1] = row_ids
        return population.with_columns({"tokens": ids})

    @property
    def encoding(self) -> dict[str, Any]:
        """The meaning of ids on the disk, as a manifest states it; public."""
        return {
            "vocabulary": self.source,
            "vocabulary_size": len(self),
            "vocabulary_sha256": self.sha256,
            "splitting": self.splitting,
        }

    def sequences(self, texts: pa.Array) -> Sequences:
        """The ids of each text of a large_string array, all of them: uint16, or uint32 for more."""
        ids, words_N = (self._by_spaces if self.splitting == "spaces" else self._one_by_one)(texts)
        edges = np.concatenate([np.zeros(1, np.int64), np.cumsum(words_N + 2)])
        values = np.empty(int(edges[-1]), np.uint16 if len(self) <= 2**16 else np.uint32)
        inside = np.ones(len(values), bool)
        for places, special in ((edges[:-1], BOS), (edges[1:] - 1, EOS)):
            values[places] = special
            inside[places] = False
        values[inside] = ids
        return Sequences(values, edges, self.encoding)

    def _one_by_one(self, texts: pa.Array) -> tuple[np.ndarray, np.ndarray]:
        ids, words_N = array.array("i"), []
        for text in texts.to_pylist():
            row = [self.ids.get(word, OOV) for word in self.split(text)]
            ids.extend(row)
            words_N.append(len(row))
        return np.frombuffer(ids, np.intc), np.array(words_N, np.int64)

    def _by_spaces(self, texts: pa.Array) -> tuple[np.ndarray, np.ndarray]:
        """As `_one_by_one` with `spaces`, by Arrow: many times as fast."""
        # Called by name: Arrow creates these functions at import, so that type checkers miss them.
        content = np.frombuffer(text_buffers(texts)[1], np.uint8) if len(texts) else np.zeros(0)
        if np.any((content < 32) | (content == 127)):
            removed = pc.ReplaceSubstringOptions(CONTROL, "")
            texts = pc.call_function("replace_substring_regex", [texts], removed)
        split = pc.call_function("split_pattern", [texts], pc.SplitPatternOptions(" "))
        pieces = split.flatten()
        real = pc.call_function("binary_length", [pieces]).to_numpy() > 0
        ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(real)])
        places = pc.call_function("index_in", [pieces], pc.SetLookupOptions(self._words))
        # A word's place in the list, or -1; the list begins with the id after OOV.
        ids = places.fill_null(-1).to_numpy()[real] + (OOV + 1)
        edges = split.offsets.to_numpy()
        return ids, np.diff(ends[edges - edges[0]])

    @cached_property
    def _words(self) -> pa.Array:
        return pa.array(self.tokens[OOV + 1 :], pa.large_string())

    def __contains__(self, word: object) -> bool:
        """Whether a word of a text has an id of its own; never true of a special token."""
        return word in self.ids

    def decode(self, ids: Iterable[int]) -> str:
        """The words of one sequence, joined by spaces, up to the end of sentence or padding."""
        decoded = []
        for token in map(int, ids):
            if token in (PAD, EOS):
                break
            if not 0 <= token < len(self.tokens):
                raise InputError(f"ids must lie in 0 .. {len(self.tokens) - 1}, found {token}")
            if token != BOS:
                decoded.append(self.tokens[token])
        return " ".join(decoded)

    def log_prior(self, size: int | None = None) -> tuple[float, ...]:
        """Log frequencies of the tokens as targets, add-one smoothed, for `output_bias_prior`.

        The result is as long as the vocabulary, or has `size` entries; the additional ids count 0.
        """
        if not self.counts[EOS]:
            problem = "does not say how many sentences were counted, hence how often one ends"
            raise InputError(f"{self.source} {problem}: set unigram_prior: false")
        counts = list(self.counts) + [0] * ((size or len(self)) - len(self))
        total = sum(counts) + len(counts)
        return tuple(math.log((count + 1) / total) for count in counts)

    def save(self, path: str | Path) -> None:
        """Writes a JSON file completely or not at all."""
        record = {
            "format": _FORMAT,
            "source": self.source,
            "splitting": self.splitting,
            "tokens": self.tokens[len(SPECIALS) :],
            "counts": self.counts,
        }
        files.write_atomically(files.user_path(path), json.dumps(record, ensure_ascii=True) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> "Vocabulary":
        """Reads what `save` wrote."""
        with named(f"{path} is not a vocabulary file ({_FORMAT})", CorruptFile):
            record = files.read_record(files.user_path(path), _FIELDS)
            tokens, counts = record["tokens"], record["counts"]
            if not (
                record["format"] == _FORMAT
                and record["splitting"] in SPLITTINGS
                and all(isinstance(token, str) for token in tokens)
                and all(type(count) is int and 0 <= count < 2**63 for count in counts)
            ):
                raise InputError("its fields are not those of a vocabulary")
            every = SPECIALS + tuple(tokens)
            return cls(every, tuple(counts), record["source"], record["splitting"])


def with_words(population: Population, split: Split = words) -> Population:
    """The same clients with a column "words": the words of the column "text".

    The words of a text are joined by `jaxpfl.data.columns.WORD_SEPARATOR`, a control character and
    therefore in none of them. Other columns and the fingerprint do not change. An existing column
    "words" does not change either, because its words may have been altered on purpose.
    """
    if "words" in population.columns:
        return population
    joined = text_array([WORD_SEPARATOR.join(split(text)) for text in texts_of(population)])
    return population.with_columns({**population.columns, "words": joined})


def word_lists(population: Population, split: Split = words) -> Iterator[Iterable[str]]:
    """The words of each example: the column "words" without empty ones, else "text" by `split`."""
    if "words" not in population.columns:
        return map(split, texts_of(population))
    rows = texts_of(population, "words")
    return ([word for word in row.split(WORD_SEPARATOR) if word] for row in rows)
