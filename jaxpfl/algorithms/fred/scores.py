"""Public corpora's distances from the released moments, how certain they are, and mixtures.

The noise of a release makes every distance longer: it replaces the small eigenvalues of the
covariance by its own. The candidates' distances grow by nearly the same amount, but with many
dimensions and few clients the differences between these amounts exceed those between the
candidates. Candidates are therefore ordered by the distance without this bias, which follows from
released values alone, by a parametric bootstrap (Efron and Tibshirani 1993, "An Introduction to the
Bootstrap", section 6.5), which is post-processing and costs no privacy:

1. The clients' covariance is estimated. Eigenvalues above the largest that noise alone would have,
   2 s sqrt(d) for entries of standard deviation s, are moved back by the noise's part in them
   (Benaych-Georges and Nadakuditi 2011, "The eigenvalues and eigenvectors of finite, low rank
   perturbations of large random matrices", section 3.1). Only the trace of the other directions is
   known. A model says how it is spread over them: as in the mean of the candidates, as in one of
   the candidates, or evenly.
2. From each model, releases with the same noise are simulated and scored. The mean error of a
   simulated distance is the bias; its standard deviation is the spread.
3. An interval reaches from the least bias-corrected distance to the largest over all models, and
   `_WIDTH` standard deviations beyond both. A difference of two neighbours is treated likewise.

The intervals are measured, not proven: see `benchmarks/macro/fred_intervals.py`.

THE NEAREST MIXTURE of public corpora. Let the clients have mean p and covariance C = F F', corpus k
mean m_k and second moment S_k, and the mixture with shares w mean m = sum w_k m_k and covariance
M = sum w_k S_k - m m'. Then

    FreD(w) = ||m - p||^2 + Tr(M + C - 2 (F' M F)^(1/2))
    dFreD/dw_k = Tr(S_k) - 2 p'm_k - Tr(T (S_k - m_k m' - m m_k')),         T = F (F' M F)^(-1/2) F'

on the plane where shares sum to 1. M is a concave function of w, and the trace of a square root is
concave and monotone, so FreD(w) is convex. Its minimum is found by sequential least squares
programming (Kraft 1988, "A software package for sequential quadratic programming"). Most of a noisy
covariance may be noise, and any guess of what it hides draws all shares towards itself. Covariances
are therefore compared in the directions alone that stand out of the noise (`visible`), and means in
all.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import minimize
from threadpoolctl import threadpool_limits

from jaxpfl import cores
from jaxpfl.algorithms.frechet import Reference
from jaxpfl.algorithms.fred.query import MomentNoise, PrivateMoments
from jaxpfl.algorithms.gaussian_moments import Moments
from jaxpfl.errors import InputError
from jaxpfl.progress import track

# An interval reaches this many standard deviations beyond the estimates of all models.
_WIDTH = 2.6
# Simulated releases, from which the spread is estimated, and of each further model for its bias.
_SIMULATIONS, _OF_MODEL = 24, 6
# So many candidates, the nearest ones, are models of their own.
_CANDIDATE_MODELS = 6


class Score(NamedTuple):
    """The distance of one candidate, a public corpus, from the clients' data.

    Attributes:
      distance: FreD of the released moments, squared as in the paper's Equation 2.
      corrected: an estimate of the distance without noise: `distance` minus the noise's bias.
      low, high: an interval for the distance without noise; equal to it without noise.
      tied: whether the noise does not allow to tell which is nearer, this candidate or the next one
        in the order of `corrected`; False for the last one.
    """

    name: str
    distance: float
    corrected: float
    low: float
    high: float
    tied: bool

    def row(self) -> dict[str, Any]:
        name, *values = self
        return {"candidate": name, **dict(zip(self._fields[1:], values, strict=True))}


def score(
    private: PrivateMoments, candidates: Mapping[str, Moments], *, progress: bool = False
) -> list[Score]:
    """Returns the FreD of every candidate, the least `corrected` first; scoring costs no privacy.

    Up to 66 releases are simulated for the intervals, which takes some seconds at d = 256.
    """
    if not candidates:
        return []
    reference = Reference(private.moments)
    for name, candidate in candidates.items():
        if candidate.dimension != reference.dimension:
            expected = f"expected {reference.dimension}: embed both with the same model"
            raise InputError(f"candidate {name!r} has dimension {candidate.dimension}, {expected}")
    distance_K = reference.distances(list(candidates.values()))
    order_K = np.argsort(distance_K, kind="stable")
    names = [list(candidates)[index] for index in order_K]
    distance_K = distance_K[order_K]
    if private.noise.diagonal == 0:
        exact = zip(names, distance_K.tolist(), strict=True)
        return [Score(name, d, d, d, d, False) for name, d in exact]
    corrected_MxK, error_SxK = unbiased(private, [candidates[name] for name in names], progress)
    order_K = np.argsort(corrected_MxK[0], kind="stable")
    names, distance_K = [names[index] for index in order_K], distance_K[order_K]
    corrected_MxK, error_SxK = corrected_MxK[:, order_K], error_SxK[:, order_K]
    spread_K = error_SxK.std(axis=0, ddof=1)
    low_K, high_K = corrected_MxK.min(axis=0), corrected_MxK.max(axis=0)
    low_K, high_K = low_K - _WIDTH * spread_K, high_K + _WIDTH * spread_K
    gap_K = np.diff(corrected_MxK, axis=1).min(axis=0)
    gap_K -= _WIDTH * np.diff(error_SxK, axis=1).std(axis=0, ddof=1)
    estimates = (np.maximum(values_K, 0.0) for values_K in (corrected_MxK[0], low_K, high_K))
    rows = zip(names, distance_K, *estimates, [*(gap_K <= 0), False], strict=True)
    return [Score(name, *map(float, numbers), tied=bool(tied)) for name, *numbers, tied in rows]


def unbiased(
    private: PrivateMoments, candidates: Sequence[Moments], progress: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Distances without the noise's bias, and the errors of simulated ones.

    An estimate may be below 0. Where noise hides much of the covariance it is too small, because
    the hidden part is taken from the candidates; differences of candidates are less wrong. Returned
    are the distances by each model, float64 [models, candidates], the most plausible model first,
    and this one's errors [simulations, candidates]. Without noise both have one row.
    """
    distance_K = Reference(private.moments).distances(candidates)
    if private.noise.diagonal == 0:
        return distance_K[None], np.zeros((1, len(candidates)))
    errors = list(_errors(private, candidates, progress))
    bias_MxK = np.stack([error_SxK.mean(axis=0) for error_SxK in errors])
    return distance_K - bias_MxK, errors[0]


def _errors(
    private: PrivateMoments, candidates: Sequence[Moments], progress: bool
) -> Iterator[np.ndarray]:
    """Each model's errors [simulations, candidates] of the distances of simulated releases.

    The simulated noise protects nothing, and may therefore be public and always the same.
    """
    generator = np.random.Generator(np.random.Philox(key=0))
    models = list(_models(private, candidates))

    def distances(model: Moments) -> np.ndarray:
        return Reference(model).distances(candidates)

    # BLAS would wake all its threads for every small product, which then wait for each other: where
    # the processor has other work, that takes twenty times as long as one thread.
    with threadpool_limits(1, "blas"), ThreadPoolExecutor(cores.number()) as threads:
        for number, model in enumerate(track(models, "scoring the candidates", progress=progress)):
            simulations = range(_OF_MODEL if number else _SIMULATIONS)
            releases = [_released(model, private.noise, generator) for _ in simulations]
            exact_K, *simulated = threads.map(distances, [model, *releases])
            yield np.stack(simulated) - exact_K


def estimate(private: PrivateMoments, prior: Moments) -> Moments:
    """The clients' moments without noise, as far as the release tells.

    The first step of this file's method: the mean is the released one, directions of the covariance
    that stand out of the noise stay, and the rest of its trace is spread as in `prior`, which
    is public. Without noise these are the released moments.
    """
    return next(_models(private, [prior])) if private.noise.diagonal else private.moments


def visible(private: PrivateMoments) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The part of the released covariance that stands out of the noise, see the head of this file.

    Its eigenvalues without the noise's part [r], all where there is no noise; their directions
    [d, r]; and the other directions [d, d - r].
    """
    eigenvalue_D, vector_DxD = np.linalg.eigh(private.moments.covariance_DxD)
    edge = 2 * private.noise.off_diagonal * math.sqrt(private.moments.dimension)
    above_D = (eigenvalue_D > edge) | (edge == 0)
    visible_R = eigenvalue_D[above_D]
    visible_R = (visible_R + np.sqrt(visible_R**2 - edge**2)) / 2
    return visible_R, vector_DxD[:, above_D], vector_DxD[:, ~above_D]


def _models(private: PrivateMoments, candidates: Sequence[Moments]) -> Iterator[Moments]:
    """Models of the clients' moments without noise; the most plausible one first."""
    released, noise = private.moments, private.noise
    visible_R, visible_DxR, other_DxQ = visible(private)
    visible_DxD = (visible_DxR * visible_R) @ visible_DxR.T
    rest = float(np.trace(released.covariance_DxD)) - noise.mean_bias - float(visible_R.sum())

    def model(shape_QxQ: np.ndarray) -> Moments:
        share = max(rest, 0.0) / max(float(np.trace(shape_QxQ)), 1e-30)
        rest_DxD = other_DxQ @ (share * shape_QxQ) @ other_DxQ.T
        return Moments(released.count, released.mean_D, visible_DxD + rest_DxD)

    shapes = [other_DxQ.T @ candidate.covariance_DxD @ other_DxQ for candidate in candidates]
    yield model(np.mean(shapes, axis=0))
    for shape_QxQ in shapes[:_CANDIDATE_MODELS]:
        yield model(shape_QxQ)
    yield model(np.eye(other_DxQ.shape[1]))


def _released(model: Moments, noise: MomentNoise, generator: np.random.Generator) -> Moments:
    """The moments that a release would state of clients with the model's moments."""
    dimension = model.dimension
    count = max(model.count + noise.count * generator.standard_normal(), 1.0)
    scale = model.count / count
    moved_D = noise.mean * generator.standard_normal(dimension)
    noise_DxD = noise.off_diagonal * generator.standard_normal((dimension, dimension))
    noise_DxD = np.tril(noise_DxD, -1)
    noise_DxD += noise_DxD.T + np.diag(noise.diagonal * generator.standard_normal(dimension))
    mean_D = scale * (model.mean_D + moved_D)
    # The clients' covariance is taken about the released mean.
    shift_D = model.mean_D - mean_D
    covariance_DxD = model.covariance_DxD + np.outer(shift_D, shift_D) + noise_DxD
    return Moments(count, mean_D, scale * covariance_DxD)


class BestMixture(NamedTuple):
    """The nearest mixture of the candidates; public.

    Attributes:
      shares: of the candidates that are part of it, the largest first; they sum to 1.
      distance: its squared Frechet distance to the clients, as in `best_mixture`.
      nearest: the candidate that is nearest alone.
      nearest_distance: the distance of that one, at least `distance`.
    """

    shares: dict[str, float]
    distance: float
    nearest: str
    nearest_distance: float

    def __str__(self) -> str:
        parts = (f"{share:.1%} {name}" for name, share in self.shares.items() if share > 0.0005)
        # As a ratio: these distances see only what the noise does not hide, others estimate all.
        nearer = 1 - self.distance / self.nearest_distance if self.nearest_distance else 0.0
        return f"best mixture: {' + '.join(parts)}, {nearer:.0%} nearer than {self.nearest} alone"


def best_mixture(private: PrivateMoments, candidates: Mapping[str, Moments]) -> BestMixture:
    """Returns the mixture of the candidates with the least Frechet distance; costs no privacy.

    With noise, distances are those of this file's head, less what the noise adds to that of the
    means: an estimate, without an interval.
    """
    names, parts = list(candidates), list(candidates.values())
    dimensions = sorted({part.dimension for part in parts})
    if dimensions != [private.moments.dimension]:
        expected = f"dimension {private.moments.dimension} as the clients have"
        raise InputError(f"candidates must have {expected}, found {dimensions or 'no candidate'}")
    at, even_K = distance_of_mixture(private, parts), np.full(len(parts), 1 / len(parts))
    search: Any = minimize(
        at,
        even_K,
        jac=True,
        method="SLSQP",
        bounds=[(0, 1)] * len(parts),
        constraints={"type": "eq", "fun": lambda w: w.sum() - 1, "jac": np.ones_like},
        options={"ftol": 1e-12, "maxiter": 500},
    )
    # A smaller share is rounding of the search.
    share_K = np.where(search.x > 1e-6, search.x, 0.0)
    share_K /= share_K.sum()
    alone_K = [at(vertex_K)[0] for vertex_K in np.eye(len(parts))]
    nearest = int(np.argmin(alone_K))
    if not at(share_K)[0] < alone_K[nearest]:
        share_K = np.eye(len(parts))[nearest]
    bias = private.noise.mean_bias
    mixed, alone = max(at(share_K)[0] - bias, 0.0), max(alone_K[nearest] - bias, 0.0)
    order_K = np.argsort(-share_K, kind="stable")
    shares = {names[k]: float(share_K[k]) for k in order_K if share_K[k]}
    return BestMixture(shares, mixed, names[nearest], alone)


def distance_of_mixture(
    private: PrivateMoments, parts: Sequence[Moments]
) -> Callable[[np.ndarray], tuple[float, np.ndarray]]:
    """Returns a function of K shares: FreD of this file's head, and its gradient [K]."""
    visible_R, visible_DxR, other_DxQ = visible(private)
    clients_D, mean_KxD = private.moments.mean_D, np.stack([part.mean_D for part in parts])
    covariance_KxRxR = np.stack([visible_DxR.T @ p.covariance_DxD @ visible_DxR for p in parts])
    away_KxQ = (mean_KxD - clients_D) @ other_DxQ
    mean_KxR, clients_R = mean_KxD @ visible_DxR, clients_D @ visible_DxR
    linear_K = np.trace(covariance_KxRxR, axis1=1, axis2=2)
    linear_K = linear_K + np.sum((mean_KxR - clients_R) ** 2, axis=1) + visible_R.sum()
    # In the coordinates of F.
    mean_KxR = mean_KxR * np.sqrt(visible_R)
    second_KxRxR = covariance_KxRxR * np.sqrt(np.outer(visible_R, visible_R))
    second_KxRxR += mean_KxR[:, :, None] * mean_KxR[:, None]

    def at(share_K: np.ndarray) -> tuple[float, np.ndarray]:
        mean_R, away_Q = share_K @ mean_KxR, share_K @ away_KxQ
        inside_RxR = np.tensordot(share_K, second_KxRxR, 1) - np.outer(mean_R, mean_R)
        eigenvalue_R, vector_RxR = np.linalg.eigh(inside_RxR)
        # A direction that no part has gives 0 to all, whatever stands here.
        least = max(1e-12 * float(np.max(eigenvalue_R, initial=0.0)), 1e-200)
        inverse_RxR = vector_RxR / np.sqrt(np.maximum(eigenvalue_R, least)) @ vector_RxR.T
        overlap = 2 * float(np.sum(np.sqrt(np.maximum(eigenvalue_R, 0.0))))
        slope_K = linear_K - np.tensordot(second_KxRxR, inverse_RxR, 2)
        slope_K += 2 * (mean_KxR @ (inverse_RxR @ mean_R) + away_KxQ @ away_Q)
        return max(float(share_K @ linear_K + away_Q @ away_Q) - overlap, 0.0), slope_K

    return at
