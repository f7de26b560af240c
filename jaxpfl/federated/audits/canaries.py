"""Canary clients go through the release, and an audit observes them (`privacy.auditing`).

An audit plays a run of given plans on made-up clients, with the release that every run has: ledger,
cohorts, clip, sum and noise. All clients contribute nothing, except canaries. Canary i would like
to move coordinate i of every sum, which no other client moves, by several clip norms, so that the
clip is tested, too. Whether it is in is decided by a fair coin:

| participation      | in                 | out                                                    |
|--------------------|--------------------|--------------------------------------------------------|
| Poisson, or cyclic | its contribution   | a contribution of zero, as if it were not there        |
| of fixed size      | its contribution   | the opposite contribution: one client is replaced      |

A canary's coordinate is observed in every round, in clip norms: 1 or 0 and noise. Two scores say
how much all rounds look like "in":

    likelihood   the logarithm of the likelihoods of all rounds, in against out, as stated by the
                 plans: the best score there is, if the release does what is stated. It averages
                 over cohorts where they are secret. In cyclic participation, which amplifies
                 nothing, it uses the cohorts.
    sum          of all rounds but the last of an odd number. Noise that rounds share cancels in it.

With cyclic participation, trials are those canaries alone whose place in an epoch shows most.
`Gradients` asks as training does, with a model whose gradient is the client's data. The questions
in `algorithms.canaries` call algorithms' own client functions. It is a SIMULATION: nothing is
charged but ledgers of the game's own, and its secrets follow from a seed.
"""

import dataclasses
import math
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
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
from jaxpfl.federated.clients.clipped_gradients import ClippedGradients
from jaxpfl.federated.clients.local_training import LocalTraining
from jaxpfl.federated.release.query import Query
from jaxpfl.federated.release.releaser import Released, Releaser
from jaxpfl.privacy.auditing import Trials
from jaxpfl.privacy.correlated_noise import square_root
from jaxpfl.privacy.guarantee import Guarantee
from jaxpfl.privacy.keys import RunSecret
from jaxpfl.privacy.ledger import Ledger, guarantee_of
from jaxpfl.privacy.plan import Plan

_STEP_OF_ONE = optax.sgd(1.0)

LENGTH = 10.0
"""The norm of a canary's contribution before the clip, in clip norms."""


class Shown(NamedTuple):
    """An answer, as an attacker sees it."""

    # Each canary's contribution in clip norms, and noise; None = of no canary alone.
    seen_M: np.ndarray | None
    clip_norm: jax.Array | None = None  # of the next round, if it changes


class Questions(Protocol):
    """The questions of every round, one for each plan of a game."""

    def clients(self, present_M: np.ndarray) -> Population:
        """Returns all clients, of whom the first are the canaries, in or out."""
        ...

    def ask(
        self, number: int, release: Callable[..., Released], round: int, clip: jax.Array | None
    ) -> Shown:
        """Asks question `number` by `release`, whose `clip_norm` is `clip`, the one shown last."""
        ...


MakeQuestions = Callable[[tuple[Plan, ...], int], Questions]
"""Makes the questions of plans, for a number of canaries."""

MakeAsking = Callable[[Population, Ledger, RunSecret], AbstractContextManager[Any]]
"""Makes the game's `federated.Releaser`, or one that a test has made worse."""


class Played(NamedTuple):
    """A game's result, simulated: scores and coins of all canaries, and the stated cost."""

    trials: Trials
    stated: Guarantee


@dataclasses.dataclass(frozen=True)
class Game:
    """A game's plans, and how it is played.

    Attributes:
      plans: each is asked once in every round, on the same clients. All are private and have the
        same population, unit, sampling and delta.
      canaries: at most the population.
      rounds: how many of the plans' rounds are played; None = all.
      questions: makes the questions; None = `Gradients`.
    """

    plans: tuple[Plan, ...]
    canaries: int = 1_000
    rounds: int | None = None
    questions: MakeQuestions | None = None

    def __post_init__(self) -> None:
        checks.positive_int("canaries", self.canaries)
        if not self.plans or not all(plan.private for plan in self.plans):
            raise InputError("an audit needs plans with noise, found one without or no plan")
        for name in ("population", "unit", "sampling", "delta", "rounds", "local"):
            values = sorted({getattr(plan, name) for plan in self.plans})
            if len(values) > 1:
                reason = f"plans that are audited together must share {name}, found {values}"
                raise InputError(reason)
        first = self.plans[0]
        if first.sampling not in ("poisson", "fixed", "cyclic") or first.local:
            allowed = "'poisson', 'fixed' or 'cyclic', and noise of the server's"
            of_plans = f"{first.sampling!r}{' and noise of clients' if first.local else ''}"
            raise InputError(f"an audit needs sampling {allowed}, found {of_plans}")
        if self.canaries > first.population:
            most = f"the population, {first.population}"
            raise InputError(f"canaries must be at most {most}, found {self.canaries}")
        rounds = first.rounds if self.rounds is None else self.rounds
        first.check_round(checks.positive_int("rounds", rounds))
        object.__setattr__(self, "rounds", rounds)

    def play(self, runs: int, *, seed: int = 0, asking_of: MakeAsking | None = None) -> Played:
        """Plays whole runs, each with new coins, cohorts and noise, which follow from the seed."""
        asking_of = asking_of or (lambda *parts: Releaser(*parts, run="audit"))
        questions = (self.questions or Gradients)(self.plans, self.canaries)
        scores, present, stated = [], [], None
        for run in range(checks.positive_int("runs", runs)):
            coins = np.random.default_rng([checks.non_negative_int("seed", seed), run])
            present_M = coins.random(self.canaries) < 0.5
            secret = _Watched.reproducible(seed, f"audit, run {run}")
            observed, stated = self._run(questions, present_M, secret, asking_of)
            places = self._places(secret)
            # The canaries whose places in an epoch these rounds show best, whatever their coins.
            # Some take part less often than others in rounds that are no whole epochs, and noise
            # that rounds share hides some places more.
            best_M = np.ones(self.canaries, bool)
            for plan, place_M in zip(self.plans, places, strict=True):
                if place_M is not None:
                    contributions_RxT, _ = contributions(plan, self.rounds or plan.rounds)
                    square_R = np.sum(contributions_RxT**2, axis=1)
                    best_M &= (square_R >= 0.999 * square_R.max())[place_M]
            # Several plans may have no place in common.
            best_M |= not best_M.any()
            scores.append(scores_of(self.plans, observed, places)[:, best_M])
            present.append(present_M[best_M])
        assert stated is not None
        return Played(Trials(np.concatenate(scores, axis=1), np.concatenate(present)), stated)

    def _places(self, secret: "_Watched") -> list[np.ndarray | None]:
        """For each plan the place of each canary in an epoch, if the observer knows it."""
        places: list[np.ndarray | None] = []
        if self.plans[0].sampling != "cyclic" or len(secret.cohorts) != len(self.plans):
            return [None] * len(self.plans)
        for plan, seed in zip(self.plans, secret.cohorts.values(), strict=True):
            place_N = np.zeros(plan.population, np.int64)
            for place in range(plan.participation.rounds_per_epoch):
                place_N[plan.participation.sample(seed, place + 1)] = place
            places.append(place_N[: self.canaries])
        return places

    def _run(
        self, questions: Questions, present_M: np.ndarray, secret: RunSecret, asking_of: MakeAsking
    ) -> tuple[list[np.ndarray | None], Guarantee]:
        """The observations of one run, [rounds, canaries] for each plan; and its cost."""
        first, clients = self.plans[0], questions.clients(present_M)
        clips: list[jax.Array | None] = [None] * len(self.plans)
        seen: list[list[np.ndarray]] = [[] for _ in self.plans]
        assert self.rounds is not None
        with (
            tempfile.TemporaryDirectory(prefix="jaxpfl audit ") as folder,
            Ledger(Path(folder) / "ledger.jsonl", clients, unit=first.unit) as ledger,
            asking_of(clients, ledger, secret) as asking,
        ):
            for round in range(1, self.rounds + 1):
                release = partial(asking.release, round=round)
                for number in range(len(self.plans)):
                    shown = questions.ask(number, release, round, clips[number])
                    clips[number] = shown.clip_norm
                    if shown.seen_M is not None:
                        seen[number].append(shown.seen_M)
            stated = guarantee_of(ledger.charges, first.delta, first.unit)
        return [np.stack(rounds) if rounds else None for rounds in seen], stated


class _Watched(RunSecret):
    """A secret that remembers the seeds of cohorts by their identities, in the order of calls."""

    def __init__(self, words: bytes | None = None) -> None:
        super().__init__(words)
        self.cohorts: dict[str, int] = {}

    def words_of(self, purpose: str, text: str) -> np.ndarray:
        words = super().words_of(purpose, text)
        if purpose == "cohort":
            self.cohorts[text] = int.from_bytes(words.tobytes(), "big")
        return words


class Gradients:
    """Training, in which canary i moves coordinate i of the gradient; every second round back."""

    def __init__(self, plans: tuple[Plan, ...], canaries: int) -> None:
        self.plans, self.canaries = plans, canaries
        # Made once: a release knows a query by its identity.
        self.queries = []
        for number, plan in enumerate(plans):
            model = CanaryModel(canaries, plan.clip_norm)
            client_fn, cohort = LocalTraining(model, _STEP_OF_ONE), CohortSpec(1, 1)
            if plan.unit == "example":
                client_fn, cohort = ClippedGradients(model, plan.clip_norm), CohortSpec(16, 16)
            query = Query(f"canaries {number}", client_fn, plan, cohort, columns=model.columns)
            self.queries.append(query)

    def clients(self, present_M: np.ndarray) -> Population:
        """Clients of one example each: a direction, and a length in clip norms."""
        first = self.plans[0]
        lengths = np.zeros(first.population, np.float32)
        absent = -LENGTH if first.participation.adjacency == "replace_one" else 0.0
        lengths[: self.canaries] = np.where(present_M, LENGTH, absent)
        directions = np.arange(first.population, dtype=np.int32) % self.canaries
        return of_one_row({"direction": directions, "length": lengths})

    def ask(
        self, number: int, release: Callable[..., Released], round: int, clip: jax.Array | None
    ) -> Shown:
        plan = self.plans[number]
        clip_norm = plan.clip_norm if clip is None else float(clip)
        broadcast = jnp.full(self.canaries, alternating(round), jnp.float32)
        answer = release(self.queries[number], broadcast, clip_norm=clip)
        seen_M = alternating(round) * np.asarray(answer.value, np.float64) / clip_norm
        return Shown(seen_M, None if plan.clip.adaptive is None else answer.clip_norm)


def of_one_row(columns: dict[str, np.ndarray], times: int = 1) -> Population:
    """Made-up clients; each holds one row of all columns, so many times."""
    count = len(next(iter(columns.values())))
    names: Any = [str(number) for number in range(count)]
    repeated = {name: np.repeat(column, times, axis=0) for name, column in columns.items()}
    return Population(repeated, times * np.arange(count + 1), names, name="canaries")


@dataclasses.dataclass(frozen=True)
class CanaryModel:
    """A model that an example moves in its own direction, away from zero, wherever it is.

    An example holds a length l and a direction i; its loss is -slope l |params_i|.
    """

    dimension: int
    slope: float
    name: str = "canaries"
    columns: tuple[str, ...] = ("direction", "length")

    def init(self, key: jax.Array) -> jax.Array:
        return jnp.ones(self.dimension, jnp.float32)

    def loss(self, params: jax.Array, batch: Any, mask: jax.Array) -> tuple[jax.Array, Any]:
        losses_B = -self.slope * batch["length"] * jnp.abs(params[batch["direction"]])
        total = jnp.sum(jnp.where(mask, losses_B, jnp.float32(0)))
        count = jnp.sum(mask, dtype=jnp.float32)
        return total / jnp.maximum(count, 1), {"loss_sum": total, "count": count}

    def evaluate(self, params: jax.Array, batch: Any, mask: jax.Array) -> Any:
        return self.loss(params, batch, mask)[1]


def alternating(round: int) -> int:
    """The sign of canaries' contributions in round 1, 2, ...: 1, -1, ..."""
    return 1 if round % 2 else -1


def scores_of(
    plans: tuple[Plan, ...],
    observed: Sequence[np.ndarray | None],
    places: Sequence[np.ndarray | None],
) -> np.ndarray:
    """The scores "likelihood" and "sum" of each canary, float64 [2, canaries].

    Args:
      observed: for each plan [rounds, canaries]: sign times coordinate, in clip norms; None = the
        plan's releases show no canary alone.
      places: for each plan int64 [canaries], from 0: the places in all epochs of cyclic
        participation; None where they are not known.
    """
    likelihood_M, sum_M = 0.0, 0.0
    for plan, seen_TxM, place_M in zip(plans, observed, places, strict=True):
        if seen_TxM is None:
            continue
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
        # A client has one place in all epochs, and noise may be correlated.
        place_RxT, whitening_TxT = contributions(plan, len(seen_TxM))
        seen_TxM = whitening_TxT @ seen_TxM
        exponent_RxM = (place_RxT @ seen_TxM - 0.5 * np.sum(place_RxT**2, axis=1)[:, None]) / z**2
        if place_M is not None:
            return exponent_RxM[place_M, np.arange(len(place_M))]
        return special.logsumexp(exponent_RxM, axis=0) - math.log(len(place_RxT))
    q = plan.participation.sampling_rate
    with np.errstate(divide="ignore"):
        left, taken = np.log1p(-q), math.log(q)

    def mixture(moved: float) -> np.ndarray:
        """The likelihood that a coordinate is moved with probability q, against never."""
        return np.logaddexp(left, taken + (2 * moved * seen_TxM - 1) / (2 * z**2))

    present_TxM = mixture(1.0)
    absent = mixture(-1.0) if plan.participation.adjacency == "replace_one" else 0.0
    return (present_TxM - absent).sum(axis=0)


def contributions(plan: Plan, rounds: int) -> tuple[np.ndarray, np.ndarray]:
    """The contributions of a client of each place [places, rounds], where noise is independent.

    Returns also the matrix [rounds, rounds] by which the observations are multiplied for that.
    """
    cycle = plan.participation.rounds_per_epoch
    place_RxT = (np.arange(rounds)[None, :] % cycle == np.arange(cycle)[:, None]).astype(float)
    if not plan.correlated:
        return place_RxT, np.eye(rounds)
    # C makes the noise C^-1 Z of the rounds independent. The observations are multiplied by signs
    # and the noise is not, so that it needs them, too.
    column_R = square_root(plan.bands)
    column_T = np.pad(column_R / np.linalg.norm(column_R), (0, rounds))[:rounds]
    sign_T = np.array([alternating(round) for round in range(1, rounds + 1)])
    whitening_TxT = linalg.toeplitz(column_T, np.zeros(rounds)) * sign_T
    return place_RxT @ whitening_TxT.T, whitening_TxT
