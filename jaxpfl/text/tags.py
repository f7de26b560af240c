"""Stack Overflow's posts as bags of words with tags, as `models.TagPrediction` reads them.

As in TensorFlow Federated's baseline, the words of an example are those of its text and its title,
split at white space alone, and its tags are separated by "|". The vocabularies are the most
frequent words and tags of public counts (`data.readers.counts`).
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np

from jaxpfl.checks import positive_int
from jaxpfl.data.population import Population
from jaxpfl.data.readers.counts import read_counts
from jaxpfl.errors import InputError
from jaxpfl.models.base import PAD

_BLOCK = 65_536


@dataclass(frozen=True)
class TagEncoder:
    """Encodes posts with two public vocabularies.

    Attributes:
      words, tags: the vocabularies; the id of an entry is its place.
      max_words, max_tags: a longer list is cut. Public, because they must not follow from the data.
    """

    words: tuple[str, ...]
    tags: tuple[str, ...]
    max_words: int = 64
    max_tags: int = 5

    def __post_init__(self) -> None:
        positive_int("max_words", self.max_words)
        positive_int("max_tags", self.max_tags)

    def encode(self, population: Population) -> Population:
        """The population with "words" [examples, max_words] and "tags" [examples, max_tags] only.

        Both hold ids, int16 where they fit, padded with -1; an id that equals the vocabulary's size
        is any other word or tag. A missing column "title" is as good as an empty one.

        Raises:
          InputError: the population lacks the column "text" or "tags", or they do not hold text.
        """
        for name in ("text", "tags"):
            column = population.columns.get(name)
            if column is None or isinstance(column, np.ndarray):
                found = ", ".join(map(repr, population.columns)) or "none"
                raise InputError(
                    f"population {population.name!r} must have a column {name!r} of text to "
                    f"predict tags, found columns {found}"
                )
        number = population.num_examples
        words = _Rows(self.words, number, self.max_words)
        tags = _Rows(self.tags, number, self.max_tags)
        for start in range(0, number, _BLOCK):
            texts, titles, lists = (
                _slice(population, name, start) for name in ("text", "title", "tags")
            )
            for row, (text, title) in enumerate(zip(texts, titles, strict=True), start):
                words.fill(row, f"{text} {title}".split())
            for row, tagged in enumerate(lists, start):
                tags.fill(row, filter(None, tagged.split("|")))
        return population.with_columns({"words": words.ids, "tags": tags.ids})


class _Rows:
    def __init__(self, vocabulary: tuple[str, ...], number: int, width: int) -> None:
        dtype = np.int16 if len(vocabulary) < 2**15 else np.int32
        self.ids = np.full((number, width), PAD, dtype)
        self._id_of = {word: place for place, word in enumerate(vocabulary)}

    def fill(self, row: int, words: Iterable[str]) -> None:
        other, width = len(self._id_of), self.ids.shape[1]
        ids = [self._id_of.get(word, other) for word in islice(words, width)]
        self.ids[row, : len(ids)] = ids


def _slice(population: Population, name: str, start: int) -> Iterator[str]:
    column = population.columns.get(name)
    if column is None:
        return iter([""] * min(_BLOCK, population.num_examples - start))
    return iter(column[start : start + _BLOCK].to_pylist())


def most_frequent(path: str | Path, number: int, what: str) -> tuple[str, ...]:
    """The `number` most frequent entries of a file of public counts.

    Args:
      what: names the field of the config in errors.

    Raises:
      InputError: the file cannot be read, or has fewer entries.
      CorruptFile: it is a damaged archive.
    """
    counts: Mapping[str, int] = read_counts(path)
    if len(counts) < number:
        raise InputError(f"{path} has {len(counts)} entries, expected at least {what} = {number}")
    return tuple(islice(counts, number))
