"""What differs between clients declared public: scores, also by group, and models of their own."""

import dataclasses
import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpfl import checks
from jaxpfl.data.cohort import CohortSpec, batches
from jaxpfl.data.population import Population
from jaxpfl.federated.clients.client import Examples, Static, computed, first_state, next_state
from jaxpfl.federated.clients.local_training import LocalTraining
from jaxpfl.federated.clients.personal import BestFitting, Personalising
from jaxpfl.models.base import Params

SIMULATION = (
    "SIMULATION: the run without noise read the same clients without privacy; a deployment has "
    "no such run."
)
MODELS = UNTRAINED, NOISELESS, PRIVATE = "untrained", "without noise", "with noise"


@dataclasses.dataclass(frozen=True)
class ClientScores:
    """What a model scores on each client that has examples.

    Attributes:
      clients: their indices, int64 [n].
      scores: {metric: float64 [n]}, with "count", the number of targets.
    """

    clients: np.ndarray
    scores: Mapping[str, np.ndarray]

    def distribution(self) -> dict[str, dict[str, float]]:
        """How each metric differs between clients, all of which count alike.

        "mean"; the percentiles "p10", "p25", "p50", "p75" and "p90"; "worst tenth", the mean of the
        ceil(n / 10) clients with the lowest accuracy, or the highest value of another metric (Li et
        al. 2020, "Fair Resource Allocation in Federated Learning", section 4); and "gini", the mean
        difference of two clients over twice the mean, 0 where all are alike.
        """
        number = len(self.clients)
        tenth, shares, distributions = math.ceil(number / 10), (10, 25, 50, 75, 90), {}
        # A client counts by how many it is above, minus how many it is below: each pair once.
        above = 2 * np.arange(number) + 1 - number
        for metric in [name for name in self.scores if name != "count"]:
            rising = np.sort(self.scores[metric])
            worst, mean = rising[:tenth] if metric == "accuracy" else rising[-tenth:], rising.mean()
            distributions[metric] = {
                "mean": float(mean),
                **{f"p{share}": float(np.percentile(rising, share)) for share in shares},
                "worst tenth": float(np.mean(worst)),
                "gini": float(above @ rising / (number**2 * mean)) if mean else 0.0,
            }
        return distributions


@dataclasses.dataclass(frozen=True)
class GroupScores:
    """What three models score on groups of clients: whom the noise harms.

    Noise and clipping can cost small groups more than others (Bagdasaryan, Poursaeed, Shmatikov
    2019, "Differential privacy has disparate impact on model accuracy"). What is due to the noise
    shows beside a run without it on the same clients, which is not private: a SIMULATION.

    Attributes:
      column: the public column whose value is a client's group.
      clients: the number of scored clients of each group.
      means: {model: {group: {metric: mean over the group's clients, who all count alike}}}, with
        the models "untrained", "without noise" and "with noise".
    """

    column: str
    clients: Mapping[str, int]
    means: Mapping[str, Mapping[str, Mapping[str, float]]]

    def rows(self, metric: str) -> list[dict[str, Any]]:
        """A row for each group: its clients, a score for each model, and the cost of noise."""
        rows = []
        for group, number in self.clients.items():
            scores = {model: groups[group][metric] for model, groups in self.means.items()}
            cost = scores[PRIVATE] - scores[NOISELESS]
            rows.append({self.column: group, "clients": number, **scores, "cost of noise": cost})
        return rows

    def __str__(self) -> str:
        lines = [SIMULATION]
        for metric in next(iter(self.means[PRIVATE].values())):
            lines.append(f"{metric}, mean over clients by {self.column}:")
            for row in self.rows(metric):
                (_, group), (_, number), *scores = row.items()
                shown = ", ".join(f"{name} {value:.4g}" for name, value in scores)
                lines.append(f"  {group} ({number} clients): {shown}")
        return "\n".join(lines)


@dataclasses.dataclass(frozen=True)
class Personal:
    """Clients' own models: what training on a client's own examples makes of the shared one.

    Called with the index of a client, it returns the parameters of its own model.

    Attributes:
      client: `federated.Ditto`, `APFL` or `PersonalParts`, for the own model of a client that takes
        part once; a plain `federated.LocalTraining`, for what it trains (fine-tuning); or IFCA's,
        `algorithm.queries[0].client_fn`, for the one of its `params` that fits the client best.
      examples: of the same clients as are scored, but not what they are scored on.
      cohort: batch size, epochs and most examples of this training.
    """

    client: LocalTraining | Personalising | BestFitting
    params: Params
    examples: Population
    cohort: CohortSpec

    def __post_init__(self) -> None:
        if type(self.client) not in (LocalTraining, BestFitting):
            hint = "such as jaxpfl.federated.Ditto(...)"
            checks.instance("client", self.client, Personalising, hint)

    def __call__(self, client: int) -> Params:
        """Trains on at most `max_examples` of the client's examples, in a new order each epoch.

        A client without examples has the shared model, or IFCA's first.
        """
        spec, draws = self.cohort, np.random.default_rng(client)
        low, high = self.examples.offsets[client : client + 2]
        chosen = low + draws.permutation(high - low)[: spec.max_examples]
        if not len(chosen):
            clusters = isinstance(self.client, BestFitting)
            return jax.tree.map(lambda leaf: leaf[0], self.params) if clusters else self.params
        orders = (draws.permutation(len(chosen)) for _ in range(spec.epochs))
        epochs = [batches(order, spec.batch_size) for order in orders]
        rows, mask = (np.concatenate(parts) for parts in zip(*epochs, strict=True))
        # One shape for all clients, and one compilation.
        steps, missing = jnp.int32(len(rows)), ((0, spec.max_steps - len(rows)), (0, 0))
        rows, mask = np.pad(rows, missing), np.pad(mask, missing)
        batch = {name: x[chosen][rows] for name, x in self.examples.numeric().items()}
        examples = Examples(batch, jnp.asarray(mask), steps)
        return _trained(Static(self.client), self.params, examples, jax.random.key(client))


@partial(jax.jit, static_argnums=0)
def _trained(static: Static, params: Params, examples: Examples, key: jax.Array) -> Params:
    client = static.function
    if isinstance(client, BestFitting):
        chosen = client.chosen(params, examples)
        return jax.tree.map(lambda leaf: leaf[chosen], params)
    sent, state = computed(client, params, first_state(client, params), examples, key)
    if isinstance(client, Personalising):
        return client.own_model(params, next_state(client, params, state, sent))
    return jax.tree.map(jnp.add, params, sent)
