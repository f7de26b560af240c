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

| unit    | per_client | one unit moves count, sum, second moment by |
|---------|------------|---------------------------------------------|
| example | -          | 1, c, c^2                                   |
| client  | "mean"     | 1, c, c^2: a client gives its averages      |
| client  | "sum"      | k, k c, k c^2: at most k examples a client  |

Guarantee, for add-or-remove-one of the unit: releases of noise multipliers z_i (noise divided by
the movement above) are together exactly as private as one Gaussian of shift / noise
mu = sqrt(sum 1 / z_i^2) (Dong, Roth, Su 2022, Corollary 3.3).
"""

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np

from jaxpfl import checks
from jaxpfl.algorithms.frechet import Reference
from jaxpfl.algorithms.gaussian_moments import Moments, RunningMoments, project_psd
from jaxpfl.data.cohort import Cohort, CohortSpec
from jaxpfl.data.population import Population
from jaxpfl.data.prefetch import prefetch
from jaxpfl.errors import BudgetExhausted, InputError
from jaxpfl.federated.mesh import client_mesh
from jaxpfl.federated.moments import ClientMoment, from_half, half_shape
from jaxpfl.federated.private_sum import private_sum
from jaxpfl.privacy import accounting, confirmation
from jaxpfl.privacy.keys import bound_to, key_to_words, round_keys, training_root
from jaxpfl.privacy.ledger import Ledger
from jaxpfl.privacy.plan import Plan, Unit
from jaxpfl.text.embed import Embedder, embedded

Mode = Literal["exact", "paper"]
PerClient = Literal["mean", "sum"]

LABEL = "fred"
# Rows that are added up at a time where the unit is the example and clients do not matter.
_BLOCK = 1024


@dataclasses.dataclass(frozen=True)
class Split:
    """How mu^2 is shared out between the releases; the shares sum to 1.

    The default gives mean and covariance equal parts and the count as little as its error, a few
    hundred units, allows. A count of 0 is for a population that is declared public.
    """

    count: float = 0.004
    mean: float = 0.498
    covariance: float = 0.498

    def __post_init__(self) -> None:
        checks.non_negative("split.count", self.count)
        for name in ("mean", "covariance"):
            checks.positive(f"split.{name}", getattr(self, name))
        total = self.count + self.mean + self.covariance
        if not math.isclose(total, 1.0, abs_tol=1e-9):
            raise InputError(f"split must sum to 1, found {total:g}")


@dataclasses.dataclass(frozen=True)
class FredPlan:
    """What one private query of the moments does and costs; every field is public.

    Made by `calibrated`, `paper` or `without_privacy`.

    Attributes:
      multipliers: noise / sensitivity of count, mean and covariance; the count's is infinite
        where `population` is declared public (nothing about it is released).
      delta: of the statement.
      clip_norm: c, of embeddings and of centred embeddings.
      unit: "client", or "example" (the paper's): what is added or removed.
      per_client: "mean" or "sum", see the table above; of no meaning for the unit "example".
      max_examples: k, a cap on the examples that a client uses where the unit is the client.
        Where it is the example all are used: a cap would put another example in a removed one's
        place and so double the sensitivity.
      population: the number of units, if it is declared public.
      mode: "exact", or "paper": Algorithm 1 as printed.
      private: False only through `without_privacy`.
    """

    multipliers: tuple[float, float, float]
    delta: float
    clip_norm: float = 1.0
    unit: Unit = "client"
    per_client: PerClient = "mean"
    max_examples: int = 64
    population: int | None = None
    mode: Mode = "exact"
    private: bool = True

    def __post_init__(self) -> None:
        if not 1e-6 <= checks.positive("clip_norm", self.clip_norm) <= 1e6:
            raise InputError(f"clip_norm must lie in [1e-6, 1e6], found {self.clip_norm:g}")
        checks.one_of("unit", self.unit, ("client", "example"))
        checks.one_of("per_client", self.per_client, ("mean", "sum"))
        checks.one_of("mode", self.mode, ("exact", "paper"))
        checks.positive_int("max_examples", self.max_examples)
        if self.population is not None:
            checks.positive_int("population", self.population)
        if not self.private:
            if any(self.multipliers):
                raise InputError("a plan without privacy has no noise: use without_privacy")
            return
        if math.isinf(self.multipliers[0]) != (self.population is not None):
            raise InputError(
                "the count's multiplier must be infinite exactly where population is declared"
            )
        checks.open_fraction("delta", self.delta)
        for name, multiplier in zip(("mean", "covariance"), self.multipliers[1:], strict=True):
            checks.positive(f"noise multiplier of the {name}", multiplier)
        if self.population is None:
            checks.positive("noise multiplier of the count", self.multipliers[0])
        elif self.delta >= 1 / self.population:
            raise InputError(
                f"delta = {self.delta:g} is not below 1 / population = {1 / self.population:g}"
            )

    @classmethod
    def calibrated(
        cls,
        *,
        epsilon: float,
        delta: float,
        clip_norm: float = 1.0,
        unit: Unit = "client",
        per_client: PerClient = "mean",
        max_examples: int = 64,
        population: int | None = None,
        split: Split | None = None,
    ) -> Self:
        """Returns the plan with the least noise that is (epsilon, delta)-private.

        The exact Gaussian gives mu (0.1527 for (0.6, 2e-6)); release i gets the multiplier
        1 / (mu sqrt(share_i)). A second formula must confirm the epsilon.

        Args:
          population: the number of units, where that is public; else it is released with noise.
          split: shares of mu^2; default `Split()`, or half and half where `population` is given.

        Raises:
          InputError: a value out of range; the split gives a share to a count that is public, or
            none to one that is not.
        """
        target = checks.positive("epsilon", epsilon)
        if split is None:
            split = Split() if population is None else Split(0.0, 0.5, 0.5)
        if (split.count == 0) != (population is not None):
            raise InputError(
                "split.count must be 0 exactly where population is declared public, found "
                f"split.count = {split.count:g} and population = {population}"
            )
        total = accounting.smallest_noise_multiplier(
            dp_accounting.GaussianDpEvent, target, delta, "pld", "add_or_remove_one"
        )
        shares = (split.count, split.mean, split.covariance)
        plan = cls(
            multipliers=_three(total / math.sqrt(s) if s else math.inf for s in shares),
            delta=delta,
            clip_norm=clip_norm,
            unit=unit,
            per_client=per_client,
            max_examples=max_examples,
            population=population,
        )
        if confirmation.gaussian_epsilon(plan.mu, delta) > target * (1 + 1e-9):
            raise InputError(f"the accountants disagree on epsilon = {target:g}")
        return plan

    @classmethod
    def paper(
        cls,
        *,
        epsilon: float,
        delta: float,
        population: int,
        clients: int,
        clip_norm: float = 1.0,
    ) -> Self:
        """Returns Algorithm 1 as printed, for comparison; `epsilon()` is what it REALLY costs.

        It claims (epsilon, delta) for each of two releases, and so (2 epsilon, 2 delta). But the
        mean's noise is added to each of n examples and then averaged, so it is sqrt(n) too small;
        the covariance's is added to each client's share, so it is sqrt(clients) too large, and to
        the plain triangle. n is disclosed, so only replace-one makes sense of it: one example
        moves the sum by 2 c and the second moment by sqrt(2) c^2.

        Args:
          population: n, the number of examples; disclosed.
          clients: the number of clients; disclosed.
        """
        n = checks.positive_int("population", population)
        clients = checks.positive_int("clients", clients)
        factor = math.sqrt(2 * math.log(1.25 / checks.open_fraction("delta", delta)))
        factor /= checks.positive("epsilon", epsilon)
        # tau_1 = 2 c factor / n on each example; tau_2 = c^2 factor / n on each client's share.
        return cls(
            multipliers=(math.inf, 2 * factor / math.sqrt(n), factor * math.sqrt(clients)),
            delta=delta,
            clip_norm=clip_norm,
            unit="example",
            population=n,
            mode="paper",
        )

    @classmethod
    def without_privacy(
        cls,
        *,
        clip_norm: float = 1.0,
        unit: Unit = "client",
        per_client: PerClient = "mean",
        max_examples: int = 64,
    ) -> Self:
        """Returns the same query without noise: NOT private, and everything made says so."""
        return cls(
            multipliers=(0.0, 0.0, 0.0),
            delta=0.0,
            clip_norm=clip_norm,
            unit=unit,
            per_client=per_client,
            max_examples=max_examples,
            private=False,
        )

    @property
    def sensitivities(self) -> tuple[float, float, float]:
        """By how much one unit moves count, sum and second moment, in L2 norm."""
        c, k = self.clip_norm, 1
        if self.unit == "client" and self.per_client == "sum":
            k = self.max_examples
        return (float(k), k * c, k * c**2)

    @property
    def accounted_multipliers(self) -> tuple[float, float, float]:
        """Noise / the movement under the adjacency in use: replace-one in the mode "paper"."""
        count, mean, covariance = self.multipliers
        if self.mode == "paper":
            return (count, mean / 2, covariance / math.sqrt(2))
        return self.multipliers

    @property
    def mu(self) -> float:
        """Shift / noise of the one Gaussian that all releases together amount to."""
        if not self.private:
            return math.inf
        return math.sqrt(math.fsum(z**-2 for z in self.accounted_multipliers))

    def event(self) -> dp_accounting.DpEvent:
        """Returns the event of the whole query.

        In the mode "paper" its multipliers are relative to replace-one, whose shift is at least
        that of add-or-remove-one: a ledger of the latter is charged too much, never too little.
        """
        if not self.private:
            return dp_accounting.NonPrivateDpEvent()
        finite = [z for z in self.accounted_multipliers if math.isfinite(z)]
        return dp_accounting.ComposedDpEvent([dp_accounting.GaussianDpEvent(z) for z in finite])

    def epsilon(self) -> float:
        """Returns what the query really costs at `delta` (exact)."""
        return confirmation.gaussian_epsilon(self.mu, self.delta) if self.private else math.inf

    def epsilons(self) -> dict[str, float]:
        """Returns the cost of each release alone at `delta`: "count", "mean", "covariance"."""
        names = ("count", "mean", "covariance")
        return {
            name: confirmation.gaussian_epsilon(1 / z, self.delta) if z else math.inf
            for name, z in zip(names, self.accounted_multipliers, strict=True)
            if math.isfinite(z)
        }

    def statement(self) -> str:
        """Returns the guarantee in one line."""
        if not self.private:
            return f"NOT PRIVATE: no noise, epsilon = infinity, unit = {self.unit}"
        adjacency = "add or remove one" if self.mode == "exact" else "replace one"
        realised = "" if self.mode == "exact" else "Algorithm 1 as printed, REALISED "
        epsilon = accounting.rounded_up(self.epsilon())
        return (
            f"{realised}(epsilon = {epsilon}, delta = {self.delta:g}), "
            f"unit = {self.unit}, adjacency = {adjacency} {self.unit}, accountant = exact Gaussian"
        )

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields as plain values for JSON."""
        return dataclasses.asdict(self)

    def _release(self, index: int, units: int) -> Plan:
        """The door's plan of release 0, 1 or 2: everyone takes part."""
        sensitivity = self.sensitivities[index]
        if not self.private:
            plan = Plan.without_privacy(
                population=units, clients_per_round=units, rounds=1, clip_norm=sensitivity
            )
            return dataclasses.replace(plan, unit=self.unit)
        return Plan(
            population=units,
            clients_per_round=units,
            rounds=1,
            clip_norm=sensitivity,
            noise_multiplier=self.multipliers[index],
            delta=self.delta,
            unit=self.unit,
        )


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


def _three(values: Any) -> tuple[float, float, float]:
    count, mean, covariance = values
    return (count, mean, covariance)
