"""What is measured or counted on private clients, each by ONE release with user-level privacy.

ACCURACIES of a model (`federated_metrics`). A threshold, a model or a step that was chosen by the
clients' accuracies reveals something about them, so the accuracies are released with noise. Every
client contributes one vector, once:

    sqrt(h)      times the one-hot vector of the bin that contains the client's own accuracy
    sqrt(1 - h)  times its share of correct, and its share of incorrect examples

The shares are non-negative and sum to 1, so the vector has L2 norm at most 1. The histogram's share
h of the squared norm decides how precise the histogram is compared with the mean accuracy. A client
without examples contributes zero; all others weigh the same, however many examples they have.

Guarantee: the sum changes by at most 1 in L2 norm when a client is added or removed, and the noise
has standard deviation z, so the release is a Gaussian mechanism with noise multiplier z.

The task comes from Augenstein et al. 2020 ("Generative models for effective ML on private,
decentralized datasets"), appendix C.3, where thresholds are percentiles of user accuracy. The
mechanism is our own.

SUMS of counts (`federated_sums`). Each example has a row of counts, such as its words out of the
vocabulary and its other words. A client adds up the rows of its examples, once, and the sum of all
clients is released with noise.

Guarantee: a client's sum is clipped to the plan's clip norm S in L2 norm, which leaves the ratios
of its counts as they are. The release is a Gaussian mechanism with the plan's noise multiplier.
Where no client can count more than S, nothing is clipped. The task is that of the paper's Table 6;
the mechanism is our own.
"""

import dataclasses
import math
from typing import Any, NamedTuple, Self, cast

import jax
import jax.numpy as jnp
import numpy as np
from scipy import optimize

from jaxpfl import checks
from jaxpfl.algorithms.base import Algorithm, answered_once, releaser_of, run_rounds
from jaxpfl.checked import Checked, OpenFraction, PositiveInt
from jaxpfl.data.population import Population, one_per_example
from jaxpfl.errors import InputError
from jaxpfl.federated.clients.client import Batch
from jaxpfl.privacy.clipping import Clip
from jaxpfl.privacy.keys import RunSecret
from jaxpfl.privacy.ledger import Ledger
from jaxpfl.privacy.participation import Poisson
from jaxpfl.privacy.plan import Plan

LABEL, COLUMN = "federated_metrics", "counts"
TWENTIETHS = tuple(i / 20 for i in range(21))


def _everyone(population: int, clip_norm: float) -> Any:
    """The terms of a plan of one round in which every client takes part."""
    clip, participation = Clip(float(clip_norm)), Poisson(population, population)
    return {"rounds": 1, "clip": clip, "participation": participation}


def plan_of_everyone(
    population: int, clip_norm: float, epsilon: float | None, delta: float | None
) -> Plan:
    """One round in which every client takes part; with neither it is NOT private."""
    terms = _everyone(population, clip_norm)
    if epsilon is None and delta is None:
        return Plan.without_privacy(**terms)
    return Plan.calibrated(epsilon=cast(float, epsilon), delta=cast(float, delta), **terms)


@dataclasses.dataclass(frozen=True)
class MetricsPlan(Checked):
    """The settings of one release of metrics; every field is public.

    Attributes:
      release: the plan of one round in which every client takes part, with the clip norm 1 that the
        `weights` give a client; `calibrated` and `without_privacy` make it.
      edges: edges of the histogram's bins, increasing from 0 to 1. A bin includes its lower edge,
        and the last bin includes both. All bins have equal noise, so narrow bins where thresholds
        are expected cost little.
      histogram_share: h, the histogram's share of a contribution's squared norm, in (0, 1).
      max_examples: a client with more examples uses a uniform subset of this many.
    """

    release: Plan
    edges: tuple[float, ...] = TWENTIETHS
    histogram_share: OpenFraction = 0.5
    max_examples: PositiveInt = 1024

    def check_fields(self) -> None:
        checks.instance("release", self.release, Plan, "a Plan")
        population = self.release.population
        terms = self.release.rounds, self.release.clip, self.release.participation
        if terms != (1, Clip(1.0), Poisson(population, population)):
            raise InputError("release must be one round of everyone with clip norm 1")
        edges = tuple(checks.real("edges", edge) for edge in self.edges)
        rising = all(low < high for low, high in zip(edges, edges[1:], strict=False))
        if len(edges) < 2 or edges[0] != 0 or edges[-1] != 1 or not rising:
            raise InputError(f"edges must increase from 0 to 1, found {list(edges)}")
        object.__setattr__(self, "edges", edges)

    @classmethod
    def calibrated(cls, epsilon: float, delta: float, population: int, **settings: Any) -> Self:
        """Returns the plan with the least noise, as `Plan.calibrated`; `settings`: other fields."""
        terms = _everyone(population, 1.0)
        return cls(Plan.calibrated(epsilon=epsilon, delta=delta, **terms), **settings)

    @classmethod
    def without_privacy(cls, population: int, **settings: Any) -> Self:
        """Returns the plan of the same metrics without noise: NOT private, and marked so."""
        return cls(Plan.without_privacy(**_everyone(population, 1.0)), **settings)

    @property
    def weights(self) -> tuple[float, float]:
        """The factors of histogram and shares before the noise."""
        return (math.sqrt(self.histogram_share), math.sqrt(1 - self.histogram_share))

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields as plain values for JSON, those of `release` among them."""
        own = {name: value for name, value in vars(self).items() if name != "release"}
        return {**self.release.to_dict(), **own}


@dataclasses.dataclass(frozen=True)
class ReleasedMetrics:
    """The metrics as released; public.

    Attributes:
      histogram_B: noisy number of users in each bin of accuracy, float64 [bins].
      correct, incorrect: noisy sums of the users' shares.
    """

    plan: MetricsPlan
    histogram_B: np.ndarray
    correct: float
    incorrect: float

    @classmethod
    def of(cls, plan: MetricsPlan, sums: dict[str, jax.Array]) -> Self:
        """The metrics from the last state of `federated_metrics`."""
        histogram, shares = plan.weights
        histogram_B = np.asarray(sums["histogram"], np.float64) / histogram
        correct, incorrect = (float(sums[name]) / shares for name in ("correct", "incorrect"))
        return cls(plan, histogram_B, correct, incorrect)

    @property
    def noise(self) -> tuple[float, float]:
        """Standard deviations of the noise in a histogram bin and in a sum of shares."""
        histogram, shares = self.plan.weights
        z = self.plan.release.noise_multiplier
        return (z / histogram, z / shares)

    def accuracy(self) -> float:
        """Returns the users' mean accuracy, in 0 .. 1; NaN where their number is below its noise.

        Users without examples do not count.
        """
        count = self.correct + self.incorrect
        # Both sums have noise, so the count has sqrt(2) times as much.
        if not count > math.sqrt(2) * self.noise[1]:
            return math.nan
        return min(max(self.correct / count, 0.0), 1.0)

    def percentile(self, percent: float) -> float:
        """Returns the accuracy, in 0 .. 1, that `percent` % of users with examples do not reach.

        It is read from the monotone function that is nearest to the noisy cumulative histogram in
        least squares, so it never falls as `percent` rises, even where noise makes bins negative.
        The function is linear within a bin; if the percentile falls into a gap of empty bins, the
        result is the lower end of the gap. Without noise the result is within one bin of the exact
        percentile. It is NaN where the noisy number of users is not positive.
        """
        if not 0 < checks.real("percent", percent) < 100:
            raise InputError(f"percent must lie strictly between 0 and 100, found {percent!r}")
        rising = np.asarray(optimize.isotonic_regression(np.cumsum(self.histogram_B)).x)
        below = np.concatenate([np.zeros(1), np.maximum(rising, 0.0)])
        wanted = percent / 100 * below[-1]
        if not wanted > 0:
            return math.nan
        upper = int(np.searchsorted(below, wanted, side="left"))
        inside = (wanted - below[upper - 1]) / (below[upper] - below[upper - 1])
        low, high = self.plan.edges[upper - 1 : upper + 1]
        return float(low + inside * (high - low))

    def to_dict(self) -> dict[str, Any]:
        """Returns the released numbers as plain values for JSON."""
        return {
            "plan": self.plan.to_dict(),
            "statement": self.plan.release.statement(),
            "histogram": self.histogram_B.tolist(),
            "correct": self.correct,
            "incorrect": self.incorrect,
        }


def federated_metrics(plan: MetricsPlan) -> Algorithm:
    """Returns the release of the metrics as an algorithm of one round.

    It reads the column "correct", bool, which `with_correct` adds. Its state is the noisy sum, from
    which `ReleasedMetrics.of` computes the metrics: "histogram", float32 [bins], "correct" and
    "incorrect", times the plan's weights.
    """
    histogram_B, zero = jnp.zeros(len(plan.edges) - 1, jnp.float32), jnp.float32(0)
    first = {"histogram": histogram_B, "correct": zero, "incorrect": zero}
    client_fn = ClientMetrics(plan.edges, plan.weights)
    reads: Any = {"column": "correct", "max_examples": plan.max_examples}
    return answered_once(LABEL, "metrics", client_fn, plan.release, first=first, **reads)


def release(
    clients: Population,
    plan: MetricsPlan,
    *,
    correct: Any,
    ledger: Ledger,
    secret: RunSecret | None = None,
    run: str | None = None,
) -> ReleasedMetrics:
    """Runs `federated_metrics` once: releases the metrics of a model on all clients.

    Args:
      clients: as many as the plan states.
      correct: see `with_correct`. PRIVATE.
      secret, run: as for `fred.private_moments`.

    Raises:
      InputError: `correct` is not as expected, or the plan or the ledger is of another population.
      BudgetExhausted: the release exceeds the ledger's budget; nothing was released.
    """
    algorithm = federated_metrics(plan)
    evaluated = with_correct(clients, correct)
    releaser = releaser_of(algorithm, evaluated, ledger, secret, run=run)
    return ReleasedMetrics.of(plan, run_rounds(algorithm, releaser, jax.random.key(0)))


@dataclasses.dataclass(frozen=True)
class ClientMetrics:
    """The client function, by steps: the vector that the head of this file defines.

    The squares of the `weights`, the factors of histogram and shares, sum to 1.
    """

    edges: tuple[float, ...]
    weights: tuple[float, float]

    def init(self, broadcast: Any, key: jax.Array) -> Any:
        """Counts of nothing: examples, and correct ones."""
        del broadcast, key  # the model was evaluated before, and nothing is random
        return jnp.float32(0), jnp.float32(0)

    def step(self, broadcast: Any, state: Any, batch: Batch, mask_B: jax.Array, key: Any) -> Any:
        count, hits = state
        more = jnp.sum(mask_B, dtype=jnp.float32)
        return count + more, hits + jnp.sum(mask_B & batch["correct"], dtype=jnp.float32)

    def finish(self, broadcast: Any, state: Any) -> Any:
        """Returns "histogram", float32 [bins], "correct" and "incorrect"."""
        count, hits = state
        divisor = jnp.maximum(count, 1)
        inner = jnp.asarray(self.edges[1:-1], jnp.float32)
        number = jnp.sum(hits / divisor >= inner, dtype=jnp.int32)
        in_bin_B = (jnp.arange(len(self.edges) - 1, dtype=jnp.int32) == number) & (count > 0)
        histogram, shares = (jnp.float32(weight) for weight in self.weights)
        return {
            "histogram": histogram * in_bin_B.astype(jnp.float32),
            "correct": shares * hits / divisor,
            "incorrect": shares * (count - hits) / divisor,
        }


def with_correct(clients: Population, correct: Any) -> Population:
    """The clients with the column "correct", bool [examples], of `correct_examples`. PRIVATE."""
    return clients.with_columns({"correct": one_per_example(clients, "correct", correct)})


def federated_sums(plan: Plan, *, length: int, max_examples: int) -> Algorithm:
    """Returns the release of the sum of the column "counts" as an algorithm of one round.

    Its last state is the noisy sum, float32 [length].

    Args:
      plan: see `plan_of_everyone`.
      length: of a row of the column, which is float32 [examples, length] and not negative.
      max_examples: a client with more examples counts a uniform subset of this many.
    """
    first, client_fn = jnp.zeros(length, jnp.float32), ClientSums(length)
    reads: Any = {"column": COLUMN, "max_examples": max_examples}
    return answered_once("federated_sums", "sums", client_fn, plan, first=first, **reads)


@dataclasses.dataclass(frozen=True)
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
