"""The public corpora that FreD compares and that prefinetuning trains on."""

from collections.abc import Callable, Iterator, Mapping
from functools import cache

import numpy as np

from jaxpfl.data.columns import take
from jaxpfl.data.draws import generator_of
from jaxpfl.data.population import Population
from jaxpfl.errors import InputError
from jaxpfl.experiments.central.prefinetune import Corpus
from jaxpfl.experiments.central.public_check import PrivateContent
from jaxpfl.experiments.engine.build import open_public
from jaxpfl.experiments.systems.federated_training.config import Config

ALONE = "public"
"""The name of the only candidate, `data.public`, where there is no `fred` section."""


class Candidates:
    """The candidates of a config, whose sources are read when they are first needed.

    Without a section `fred`, `data.public` is the only one.

    Attributes:
      shares: the candidates by name, each as shares of sources, which sum to 1.
      population: of a source; `InputError` if it cannot be read or has the private clients' data.
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
        rows = np.sort(self._order(source, seed)[:limit])
        return self._examples(source, (column,), rows)

    def corpus(
        self,
        name: str,
        examples: int,
        valid: float,
        *,
        seed: int,
        columns: tuple[str, ...],
        encode: Callable[[Population], Population] | None,
    ) -> Corpus:
        """The randomly drawn examples, held-out ones included, that a candidate is prefinetuned on.

        Every mixture takes the first examples of a source in the same random order, so that two
        mixtures share as many examples as possible.

        Args:
          valid: the fraction of each part of a mixture that is held out.
          columns: the columns that the model reads; `encode` makes them from "text", if given.
        """
        train, held = [], []
        for source, number in _apportion(self.shares[name], examples).items():
            rows = self._order(source, seed)
            if number > len(rows):
                raise InputError(
                    f"candidate {name!r} needs {number} examples of {self.sources[source]!r}, "
                    f"which has {len(rows)}: lower prefinetune.examples"
                )
            drawn = self._examples(source, ("text",) if encode else columns, rows[:number])
            values = dict((encode(drawn) if encode else drawn).columns)
            held_out = round(valid * number)
            train.append({column: values[column][held_out:] for column in columns})
            held.append({column: values[column][:held_out] for column in columns})
        if not any(len(part[columns[0]]) for part in held):
            raise InputError(
                f"prefinetune.valid = {valid:g} holds out no example of candidate {name!r}: raise "
                "prefinetune.examples"
            )
        joined = (
            {column: np.concatenate([part[column] for part in parts]) for column in columns}
            for parts in (train, held)
        )
        return Corpus(name, *joined)

    def texts(self, limit: int, seed: int) -> Iterator[str]:
        """At most `limit` texts of each source, from which a public vocabulary is made."""
        for source in self.sources:
            yield from self.sample(source, "text", limit, seed).columns["text"].to_pylist()

    def _examples(self, source: str, columns: tuple[str, ...], rows: np.ndarray) -> Population:
        """Some examples of a source, as one client."""
        population = self.population(source)
        if not population.num_examples:
            raise InputError(f"candidate {source!r} has no examples")
        values = {column: take(population.column(column), rows) for column in columns}
        return Population(values, np.array([0, len(rows)]), [source], source)

    def _order(self, source: str, seed: int) -> np.ndarray:
        """All rows of a source in a random order that follows from its name and the seed."""
        examples = self.population(source).num_examples
        return generator_of(f"candidate {seed} {source}").permutation(examples)


def _apportion(shares: Mapping[str, float], total: int) -> dict[str, int]:
    """Splits `total` into whole numbers in these proportions, by the largest remainder method."""
    exact = {name: share * total for name, share in shares.items()}
    counts = {name: int(value) for name, value in exact.items()}
    by_remainder = sorted(exact, key=lambda name: (counts[name] - exact[name], name))
    for name in by_remainder[: total - sum(counts.values())]:
        counts[name] += 1
    return {name: count for name, count in counts.items() if count}
