"""FreD: a private Frechet distance from clients' data to public corpora.

Source: Hou, Zhan, Shrivastava, Wang, Livshits, Fanti, Lazar 2023, "Privately Customizing
Prefinetuning to Better Match User Data in Federated Learning", Algorithm 1.

    count       n = sum 1                                       + N(0, s_0^2)
    mean        p = sum clip_c(e) / n                           + N(0, s_1^2) on the sum
    covariance  C = sum v v^T / n,  v = clip_c(clip_c(e) - p)   + N(0, s_2^2) on the sum's half
    C           is projected to the nearest positive semidefinite matrix
    FreD        = ||m - p||^2 + Tr(M + C - 2 (M C)^(1/2))       for each corpus with moments m, M

Each release is ONE Gaussian, drawn as the server would see it through secure aggregation, so it
depends neither on the number of clients nor on how examples are spread over them. What it costs
is paid once: any number of corpora, and mixtures of them, are scored from the same release.

What a query costs, and by how much one unit moves each release: `fred.plan`.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np

from jaxpfl.algorithms.base import Algorithm, releaser_of, run_rounds
from jaxpfl.algorithms.frechet import Reference
from jaxpfl.algorithms.fred.plan import FredPlan
from jaxpfl.algorithms.gaussian_moments import Moments, RunningMoments, project_psd
from jaxpfl.data.cohort import CohortSpec
from jaxpfl.data.population import Population
from jaxpfl.errors import InputError
from jaxpfl.federated.moments import from_half, half_shape
from jaxpfl.federated.query import Execution, Query
from jaxpfl.privacy.ledger import Ledger
from jaxpfl.privacy.plan import Plan
from jaxpfl.privacy.secret import Secret
from jaxpfl.text.embed import Embedder, embedded

LABEL = "fred"
# Rows that are added up at a time where the unit is the example and clients do not matter.
_BLOCK = 1024


class Noise(NamedTuple):
    """What the noise does to the released moments; public.

    Attributes:
      count: std of the count, in units; 0 where it was declared public.
      mean: std of each coordinate of the mean.
      diagonal, off_diagonal: std of the covariance's entries, before the projection.
      mean_bias: what it adds to ||m - p||^2 on average, d mean^2.
      trace_bias: what it adds to the trace: by the projection (the released trace after it minus
        before it) and by centring at a noisy mean.
    """

    count: float
    mean: float
    diagonal: float
    off_diagonal: float
    mean_bias: float
    trace_bias: float


class PrivateMoments(NamedTuple):
    """The released moments; public."""

    moments: Moments
    noise: Noise
    plan: FredPlan

    def save(self, path: str | Path) -> None:
        """Writes an .npz file that `load` reads."""
        np.savez(
            path,
            count=self.moments.count,
            mean=self.moments.mean_D,
            covariance=self.moments.covariance_DxD,
            noise=np.array(self.noise),
        )

    @classmethod
    def load(cls, path: str | Path, plan: FredPlan) -> Self:
        """Reads what `save` wrote for `plan`."""
        with np.load(path, allow_pickle=False) as file:
            moments = Moments(float(file["count"]), file["mean"], file["covariance"])
            return cls(moments, Noise(*(float(x) for x in file["noise"])), plan)


class Score(NamedTuple):
    """One candidate's distance.

    Attributes:
      name: the candidate's.
      distance: FreD, squared like the paper's Equation 2.
      corrected: FreD minus the distance that the noise alone makes: that of the candidate from
        itself, released at the same noise. Near the non-private distance where candidate and
        clients are not too different; 0 on average where they are the same.
    """

    name: str
    distance: float
    corrected: float


class FredState(NamedTuple):
    """The noisy sums; public.

    Attributes:
      count: float32 scalar; as declared, where that is public.
      sum_D: float32 [d].
      half: float32 `half_shape(d)`, of the second moment about the released mean.
    """

    count: jax.Array
    sum_D: jax.Array
    half: jax.Array


def fred(plan: FredPlan, *, units: int, dimension: int) -> Algorithm:
    """Returns the query of the moments as an algorithm of one round; its state is `FredState`.

    It reads the column "embedding", float [examples, d], e.g. of `text.embed.embed`. `moments`
    makes the released moments of its last state, `score` the distances of candidates.

    Args:
      plan: what is released and at which noise.
      units: number of clients, or of examples where these are the unit.
      dimension: d.

    Raises:
      InputError: the population is not the one that the plan declares; delta is too large for it.
    """
    if plan.population is not None and plan.population != units:
        raise InputError(
            f"the plan declares a public population of {plan.population} {plan.unit}s, the data "
            "has another number"
        )
    if plan.private and (units == 0 or plan.delta >= 1 / units):
        # The number of units may be private: the message does not tell it.
        raise InputError(f"delta = {plan.delta:g} is not below 1 / the number of {plan.unit}s")
    queries = tuple(
        _query(plan, moment, released)
        for moment, released in zip(plan.moments, plan.plans(units), strict=True)
    )
    of = {query.label: query for query in queries}

    def init(key):
        del key  # nothing is drawn
        return FredState(
            jnp.float32(0), jnp.zeros(dimension, jnp.float32), jnp.zeros(half_shape(dimension))
        )

    def step(state, release, round):
        del round
        origin_D = jnp.zeros(dimension, jnp.float32)
        count = jnp.float32(plan.population or 0)
        if plan.population is None:
            count = release(of["count"], origin_D).value
        state = FredState(count, release(of["sum"], origin_D).value, state.half)
        centre_D = jnp.asarray(_mean(plan, state)[1], jnp.float32)
        return state._replace(half=release(of["second"], centre_D).value), {}

    return Algorithm(LABEL, init, step, queries)


def moments(plan: FredPlan, state: FredState) -> PrivateMoments:
    """The released moments of a last state: post-processing, which costs nothing."""
    count, mean_D = _mean(plan, state)
    dimension = len(mean_D)
    raw_DxD = from_half(np.asarray(state.half), dimension, isometric=plan.mode == "exact") / count
    covariance_DxD = project_psd(raw_DxD)
    stds = [z * s for z, s in zip(plan.multipliers, plan.sensitivities, strict=True)]
    mean_std = stds[1] / count
    noise = Noise(
        count=stds[0] if plan.population is None else 0.0,
        mean=mean_std,
        diagonal=stds[2] / count,
        off_diagonal=stds[2] / count / (math.sqrt(2) if plan.mode == "exact" else 1.0),
        mean_bias=dimension * mean_std**2,
        trace_bias=float(np.trace(covariance_DxD) - np.trace(raw_DxD)) + dimension * mean_std**2,
    )
    return PrivateMoments(Moments(count, mean_D, covariance_DxD), noise, plan)


def _mean(plan: FredPlan, state: FredState) -> tuple[float, np.ndarray]:
    """Count and mean: there is someone, and a mean of clipped embeddings has norm at most c."""
    count = max(float(state.count), 1.0)
    mean_D = np.asarray(state.sum_D, np.float64) / count
    return count, mean_D * min(1.0, plan.clip_norm / max(float(np.linalg.norm(mean_D)), 1e-30))


def private_moments(
    clients: Population,
    plan: FredPlan,
    *,
    ledger: Ledger,
    secret: Secret | None = None,
    run: str = LABEL,
) -> PrivateMoments:
    """Releases count, mean and covariance of the column "embedding": `fred`, run once.

    Args:
      clients: with the column "embedding", float [examples, d].
      plan: what is released and at which noise.
      ledger: of these clients, with the plan's unit.
      secret: of the run, kept private: with it, the same query is the same release and costs
        nothing more. None draws one: then it is another release.
      run: names the query in the ledger.

    Raises:
      InputError: no such column; the population is not the one declared; delta is too large for
        it; the ledger is of another population or unit.
      BudgetExhausted: the query does not fit the ledger's budget; nothing was released.
    """
    embeddings = clients.columns.get("embedding")
    if not isinstance(embeddings, np.ndarray) or embeddings.ndim != 2:
        raise InputError("the population needs a column 'embedding' of numbers [examples, d]")
    if embeddings.dtype.kind != "f":
        raise InputError(f"column 'embedding' must hold floats, found {embeddings.dtype}")
    units = len(clients) if plan.unit == "client" else clients.num_examples
    algorithm = fred(plan, units=units, dimension=embeddings.shape[1])
    releaser = releaser_of(algorithm, clients, ledger, secret or Secret(), run=run)
    return moments(plan, run_rounds(algorithm, releaser, jax.random.key(0)))


def _query(plan: FredPlan, moment: Any, released: Plan) -> Query:
    """The query of one moment, in one round with everyone."""
    execution = Execution()
    by_client = plan.unit == "client"
    # Sums over examples do not care whose they are: even blocks waste no padding.
    most = plan.max_examples if by_client else _BLOCK
    together = 32 if by_client else 4
    return Query(
        moment,
        plan.client_fn(moment),
        released,
        CohortSpec(
            batch_size=min(32, most) if by_client else _BLOCK,
            max_examples=most,
            clients_per_bucket=together * execution.devices.size,
        ),
        columns=("embedding",),
        execution=execution,
    )


def public_moments(
    corpus: Population, embedder: Embedder, clip_norm: float = 1.0, *, shown: bool = True
) -> Moments:
    """Returns the moments of a public corpus, embedded in pieces: memory is that of a piece.

    Embeddings are clipped to `clip_norm`, as the clients' are; every example has equal weight.

    Raises:
      InputError: the corpus lacks what the embedder reads, or has no examples.
    """
    if not corpus.num_examples:
        raise InputError(f"{corpus.name!r} has no examples")
    running = RunningMoments(embedder.dimension, clip_norm)
    for _, vectors_NxD in embedded(corpus, embedder, shown=shown):
        running.add(vectors_NxD)
    return running.result()


def score(private: PrivateMoments, candidates: Mapping[str, Moments]) -> list[Score]:
    """Returns every candidate's FreD, nearest first; costs no privacy.

    Raises:
      InputError: a candidate has embeddings of another dimension.
    """
    dimension = len(private.moments.mean_D)
    for name, candidate in candidates.items():
        if len(candidate.mean_D) != dimension:
            raise InputError(
                f"candidate {name!r} has embeddings of dimension {len(candidate.mean_D)}, the "
                f"clients' have {dimension}"
            )
    distances = Reference(private.moments).distances(list(candidates.values()))
    scores = [
        Score(name, float(distance), float(distance) - _from_noise_alone(candidate, private.noise))
        for (name, candidate), distance in zip(candidates.items(), distances, strict=True)
    ]
    return sorted(scores, key=lambda found: found.distance)


def _from_noise_alone(candidate: Moments, noise: Noise) -> float:
    """The candidate's distance from itself, released at this noise, by one simulated release.

    The simulation's noise is public and the same for all candidates: it hides nothing.
    """
    if noise.diagonal == 0:
        return 0.0
    dimension = len(candidate.mean_D)
    generator = np.random.Generator(np.random.Philox(key=0))
    mean_D = candidate.mean_D + noise.mean * generator.standard_normal(dimension)
    noise_DxD = noise.off_diagonal * generator.standard_normal((dimension, dimension))
    noise_DxD = np.tril(noise_DxD, -1)
    noise_DxD += noise_DxD.T + np.diag(noise.diagonal * generator.standard_normal(dimension))
    # The clients' covariance is taken about the released mean.
    moved_DxD = np.outer(candidate.mean_D - mean_D, candidate.mean_D - mean_D)
    covariance_DxD = project_psd(candidate.covariance_DxD + moved_DxD + noise_DxD)
    return Reference(Moments(candidate.count, mean_D, covariance_DxD)).distance(candidate)
