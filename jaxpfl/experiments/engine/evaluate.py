"""Evaluation of a model on clients, or a corpus, that are declared public.

A metric on private validation data is a release like any other. Nothing here charges for one, so
data that is not declared public is refused.
"""

from copy import copy
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxpfl import checks
from jaxpfl.data.population import Population
from jaxpfl.errors import InputError
from jaxpfl.experiments.central.scoring import Batches, Pending, in_batches, on_one_device, score
from jaxpfl.federated.clients.client import Static
from jaxpfl.models.base import Checking, Model, require_model
from jaxpfl.printable import facts

if TYPE_CHECKING:
    from jaxpfl.experiments.engine.by_client import ClientScores, GroupScores
    from jaxpfl.text.tokenisers.vocabulary import Vocabulary


@dataclass(frozen=True)
class DeclaredPublic:
    """The user's statement, in the code or the config, that these clients' data is public.

    `name`, by default the population's own, is shown beside all results on them.
    """

    population: Population = field(repr=False)
    name: str = ""

    def __post_init__(self) -> None:
        hint = "a Population, see jaxpfl.data.open"
        checks.instance("declared-public data", self.population, Population, hint)
        checks.instance("its name", self.name, str, "a text")

    @property
    def described(self) -> str:
        return f"{self.name or self.population.name} (declared public)"


class Evaluator:
    """Batched, jitted evaluation of `model` on declared-public examples.

    Args:
      model: its `evaluate` returns the sums of the metrics over a batch.
      max_examples: a larger population is subsampled to this many, the same in every run.
      vocabulary: of a language model, to generate sentences at each evaluation of a run; None
        generates none.

    Raises:
      InputError: if `public` is not a `DeclaredPublic`, has no examples, or does not have what
        the model reads.
    """

    def __init__(
        self,
        model: Model,
        public: DeclaredPublic,
        *,
        max_examples: int = 2_000,
        batch_size: int = 128,
        vocabulary: "Vocabulary | None" = None,
    ) -> None:
        if not isinstance(public, DeclaredPublic):
            why = f"found {type(public).__name__}: a metric on private clients is a release"
            raise InputError(f"evaluation data must be wrapped in DeclaredPublic(...), {why}")
        require_model(model)
        if vocabulary is not None:
            from jaxpfl.text.tokenisers.vocabulary import Vocabulary

            checks.instance("vocabulary", vocabulary, Vocabulary, "a jaxpfl.text.Vocabulary")
        self.model, self.vocabulary = model, vocabulary
        self.name = public.described
        self._max_examples = checks.positive_int("max_examples", max_examples)
        self._batch_size = checks.positive_int("batch_size", batch_size)
        self.population = public.population
        if not self.population.num_examples:
            more = "give a larger fraction of the clients to it"
            raise InputError(f"the evaluation data must have examples, found none: {more}")
        check_examples(model, self.population, self.name)

    def on(self, population: Population) -> "Evaluator":
        """The same evaluation on fewer examples, which its name says."""
        left_out = self.population.num_examples - population.num_examples
        if not left_out:
            return self
        evaluator = copy(self)
        evaluator.population = population
        evaluator.name = f"{self.name}, without {left_out} examples that clients who train hold"
        for cached in ("columns", "_batches"):
            vars(evaluator).pop(cached, None)
        return evaluator

    def _repr_html_(self) -> str:
        scored = {"on": self.name, "examples, at most": self._max_examples}
        return facts("Evaluator", {"model": type(self.model).__name__, **scored})

    @cached_property
    def columns(self) -> dict[str, np.ndarray]:
        """The examples in use, so that a baseline can be evaluated on the same ones."""
        rows = np.arange(self.population.num_examples)
        if len(rows) > self._max_examples:
            generator = np.random.Generator(np.random.Philox(key=0))
            rows = np.sort(generator.choice(len(rows), self._max_examples, replace=False))
        return {name: column[rows] for name, column in self.population.numeric().items()}

    @cached_property
    def _batches(self) -> Batches:
        return in_batches(self.columns, self._batch_size)

    def __call__(self, params: Any) -> Pending:
        """Dispatches the evaluation of `params` and returns without waiting."""
        return score(Static(self.model), on_one_device(params), self._batches)

    def by_client(self, params: Any) -> "ClientScores":
        """Scores parameters, shared or by client (`jaxpfl.Personal`), on each client's examples."""
        # Seldom used, and therefore loaded here.
        from jaxpfl.experiments.engine.by_client import ClientScores

        offsets, columns = self.population.offsets, self.population.numeric()
        clients, pending, model = np.flatnonzero(np.diff(offsets)), [], Static(self.model)
        for client in clients.tolist():
            own = on_one_device(params(client) if callable(params) else params)
            rows = slice(*offsets[client : client + 2])
            examples = {name: column[rows] for name, column in columns.items()}
            pending.append(score(model, own, in_batches(examples, self._batch_size)))
        scores = [sums.result() for sums in pending]
        by_metric = {name: np.array([of_one[name] for of_one in scores]) for name in scores[0]}
        return ClientScores(clients, by_metric)

    def by_group(
        self, column: str, params: Any, *, untrained: Any, noiseless: Any
    ) -> "GroupScores":
        """Scores by groups of clients, which a public column names: whom the noise harms.

        `params` are of the private run; `untrained`, where it began; `noiseless`, of the same run
        without privacy, which a SIMULATION alone can have. All examples of a client must have one
        value in the column: `InputError`.
        """
        from jaxpfl.experiments.engine.by_client import MODELS, GroupScores

        models = zip(MODELS, (untrained, noiseless, params), strict=True)
        scores = {name: self.by_client(model) for name, model in models}
        population = self.population
        if column not in population.columns:
            names = ", ".join(population.columns) or "none"
            raise InputError(f"{population.name} has no column {column!r} of groups, only {names}")
        values = population.columns[column]
        of_examples = values.tolist() if isinstance(values, np.ndarray) else values.to_pylist()
        clients = next(iter(scores.values())).clients
        group_C = np.full(len(clients), "", object)
        for place, client in enumerate(clients.tolist()):
            low, high = population.offsets[client : client + 2].tolist()
            own = {str(value) for value in of_examples[low:high]}
            if len(own) > 1:
                one = "one value for all examples of a client"
                raise InputError(f"{column!r} must have {one}, found {len(own)} of client {client}")
            (group_C[place],) = own
        names = sorted(set(group_C.tolist()))
        means: dict[str, dict[str, dict[str, float]]] = {model: {} for model in scores}
        for model, name in product(scores, names):
            own = {m: v[group_C == name] for m, v in scores[model].scores.items() if m != "count"}
            means[model][name] = {metric: float(np.mean(values)) for metric, values in own.items()}
        return GroupScores(column, {name: int(np.sum(group_C == name)) for name in names}, means)


def check_examples(model: Model, population: Population, name: str) -> None:
    """Refuses examples that the model cannot read; messages contain no values of the data."""
    numeric, columns = population.numeric(), population.columns
    for column in model.columns or ():
        if column not in numeric:
            hint = ": encode the text by the clients' vocabulary" if "text" in columns else ""
            has = f"{name} has only {', '.join(columns) or 'none'}"
            raise InputError(f"the model reads a column {column!r}, but {has}{hint}")
    if isinstance(model, Checking):
        model.check(numeric)
