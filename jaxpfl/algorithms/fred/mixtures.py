"""The mixture of public corpora that is nearest to the clients, from one release.

Mean and covariance of a mixture follow from those of its parts, so its Frechet distance to the
clients is a function of the shares alone, and a convex one. Its minimum is found with its gradient
(`frechet.Reference.of_mixture`) by sequential least squares programming (Kraft 1988, "A software
package for sequential quadratic programming"). It reads the release and public corpora, and
therefore costs no privacy.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import minimize

from jaxpfl.algorithms.frechet import Reference
from jaxpfl.algorithms.fred.query import PrivateMoments
from jaxpfl.algorithms.fred.scores import estimate
from jaxpfl.algorithms.gaussian_moments import Moments, mixture

# A smaller share is rounding of the search.
_LEAST_SHARE = 1e-6


class BestMixture(NamedTuple):
    """The nearest mixture of the candidates; public.

    Attributes:
      shares: of the candidates that are part of it, the largest first; they sum to 1.
      distance: its squared Frechet distance to the clients, see `best_mixture`.
      nearest: the candidate that is nearest alone.
      nearest_distance: the distance of that one, at least `distance`.
    """

    shares: dict[str, float]
    distance: float
    nearest: str
    nearest_distance: float

    def __str__(self) -> str:
        parts = (f"{100 * share:.3g} % {name}" for name, share in self.shares.items())
        alone = f"{self.nearest} alone: {self.nearest_distance:.5g}"
        return f"best mixture: {' + '.join(parts)}, at distance {self.distance:.5g} ({alone})"


def best_mixture(private: PrivateMoments, candidates: Mapping[str, Moments]) -> BestMixture:
    """Returns the mixture of the candidates with the least Frechet distance; costs no privacy.

    Distances are to the clients' moments without noise as `fred.scores.estimate` finds them: what
    the noise hides of the covariance is taken to be as in the mean of the candidates' own. They are
    an estimate, near `Score.corrected`, and have no interval.

    Args:
      private: the moments of the clients, as released.
      candidates: the moments of public corpora, by name.

    Raises:
      InputError: there is no candidate, or one has embeddings of another dimension.
    """
    names, parts = list(candidates), list(candidates.values())
    even_K = np.full(len(parts), 1 / max(len(parts), 1))
    even = mixture(parts, even_K)
    # Refuses another dimension before it is computed with.
    Reference(private.moments).distance(even)
    spread_DxD = np.mean([part.covariance_DxD for part in parts], axis=0)
    prior = Moments(even.count, even.mean_D, spread_DxD)
    reference = Reference(estimate(private, prior))
    alone_K = reference.distances(parts)
    nearest = int(alone_K.argmin())
    search: Any = minimize(
        reference.of_mixture(parts),
        even_K,
        jac=True,
        method="SLSQP",
        bounds=[(0, 1)] * len(parts),
        constraints={"type": "eq", "fun": lambda w: w.sum() - 1, "jac": np.ones_like},
        options={"ftol": 1e-12, "maxiter": 500},
    )
    share_K = np.where(search.x > _LEAST_SHARE, search.x, 0.0)
    share_K /= share_K.sum()
    found = reference.distance(mixture(parts, share_K))
    if not found < alone_K[nearest]:
        share_K, found = np.eye(len(parts))[nearest], float(alone_K[nearest])
    order_K = np.argsort(-share_K, kind="stable")
    shares = {names[k]: float(share_K[k]) for k in order_K if share_K[k]}
    return BestMixture(shares, found, names[nearest], float(alone_K[nearest]))
