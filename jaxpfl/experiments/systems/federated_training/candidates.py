"""The public corpora of an experiment: what FreD compares and prefinetuning trains on.

Everything here is public: sources that a config names, and clients that it declares public.
"""

import hashlib
from collections.abc import Iterator, Mapping
from functools import cache

import numpy as np

from jaxpfl.data.columns import Column, take
from jaxpfl.data.population import Population
from jaxpfl.errors import InputError
from jaxpfl.experiments.central.prefinetune import Corpus
from jaxpfl.experiments.engine.build import open_public
from jaxpfl.experiments.engine.public_check import PrivateContent
from jaxpfl.experiments.systems.federated_training.config import Config
from jaxpfl.text.tokenisers.vocabulary import Vocabulary

ALONE = "public"
"""The candidate's name where there is no `fred` section: it is `data.public`."""


class Candidates:
    """The candidates of a config; sources are read when first needed.

    Args:
      config: its `fred` section names the candidates; without one, `data.public` is the only one.
      public: the clients that `data.split.public` declares public, or None.
      private: what no candidate may hold.
    """

    def __init__(self, config: Config, public: Population | None, private: PrivateContent) -> None:
        self._public, self._private = public, private
        fred = config.fred
        if fred is not None:
            self.sources = fred.sources
            self._shares = {name: fred.shares(name) for name in fred.candidates}
        else:
            assert config.data.public is not None
            self.sources = {ALONE: config.data.public}
            self._shares = {ALONE: {ALONE: 1.0}}
        self.population = cache(self._population)

    @property
    def names(self) -> list[str]:
        return list(self._shares)

    def shares(self, name: str) -> Mapping[str, float]:
        """What candidate `name` is made of: shares of `sources`, which sum to 1."""
        return self._shares[name]

    def _population(self, source: str) -> Population:
        """The examples of the source called `source`, an entry of `sources`.

        Raises:
          InputError: it cannot be read, or holds the private clients' data.
        """
        what = "data.public" if source == ALONE else f"fred.candidates.{source}"
        return open_public(self.sources[source], self._public, self._private, what)

    def sample(self, source: str, column: str, limit: int, seed: int) -> Population:
        """At most `limit` examples of one source, drawn at random, as one client's `column`.

        Raises:
          InputError: the source has no such column, or no examples.
        """
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
        vocabulary: Vocabulary | None,
        sequence_length: int,
    ) -> Corpus:
        """What candidate `name` is prefinetuned on: `examples` drawn at random.

        A source gives the first of its examples in one random order, so that two mixtures share
        what they can. Of every part of a mixture the fraction `valid` is held out.

        Args:
          columns: what the model reads; "tokens" are made of "text" by `vocabulary`.

        Raises:
          InputError: the sources hold too few examples.
        """
        drawn: dict[str, list[tuple[Column, int]]] = {column: [] for column in columns}
        for source, number in _apportion(self.shares(name), examples).items():
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
                    assert vocabulary is not None
                    texts = take(_column(population, source, "text"), rows).to_pylist()
                    values = vocabulary.encode_texts(texts, sequence_length)
                else:
                    values = take(_column(population, source, column), rows)
                drawn[column].append((values, held_out))
        if not any(held_out for _, held_out in drawn[columns[0]]):
            raise InputError(
                f"prefinetune.valid = {valid:g} holds out no example of candidate {name!r}: raise "
                "prefinetune.examples"
            )
        return Corpus(
            name,
            train={
                column: np.concatenate([values[held_out:] for values, held_out in parts])
                for column, parts in drawn.items()
            },
            valid={
                column: np.concatenate([values[:held_out] for values, held_out in parts])
                for column, parts in drawn.items()
            },
        )

    def texts(self, limit: int, seed: int) -> Iterator[str]:
        """Texts of all sources, at most `limit` of each: what a public vocabulary is made of."""
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
    """All rows of a source in one random order, a function of its name and the seed."""
    digest = hashlib.sha256(f"candidate {seed} {source}".encode()).digest()
    generator = np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:16], "big")))
    return generator.permutation(population.num_examples)


def _apportion(shares: Mapping[str, float], total: int) -> dict[str, int]:
    """Whole numbers that sum to `total`, by largest remainder."""
    exact = {name: share * total for name, share in shares.items()}
    counts = {name: int(value) for name, value in exact.items()}
    by_remainder = sorted(exact, key=lambda name: (counts[name] - exact[name], name))
    for name in by_remainder[: total - sum(counts.values())]:
        counts[name] += 1
    return {name: count for name, count in counts.items() if count}
