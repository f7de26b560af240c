"""IFCA: clients of several kinds, each of which trains the model that fits its data best.

Source: Ghosh, Chung, Yin, Ramchandran 2020, "An Efficient Framework for Clustered Federated
Learning", Algorithm 1, model averaging.

    for each round t:
        sample a cohort                                 each client with probability q
        for each client i in the cohort:
            j = argmin_j  loss of theta_j on its own examples
            send k blocks, zeros but for block j:  clip_S(LocalTraining(theta_j) - theta_j)
        theta_j = server optimiser(theta_j, -release_j / n)        for each of the k models

A round releases one noisy sum of k blocks, with noise on all. One block of a contribution is not
zero, so that its norm is S at most, and a round costs as much as one of `fed_avg`. The number of
clients that chose a model is private: its block is divided by n, the planned cohort, as in the
paper's gradient averaging. A count of each cluster would take a part of the contribution's norm,
and the quotient of two noisy sums is worst for the smallest cluster. Where clusters are equal, a
server's rate of k makes up for it.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxpfl import checks
from jaxpfl.algorithms.base import Algorithm, require_parts
from jaxpfl.algorithms.fed_avg import fed_avg
from jaxpfl.federated.clients.client import PyTree
from jaxpfl.federated.clients.local_training import LocalTraining
from jaxpfl.federated.clients.personal import BestFitting
from jaxpfl.models.base import Model
from jaxpfl.privacy.plan import Plan


@dataclasses.dataclass(frozen=True)
class Clusters:
    """k models: parameters with an axis [k] before their own. It is initialised, not trained."""

    model: Model
    clusters: int

    @property
    def columns(self) -> tuple[str, ...] | None:
        return self.model.columns

    def init(self, key: jax.Array) -> PyTree:
        """k drawn models."""
        drawn = [self.model.init(own) for own in jax.random.split(key, self.clusters)]
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *drawn)


def ifca(
    model: Model,
    *,
    clusters: int,
    client: optax.GradientTransformation,
    server: optax.GradientTransformation,
    plan: Plan,
    **settings: Any,
) -> Algorithm:
    """Returns IFCA for `clusters` copies of `model` under `plan`.

    Args:
      clusters: k. The parameters, of `start` too, have an axis [k] before their own.
      server, plan, settings: as for `fed_avg`.

    State and metrics are those of `fed_avg`. A client finds its model by its own data, by
    `jaxpfl.Personal` with the query's `client_fn`. All are exported (`cluster_1`, ...).
    `InputError` if an argument is of another kind or out of range.
    """
    require_parts(model, plan, client=client, server=server)
    several: Any = Clusters(model, checks.positive_int("clusters", clusters))
    choosing = BestFitting(model, LocalTraining(model, client))
    made = fed_avg(several, client=choosing, server=server, plan=plan, **settings)
    return made._replace(name="ifca")
