"""The accuracy of a model on private clients, measured by ONE release with user-level privacy.

A threshold, a model or a step that was chosen by the clients' accuracies reveals something about
them, so the accuracies are released with noise. Every client contributes one vector, once:

    sqrt(h)      times the one-hot vector of the bin that contains the client's own accuracy
    sqrt(1 - h)  times, for each slice, the share of the client's examples that are in the slice
                 and correct, and the share that are in the slice and incorrect

The shares are non-negative and sum to at most 1, so the vector has L2 norm at most 1. The
histogram's share h of the squared norm decides how precise the histogram is compared with the
slices. A client without examples contributes zero. The metrics of slices are means over USERS, all
of whom have equal weight, however many examples they have.

Guarantee: the sum changes by at most 1 in L2 norm when a client is added or removed, and the noise
has standard deviation z, so the release is a Gaussian mechanism with noise multiplier z. Everything
in `ReleasedMetrics` is computed from the release and costs no further privacy.

The task comes from Augenstein et al. 2020 ("Generative models for effective ML on private,
decentralized datasets"), appendix C.3, where thresholds are percentiles of user accuracy. The paper
does not release them privately; the mechanism here is our own.
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
from jaxpfl.federated.clients.client import Batch
from jaxpfl.federated.release.query import Execution, Query
from jaxpfl.privacy.ledger import Ledger
from jaxpfl.privacy.secret import RunSecret

LABEL = "federated_metrics"


class SliceMetric(NamedTuple):
    """The accuracy on one slice; a user's shares of all slices sum to at most 1.

    Attributes:
      correct, count: noisy sums of the users' shares; the noise may make a count negative.
      accuracy: correct / count, clipped to 0 .. 1; NaN where the count does not exceed its noise.
      noise: approximate standard deviation of `accuracy` due to noise; NaN where `accuracy` is.
    """

    correct: float
    count: float
    accuracy: float
    noise: float


@dataclasses.dataclass(frozen=True)
class ReleasedMetrics:
    """The metrics as released; public.

    Attributes:
      plan: what was released and with how much noise.
      histogram_B: noisy number of users in each bin of accuracy, float64 [bins], or None.
      correct_J, incorrect_J: noisy sums of the users' shares, float64 [slices], or None.
    """

    plan: MetricsPlan
    histogram_B: np.ndarray | None
    correct_J: np.ndarray | None
    incorrect_J: np.ndarray | None

    @property
    def noise(self) -> tuple[float, float]:
        """Standard deviations of the noise in a histogram bin and in a sum of shares."""
        z = self.plan.noise_multiplier
        histogram, slices = self.plan.weights
        return (z / histogram if histogram else math.inf, z / slices if slices else math.inf)

    @property
    def slices(self) -> dict[str, SliceMetric]:
        """The metrics of all slices by name."""
        correct_J, incorrect_J = self._of_slices()
        pairs = zip(correct_J.tolist(), incorrect_J.tolist(), strict=True)
        found = [_slice_metric(right, wrong, self.noise[1]) for right, wrong in pairs]
        return dict(zip(self.plan.slices, found, strict=True))

    def accuracy(self) -> float:
        """Returns the users' mean accuracy on examples in any slice: in 0 .. 1, or NaN."""
        correct_J, incorrect_J = self._of_slices()
        deviation = self.noise[1] * math.sqrt(len(correct_J))
        return _slice_metric(float(correct_J.sum()), float(incorrect_J.sum()), deviation).accuracy

    def percentile(self, percent: float) -> float:
        """Returns the accuracy, in 0 .. 1, that `percent` of the users with examples do not reach.

        It is read from the monotone function that is nearest to the noisy cumulative histogram in
        least squares, so it never falls as `percent` rises, even where noise makes bins negative.
        The function is linear within a bin; if the percentile falls into a gap of empty bins, the
        result is the lower end of the gap. Without noise the result is within one bin of the exact
        percentile. It is NaN where the noisy number of users is not positive.

        Args:
          percent: strictly between 0 and 100.

        Raises:
          InputError: `percent` is out of range, or no histogram was released.
        """
        if not 0 < checks.real("percent", percent) < 100:
            raise InputError(f"percent must lie strictly between 0 and 100, found {percent!r}")
        if self.histogram_B is None:
            raise InputError(
                "no histogram was released, because the plan's histogram_share is 0: a percentile "
                "needs a positive histogram_share"
            )
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
            raise InputError(
                "no slices were released, because the plan's histogram_share is 1: an accuracy "
                "needs a histogram_share below 1"
            )
        return self.correct_J, self.incorrect_J


class MetricsState(NamedTuple):
    """The noisy sums; public.

    Attributes:
      histogram_B: users in each bin times `plan.weights[0]`, float32 [bins].
      correct_J, incorrect_J: sums of users' shares times `plan.weights[1]`, float32 [slices].
    """

    histogram_B: jax.Array
    correct_J: jax.Array
    incorrect_J: jax.Array


def federated_metrics(plan: MetricsPlan) -> Algorithm:
    """Returns the release of the metrics as an algorithm of one round with a `MetricsState`.

    It reads the columns "correct", bool, and "slice", int32, which `with_metrics` adds to the
    clients. `metrics` computes the released metrics from the final state.
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
            clients_per_bucket=32 * execution.replicas,
        ),
        columns=("correct", "slice"),
        execution=execution,
    )

    def init(key):
        del key  # nothing is random
        zero_J = jnp.zeros(slices, jnp.float32)
        return MetricsState(jnp.zeros(bins, jnp.float32), zero_J, zero_J)

    def step(state, release, round):
        del state, round
        found = release(query).value
        return MetricsState(found["histogram"], found["correct"], found["incorrect"]), {}

    return Algorithm(LABEL, init, step, (query,))


def metrics(plan: MetricsPlan, state: MetricsState) -> ReleasedMetrics:
    """Returns the released metrics from the final state; this post-processing costs no privacy."""
    histogram, shares = plan.weights
    histogram_B, correct_J, incorrect_J = (np.asarray(part, np.float64) for part in state)
    return ReleasedMetrics(
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
    secret: RunSecret | None = None,
    slice_column: str | None = None,
    run: str = LABEL,
) -> ReleasedMetrics:
    """Runs `federated_metrics` once: releases the metrics of a model on all clients.

    Args:
      clients: the clients; as many as the plan states.
      plan: what is released and with how much noise.
      correct: see `with_metrics`. PRIVATE.
      ledger: the ledger of these clients.
      secret: the run's secret, which must stay private. With it the same query gives the same
        release, which is charged once. None: a new secret is drawn, and another release made.
      slice_column: see `with_metrics`.
      run: name of the release in the ledger.

    Raises:
      InputError: `correct` or the column is not as expected, or the plan or the ledger is of
        another population.
      BudgetExhausted: the release exceeds the ledger's budget; nothing was released.
    """
    algorithm = federated_metrics(plan)
    held = with_metrics(clients, correct, slice_column)
    releaser = releaser_of(algorithm, held, ledger, secret or RunSecret(), run=run)
    return metrics(plan, run_rounds(algorithm, releaser, jax.random.key(0)))


@dataclasses.dataclass(frozen=True)
class ClientMetrics:
    """The client function, by steps, which computes the vector that the head of this file defines.

    Attributes:
      edges: edges of the histogram's bins.
      slices: number of slices.
      weights: factors of histogram and slices; their squares sum to 1.
    """

    edges: tuple[float, ...]
    slices: int
    weights: tuple[float, float]

    def init(self, broadcast: Any, key: jax.Array) -> Any:
        """Counts of nothing: examples, correct ones, and both by slice."""
        del broadcast, key  # the model was evaluated before, and nothing is random
        zero_J = jnp.zeros(self.slices, jnp.float32)
        return jnp.float32(0), jnp.float32(0), zero_J, zero_J

    def step(
        self, broadcast: Any, state: Any, batch: Batch, real_B: jax.Array, key: jax.Array
    ) -> Any:
        """Counts one batch."""
        del broadcast, key
        held, hits, correct_J, incorrect_J = state
        correct_B = real_B & batch["correct"]
        numbers_J = jnp.arange(self.slices, dtype=jnp.int32)
        here_BxJ = batch["slice"][:, None] == numbers_J[None, :]
        right_BxJ = here_BxJ & correct_B[:, None]
        wrong_BxJ = here_BxJ & (real_B & ~correct_B)[:, None]
        return (
            held + jnp.sum(real_B, dtype=jnp.float32),
            hits + jnp.sum(correct_B, dtype=jnp.float32),
            correct_J + jnp.sum(right_BxJ, axis=0, dtype=jnp.float32),
            incorrect_J + jnp.sum(wrong_BxJ, axis=0, dtype=jnp.float32),
        )

    def finish(self, broadcast: Any, state: Any) -> dict[str, jax.Array]:
        """Returns "histogram" [bins], "correct" [slices] and "incorrect" [slices], float32."""
        del broadcast
        held, hits, correct_J, incorrect_J = state
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
    """Returns the clients with the columns that the client function reads.

    Args:
      correct: bool [examples], from `federated.clients.evaluation.correct_examples`. PRIVATE.
      slice_column: a column with the number of each example's slice. An example whose number is
        not that of a slice is in no slice, but counts in the denominator of its client's shares.
        None: all examples are in slice 0.

    Raises:
      InputError: `correct` or the column is not as expected.
    """
    correct = np.asarray(correct)
    if correct.dtype != bool or correct.shape != (clients.num_examples,):
        # The shape found is the number of examples, which may be private.
        raise InputError(
            f"correct must hold one boolean for each example, found {correct.dtype} with "
            f"{correct.ndim} axes, or another number of values"
        )
    if slice_column is None:
        number = np.zeros(len(correct), np.int32)
    else:
        held = clients.columns.get(slice_column)
        if not isinstance(held, np.ndarray) or held.dtype.kind not in "iu" or held.ndim != 1:
            raise InputError(
                f"the clients must have a column {slice_column!r} with one whole number for each "
                f"example, found the columns {', '.join(clients.columns)}"
            )
        # A number that does not fit into 32 bits is the number of no slice.
        number = np.clip(held, -1, 2**31 - 1).astype(np.int32)
    return clients.with_columns({"correct": correct, "slice": number})


def _slice_metric(correct: float, incorrect: float, deviation: float) -> SliceMetric:
    count = correct + incorrect
    # Both sums have noise of this standard deviation, so the count has sqrt(2) times as much.
    if not count > math.sqrt(2) * deviation:
        return SliceMetric(correct, count, math.nan, math.nan)
    accuracy = min(max(correct / count, 0.0), 1.0)
    noise = deviation * math.hypot(1 - accuracy, accuracy) / count
    return SliceMetric(correct, count, accuracy, noise)
