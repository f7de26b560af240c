"""Mean and covariance of embeddings in one pass, and those of mixtures in closed form.

All quantities here are public. Rows are clipped to an L2 norm, as the clients' embeddings are, and
the covariance is the population covariance, which divides by n.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from jaxpfl import checks
from jaxpfl.errors import InputError

# Long enough for the matrix product to run at nearly full speed; at d = 768 a block has 50 MB.
_BLOCK_ROWS = 16_384
_FEW_ROWS = 64  # whose sum in their own precision costs no digits, and a tenth of the time
_ASYMMETRY = 1e-6
# A norm that exceeds the clip norm by at most this many units in the last place is not clipped.
_NORM_ROUNDING = 8


@dataclass(frozen=True, eq=False)
class Moments:
    """Size, mean and covariance of a corpus of embeddings, from which the Frechet distance follows.

    Args:
        count: number of examples, > 0; not always whole, since it may be noisy or of a mixture.
        mean_D: mean, stored as float64.
        covariance_DxD: symmetric population covariance, stored as float64. Noise may give it
            negative eigenvalues; `Reference` and `distance` then project it.

    Raises:
        InputError: a shape does not fit, a number is not finite, or the matrix is asymmetric by
            more than 1e-6 of its largest entry. A smaller asymmetry is averaged away.
    """

    count: float
    mean_D: np.ndarray
    covariance_DxD: np.ndarray

    def __post_init__(self):
        mean_D = np.asarray(self.mean_D, np.float64)
        if mean_D.ndim != 1 or not mean_D.size:
            raise InputError(f"mean_D must have shape [d], d >= 1, found {list(mean_D.shape)}")
        if not np.isfinite(mean_D).all():
            raise InputError("mean_D must be finite, found an entry that is not")
        covariance_DxD = _symmetric("covariance_DxD", self.covariance_DxD)
        if len(covariance_DxD) != mean_D.size:
            expected = f"shape {[mean_D.size] * 2}, because mean_D has {mean_D.size} entries"
            actual = list(covariance_DxD.shape)
            raise InputError(f"covariance_DxD must have {expected}, found shape {actual}")
        object.__setattr__(self, "count", checks.positive("count", self.count))
        object.__setattr__(self, "mean_D", mean_D)
        object.__setattr__(self, "covariance_DxD", covariance_DxD)

    @property
    def dimension(self) -> int:
        return self.mean_D.size


class RunningMoments:
    """Accumulates the moments of a corpus that arrives in pieces and need not fit in memory.

    Within a block, products of rows are added up in their own precision; blocks are added up in
    float64. A large mean of the first block is subtracted from all rows, because it would cost
    digits. Rows with a larger L2 norm than `clip_norm` are scaled down to it; `math.inf` clips
    no row.
    """

    def __init__(self, dimension: int, clip_norm: float):
        self._dimension = checks.positive_int("dimension", dimension)
        finite = clip_norm != math.inf
        self._clip_norm = checks.positive("clip_norm", clip_norm) if finite else math.inf
        self._count = 0
        self._dtype: np.dtype | None = None
        self._shift_D: np.ndarray | None = None
        self._sum_D = np.zeros(self._dimension)
        self._products_DxD = np.zeros((self._dimension, self._dimension))

    def add(self, embeddings_NxD) -> None:
        """Adds any number of rows: a NumPy or JAX array of floating point numbers [n, d].

        The first call decides the precision: float64 stays float64, any other type becomes float32.

        Raises:
            InputError: the shape or type does not fit, or a row has an entry that is not finite;
                the message gives the row's index in the whole corpus. The object must not be used
                afterwards, because some of the rows may have been added.
        """
        embeddings_NxD = np.asarray(embeddings_NxD)
        if embeddings_NxD.ndim != 2 or embeddings_NxD.shape[1] != self._dimension:
            shape = list(embeddings_NxD.shape)
            raise InputError(f"embeddings must have shape [n, {self._dimension}], found {shape}")
        # JAX's issubdtype, because numpy's does not know bfloat16.
        if not jnp.issubdtype(embeddings_NxD.dtype, jnp.floating):
            raise InputError(f"embeddings must be floating point, found {embeddings_NxD.dtype}")
        if self._dtype is None:
            wide = embeddings_NxD.dtype == np.float64
            self._dtype = np.dtype(np.float64 if wide else np.float32)
        for start in range(0, len(embeddings_NxD), _BLOCK_ROWS):
            rows_BxD = self._clipped(embeddings_NxD[start : start + _BLOCK_ROWS])
            count, sum_D = len(rows_BxD), _sum(rows_BxD)
            if (shift_D := self._shift_D) is None:
                mean_D, square = sum_D / count, np.vdot(rows_BxD, rows_BxD) / count
                if 2 * mean_D @ mean_D <= square < np.inf:
                    mean_D[:] = 0  # so small that it costs no digits
                shift_D = self._shift_D = mean_D.astype(self._dtype)
                self._centred_BxD = np.empty((_BLOCK_ROWS, self._dimension), self._dtype)
            if shift_D.any():
                # In one buffer, because new memory takes longer than the writing.
                rows_BxD = np.subtract(rows_BxD, shift_D, out=self._centred_BxD[:count])
                sum_D = _sum(rows_BxD)
            self._sum_D += sum_D
            # NumPy uses the faster symmetric product, because both factors are one array.
            self._products_DxD += rows_BxD.T @ rows_BxD
            self._count += count

    def result(self) -> Moments:
        """Returns the moments of all rows added so far; more may be added afterwards."""
        if self._shift_D is None:
            raise InputError("moments need at least one embedding, found none")
        mean_D = self._sum_D / self._count
        covariance_DxD = self._products_DxD / self._count - np.outer(mean_D, mean_D)
        return Moments(float(self._count), mean_D + self._shift_D, covariance_DxD)

    def _clipped(self, rows_NxD: np.ndarray) -> np.ndarray:
        """The rows in the precision of the corpus, contiguous and clipped; must be finite."""
        with np.errstate(over="ignore", invalid="ignore"):
            rows_NxD = np.ascontiguousarray(rows_NxD, self._dtype)
            square_N = np.einsum("nd,nd->n", rows_NxD, rows_NxD)
        if not np.isfinite(square_N).all():
            fine_N = np.isfinite(rows_NxD).all(axis=1)
            if not fine_N.all():
                row = self._count + int(np.argmin(fine_N))
                raise InputError(f"the embedding in row {row} has an entry that is not finite")
            what = f"the squared norms of embeddings must not overflow {rows_NxD.dtype}"
            raise InputError(f"{what}, found an embedding that is too large")
        # Embeddings are often normalised: rows of norm `clip_norm` up to rounding are not copied.
        slack = 1 + _NORM_ROUNDING * np.finfo(rows_NxD.dtype).eps
        long = np.flatnonzero(square_N > (self._clip_norm * slack) ** 2)
        if long.size:
            rows_NxD = rows_NxD.copy()
            scale_N = (self._clip_norm / np.sqrt(square_N[long])).astype(rows_NxD.dtype)
            rows_NxD[long] *= scale_N[:, None]
        return rows_NxD


def moments(embeddings_NxD, clip_norm: float) -> Moments:
    """Returns the moments of the embeddings [n, d], n >= 1, of a public corpus.

    Accurate to about 1e-6 of their size for rows in float32, and to rounding for float64;
    `clip_norm` as of `RunningMoments`.
    """
    shape = np.shape(embeddings_NxD)
    if len(shape) != 2:
        raise InputError(f"embeddings must have shape [n, d], found {list(shape)}")
    running = RunningMoments(shape[1], clip_norm)
    running.add(embeddings_NxD)
    return running.result()


def clipped(embeddings_NxD, clip_norm: float) -> np.ndarray:
    """Returns the rows, float32 [n, d], scaled down where their L2 norm exceeds `clip_norm`."""
    rows_NxD = np.asarray(embeddings_NxD, np.float32)
    norm_Nx1 = np.linalg.norm(rows_NxD, axis=-1, keepdims=True)
    return rows_NxD * np.minimum(1, clip_norm / np.maximum(norm_Nx1, 1e-30)).astype(np.float32)


def mixture(parts: Sequence[Moments], shares: Sequence[float]) -> Moments:
    """Returns the exact moments of a mixture of corpora, computed from their moments alone.

    Where corpus i has share s_i, the mean is m = sum s_i m_i and the covariance is
    sum s_i (C_i + (m_i - m)(m_i - m)^T). The count is the largest that a mixture without repeated
    examples can have: the minimum over i of count_i / s_i. Shares are at least 0, and sum to 1 to
    within 1e-6.
    """
    dimensions = sorted({part.dimension for part in parts})
    if len(dimensions) != 1:
        raise InputError(
            f"a mixture needs parts of one dimension, found {dimensions or 'no corpus'}"
        )
    if np.shape(shares) != (len(parts),):
        raise InputError(f"a mixture needs {len(parts)} shares, found shape {np.shape(shares)}")
    shares = [checks.non_negative(f"share {k}", float(share)) for k, share in enumerate(shares)]
    total = math.fsum(shares)
    if abs(total - 1) > 1e-6:
        raise InputError(f"the shares of a mixture must sum to 1, found a sum of {total!r}")
    shares_K = np.asarray(shares) / total
    means_KxD = np.stack([part.mean_D for part in parts])
    mean_D = shares_K @ means_KxD
    spread_KxD = np.sqrt(shares_K)[:, None] * (means_KxD - mean_D)
    covariances_KxDxD = np.stack([part.covariance_DxD for part in parts])
    covariance_DxD = np.tensordot(shares_K, covariances_KxDxD, 1) + spread_KxD.T @ spread_KxD
    pairs = zip(parts, shares_K, strict=True)
    count = min(part.count / share for part, share in pairs if share > 0)
    return Moments(float(count), mean_D, covariance_DxD)


def project_psd(matrix_DxD) -> np.ndarray:
    """Returns the positive semidefinite matrix nearest to a symmetric one in Frobenius norm.

    The eigenvectors are kept and negative eigenvalues become 0 (Higham 1988, "Computing a nearest
    symmetric positive semidefinite matrix", Theorem 2.1). A positive definite matrix is returned
    as it is.
    """
    matrix_DxD = _symmetric("matrix", matrix_DxD)
    try:
        np.linalg.cholesky(matrix_DxD)  # eight times faster than an eigendecomposition
    except np.linalg.LinAlgError:
        pass
    else:
        return matrix_DxD
    eigenvalue_D, vector_DxD = np.linalg.eigh(matrix_DxD)
    positive_D = eigenvalue_D > 0
    factor_DxR = vector_DxD[:, positive_D] * np.sqrt(eigenvalue_D[positive_D])
    return factor_DxR @ factor_DxR.T


def _symmetric(name: str, matrix_DxD) -> np.ndarray:
    """The matrix in float64, exactly symmetric."""
    matrix_DxD = np.asarray(matrix_DxD, np.float64)
    if matrix_DxD.ndim != 2 or len(set(matrix_DxD.shape)) != 1 or not matrix_DxD.size:
        raise InputError(f"{name} must have shape [d, d], d >= 1, found {list(matrix_DxD.shape)}")
    if not np.isfinite(matrix_DxD).all():
        raise InputError(f"{name} must be finite, found an entry that is not finite")
    if np.array_equal(matrix_DxD, matrix_DxD.T):
        return matrix_DxD
    if np.abs(matrix_DxD - matrix_DxD.T).max() > _ASYMMETRY * np.abs(matrix_DxD).max():
        raise InputError(f"{name} must be symmetric, found one that is not symmetric")
    return (matrix_DxD + matrix_DxD.T) / 2


def _sum(rows_NxD: np.ndarray) -> np.ndarray:
    """The sum of rows, float64 [d], of which so many are added up in their own precision."""
    whole = len(rows_NxD) // _FEW_ROWS * _FEW_ROWS
    few_KxFxD = rows_NxD[:whole].reshape(-1, _FEW_ROWS, rows_NxD.shape[1])
    parts_KxD = few_KxFxD.sum(axis=1)
    return parts_KxD.sum(axis=0, dtype=np.float64) + rows_NxD[whole:].sum(axis=0, dtype=np.float64)
