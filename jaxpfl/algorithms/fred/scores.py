"""The distances of public corpora from the released moments, and how certain they are.

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
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

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
            raise InputError(
                f"candidate {name!r} has embeddings of dimension {candidate.dimension}, expected "
                f"{reference.dimension} as the clients have: embed both with the same model"
            )
    distance_K = reference.distances(list(candidates.values()))
    order_K = np.argsort(distance_K, kind="stable")
    names = [list(candidates)[index] for index in order_K]
    distance_K = distance_K[order_K]
    if private.noise.diagonal == 0:
        return [
            Score(n, d, d, d, d, False) for n, d in zip(names, distance_K.tolist(), strict=True)
        ]
    corrected_MxK, error_SxK = unbiased(private, [candidates[name] for name in names], progress)
    order_K = np.argsort(corrected_MxK[0], kind="stable")
    names, distance_K = [names[index] for index in order_K], distance_K[order_K]
    corrected_MxK, error_SxK = corrected_MxK[:, order_K], error_SxK[:, order_K]
    spread_K = error_SxK.std(axis=0, ddof=1)
    low_K, high_K = corrected_MxK.min(axis=0), corrected_MxK.max(axis=0)
    low_K, high_K = low_K - _WIDTH * spread_K, high_K + _WIDTH * spread_K
    gap_K = np.diff(corrected_MxK, axis=1).min(axis=0)
    gap_K -= _WIDTH * np.diff(error_SxK, axis=1).std(axis=0, ddof=1)
    return [
        Score(name, *map(float, numbers), tied=bool(tied))
        for name, *numbers, tied in zip(
            names,
            distance_K,
            np.maximum(corrected_MxK[0], 0.0),
            np.maximum(low_K, 0.0),
            np.maximum(high_K, 0.0),
            [*(gap_K <= 0), False],
            strict=True,
        )
    ]


def unbiased(
    private: PrivateMoments, candidates: Sequence[Moments], progress: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Distances without the noise's bias, and the errors of simulated ones.

    An estimate may be below 0. Where noise hides much of the covariance it is too small, because
    the hidden part is taken from the candidates; differences of candidates are less wrong.

    Returns:
      The distances by each model, float64 [models, candidates], the most plausible model first, and
      this one's errors [simulations, candidates]. Without noise both have one row.
    """
    distance_K = Reference(private.moments).distances(candidates)
    if private.noise.diagonal == 0:
        return distance_K[None], np.zeros((1, len(candidates)))
    error_MxKs = list(_errors(private, candidates, progress))
    return distance_K - np.stack([error_SxK.mean(axis=0) for error_SxK in error_MxKs]), error_MxKs[
        0
    ]


def _errors(
    private: PrivateMoments, candidates: Sequence[Moments], progress: bool
) -> Iterator[np.ndarray]:
    """Each model's errors [simulations, candidates] of the distances of simulated releases.

    The simulated noise protects nothing, and may therefore be public and always the same.
    """
    generator = np.random.Generator(np.random.Philox(key=0))
    models = list(_models(private, candidates))
    for number, model in enumerate(track(models, "scoring the candidates", progress=progress)):
        exact_K = Reference(model).distances(candidates)
        simulations = _OF_MODEL if number else _SIMULATIONS
        yield np.stack(
            [
                Reference(_released(model, private.noise, generator)).distances(candidates)
                - exact_K
                for _ in range(simulations)
            ]
        )


def estimate(private: PrivateMoments, prior: Moments) -> Moments:
    """The clients' moments without noise, as far as the release tells.

    The first step of this file's method: the mean is the released one, directions of the covariance
    that stand out of the noise stay, and the rest of its trace is spread as in `prior`, which
    is public. Without noise these are the released moments.
    """
    return next(_models(private, [prior])) if private.noise.diagonal else private.moments


def visible(private: PrivateMoments) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The part of the released covariance that stands out of the noise, see the head of this file.

    Returns:
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
