"""The public corpora that FreD compares and that prefinetuning trains on.

They are the sources that a config names and the clients that it declares public.
"""

import hashlib
from collections.abc import Iterator, Mapping
from functools import cache

import numpy as np

from jaxpfl.data.columns import Column, take
from jaxpfl.data.population import Population
from jaxpfl.errors import InputError
from jaxpfl.experiments.central.prefinetune import Corpus
from jaxpfl.experiments.central.public_check import PrivateContent
from jaxpfl.experiments.engine.build import open_public
from jaxpfl.experiments.systems.federated_training.config import Config
from jaxpfl.text.tokenisers.base import TextEncoder
from jaxpfl.text.tokenisers.vocabulary import Vocabulary

ALONE = "public"
"""The name of the only candidate, `data.public`, where there is no `fred` section."""


class Candidates:
    """The candidates of a config, whose sources are read when they are first needed.

    Args:
      config: its `fred` section names the candidates; without one, `data.public` is the only one.
      public: the clients that `data.split.public` declares public, or None.
      private: the private content, which no candidate may contain.

    Attributes:
      sources: the sources by name.
      shares: the candidates by name, each as shares of sources, which sum to 1.
      population: returns the population of a source, and raises InputError if the source cannot be
        read or contains the private clients' data.
    """

    def __init__(self, config: Config, public: Population | None, private: PrivateContent) -> None:
        self._public, self._private = public, private
        fred, alone = config.fred, {ALONE: str(config.data.public)}
        self.sources = alone if fred is None else fred.sources
        self.shares = {
            name: {name: 1.0} if isinstance(given, str) else given
            for name, given in (alone if fred is None else fred.candidates).items()
        }
        self.population = cache(self._population)

    def _population(self, source: str) -> Population:
        what = "data.public" if source == ALONE else f"fred.candidates.{source}"
        return open_public(self.sources[source], self._public, self._private, what)

    def sample(self, source: str, column: str, limit: int, seed: int) -> Population:
        """At most `limit` randomly drawn examples of one source, as one client with one column."""
        population = self.population(source)
        values = _column(population, source, column)
        values = take(values, np.sort(_order(population, source, seed)[:limit]))
        return Population({column: values}, np.array([0, len(values)]), [source], source)

    def corpus(
        self,
        name: str,
        examples: int,
        valid: float,
        *,
        seed: int,
        columns: tuple[str, ...],
        encoder: Vocabulary | TextEncoder | None,
        sequence_length: int,
    ) -> Corpus:
        """The randomly drawn examples that candidate `name` is prefinetuned on.

        Every mixture takes the first examples of a source in the same random order, so that two
        mixtures share as many examples as possible.

        Args:
          examples: the number of examples, held-out ones included.
          valid: the fraction of each part of a mixture that is held out.
          columns: the columns that the model reads; `encoder` makes "tokens" from "text".
        """
        train: dict[str, list[Column]] = {column: [] for column in columns}
        held: dict[str, list[Column]] = {column: [] for column in columns}
        for source, number in _apportion(self.shares[name], examples).items():
            population = self.population(source)
            if number > population.num_examples:
                raise InputError(
                    f"candidate {name!r} needs {number} examples of {self.sources[source]!r}, "
                    f"which has {population.num_examples}: lower prefinetune.examples"
                )
            rows = _order(population, source, seed)[:number]
            held_out = round(valid * number)
            for column in columns:
                if column == "tokens":
                    assert encoder is not None
                    texts = take(_column(population, source, "text"), rows).to_pylist()
                    values = encoder.encode_texts(texts, sequence_length)
                else:
                    values = take(_column(population, source, column), rows)
                train[column].append(values[held_out:])
                held[column].append(values[:held_out])
        if not any(map(len, held[columns[0]])):
            raise InputError(
                f"prefinetune.valid = {valid:g} holds out no example of candidate {name!r}: raise "
                "prefinetune.examples"
            )
        parts = ({c: np.concatenate(rows) for c, rows in part.items()} for part in (train, held))
        return Corpus(name, *parts)

    def texts(self, limit: int, seed: int) -> Iterator[str]:
        """At most `limit` texts of each source, from which a public vocabulary is made."""
        for source in self.sources:
            yield from self.sample(source, "text", limit, seed).columns["text"].to_pylist()


def _column(population: Population, source: str, column: str) -> Column:
    if column not in population.columns:
        found = ", ".join(sorted(population.columns)) or "none"
        raise InputError(f"candidate {source!r} needs a column {column!r}, found {found}")
    if not population.num_examples:
        raise InputError(f"candidate {source!r} has no examples")
    return population.columns[column]


def _order(population: Population, source: str, seed: int) -> np.ndarray:
    """All rows of a source in a random order that follows from its name and the seed."""
    digest = hashlib.sha256(f"candidate {seed} {source}".encode()).digest()
    generator = np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:16], "big")))
    return generator.permutation(population.num_examples)


def _apportion(shares: Mapping[str, float], total: int) -> dict[str, int]:
    """Splits `total` into whole numbers in these proportions, by the largest remainder method."""
    exact = {name: share * total for name, share in shares.items()}
    counts = {name: int(value) for name, value in exact.items()}
    by_remainder = sorted(exact, key=lambda name: (counts[name] - exact[name], name))
    for name in by_remainder[: total - sum(counts.values())]:
        counts[name] += 1
    return {name: count for name, count in counts.items() if count}
