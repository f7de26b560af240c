"""Whom noise harms: scores by groups of clients declared public, beside a run without noise.

Noise and clipping can cost small groups more than others (Bagdasaryan, Poursaeed, Shmatikov 2019,
"Differential privacy has disparate impact on model accuracy"). How much is due to the noise alone
shows only beside a run without it on the same clients, which is not private: a SIMULATION.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxpfl.data.population import Population
from jaxpfl.errors import InputError
from jaxpfl.experiments.engine.by_client import ClientScores

SIMULATION = (
    "SIMULATION: the run without noise read the same clients without privacy; a deployment has "
    "no such run."
)
MODELS = UNTRAINED, NOISELESS, PRIVATE = "untrained", "without noise", "with noise"


@dataclasses.dataclass(frozen=True)
class GroupScores:
    """What three models score on groups of clients.

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
        return [
            {
                self.column: group,
                "clients": number,
                **{model: groups[group][metric] for model, groups in self.means.items()},
                "cost of noise": self.means[PRIVATE][group][metric]
                - self.means[NOISELESS][group][metric],
            }
            for group, number in self.clients.items()
        ]

    def __str__(self) -> str:
        lines = [SIMULATION]
        for metric in next(iter(self.means[PRIVATE].values())):
            lines.append(f"{metric}, mean over clients by {self.column}:")
            for row in self.rows(metric):
                group, *values = row.values()
                shown = [f"{value:.4g}" for value in values[1:]]
                names = [*self.means, "cost of noise"]
                scores = ", ".join(f"{n} {v}" for n, v in zip(names, shown, strict=True))
                lines.append(f"  {group} ({values[0]} clients): {scores}")
        return "\n".join(lines)


def group_scores(
    population: Population, column: str, scores: Mapping[str, ClientScores]
) -> GroupScores:
    """Puts the scores of clients declared public together by the groups that a column names.

    Raises:
      InputError: there is no such column, or a client's examples are of several groups.
    """
    groups_N = _groups(population, column)
    clients = next(iter(scores.values())).clients
    group_C = groups_N[clients]
    names = sorted(set(group_C.tolist()))
    means = {
        model: {
            name: {
                metric: float(np.mean(values[group_C == name]))
                for metric, values in found.scores.items()
                if metric != "count"
            }
            for name in names
        }
        for model, found in scores.items()
    }
    return GroupScores(column, {name: int(np.sum(group_C == name)) for name in names}, means)


def _groups(population: Population, column: str) -> np.ndarray:
    """The group of each client as text [clients]; "" for one without examples."""
    if column not in population.columns:
        known = ", ".join(population.columns)
        raise InputError(
            f"{population.name} has no column {column!r} of groups, only {known or 'none'}"
        )
    values = population.columns[column]
    of_examples = values.tolist() if isinstance(values, np.ndarray) else values.to_pylist()
    groups = np.full(len(population), "", object)
    for client, (low, high) in enumerate(
        zip(population.offsets[:-1].tolist(), population.offsets[1:].tolist(), strict=True)
    ):
        own = {str(value) for value in of_examples[low:high]}
        if len(own) > 1:
            raise InputError(
                f"the column {column!r} must have one value for all examples of a client, found "
                f"{len(own)} of client {client}"
            )
        groups[client] = own.pop() if own else ""
    return groups
