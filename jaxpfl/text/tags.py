"""Stack Overflow's posts as bags of words with tags, as `models.TagPrediction` reads them.

As in TensorFlow Federated's baseline, the words of an example are those of its text and its title,
split at white space alone, and its tags are separated by "|". The vocabularies are the most
frequent words and tags of public counts (`data.readers.counts`).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice, repeat
from pathlib import Path

import numpy as np

from jaxpfl.checks import positive_int
from jaxpfl.data.population import Population
from jaxpfl.data.readers.counts import read_counts
from jaxpfl.errors import InputError
from jaxpfl.models.base import PAD
from jaxpfl.text.columns import texts_of


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
        number, titled = population.num_examples, "title" in population.columns
        titles = texts_of(population, "title") if titled else repeat("", number)
        posts = zip(texts_of(population), titles, strict=True)
        words = (f"{text} {title}".split() for text, title in posts)
        tags = (filter(None, tagged.split("|")) for tagged in texts_of(population, "tags"))
        return population.with_columns(
            {
                "words": _ids(self.words, words, number, self.max_words),
                "tags": _ids(self.tags, tags, number, self.max_tags),
            }
        )


def _ids(
    vocabulary: tuple[str, ...], lists: Iterable[Iterable[str]], number: int, width: int
) -> np.ndarray:
    """The ids of the first `width` entries of each of `number` lists, padded."""
    other, id_of = len(vocabulary), {word: place for place, word in enumerate(vocabulary)}
    rows = np.full((number, width), PAD, np.int16 if other < 2**15 else np.int32)
    for row, entries in zip(rows, lists, strict=True):
        ids = [id_of.get(entry, other) for entry in islice(entries, width)]
        row[: len(ids)] = ids
    return rows


def most_frequent(path: str | Path, number: int, what: str) -> tuple[str, ...]:
    """The `number` most frequent entries of a file of public counts.

    Args:
      what: names the field of the config in errors.

    Raises:
      InputError: the file cannot be read, or has fewer entries.
      CorruptFile: it is a damaged archive.
    """
    counts = read_counts(path)
    if len(counts) < number:
        raise InputError(f"{path} has {len(counts)} entries, expected at least {what} = {number}")
    return tuple(islice(counts, number))
