"""The public corpora that FreD compares and that prefinetuning trains on."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import numpy as np

from jaxpfl.algorithms.gaussian_moments import Moments, mixture, moments
from jaxpfl.data.columns import take
from jaxpfl.data.draws import generator_of
from jaxpfl.data.population import Population
from jaxpfl.errors import InputError
from jaxpfl.experiments.central.prefinetune import Corpus
from jaxpfl.experiments.central.public_check import PrivateContent
from jaxpfl.experiments.central.text_pool import rows_by_corpus
from jaxpfl.experiments.config.sections import PrefinetuneConfig
from jaxpfl.experiments.engine.build import open_public
from jaxpfl.experiments.systems.federated_training.config import CHOSEN, Config
from jaxpfl.text.cut import Cut
from jaxpfl.text.embed import Embedder, embed, embeddings_of

Encode = Callable[[Population], Population]

ALONE = "public"
"""The name of the only candidate, `data.public`, where there is no `fred` section."""


@dataclass(frozen=True)
class Candidates:
    """The candidates of a config.

    Attributes:
      sources: the sources by name, as the config names them.
      shares: the candidates by name, each as shares of sources, which sum to 1.
      populations: the examples of each source.
      seed: decides which examples are drawn.
      most: the most examples of a source that are compared.
    """

    sources: Mapping[str, str]
    shares: Mapping[str, Mapping[str, float]]
    populations: Mapping[str, Population] = field(repr=False)
    seed: int
    most: int = 20_000

    @classmethod
    def of(cls, config: Config, public: Population, private: PrivateContent) -> Self:
        """Opens the sources of a config; `InputError` for one that holds the clients' data."""
        fred, seed = config.fred, config.run.seed
        if fred is None:
            source = str(config.data.public)
            populations = {ALONE: open_public(source, public, private, "data.public")}
            return cls({ALONE: source}, {ALONE: {ALONE: 1.0}}, populations, seed)
        populations = {
            name: open_public(source, public, private, f"fred.candidates.{name}")
            for name, source in fred.sources.items()
        }
        return cls(fred.sources, fred.shares, populations, seed, fred.max_candidate_examples)

    def cut(self, cut: Cut) -> Self:
        """The same candidates, whose texts are cut by this rule."""
        pieces = {name: cut.population(whole) for name, whole in self.populations.items()}
        return replace(self, populations=pieces)

    def sample(self, source: str, column: str) -> Population:
        """At most `most` randomly drawn examples of one source, as one client with one column."""
        return self._examples(source, (column,), self._sampled(source))

    def embeddings(self, function: Embedder) -> dict[str, np.ndarray]:
        """The embeddings of the `sample` of each source, float32 [examples, d]."""
        samples = {source: self.sample(source, function.column) for source in self.sources}
        return {source: embeddings_of(embed(one, function)) for source, one in samples.items()}

    def moments(self, embeddings: Mapping[str, np.ndarray], clip_norm: float) -> dict[str, Moments]:
        """The moments of all candidates; a mixture's are computed from those of its sources."""
        of_source = {source: moments(rows, clip_norm) for source, rows in embeddings.items()}
        mixed = {}
        for name, shares in self.shares.items():
            parts = [of_source[source] for source in shares]
            mixed[name] = mixture(parts, list(shares.values())) if len(parts) > 1 else parts[0]
        return mixed

    def parts(self, name: str, settings: PrefinetuneConfig) -> dict[str, tuple[int, int]]:
        """How many examples of each source a candidate has, and how many of these are held out.

        Raises:
          InputError: a source has too few, or none is held out.
        """
        # Whole numbers in the proportions of the shares, by the largest remainder method.
        exact = {source: share * settings.examples for source, share in self.shares[name].items()}
        numbers, parts = {source: int(number) for source, number in exact.items()}, {}
        by_remainder = sorted(exact, key=lambda source: (numbers[source] - exact[source], source))
        for source in by_remainder[: settings.examples - sum(numbers.values())]:
            numbers[source] += 1
        for source, number in numbers.items():
            if number > (available := self.populations[source].num_examples):
                needed = f"{number} examples of {self.sources[source]!r}, which has {available}"
                raise InputError(f"candidate {name!r} needs {needed}: lower prefinetune.examples")
            if number:
                parts[source] = number, round(settings.valid * number)
        if not any(held_out for _, held_out in parts.values()):
            problem = f"holds out no example of candidate {name!r}: raise prefinetune.examples"
            raise InputError(f"prefinetune.valid = {settings.valid:g} {problem}")
        return parts

    def corpus(
        self, name: str, settings: PrefinetuneConfig, columns: tuple[str, ...], encode: Encode
    ) -> Corpus:
        """The randomly drawn examples, held-out ones included, that a candidate is prefinetuned on.

        Every mixture takes the first examples of a source in the same random order, so that two
        mixtures share as many examples as possible. Errors are those of `parts`.

        Args:
          columns: the columns that the model reads; `encode` makes "tokens" from "text".
        """
        train, valid = [], []
        for source, (number, held_out) in self.parts(name, settings).items():
            rows = self._order(source)[:number]
            examples = encode(self._examples(source, columns, rows)).columns
            train.append({column: examples[column][held_out:] for column in columns})
            valid.append({column: examples[column][:held_out] for column in columns})
        return Corpus(name, *(_joined(parts, columns) for parts in (train, valid)))

    def chosen(
        self, rows_M: np.ndarray, valid: float, columns: tuple[str, ...], encode: Encode
    ) -> Corpus:
        """As `corpus`, of rows that were chosen of all sources' `sample`s, one after another.

        The fraction `valid` of them is held out.
        """
        pool = {source: self._sampled(source) for source in self.sources}
        rows = rows_by_corpus(rows_M, {source: len(sampled) for source, sampled in pool.items()})
        parts = [
            encode(self._examples(source, columns, pool[source][of_source])).columns
            for source, of_source in rows.items()
            if len(of_source)
        ]
        joined = _joined(parts, columns).items()
        order = generator_of(f"chosen {self.seed}").permutation(len(rows_M))
        halves = np.split(order, [round(valid * len(rows_M))])
        held_out, train = ({column: values[half] for column, values in joined} for half in halves)
        return Corpus(CHOSEN, train, held_out)

    def _sampled(self, source: str) -> np.ndarray:
        """The rows of a source's `sample`, ascending."""
        return np.sort(self._order(source)[: self.most])

    def _examples(self, source: str, columns: tuple[str, ...], rows: np.ndarray) -> Population:
        """Some examples of a source, as one client; "tokens" are made of their "text"."""
        population, read = self.populations[source], ("text",) if "tokens" in columns else columns
        if not population.num_examples:
            raise InputError(f"candidate {source!r} has no examples")
        values = {column: take(population.column(column), rows) for column in read}
        return Population(values, np.array([0, len(rows)]), [source], source)

    def _order(self, source: str) -> np.ndarray:
        """All rows of a source in a random order that follows from its name and the seed."""
        examples = self.populations[source].num_examples
        return generator_of(f"candidate {self.seed} {source}").permutation(examples)


def _joined(parts: Sequence[Mapping], columns: tuple[str, ...]) -> dict[str, np.ndarray]:
    return {column: np.concatenate([part[column] for part in parts]) for column in columns}
