"""Canaries for algorithms' own client functions (`audits.canaries`).

Canaries of federated training have the model of an audit, and keep their clients' states. FreD and
candidates' scores have the worst neighbours: a client with one thing that nobody else has, and one
with embeddings of zero, which contribute nothing. Canary i has the unit vector i as its embedding,
so that there are as many dimensions as canaries. Of several labels, canary i has label i modulo
their number, and is looked for in the moments of its own; of several embeddings it has the unit
vector in all, and is looked for in all by their shares.

| question          | canary i moves this number, and so far                         | read off   |
|-------------------|----------------------------------------------------------------|------------|
| FreD's sum        | coordinate i, by the clip norm: it holds ten times that        | the sum    |
| its second moment | entry (i, i), about the origin, by the squared clip norm       | the matrix |
| its count         | one number for all clients, which shows no canary alone        | -          |
| scores            | those of candidates i and -i, which are in one prompt          | the scores |
| votes             | those for candidate i, with as many texts as a client may have | the votes  |
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from jaxpfl.algorithms.base import Algorithm
from jaxpfl.algorithms.candidate_scores import ScoreKind, Scorer
from jaxpfl.algorithms.fred import FredPlan, fred
from jaxpfl.data.population import Population
from jaxpfl.federated.audits import canaries as audits
from jaxpfl.federated.audits.canaries import LENGTH, Gradients, Shown
from jaxpfl.federated.clients.client import Examples, contribution
from jaxpfl.federated.clients.moments import from_half
from jaxpfl.federated.release.query import Query
from jaxpfl.federated.release.releaser import Release, Released
from jaxpfl.privacy.plan import Plan

_SLOPE = 100.0
"""The canaries' loss per clip norm: a step of rate 0.001 moves a canary by one clip norm."""


class TrainingCanaries(Gradients):
    """The question of an algorithm that trains, whose clients may keep states.

    Its server begins anew in every round. A canary is looked for in all parts of a contribution, as
    much as its first contribution has of each. `algorithm_of` is `(model, plan=) -> algorithm`,
    whose state has `params`; `plans` is one.
    """

    def __init__(
        self, algorithm_of: Callable[..., Algorithm], plans: tuple[Plan, ...], canaries: int
    ) -> None:
        super().__init__(plans, canaries)
        (self.plan,) = plans
        model = audits.CanaryModel(canaries, _SLOPE * self.plan.clip_norm)
        self.algorithm = algorithm_of(model, plan=self.plan)

    def ask(
        self, number: int, release: Callable[..., Released], round: int, clip: jax.Array | None
    ) -> Shown:
        shown: list[Shown] = []

        def watched(query: Query, broadcast: Any, clip_norm: Any = None) -> Released:
            del clip_norm  # the first one, because the server begins anew
            answer = release(query, broadcast, clip_norm=clip)
            row = {"direction": jnp.zeros((1, 1), jnp.int32), "length": jnp.full((1, 1), LENGTH)}
            one = Examples(row, jnp.ones((1, 1), bool), jnp.int32(1))
            sent = contribution(query.client_fn, broadcast, one, jax.random.key(0))
            both = zip(jax.tree.leaves(sent), jax.tree.leaves(answer.value), strict=True)
            parts = [(a[0], b) for a, b in both if a.shape == (self.canaries,)]
            first_P, value_PxM = (np.asarray(part, np.float64) for part in zip(*parts, strict=True))
            seen_M = first_P @ value_PxM / np.linalg.norm(first_P)
            seen_M /= self.plan.clip_norm if clip is None else float(clip)
            shown.append(Shown(seen_M, self.plan.clip.adaptive and answer.clip_norm))
            return answer

        state = self.algorithm.init(jax.random.key(0))
        state = state._replace(params=audits.alternating(round) * state.params)
        self.algorithm.step(state, cast(Release, watched), round)
        return shown[0]


class MomentCanaries:
    """FreD's questions, under its plan: a clip norm's worth of moments, or none."""

    def __init__(self, fred_plan: FredPlan, plans: tuple[Plan, ...], canaries: int) -> None:
        units = plans[0].population
        if fred_plan.population is not None:
            fred_plan = dataclasses.replace(fred_plan, population=units)
        self.plan, self.plans, self.canaries = fred_plan, plans, canaries
        self.columns = ["embedding", *map(str, range(1, len(fred_plan.shares)))]
        dimensions = dict.fromkeys(self.columns, canaries)
        self.queries = fred(fred_plan, units=units, dimension=dimensions).queries

    def clients(self, present_M: np.ndarray) -> Population:
        length, units = LENGTH * self.plan.clip_norm, self.plans[0].population
        clients = _holding(length * present_M, units, 1)
        label_N = np.arange(units, dtype=np.int32) % self.plan.labels
        columns = dict.fromkeys(self.columns, clients.columns["embedding"])
        return clients.with_columns({**columns, "label": label_N})

    def ask(
        self, number: int, release: Callable[..., Released], round: int, clip: jax.Array | None
    ) -> Shown:
        del round, clip  # one round, with a constant clip norm
        query = self.queries[number]
        labels, shares = () if self.plan.labels == 1 else (self.plan.labels,), self.plan.shares
        origin = jnp.zeros((*labels, self.canaries), jnp.float32)
        value = release(query, (origin,) * len(shares) if len(shares) > 1 else origin).value
        if query.label == "count":
            return Shown(None)
        values, own_M = value if len(shares) > 1 else (value,), np.arange(self.canaries)
        shown_M = np.zeros(self.canaries)
        for share, value in zip(shares, values, strict=True):
            value_Kx = np.asarray(value, np.float64) if labels else np.asarray(value)[None]
            if query.label == "second":
                diagonals = [np.diagonal(from_half(half, self.canaries)) for half in value_Kx]
                value_Kx = np.stack(diagonals)
            shown_M += math.sqrt(share) * value_Kx[own_M % self.plan.labels, own_M]
        return Shown(shown_M / query.plan.clip_norm)


class ScoreCanaries:
    """The question of a `Scorer` of one Poisson plan: a clip norm's worth of scores, or none."""

    def __init__(
        self, kind: ScoreKind, max_texts: int, plans: tuple[Plan, ...], canaries: int
    ) -> None:
        (plan,) = plans
        self.scorer = Scorer(plan, kind=kind, max_texts=max_texts)
        self.votes = kind == "nn_histogram"
        directions = np.eye(canaries, dtype=np.float32)[:, None]
        # Scores that are not scaled need so many candidates to reach the clip norm.
        self.pairs = math.ceil(plan.clip_norm**2 / 2) if kind == "cosine" else 1
        both = np.concatenate([directions] * self.pairs + [-directions] * self.pairs, axis=1)
        self.candidates_KxJxD = directions if self.votes else both

    def clients(self, present_M: np.ndarray) -> Population:
        texts = self.scorer.max_texts if self.votes else 1
        return _holding(present_M, self.scorer.plan.population, texts)

    def ask(
        self, number: int, release: Callable[..., Released], round: int, clip: jax.Array | None
    ) -> Shown:
        del number, clip  # one plan, with a constant clip norm
        scores_KxJ = self.scorer.release(cast(Release, release), self.candidates_KxJxD, round)
        scores_KxJ = scores_KxJ.astype(np.float64)
        if not self.votes:
            # A candidate's score is y_i / sqrt(2 pairs) for coordinates y; its opposite's is -.
            scores_KxJ = scores_KxJ[:, [0]] - scores_KxJ[:, [-1]]
            scores_KxJ = scores_KxJ * math.sqrt(self.pairs / 2)
        return Shown(scores_KxJ[:, 0] / self.scorer.plan.clip_norm)


def _holding(length_M: np.ndarray, population: int, examples: int) -> Population:
    """Clients with equal embeddings: canary i with its length times the unit vector i."""
    canaries = len(length_M)
    embedding_NxD = np.zeros((population, canaries), np.float32)
    np.fill_diagonal(embedding_NxD, length_M)
    return audits.of_one_row({"embedding": embedding_NxD}, examples)
