"""What private clients hold, counted by ONE release with user-level privacy.

Each example has a row of counts, such as its words out of the vocabulary and its other words. A
client adds up the rows of its examples, once, and the sum of all clients is released with noise.

Guarantee: a client's sum is clipped to the plan's clip norm S in L2 norm, which leaves the ratios
of its counts as they are. The release is a Gaussian mechanism with the plan's noise multiplier.
Where no client can count more than S, nothing is clipped.

The task comes from Augenstein et al. 2020 ("Generative models for effective ML on private,
decentralized datasets"), Table 6. The mechanism is our own.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np

from jaxpfl.algorithms.base import Algorithm, answered_once
from jaxpfl.data.cohort import CohortSpec
from jaxpfl.federated.clients.client import Batch
from jaxpfl.federated.release.query import Execution, Query
from jaxpfl.privacy.clipping import Clip
from jaxpfl.privacy.participation import Poisson
from jaxpfl.privacy.plan import Plan

COLUMN = "counts"


def plan_of_everyone(
    population: int, clip_norm: float, epsilon: float | None, delta: float | None
) -> Plan:
    """One round in which every client takes part; with neither it is NOT private."""
    terms: Any = {"rounds": 1, "clip": Clip(float(clip_norm))}
    terms["participation"] = Poisson(population, population)
    if epsilon is None and delta is None:
        return Plan.without_privacy(**terms)
    return Plan.calibrated(epsilon=cast(float, epsilon), delta=cast(float, delta), **terms)


def federated_sums(plan: Plan, *, length: int, max_examples: int) -> Algorithm:
    """Returns the release of the sum of the column "counts" as an algorithm of one round.

    Args:
      plan: see `plan_of_everyone`.
      length: of a row of the column, which is float32 [examples, length] and not negative.
      max_examples: a client with more examples counts a uniform subset of this many.

    Returns:
      The algorithm, whose last state is the noisy sum, float32 [length].
    """
    most, per_bucket = max_examples, 32 * Execution().replicas
    cohort = CohortSpec(min(256, most), most, clients_per_bucket=per_bucket)
    query = Query("sums", ClientSums(length), plan, cohort, columns=(COLUMN,))
    return answered_once("federated_sums", query, jnp.zeros(length, jnp.float32))


@dataclass(frozen=True)
class ClientSums:
    """The client function, by steps: the sum of a client's rows, float32 [length]."""

    length: int

    def init(self, broadcast: Any, key: jax.Array) -> Any:
        """The sum of no rows."""
        del broadcast, key  # nothing is trained, and nothing is random
        return jnp.zeros(self.length, jnp.float32)

    def step(self, broadcast: Any, state: Any, batch: Batch, mask_B: jax.Array, key: Any) -> Any:
        """Adds the rows of one batch."""
        return state + jnp.sum(jnp.where(mask_B[:, None], batch[COLUMN], 0), axis=0)

    def finish(self, broadcast: Any, state: Any) -> Any:
        """The sum as it is."""
        return state


class Rates(NamedTuple):
    """Shares of two counts as released, and the standard deviations of their noise; public.

    Both are float64 [groups], and NaN where the noise hides the group: where the noisy number of
    all that is counted is not above its own noise.
    """

    rate_G: np.ndarray
    noise_G: np.ndarray

    @classmethod
    def of(cls, plan: Plan, sum_C: Any) -> "Rates":
        """From the last state of `federated_sums`, whose row has the pairs (these, others)."""
        these_G, others_G = np.asarray(sum_C, np.float64).reshape(-1, 2).T
        noise, total_G = plan.value_noise_std(plan.clip_norm), these_G + others_G
        total_G = np.where(total_G > np.sqrt(2) * noise, total_G, np.nan)
        rate_G = np.clip(these_G / total_G, 0.0, 1.0)
        return cls(rate_G, noise * np.hypot(rate_G, 1 - rate_G) / total_G)
