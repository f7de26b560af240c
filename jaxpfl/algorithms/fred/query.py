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

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np

from jaxpfl.algorithms.frechet import Reference
from jaxpfl.algorithms.fred.plan import FredPlan
from jaxpfl.algorithms.gaussian_moments import Moments, RunningMoments, project_psd
from jaxpfl.data.cohort import Cohort, CohortSpec
from jaxpfl.data.population import Population
from jaxpfl.data.prefetch import prefetch
from jaxpfl.errors import BudgetExhausted, InputError
from jaxpfl.federated.mesh import client_mesh
from jaxpfl.federated.moments import ClientMoment, from_half, half_shape
from jaxpfl.federated.private_sum import private_sum
from jaxpfl.privacy.keys import bound_to, key_to_words, round_keys, training_root
from jaxpfl.privacy.ledger import Ledger
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


def private_moments(
    clients: Population,
    plan: FredPlan,
    *,
    ledger: Ledger,
    noise_key: jax.Array,
    run: str = LABEL,
) -> PrivateMoments:
    """Releases count, mean and covariance of the column "embedding" (float [examples, d]).

    The ledger is charged with the whole query before anything is released. The same query again,
    with the same `run`, noise key, plan and embeddings, is the same release and costs nothing more;
    whatever of these differs, the noise is independent and the query is charged.

    Args:
      clients: with the column "embedding", e.g. of `text.embed.embed`.
      plan: what is released and at which noise.
      ledger: of these clients, with the plan's unit.
      noise_key: of `privacy.keys.noise_root()`, kept private and used for nothing else.
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
    if plan.population is not None and plan.population != units:
        raise InputError(
            f"the plan declares a public population of {plan.population} {plan.unit}s, the data "
            "has another number"
        )
    if plan.private and (units == 0 or plan.delta >= 1 / units):
        # The number of units may be private: the message does not tell it.
        raise InputError(f"delta = {plan.delta:g} is not below 1 / the number of {plan.unit}s")
    if ledger.population != clients.fingerprint:
        raise InputError("the ledger is of another population than the clients queried")
    if ledger.unit != plan.unit:
        raise InputError(f"the ledger protects each {ledger.unit}, the plan each {plan.unit}")
    identity = _identity(clients, plan, run)
    noise_key = bound_to(noise_key, identity)
    # With the secret key in it, this tells nothing of the data, unlike a hash of the data alone.
    charged_as = hashlib.sha256(f"{key_to_words(noise_key)}".encode()).hexdigest()[:12]
    ledger.charge(plan.event(), LABEL, run=f"{run} {charged_as}", round=0)

    query = _Query(clients, plan, units, noise_key)
    dimension = embeddings.shape[1]
    origin = jnp.zeros(dimension, jnp.float32)
    released = plan.population
    if released is None:
        released = float(query.release(0, "count", (), origin))
    # Post-processing: there is someone, and a mean of clipped embeddings has norm at most c.
    count = max(float(released), 1.0)
    mean_D = np.asarray(query.release(1, "sum", (dimension,), origin), np.float64) / count
    mean_D *= min(1.0, plan.clip_norm / max(float(np.linalg.norm(mean_D)), 1e-30))
    half = query.release(2, "second", half_shape(dimension), jnp.asarray(mean_D, jnp.float32))
    raw_DxD = from_half(half, dimension, isometric=plan.mode == "exact") / count
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


def require_affordable(plan: FredPlan, ledger: Ledger) -> None:
    """Refuses a query that does not fit the ledger's budget, before clients embed anything for it.

    A ledger that has been charged for a query before is let through: it may be the same one.

    Raises:
      BudgetExhausted: not even once does it fit.
    """
    queried = any(charge.label == LABEL for charge in ledger.charges)
    if not queried and ledger.affordable(plan.event()) == 0:
        raise BudgetExhausted(
            f"{ledger.path}: a FreD query would exceed the budget; nothing was released"
        )


def _identity(clients: Population, plan: FredPlan, run: str) -> bytes:
    """SHA-256 of all that a release follows from, but its noise key. PRIVATE."""
    digest = hashlib.sha256(json.dumps([run, plan.to_dict(), clients.fingerprint]).encode())
    digest.update(np.ascontiguousarray(clients.columns["embedding"]).data)
    digest.update(clients.offsets.astype("<i8").data)
    return digest.digest()


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


@dataclasses.dataclass(frozen=True)
class _Query:
    """The population through the door, once for each release."""

    population: Population
    plan: FredPlan
    units: int
    noise_key: jax.Array

    def release(self, index: int, moment: Any, shape: tuple[int, ...], centre_D: jax.Array) -> Any:
        """The noisy sum of one moment, as numpy."""
        plan = self.plan
        by_client = plan.unit == "client"
        client_fn = ClientMoment(
            moment,
            plan.clip_norm,
            average=by_client and plan.per_client == "mean",
            isometric=plan.mode == "exact",
        )
        mesh = client_mesh()
        like = jax.ShapeDtypeStruct(shape, jnp.float32)
        door = private_sum(client_fn, plan._release(index, self.units), like, mesh=mesh)
        keys = round_keys(training_root(0), self.noise_key, index)
        with prefetch(self._cohort(index, door.shards)) as buckets:
            total, _ = door(centre_D, buckets, door.init(), keys)
        return np.asarray(total)

    def _cohort(self, index: int, shards: int) -> Cohort:
        population = Population(
            {"embedding": self.population.columns["embedding"]},
            self.population.offsets,
            self.population.client_ids,
        )
        if self.plan.unit == "client":
            spec = CohortSpec(
                batch_size=min(32, self.plan.max_examples),
                max_examples=self.plan.max_examples,
                clients_per_bucket=32 * shards,
            )
        else:
            # Sums over examples do not care whose they are: even blocks waste no padding.
            population = _in_blocks(population)
            spec = CohortSpec(batch_size=_BLOCK, max_examples=_BLOCK, clients_per_bucket=4 * shards)
        everyone = np.arange(len(population))
        # Which examples of a client are used is secret: subsets are addressed by index, and with a
        # public seed the removal of one client would change the others' for all to compute.
        words = f"fred cohort {key_to_words(self.noise_key)}"
        seed = int.from_bytes(hashlib.sha256(words.encode()).digest()[:16], "big")
        return Cohort(population, everyone, spec, seed=seed, round=index, shards=shards)


def _in_blocks(population: Population) -> Population:
    total = population.num_examples
    edges = np.append(np.arange(0, total, _BLOCK), total)
    names = [str(number) for number in range(len(edges) - 1)]
    return Population(population.columns, edges, names)
