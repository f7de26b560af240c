"""The mixture of public corpora that is nearest to the clients, from one release.

Mean and covariance of a mixture follow from those of its parts, so its Frechet distance to the
clients is a function of the shares alone, and a convex one. Its minimum is found with its gradient
(`frechet.Reference.of_mixture`) by sequential least squares programming (Kraft 1988, "A software
package for sequential quadratic programming"). It reads the release and public corpora, and
therefore costs no privacy.

Most of a noisy covariance may be noise, and any guess of what it hides draws all shares towards
itself. Covariances are therefore compared in the directions alone that stand out of the noise
(`scores.visible`), and means in all.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import minimize

from jaxpfl.algorithms.frechet import Reference
from jaxpfl.algorithms.fred.query import PrivateMoments
from jaxpfl.algorithms.fred.scores import visible
from jaxpfl.algorithms.gaussian_moments import Moments, mixture

# A smaller share is rounding of the search.
_LEAST_SHARE = 1e-6


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
        alone = f"{self.nearest} alone: {self.nearest_distance:.5g}"
        return f"best mixture: {' + '.join(parts)}, at distance {self.distance:.5g} ({alone})"


def best_mixture(private: PrivateMoments, candidates: Mapping[str, Moments]) -> BestMixture:
    """Returns the mixture of the candidates with the least Frechet distance; costs no privacy.

    With noise, distances are those of this file's head, less what the noise adds to that of the
    means: an estimate, without an interval.

    Args:
      private: the moments of the clients, as released.
      candidates: the moments of public corpora, by name.

    Raises:
      InputError: there is no candidate, or one has embeddings of another dimension.
    """
    names, parts = list(candidates), list(candidates.values())
    even_K = np.full(len(parts), 1 / max(len(parts), 1))
    # Refuses other dimensions.
    Reference(private.moments).distance(mixture(parts, even_K))
    at = _distance(private, parts)
    search: Any = minimize(
        at,
        even_K,
        jac=True,
        method="SLSQP",
        bounds=[(0, 1)] * len(parts),
        constraints={"type": "eq", "fun": lambda w: w.sum() - 1, "jac": np.ones_like},
        options={"ftol": 1e-12, "maxiter": 500},
    )
    share_K = np.where(search.x > _LEAST_SHARE, search.x, 0.0)
    share_K /= share_K.sum()
    alone_K = [at(vertex_K)[0] for vertex_K in np.eye(len(parts))]
    nearest = int(np.argmin(alone_K))
    if not at(share_K)[0] < alone_K[nearest]:
        share_K = np.eye(len(parts))[nearest]
    found, alone = (
        max(each - private.noise.mean_bias, 0.0) for each in (at(share_K)[0], alone_K[nearest])
    )
    order_K = np.argsort(-share_K, kind="stable")
    shares = {names[k]: float(share_K[k]) for k in order_K if share_K[k]}
    return BestMixture(shares, found, names[nearest], alone)


def _distance(
    private: PrivateMoments, parts: Sequence[Moments]
) -> Callable[[np.ndarray], tuple[float, np.ndarray]]:
    """The distance of a mixture as far as the release tells, and its gradient, by the shares."""
    if not private.noise.diagonal:
        return Reference(private.moments).of_mixture(parts)
    mean_D = private.moments.mean_D
    kept_R, known_DxR, other_DxQ = visible(private)
    if not kept_R.size:
        # Nothing stands out: one direction, in which all are equal.
        kept_R, known_DxR = np.zeros(1), np.zeros((len(mean_D), 1))
    seen = [
        Moments(part.count, part.mean_D @ known_DxR, known_DxR.T @ part.covariance_DxD @ known_DxR)
        for part in parts
    ]
    of_seen = Reference(Moments(1.0, mean_D @ known_DxR, np.diag(kept_R))).of_mixture(seen)
    away_KxQ = np.stack([part.mean_D - mean_D for part in parts]) @ other_DxQ

    def at(shares_K: np.ndarray) -> tuple[float, np.ndarray]:
        distance, slope_K = of_seen(shares_K)
        away_Q = shares_K @ away_KxQ
        return distance + float(away_Q @ away_Q), slope_K + 2 * away_KxQ @ away_Q

    return at
