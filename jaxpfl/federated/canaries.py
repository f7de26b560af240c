"""Canary clients through the release: what an audit observes (`privacy.auditing`).

An audit plays a run of given plans on made-up clients, with the release that every run has: ledger,
cohorts, clip, sum and noise. All clients contribute nothing, except canaries. Canary i would like
to move coordinate i of every sum, which no other client moves, by several clip norms, so that the
clip is tested, too. Whether it is in is decided by a fair coin:

| participation      | in                 | out                                                    |
|--------------------|--------------------|--------------------------------------------------------|
| Poisson, or cyclic | its contribution   | a contribution of zero, as if it were not there        |
| of fixed size      | its contribution   | the opposite contribution: one client is replaced      |

Every second round it contributes with the opposite sign. It is observed what a coordinate shows of
the sign times the contribution, in clip norms, and two scores say how much that looks like "in":

    likelihood   the logarithm of the likelihoods of all rounds, in against out, as stated by the
                 plans: the best score there is, if the release does what is stated. Who took part
                 in which round is averaged over where it is secret, and known where nothing is
                 amplified by it, in cyclic participation.
    sum          of all rounds but the last of an odd number. Noise that rounds share cancels in it.

Clients train a model whose gradient is what they hold, as in `algorithms.fed_avg`, or under `unit =
"example"` as in `algorithms.fed_sgd`. The client functions of other systems are not called: their
plans are what is audited.

Nobody's data is touched, and nothing is charged but ledgers of the game's own, which are deleted
with it. Its secrets follow from a seed, so that an audit can be repeated; it is a SIMULATION.
"""

import dataclasses
import math
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax
from scipy import linalg, special

from jaxpfl import checks
from jaxpfl.data.cohort import CohortSpec
from jaxpfl.data.population import Population
from jaxpfl.errors import InputError
from jaxpfl.federated.clipped_gradients import ClippedGradients
from jaxpfl.federated.local_training import LocalTraining
from jaxpfl.federated.query import Query
from jaxpfl.federated.release import Released, Releaser
from jaxpfl.privacy.auditing import Trials
from jaxpfl.privacy.correlated_noise import band_weights, tree_terms
from jaxpfl.privacy.guarantee import Guarantee
from jaxpfl.privacy.ledger import Ledger, guarantee_of
from jaxpfl.privacy.plan import Plan
from jaxpfl.privacy.secret import Secret

_STEP_OF_ONE = optax.sgd(1.0)


class Asking(Protocol):
    """What a game asks: a `federated.Releaser`, or one that a test has made worse."""

    def release(
        self, query: Query, broadcast: Any = (), *, round: int, clip_norm: jax.Array | None = None
    ) -> Released: ...


MakeAsking = Callable[[Population, Ledger, Secret], AbstractContextManager[Asking]]


class Played(NamedTuple):
    """What a game came to: simulated.

    Attributes:
      trials: a score of each kind, and the coin, of every canary of every run.
      stated: what the ledger says that one run cost.
    """

    trials: Trials
    stated: Guarantee


@dataclasses.dataclass(frozen=True)
class Game:
    """What is played.

    Attributes:
      plans: each is asked once in every round, on the same clients. All are private and have the
        same population, unit, sampling and delta.
      canaries: at most the population.
      rounds: how many of the plans' rounds are played; None = all.
      length: the norm of a canary's contribution before the clip, in clip norms.

    Raises:
      InputError: a value is out of range, or the plans do not fit together.
    """

    plans: tuple[Plan, ...]
    canaries: int = 1_000
    rounds: int | None = None
    length: float = 10.0

    def __post_init__(self) -> None:
        checks.positive_int("canaries", self.canaries)
        checks.positive("length", self.length)
        if not self.plans or not all(plan.private for plan in self.plans):
            raise InputError("an audit needs plans with noise, found one without or no plan")
        for name in ("population", "unit", "sampling", "delta", "rounds"):
            found = sorted({getattr(plan, name) for plan in self.plans})
            if len(found) > 1:
                raise InputError(
                    f"plans that are audited together must share {name}, found {found}"
                )
        first = self.plans[0]
        if self.canaries > first.population:
            raise InputError(
                f"canaries must be at most the population, {first.population}, found "
                f"{self.canaries}"
            )
        rounds = first.rounds if self.rounds is None else self.rounds
        first.check_round(checks.positive_int("rounds", rounds))
        object.__setattr__(self, "rounds", rounds)

    def play(self, runs: int, *, seed: int = 0, asking_of: MakeAsking | None = None) -> Played:
        """Plays whole runs, each with new coins, cohorts and noise.

        Args:
          seed: what all coins and secrets follow from.
          asking_of: makes what is asked, of a run's clients, ledger and secret; None = `Releaser`.
        """
        asking_of = _releaser if asking_of is None else asking_of
        scores, present, stated = [], [], None
        for run in range(checks.positive_int("runs", runs)):
            coins = np.random.default_rng([checks.non_negative_int("seed", seed), run])
            present_M = coins.random(self.canaries) < 0.5
            secret = _Watched.reproducible(seed, f"audit, run {run}")
            observed, stated = self._run(self._clients(present_M), secret, asking_of)
            scores.append(scores_of(self.plans, observed, self._places(secret)))
            present.append(present_M)
        assert stated is not None
        return Played(Trials(np.concatenate(scores, axis=1), np.concatenate(present)), stated)

    def _places(self, secret: "_Watched") -> list[np.ndarray | None]:
        """Of each plan the place of each canary in an epoch, if it is known to the observer."""
        if self.plans[0].sampling != "cyclic" or len(secret.cohorts) != len(self.plans):
            return [None] * len(self.plans)
        found = []
        for plan, seed in zip(self.plans, secret.cohorts.values(), strict=True):
            place_N = np.zeros(plan.population, np.int64)
            for place in range(plan.rounds_per_epoch):
                place_N[plan.participation.sample(seed, place + 1)] = place
            found.append(place_N[: self.canaries])
        return found

    def _clients(self, present_M: np.ndarray) -> Population:
        """Clients of one example each: a direction, and a length in clip norms."""
        first = self.plans[0]
        held = np.zeros(first.population, np.float32)
        absent = -self.length if first.adjacency == "replace_one" else 0.0
        held[: self.canaries] = np.where(present_M, self.length, absent)
        directions = np.arange(first.population, dtype=np.int32) % self.canaries
        return Population(
            {"direction": directions, "length": held},
            np.arange(first.population + 1),
            [str(number) for number in range(first.population)],  # pyright: ignore
            name="canaries",
        )

    def _run(
        self, clients: Population, secret: Secret, asking_of: MakeAsking
    ) -> tuple[list[np.ndarray], Guarantee]:
        """What is observed in one run, [rounds, canaries] for each plan; and what it cost."""
        first = self.plans[0]
        # A client sends a change of parameters, and an example adds its gradient.
        sign = 1 if first.unit == "client" else -1
        asked = [
            _Asked(_query(plan, number, self.canaries), sign)
            for number, plan in enumerate(self.plans)
        ]
        assert self.rounds is not None
        with (
            tempfile.TemporaryDirectory(prefix="jaxpfl audit ") as folder,
            Ledger(Path(folder) / "ledger.jsonl", clients, unit=first.unit) as ledger,
            asking_of(clients, ledger, secret) as asking,
        ):
            for round in range(1, self.rounds + 1):
                for each in asked:
                    each.ask(asking, round, self.canaries)
            stated = guarantee_of(ledger.charges, first.delta, first.unit)
        return [np.stack(each.observed) for each in asked], stated


@dataclasses.dataclass
class _Asked:
    """One plan's query, and what was observed of it in the rounds so far."""

    query: Query
    sign: int
    clip_norm: jax.Array | None = None
    observed: list[np.ndarray] = dataclasses.field(default_factory=list)

    def ask(self, asking: Asking, round: int, canaries: int) -> None:
        plan, sign = self.query.plan, alternating(round)
        clip_norm = plan.clip_norm if self.clip_norm is None else float(self.clip_norm)
        broadcast = jnp.full(canaries, sign * plan.clip_norm, jnp.float32)
        found = asking.release(self.query, broadcast, round=round, clip_norm=self.clip_norm)
        self.observed.append(self.sign * sign * np.asarray(found.value, np.float64) / clip_norm)
        if plan.adaptive_clip is not None:
            self.clip_norm = found.clip_norm


class _Watched(Secret):
    """A secret that remembers the seeds of cohorts by what they were asked for, in that order."""

    def __init__(self, words: bytes | None = None) -> None:
        super().__init__(words)
        self.cohorts: dict[str, int] = {}

    def seed(self, purpose: str, text: str) -> int:
        found = super().seed(purpose, text)
        if purpose == "cohort":
            self.cohorts[text] = found
        return found


def _releaser(clients: Population, ledger: Ledger, secret: Secret) -> Releaser:
    return Releaser(clients, ledger, secret, run="audit")


def alternating(round: int) -> int:
    """The sign of canaries' contributions in round 1, 2, ...: 1, -1, ..."""
    return 1 if round % 2 else -1


@dataclasses.dataclass(frozen=True)
class CanaryModel:
    """A model whose gradient at params c (1, ..., 1) is -c times what an example holds.

    An example holds a length l and a direction i; its loss is -l params_i^2 / 2.

    Attributes:
      dimension: the number of directions.
    """

    dimension: int
    name: str = "canaries"
    columns: tuple[str, ...] = ("direction", "length")

    def init(self, key: jax.Array) -> jax.Array:
        del key  # nothing is drawn
        return jnp.ones(self.dimension, jnp.float32)

    def loss(self, params: jax.Array, batch: Any, mask: jax.Array) -> tuple[jax.Array, Any]:
        losses_B = -0.5 * batch["length"] * jnp.square(params[batch["direction"]])
        total = jnp.sum(jnp.where(mask, losses_B, jnp.float32(0)))
        count = jnp.sum(mask, dtype=jnp.float32)
        return total / jnp.maximum(count, 1), {"loss_sum": total, "count": count}

    def evaluate(self, params: jax.Array, batch: Any, mask: jax.Array) -> Any:
        return self.loss(params, batch, mask)[1]


def _query(plan: Plan, number: int, canaries: int) -> Query:
    model = CanaryModel(canaries)
    if plan.unit == "client":
        client_fn, cohort = LocalTraining(model, _STEP_OF_ONE), CohortSpec(1, 1)
    else:
        client_fn, cohort = ClippedGradients(model, plan.clip_norm), CohortSpec(16, 16)
    return Query(f"canaries {number}", client_fn, plan, cohort, columns=model.columns)


def scores_of(
    plans: tuple[Plan, ...], observed: list[np.ndarray], places: list[np.ndarray | None]
) -> np.ndarray:
    """The scores "likelihood" and "sum" of each canary, float64 [2, canaries].

    Args:
      observed: for each plan [rounds, canaries]: sign times coordinate, in clip norms.
      places: for each plan with cyclic participation int64 [canaries], from 0: the place in all
        epochs, if it is known; None = unknown, and for other plans.
    """
    likelihood_M, sum_M = 0.0, 0.0
    for plan, seen_TxM, place_M in zip(plans, observed, places, strict=True):
        rounds = len(seen_TxM)
        paired = rounds if rounds == 1 else rounds - rounds % 2
        z = plan.value_noise_std(1.0)
        likelihood_M = likelihood_M + _likelihood(plan, z, seen_TxM, place_M)
        sum_M = sum_M + seen_TxM[:paired].sum(axis=0) / z**2
    return np.stack([likelihood_M, sum_M])


def _likelihood(
    plan: Plan, z: float, seen_TxM: np.ndarray, place_M: np.ndarray | None
) -> np.ndarray:
    """The logarithm of the likelihood of "in" divided by that of "out", float64 [canaries]."""
    if plan.sampling == "cyclic":
        return _cyclic_likelihood(plan, z, seen_TxM, place_M)
    q = plan.participation.sampling_rate
    with np.errstate(divide="ignore"):
        left, taken = np.log1p(-q), math.log(q)

    def mixture(moved: float) -> np.ndarray:
        """Against a coordinate that nobody moves: of one that is moved with probability q."""
        return np.logaddexp(left, taken + (2 * moved * seen_TxM - 1) / (2 * z**2))

    present_TxM = mixture(1.0)
    absent = mixture(-1.0) if plan.adjacency == "replace_one" else 0.0
    return (present_TxM - absent).sum(axis=0)


def _cyclic_likelihood(
    plan: Plan, z: float, seen_TxM: np.ndarray, place_M: np.ndarray | None
) -> np.ndarray:
    """The same where a client has one place in all epochs, and noise may be correlated."""
    rounds, cycle = len(seen_TxM), plan.rounds_per_epoch
    place_RxT = (np.arange(rounds)[None, :] % cycle == np.arange(cycle)[:, None]).astype(float)
    sign_T = np.array([alternating(round) for round in range(1, rounds + 1)])
    if plan.correlation != "independent":
        # Divided by a root of the noise's covariance, the rounds have independent noise. The signs
        # are of what is observed, not of the noise, and must be as they were for that.
        root_TxT = noise_root(plan.correlation, cycle, rounds)
        seen_TxM = linalg.solve_triangular(root_TxT, seen_TxM * sign_T[:, None], lower=True)
        place_RxT = linalg.solve_triangular(root_TxT, (place_RxT * sign_T).T, lower=True).T
    exponent_RxM = (place_RxT @ seen_TxM - 0.5 * np.sum(place_RxT**2, axis=1)[:, None]) / z**2
    if place_M is not None:
        return exponent_RxM[place_M, np.arange(len(place_M))]
    return special.logsumexp(exponent_RxM, axis=0) - math.log(cycle)


def noise_root(correlation: str, rounds_per_epoch: int, rounds: int) -> np.ndarray:
    """A lower triangular root of the covariance of rounds' correlated noise, at unit scale.

    Args:
      correlation: "tree" or "banded", see `privacy.correlated_noise`.
    """
    rows_TxD = np.zeros((rounds, 0))
    if correlation == "banded":
        weights = band_weights(rounds_per_epoch)
        rows_TxD = np.zeros((rounds, rounds))
        for row in range(rounds):
            rows_TxD[row, row] = weights[0]
            for back in range(1, min(row, rounds_per_epoch - 1) + 1):
                rows_TxD[row] -= weights[back] * rows_TxD[row - back]
        return rows_TxD
    terms = [tree_terms(round, rounds_per_epoch) for round in range(1, rounds + 1)]
    places: dict[tuple[int, ...], int] = {}
    for each in terms:
        for address in each.addresses.tolist():
            places.setdefault(tuple(address), len(places))
    rows_TxD = np.zeros((rounds, len(places)))
    for row, each in enumerate(terms):
        for address, weight in zip(each.addresses.tolist(), each.weights, strict=True):
            rows_TxD[row, places[tuple(address)]] += weight
    return np.linalg.cholesky(rows_TxD @ rows_TxD.T)
