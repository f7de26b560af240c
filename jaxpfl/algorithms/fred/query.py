"""FreD: a private Frechet distance from clients' data to public corpora.

Source: Hou, Zhan, Shrivastava, Wang, Livshits, Fanti, Lazar 2023, "Privately Customizing
Prefinetuning to Better Match User Data in Federated Learning", Algorithm 1.

    count       n = sum 1                                       + N(0, s_0^2)
    mean        p = sum clip_c(e) / n                           + N(0, s_1^2) on the sum
    covariance  C = sum v v^T / n,  v = clip_c(clip_c(e) - p)   + N(0, s_2^2) on the half sum
    FreD        = ||m - p||^2 + Tr(M + C - 2 (M C)^(1/2))       for each corpus with moments m, M

C is released as the noise left it. `frechet.Reference` projects it to the nearest positive
semidefinite matrix; `chosen_texts` needs it as it is, where the noise has mean zero.

Each release adds ONE Gaussian noise to the sum that the server would see through secure
aggregation. The noise depends neither on the number of clients nor on how the examples are spread
over them. The query is charged once; its answer scores any number of corpora and mixtures.

`fred.plan` states the sensitivity of each release and the cost of the query.
"""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np

from jaxpfl import files
from jaxpfl.algorithms.base import Algorithm, releaser_of, run_rounds
from jaxpfl.algorithms.fred.plan import FredPlan
from jaxpfl.algorithms.gaussian_moments import Moments, RunningMoments
from jaxpfl.data.cohort import CohortSpec
from jaxpfl.data.population import Population
from jaxpfl.data.selection import at_most
from jaxpfl.errors import CorruptFile, InputError, named
from jaxpfl.federated.clients.moments import JointMoment, Moment, from_half, half_shape
from jaxpfl.federated.hosts import shared_rounds
from jaxpfl.federated.release.query import Execution, Query
from jaxpfl.federated.release.releaser import OtherProcesses, Releaser
from jaxpfl.privacy.keys import RunSecret
from jaxpfl.privacy.ledger import Ledger
from jaxpfl.privacy.plan import Plan
from jaxpfl.text.embed import Embedder, embedded, embeddings_of

LABEL = "fred"
# With the example as unit, a device adds up so many rows before it rounds their sum to float32, and
# multiplies so many at once; more rows of one product would leave fewer bits to each.
_BLOCK, _ROWS = 1024, 64


class MomentNoise(NamedTuple):
    """The standard deviations and biases that noise causes in the released moments; public.

    Attributes:
      count: standard deviation of the count, in units; 0 where this query did not release it.
      mean: standard deviation of each coordinate of the mean.
      diagonal, off_diagonal: standard deviation of the covariance's entries.
      mean_bias: expected increase of ||m - p||^2 due to the noise, d mean^2; also of the trace of
        the covariance, which is taken about a noisy mean.
    """

    count: float
    mean: float
    diagonal: float
    off_diagonal: float
    mean_bias: float


class PrivateMoments(NamedTuple):
    """The released moments, their noise and the plan they were released under; public."""

    moments: Moments
    noise: MomentNoise
    plan: FredPlan

    def arrays(self) -> dict[str, np.ndarray]:
        """The moments and their noise as named arrays, which `of_arrays` reads."""
        return {
            "count": np.asarray(self.moments.count),
            "mean": self.moments.mean_D,
            "covariance": self.moments.covariance_DxD,
            "noise": np.array(self.noise),
        }

    @classmethod
    def of_arrays(cls, arrays: Mapping[str, np.ndarray], plan: FredPlan) -> Self:
        """The moments that `arrays` returned; `plan` is the one they were released under."""
        axes = {"count": 0, "mean": 1, "covariance": 2, "noise": 1}
        for name, number in axes.items():
            array = arrays.get(name)
            if array is None or array.ndim != number or array.dtype.kind != "f":
                raise InputError(f"moments need an array {name!r} of floats, {number} axes")
        numbers, actual = len(MomentNoise._fields), len(arrays["noise"])
        if actual != numbers:
            raise InputError(f"moments need {numbers} numbers of their noise, found {actual}")
        moments = Moments(float(arrays["count"]), arrays["mean"], arrays["covariance"])
        return cls(moments, MomentNoise(*(float(x) for x in arrays["noise"])), plan)

    def save(self, path: str | Path) -> None:
        """Writes the moments and their noise to an .npz file, which `load` reads."""
        files.user_path(path).write_bytes(files.npz(self.arrays()))

    @classmethod
    def load(cls, path: str | Path, plan: FredPlan) -> Self:
        """Reads the file that `save` wrote; `plan` is the one they were released under."""
        with named(path, CorruptFile):
            return cls.of_arrays(files.read_npz(files.user_path(path)), plan)


class FredState(NamedTuple):
    """The noisy sums; public.

    Attributes:
      count: number of units, a float32 scalar; as declared, where it is public.
      sum_D: sum of the clipped embeddings, float32 [d].
      half: half of the symmetric second moment about the released mean, float32 `half_shape(d)`.

    Those of several labels have one more axis, the first. Of several embeddings, sums and halves
    are tuples.
    """

    count: jax.Array
    sum_D: Any
    half: Any


def fred(plan: FredPlan, *, units: int, dimension: int | Mapping[str, int]) -> Algorithm:
    """Returns the query of the moments as an algorithm of one round; its state is `FredState`.

    `moments` computes the released moments from the final state, and `fred.scores` the candidates'
    distances.

    Args:
      plan: what is released and at which noise.
      units: the number of clients, or of examples where the example is the unit.
      dimension: d, of the population's column "embedding", float [examples, d], which
        `text.embed.embed` adds; or of several columns by name, in the order of the plan's shares.
        A plan of several labels also reads the column "label", whole numbers from 0.

    Raises:
      InputError: the plan declares another number of units, or its delta is too large for them.
    """
    # The number of units may be private, so no message contains it.
    if plan.population is not None and plan.population != units:
        what = f"the plan declares a public population of {plan.population} {plan.unit}s"
        raise InputError(f"{what}, but the data has another number of {plan.unit}s")
    if plan.private and (units == 0 or plan.delta >= 1 / units):
        what = f"delta must be below 1 / (number of {plan.unit}s in the data), which the plan's"
        raise InputError(f"{what} delta of {plan.delta:g} is not: choose a smaller delta")
    dimensions = {"embedding": dimension} if isinstance(dimension, int) else dict(dimension)
    if len(dimensions) != len(plan.shares):
        raise InputError(f"the plan has {len(plan.shares)} shares, found {len(dimensions)} columns")
    plans = dict(zip(plan.moments, plan.plans(units), strict=True))
    columns = tuple(dimensions)
    of = {moment: _query(plan, moment, one, columns) for moment, one in plans.items()}
    labels, joint = () if plan.labels == 1 else (plan.labels,), len(dimensions) > 1

    def zeros(shape: Callable[[int], tuple[int, ...]]) -> Any:
        parts = [jnp.zeros((*labels, *shape(d)), jnp.float32) for d in dimensions.values()]
        return tuple(parts) if joint else parts[0]

    def unscaled(value: Any) -> Any:
        if not joint:
            return value
        return tuple(part / math.sqrt(s) for part, s in zip(value, plan.shares, strict=True))

    def init(key):
        count = jnp.zeros(labels, jnp.float32)
        return FredState(count, zeros(lambda d: (d,)), zeros(half_shape))

    def step(state, release, round):
        origin = zeros(lambda d: (d,))
        count = jnp.float32(plan.population or 0)
        if "count" in of:
            count = release(of["count"], origin).value
        sums = unscaled(release(of["sum"], origin).value)
        centre = jax.tree.map(lambda s: jnp.asarray(_mean(plan, count, s)[1], jnp.float32), sums)
        return FredState(count, sums, unscaled(release(of["second"], centre).value)), {}

    return Algorithm(LABEL, init, step, tuple(of.values()))


def moments(plan: FredPlan, state: FredState) -> PrivateMoments:
    """Returns the released moments from the final state: post-processing, which costs nothing.

    `by_embedding` and `by_label` part a state of several.
    """
    number, mean_D = _mean(plan, state.count, state.sum_D)
    count = float(number)
    dimension, isometric = len(mean_D), plan.stated is None
    covariance_DxD = from_half(np.asarray(state.half), dimension, isometric) / count
    stds = plan.noise_stds
    mean_std = stds[1] / count
    noise = MomentNoise(
        count=0.0 if math.isinf(stds[0]) else stds[0],
        mean=mean_std,
        diagonal=stds[2] / count,
        off_diagonal=stds[2] / count / math.sqrt(2 if isometric else 1),
        mean_bias=dimension * mean_std**2,
    )
    return PrivateMoments(Moments(count, mean_D, covariance_DxD), noise, plan)


def by_embedding(plan: FredPlan, state: FredState) -> list[tuple[FredPlan, FredState]]:
    """The sums of each embedding, and its part of the plan; of one, both as they are."""
    if len(plan.shares) == 1:
        return [(plan, state)]
    sums = zip(state.sum_D, state.half, strict=True)
    return list(zip(plan.parts, (FredState(state.count, *of) for of in sums), strict=True))


def by_label(state: FredState) -> list[FredState]:
    """The sums of each label."""
    return [FredState(*parts) for parts in zip(*state, strict=True)]


def _mean(plan: FredPlan, number: Any, sum_D: Any) -> tuple[np.ndarray, np.ndarray]:
    """The count, which is at least 1, and the mean, whose norm is at most c; of each label."""
    count = np.maximum(np.asarray(number, np.float64), 1.0)
    mean_D = np.asarray(sum_D, np.float64) / count[..., None]
    norm = np.linalg.norm(mean_D, axis=-1, keepdims=True)
    return count, mean_D * np.minimum(1.0, plan.clip_norm / np.maximum(norm, 1e-30))


def used_examples(clients: Population, plan: FredPlan, seed: int) -> Population:
    """The clients with the examples that the query uses, to be embedded.

    At most `plan.max_examples` random ones of each, which follow from the seed and the client
    alone; where the unit is the example, all.
    """
    if plan.unit == "example":
        return clients
    return clients.keeping(at_most(clients, plan.max_examples, seed))


def private_moments(
    clients: Population,
    plan: FredPlan,
    *,
    ledger: Ledger | None,
    secret: RunSecret | None = None,
    run: str | None = None,
) -> PrivateMoments:
    """Runs `fred` once: releases count, mean and covariance of the column "embedding".

    Args:
      clients: a population with the column "embedding", float [examples, d].
      ledger: of these clients, for the plan's unit; None in a process that has none.
      secret: the run's secret, which must stay private. With it the same query gives the same
        release, which is charged once. None: a new secret is drawn, and another release made.
      run: as for a `Releaser`.

    Raises:
      InputError: the column is missing or holds no floats, the plan has another number of units or
        none, its delta is too large for them, or the ledger is of another population or unit.
      BudgetExhausted: the query exceeds the ledger's budget; nothing was released.
    """
    if plan.labels > 1 or len(plan.shares) > 1:
        raise InputError("several labels or embeddings are released by `fred`, found such a plan")
    units = plan.units(clients)
    algorithm = fred(plan, units=units, dimension=embeddings_of(clients).shape[1])

    def make(others: OtherProcesses | None) -> Releaser:
        assert ledger is not None
        return releaser_of(algorithm, clients, ledger, secret, run=run, processes=others)

    releaser = shared_rounds.releaser(make, clients, algorithm.queries)
    return moments(plan, run_rounds(algorithm, releaser, jax.random.key(0)))


def _query(plan: FredPlan, moment: Moment, released: Plan, columns: tuple[str, ...]) -> Query:
    """The query of one moment, in one round in which all clients take part."""
    execution = Execution()
    by_client = plan.unit == "client"
    # A sum over examples does not depend on who holds them: equal blocks waste no padding.
    max_examples = plan.max_examples if by_client else _BLOCK
    # Examples go one block at a time: two would be added in plain float32, which rounds.
    clients_per_device = 32 if by_client else 1
    of_one = plan.client_fn(moment)
    return Query(
        moment,
        of_one if len(columns) == 1 else JointMoment(of_one, columns, plan.shares),
        released,
        CohortSpec(
            batch_size=min(32, max_examples) if by_client else _ROWS,
            max_examples=max_examples,
            clients_per_bucket=clients_per_device * execution.replicas,
        ),
        columns=columns if plan.labels == 1 else (*columns, "label"),
        execution=execution,
    )


def public_moments(
    corpus: Population, embedder: Embedder, clip_norm: float = 1.0, *, progress: bool = True
) -> Moments:
    """Returns the moments of a public corpus, which is embedded piece by piece to save memory.

    Embeddings are clipped to `clip_norm`, as the clients' are, and all examples weigh the same.
    """
    if not corpus.num_examples:
        raise InputError(f"corpus {corpus.name!r} has no examples, expected at least one")
    running = RunningMoments(embedder.dimension, clip_norm)
    for _, vectors_NxD in embedded(corpus, embedder, progress=progress, public=True):
        running.add(vectors_NxD)
    return running.result()
