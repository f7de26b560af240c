"""The Frechet distance between corpora, by the moments of their embeddings.

    FreD(1, 2) = ||m1 - m2||^2 + Tr(C1 + C2 - 2 (C1 C2)^(1/2))

is the squared 2-Wasserstein distance between the Gaussians N(m1, C1) and N(m2, C2). Source:
Dowson and Landau 1982, "The Frechet distance between multivariate normal distributions",
equation 4; Heusel et al. 2017, "GANs Trained by a Two Time-Scale Update Rule", equation 6, for
embeddings.

The product C1 C2 is not symmetric, and its matrix square root is unstable where it is singular. Its
eigenvalues are those of the symmetric matrix F^T C2 F for any factor F with F F^T = C1, so the
trace is the sum of their square roots and no matrix square root is needed. The factor of the
reference is computed once for all candidates.

The server computes all of this from public quantities, in float64 on the host.
"""

from collections.abc import Sequence

import numpy as np

from jaxpfl.algorithms.gaussian_moments import Moments as Moments
from jaxpfl.algorithms.gaussian_moments import RunningMoments as RunningMoments
from jaxpfl.algorithms.gaussian_moments import mixture as mixture
from jaxpfl.algorithms.gaussian_moments import moments as moments
from jaxpfl.algorithms.gaussian_moments import project_psd as project_psd
from jaxpfl.errors import InputError

# Is added to the eigenvalues of a covariance before it is inverted, as a share of their mean.
_RIDGE = 1e-2


class Reference:
    """One side of the distance, factored once so that many candidates are scored against it.

    A covariance with negative eigenvalues, as noise leaves them, is replaced by the nearest
    positive semidefinite matrix (`project_psd`); `rank` and `trace` are of that one.
    """

    def __init__(self, moments: Moments):
        self.dimension = moments.dimension
        self._mean_D = moments.mean_D
        # F with F F^T the nearest positive semidefinite matrix.
        eigenvalue_D, vector_DxD = np.linalg.eigh(moments.covariance_DxD)
        # An eigenvalue below this is a rounding error of the decomposition itself.
        rounding = self.dimension * np.finfo(np.float64).eps * np.abs(eigenvalue_D).max()
        above_D = eigenvalue_D > rounding
        self._factor_DxR = vector_DxD[:, above_D] * np.sqrt(eigenvalue_D[above_D])
        self.rank = self._factor_DxR.shape[1]
        self.trace = float(np.sum(self._factor_DxR**2))

    def distance(self, candidate: Moments) -> float:
        """Returns the squared 2-Wasserstein distance to a candidate, which is >= 0.

        Equal moments give 0 to about 1e-7 of the trace. The candidate's covariance must be
        positive semidefinite, as every covariance of embeddings is. This is not checked; use
        `distance` where both sides may need the projection.
        """
        _require_same(self.dimension, candidate)
        # The candidate's covariance in the coordinates of the factor.
        projected_RxR = self._factor_DxR.T @ candidate.covariance_DxD @ self._factor_DxR
        eigenvalue_R = np.linalg.eigvalsh(projected_RxR) if self.rank else np.zeros(0)
        # Rounding leaves negative eigenvalues where the product is singular.
        overlap = 2 * float(np.sum(np.sqrt(np.maximum(eigenvalue_R, 0.0))))
        shift_D = candidate.mean_D - self._mean_D
        trace = float(np.trace(candidate.covariance_DxD))
        return max(float(shift_D @ shift_D) + self.trace + trace - overlap, 0.0)

    def distances(self, candidates: Sequence[Moments]) -> np.ndarray:
        """Returns the distances to the candidates, in their order: float64 [candidates]."""
        return np.array([self.distance(candidate) for candidate in candidates], np.float64)


def _require_same(dimension: int, candidate: Moments) -> None:
    if candidate.dimension != dimension:
        what = f"a candidate has dimension {candidate.dimension}, but the reference has {dimension}"
        raise InputError(f"{what}: embed both with the same model")


def distance(a: Moments, b: Moments) -> float:
    """Returns the squared 2-Wasserstein distance between two Gaussians.

    Either covariance may have negative eigenvalues: both are projected by `project_psd`. Use
    `Reference` to compute many distances from one side.
    """
    projected = Moments(b.count, b.mean_D, project_psd(b.covariance_DxD))
    return Reference(a).distance(projected)


def witness(target: Moments, current: Moments, embeddings_NxD: np.ndarray) -> np.ndarray:
    """How fast each embedding would bring the current moments nearer to the target's.

    Let m, M be the current moments, p, C the target's, and
    T = M^-1/2 (M^1/2 C M^1/2)^1/2 M^-1/2, which takes N(m, M) to N(p, C). When a share t of the
    current corpus becomes copies of x, the squared Frechet distance falls at first by t times

        -2 (m - p)'(x - m) - (x - m)'(I - T)(x - m)

    up to a number that does not depend on x, so that only differences of the result, float64 [N],
    mean something. This form inverts M, to which a small ridge is added, and not C: with noise, C
    has negative eigenvalues, which `project_psd` replaces by zero.

    Source: the first variation of the Bures-Wasserstein distance, with the optimal map of Dowson
    and Landau 1982 and of Olkin and Pukelsheim 1982, "The distance between two random vectors with
    given dispersion matrices".
    """
    _require_same(target.dimension, current)
    eigenvalue_D, vector_DxD = np.linalg.eigh(current.covariance_DxD)
    ridge = _RIDGE * max(float(np.trace(current.covariance_DxD)) / current.dimension, 1e-30)
    root_D = np.sqrt(np.maximum(eigenvalue_D, 0.0) + ridge)
    root_DxD = (vector_DxD * root_D) @ vector_DxD.T
    inverse_DxD = (vector_DxD * (1 / root_D)) @ vector_DxD.T
    middle_D, middle_DxD = np.linalg.eigh(root_DxD @ project_psd(target.covariance_DxD) @ root_DxD)
    root_of_DxD = (middle_DxD * np.sqrt(np.maximum(middle_D, 0.0))) @ middle_DxD.T
    map_DxD = inverse_DxD @ root_of_DxD @ inverse_DxD
    away_NxD = np.asarray(embeddings_NxD, np.float64) - current.mean_D
    linear_N = away_NxD @ (current.mean_D - target.mean_D)
    moved_NxD = away_NxD - away_NxD @ map_DxD
    return -2 * linear_N - np.einsum("nd,nd->n", away_NxD, moved_NxD)
