"""How well a model does on private clients, as ONE release with user-level privacy.

A threshold, a model or a step chosen by private accuracies is a release of them. Here every client
sends one vector of L2 norm at most 1, through the door, once:

    sqrt(h)      one-hot of the bin that its own accuracy falls in
    sqrt(1 - h)  for each slice, the shares of its examples that are in the slice and correct, and
                 in it and incorrect

The shares are non-negative and sum to at most 1, so their norm is at most 1 also; h, the
histogram's share of the squared norm, decides who gets the precision. A client without examples
sends zero. Metrics of slices are therefore means over USERS: each has the same say, however much it
holds.

Guarantee: the sum moves by at most 1 when a client is added or removed, the noise has standard
deviation z, and so the release is a Gaussian mechanism of multiplier z. All that `Metrics` tells
(accuracies, percentiles, their spread) is computed from it and costs nothing more.

The task: Augenstein et al. 2020 ("Generative models for effective ML on private, decentralized
datasets"), appendix C.3, sets thresholds at percentiles of user accuracy; it releases none of them
privately. The mechanism is ours.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy import optimize

from jaxpfl import checks
from jaxpfl.algorithms.base import Algorithm, releaser_of, run_rounds
from jaxpfl.algorithms.federated_metrics.plan import MetricsPlan
from jaxpfl.data.cohort import CohortSpec
from jaxpfl.data.population import Population
from jaxpfl.errors import InputError
from jaxpfl.federated.client import Examples
from jaxpfl.federated.query import Execution, Query
from jaxpfl.privacy.ledger import Ledger
from jaxpfl.privacy.secret import Secret

LABEL = "federated_metrics"


class SliceMetric(NamedTuple):
    """One slice, in users: each is 1 in all slices together.

    Attributes:
      correct, count: noisy; a count may be negative.
      accuracy: correct / count, cut to 0 .. 1; NaN where the count is not above its noise.
      noise: about the standard deviation that the noise gives to `accuracy`; NaN where that is.
    """

    correct: float
    count: float
    accuracy: float
    noise: float


@dataclasses.dataclass(frozen=True)
class Metrics:
    """The released metrics; public.

    Attributes:
      plan: what was released and at which noise.
      histogram_B: noisy number of users by accuracy, float64 [bins]; None if not released.
      correct_J, incorrect_J: noisy sums of users' shares, float64 [slices]; None if not released.
    """

    plan: MetricsPlan
    histogram_B: np.ndarray | None
    correct_J: np.ndarray | None
    incorrect_J: np.ndarray | None

    @property
    def noise(self) -> tuple[float, float]:
        """Standard deviation of each histogram bin, and of each correct and incorrect sum."""
        z = self.plan.noise_multiplier
        histogram, slices = self.plan.weights
        return (z / histogram if histogram else math.inf, z / slices if slices else math.inf)

    @property
    def slices(self) -> dict[str, SliceMetric]:
        """Name -> the metric of that slice."""
        correct_J, incorrect_J = self._of_slices()
        pairs = zip(correct_J.tolist(), incorrect_J.tolist(), strict=True)
        found = [_slice_metric(right, wrong, self.noise[1]) for right, wrong in pairs]
        return dict(zip(self.plan.slices, found, strict=True))

    def accuracy(self) -> float:
        """The mean over users of their accuracy on examples in any slice; in 0 .. 1, or NaN."""
        correct_J, incorrect_J = self._of_slices()
        deviation = self.noise[1] * math.sqrt(len(correct_J))
        return _slice_metric(float(correct_J.sum()), float(incorrect_J.sum()), deviation).accuracy

    def percentile(self, percent: float) -> float:
        """The accuracy that `percent` of the users with examples stay below; in 0 .. 1.

        From the monotone cumulative nearest the noisy one in least squares, so that it never
        falls as `percent` rises, whatever negative bins the noise has made; straight within a bin.
        Where nobody is between two bins it is the lower one's end. Without noise it is within a
        bin of the exact one. NaN where the noisy total is not positive.

        Args:
          percent: strictly between 0 and 100.
        """
        if not 0 < checks.real("percent", percent) < 100:
            raise InputError(f"percent must lie strictly between 0 and 100, found {percent!r}")
        if self.histogram_B is None:
            raise InputError("no histogram was released: histogram_share is 0")
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

        def listed(array: np.ndarray | None) -> list[float] | None:
            return None if array is None else array.tolist()

        return {
            "plan": self.plan.to_dict(),
            "statement": self.plan.statement(),
            "histogram": listed(self.histogram_B),
            "correct": listed(self.correct_J),
            "incorrect": listed(self.incorrect_J),
        }

    def _of_slices(self) -> tuple[np.ndarray, np.ndarray]:
        if self.correct_J is None or self.incorrect_J is None:
            raise InputError("no slices were released: histogram_share is 1")
        return self.correct_J, self.incorrect_J


class MetricsState(NamedTuple):
    """The noisy sums; public.

    Attributes:
      histogram_B: float32 [bins], times `plan.weights[0]`.
      correct_J, incorrect_J: float32 [slices], times `plan.weights[1]`.
    """

    histogram_B: jax.Array
    correct_J: jax.Array
    incorrect_J: jax.Array


def federated_metrics(plan: MetricsPlan) -> Algorithm:
    """Returns the release of the metrics as an algorithm of one round; state: `MetricsState`.

    It reads the columns "correct", bool, and "slice", int32, that `with_metrics` adds to clients;
    `metrics` makes the released metrics of its last state.
    """
    execution = Execution()
    bins, slices = len(plan.edges) - 1, len(plan.slices)
    query = Query(
        "metrics",
        ClientMetrics(plan.edges, slices, plan.weights),
        plan.plan(),
        CohortSpec(
            batch_size=min(256, plan.max_examples),
            max_examples=plan.max_examples,
            clients_per_bucket=32 * execution.devices.size,
        ),
        columns=("correct", "slice"),
        execution=execution,
    )

    def init(key):
        del key  # nothing is drawn
        zero_J = jnp.zeros(slices, jnp.float32)
        return MetricsState(jnp.zeros(bins, jnp.float32), zero_J, zero_J)

    def step(state, release, round):
        del state, round
        found = release(query).value
        return MetricsState(found["histogram"], found["correct"], found["incorrect"]), {}

    return Algorithm(LABEL, init, step, (query,))


def metrics(plan: MetricsPlan, state: MetricsState) -> Metrics:
    """The released metrics of a last state: post-processing, which costs nothing."""
    histogram, shares = plan.weights
    histogram_B, correct_J, incorrect_J = (np.asarray(part, np.float64) for part in state)
    return Metrics(
        plan,
        histogram_B / histogram if histogram else None,
        correct_J / shares if shares else None,
        incorrect_J / shares if shares else None,
    )


def release(
    clients: Population,
    plan: MetricsPlan,
    *,
    correct: Any,
    ledger: Ledger,
    secret: Secret | None = None,
    slice_column: str | None = None,
    run: str = LABEL,
) -> Metrics:
    """Releases the metrics of a model on all clients: `federated_metrics`, run once.

    Args:
      clients: the clients; N of them, as the plan says.
      plan: what is released and at which noise.
      correct: bool [examples], of `federated.evaluation.correct_examples`. PRIVATE.
      ledger: of these clients.
      secret: of the run, kept private: with it, the same release costs nothing more. None draws
        one: then it is another release.
      slice_column: see `with_metrics`.
      run: names the release in the ledger.

    Raises:
      InputError: `correct` or the column is not as expected; the plan or the ledger is of another
        population.
      BudgetExhausted: the release does not fit the ledger's budget; nothing was released.
    """
    algorithm = federated_metrics(plan)
    held = with_metrics(clients, correct, slice_column)
    releaser = releaser_of(algorithm, held, ledger, secret or Secret(), run=run)
    return metrics(plan, run_rounds(algorithm, releaser, jax.random.key(0)))


@dataclasses.dataclass(frozen=True)
class ClientMetrics:
    """A client function: the vector at the head of this file.

    It reads the columns "correct", bool, and "slice", int32.

    Attributes:
      edges: of the histogram's bins.
      slices: their number.
      weights: of histogram and slices; their squares sum to 1.
    """

    edges: tuple[float, ...]
    slices: int
    weights: tuple[float, float]

    def __call__(self, broadcast: Any, examples: Examples, key: jax.Array) -> dict[str, jax.Array]:
        """Returns "histogram" [bins], "correct" [slices] and "incorrect" [slices], float32."""
        del broadcast, key  # the client has evaluated the model already, and draws nothing
        numbers_J = jnp.arange(self.slices, dtype=jnp.int32)

        def add(step, carry):
            held, hits, correct_J, incorrect_J = carry
            real_B = examples.mask[step]
            correct_B = real_B & examples.batches["correct"][step]
            here_BxJ = examples.batches["slice"][step][:, None] == numbers_J[None, :]
            right_BxJ = here_BxJ & correct_B[:, None]
            wrong_BxJ = here_BxJ & (real_B & ~correct_B)[:, None]
            return (
                held + jnp.sum(real_B, dtype=jnp.float32),
                hits + jnp.sum(correct_B, dtype=jnp.float32),
                correct_J + jnp.sum(right_BxJ, axis=0, dtype=jnp.float32),
                incorrect_J + jnp.sum(wrong_BxJ, axis=0, dtype=jnp.float32),
            )

        zero_J = jnp.zeros(self.slices, jnp.float32)
        start = (jnp.float32(0), jnp.float32(0), zero_J, zero_J)
        held, hits, correct_J, incorrect_J = jax.lax.fori_loop(0, examples.steps, add, start)
        divisor = jnp.maximum(held, 1)
        inner = jnp.asarray(self.edges[1:-1], jnp.float32)
        number = jnp.sum(hits / divisor >= inner, dtype=jnp.int32)
        in_bin_B = (jnp.arange(len(self.edges) - 1, dtype=jnp.int32) == number) & (held > 0)
        histogram, shares = (jnp.float32(weight) for weight in self.weights)
        return {
            "histogram": histogram * in_bin_B.astype(jnp.float32),
            "correct": shares * correct_J / divisor,
            "incorrect": shares * incorrect_J / divisor,
        }


def with_metrics(clients: Population, correct: Any, slice_column: str | None = None) -> Population:
    """The clients with the columns that the client function reads.

    Args:
      correct: bool [examples], of `federated.evaluation.correct_examples`. PRIVATE.
      slice_column: a column of whole numbers, each example's slice; an example whose number names
        no slice is in none, but counts in its client's shares. None: all are in slice 0.

    Raises:
      InputError: `correct` or the column is not as expected.
    """
    correct = np.asarray(correct)
    if correct.dtype != bool or correct.shape != (clients.num_examples,):
        raise InputError("correct must be one boolean an example")
    if slice_column is None:
        number = np.zeros(len(correct), np.int32)
    else:
        held = clients.columns.get(slice_column)
        if not isinstance(held, np.ndarray) or held.dtype.kind not in "iu" or held.ndim != 1:
            raise InputError(
                f"slices need a column {slice_column!r} of whole numbers, one an example; the "
                f"clients have {', '.join(clients.columns)}"
            )
        # What does not fit 32 bits names no slice.
        number = np.clip(held, -1, 2**31 - 1).astype(np.int32)
    return clients.with_columns({"correct": correct, "slice": number})


def _slice_metric(correct: float, incorrect: float, deviation: float) -> SliceMetric:
    count = correct + incorrect
    # Both sums carry noise of this deviation, so the count carries sqrt(2) of it.
    if not count > math.sqrt(2) * deviation:
        return SliceMetric(correct, count, math.nan, math.nan)
    accuracy = min(max(correct / count, 0.0), 1.0)
    noise = deviation * math.hypot(1 - accuracy, accuracy) / count
    return SliceMetric(correct, count, accuracy, noise)
