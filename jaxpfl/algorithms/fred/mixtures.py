"""The mixture of public corpora that is nearest to the clients, from one release.

Let the clients have mean p and covariance C = F F', corpus k mean m_k and second moment S_k, and
the mixture with shares w mean m = sum w_k m_k and covariance M = sum w_k S_k - m m'. Then

    FreD(w) = ||m - p||^2 + Tr(M + C - 2 (F' M F)^(1/2))
    dFreD/dw_k = Tr(S_k) - 2 p'm_k - Tr(T (S_k - m_k m' - m m_k')),         T = F (F' M F)^(-1/2) F'

on the plane where shares sum to 1. M is a concave function of w, and the trace of a square root is
concave and monotone, so FreD(w) is convex. Its minimum is found by sequential least squares
programming (Kraft 1988, "A software package for sequential quadratic programming").

Most of a noisy covariance may be noise, and any guess of what it hides draws all shares towards
itself. Covariances are therefore compared in the directions alone that stand out of the noise
(`scores.visible`), and means in all.

All of this reads the release and public corpora, and therefore costs no privacy.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import minimize

from jaxpfl.algorithms.fred.query import PrivateMoments
from jaxpfl.algorithms.fred.scores import visible
from jaxpfl.algorithms.gaussian_moments import Moments
from jaxpfl.errors import InputError


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
        raise InputError(
            f"candidates must have embeddings of dimension {private.moments.dimension} as the "
            f"clients have, found {dimensions or 'no candidate'}"
        )
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
