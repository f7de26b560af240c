"""The rows, the Gram matrix and the factor of a space of scores, by NumPy; see `scores`.

NumPy's product of a matrix with its own transpose does half of the work of a general one. Each core
takes candidates block by block, from the first reading to the block's part of the Gram matrix,
while they are in its cache.
"""

import functools
import itertools
from collections.abc import Callable

import numpy as np

from jaxpfl import cores

_BLOCK_ROWS = 2048
# Squares of lengths between which neither they nor their parts leave float32's range.
_LEAST, _MOST = 2.0**-80, 2.0**80


def rows_and_gram(candidates_KxJxD: np.ndarray, centring: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns A, float32 [prompts, responses, d], and A^T A, float32 [d, d].

    See `scores.score_space`.
    """
    candidates_KxJxD = np.ascontiguousarray(candidates_KxJxD, np.float32)
    rows_KxJxD = np.empty_like(candidates_KxJxD)
    together = rows_KxJxD.shape[1] if centring == "prompt" else 1
    shape = (-1, together, rows_KxJxD.shape[2])
    given_GxTxD, rows_GxTxD = candidates_KxJxD.reshape(shape), rows_KxJxD.reshape(shape)
    blocks = functools.partial(_sum_over_blocks, len(rows_GxTxD), max(1, _BLOCK_ROWS // together))

    if centring == "all":
        _centre_over_all(blocks, given_GxTxD[:, 0], rows_GxTxD[:, 0])

    def add(block: slice) -> np.ndarray:
        given, rows = given_GxTxD[block], rows_GxTxD[block]
        if centring != "all":
            _scale_to_unit(given, rows)
        if centring == "prompt":
            _centre_each(given, rows)
        rows_BxD = rows.reshape(-1, rows.shape[2])
        return rows_BxD.T @ rows_BxD

    return rows_KxJxD, blocks(add)


def factor(gram_DxD: np.ndarray) -> np.ndarray:
    """Returns L, float32 [d, d], lower triangular; NaN if the Gram matrix is not finite."""
    identity_DxD = np.eye(len(gram_DxD), dtype=np.float32)
    ridge = np.float32(2.0**-21) * np.trace(gram_DxD) + np.float32(1e-20)
    with cores.one_thread_a_product():
        # A ridge above the trace does not fail.
        for _ in range(13):
            try:
                factor_DxD = np.linalg.cholesky(gram_DxD + ridge * identity_DxD)
            except np.linalg.LinAlgError:  # rounding has made the sum indefinite
                ridge *= np.float32(4)
                continue
            if np.isfinite(factor_DxD).all():
                return factor_DxD
            ridge *= np.float32(4)
    return np.full_like(gram_DxD, np.nan)


def times(rows_KxJxD: np.ndarray, vector_D: np.ndarray) -> np.ndarray:
    """Returns the product, float32 [prompts, responses]."""
    rows_MxD = rows_KxJxD.reshape(-1, rows_KxJxD.shape[2])
    product_M = np.empty(len(rows_MxD), np.float32)

    def fill(part: slice) -> None:
        np.dot(rows_MxD[part], vector_D, out=product_M[part])

    cores.side_by_side(fill, _shares(len(rows_MxD)))
    return product_M.reshape(rows_KxJxD.shape[:2])


def _shares(count: int) -> list[slice]:
    """0 .. count - 1 in ranges, one for each core, or fewer."""
    edges = np.linspace(0, count, cores.number() + 1, dtype=int).tolist()
    return [slice(start, stop) for start, stop in itertools.pairwise(edges) if start < stop]


def _sum_over_blocks(count: int, size: int, function: Callable[[slice], np.ndarray]) -> np.ndarray:
    """The sum of `function` over blocks of 0 .. count - 1, each core with a range of its own."""

    def of_share(share: slice) -> np.ndarray:
        edges = [*range(share.start, share.stop, size), share.stop]
        first, *others = (slice(*pair) for pair in itertools.pairwise(edges))
        total = function(first)
        for block in others:
            total += function(block)
        return total

    return functools.reduce(np.add, cores.side_by_side(of_share, _shares(count)))


def _scale_to_unit(given: np.ndarray, unit: np.ndarray) -> None:
    """Writes rows [..., d] of unit length to `unit`; zero rows stay zero."""
    given_BxD, unit_BxD = given.reshape(-1, given.shape[-1]), unit.reshape(-1, unit.shape[-1])
    # NumPy's error state belongs to a thread.
    with np.errstate(all="ignore"):
        square_B = np.einsum("bd,bd->b", given_BxD, given_BxD)
        np.multiply(given_BxD, (1 / np.sqrt(square_B))[:, None], out=unit_BxD)
        others = np.flatnonzero(~((square_B > _LEAST) & (square_B < _MOST)))
        if others.size:
            rows_OxD = given_BxD[others]
            # Powers of two, because they round nothing.
            _, exponent_Ox1 = np.frexp(np.max(np.abs(rows_OxD), axis=1, keepdims=True))
            rows_OxD = np.ldexp(rows_OxD, -exponent_Ox1)
            square_Ox1 = np.sum(np.square(rows_OxD), axis=1, keepdims=True)
            unit_BxD[others] = rows_OxD / np.sqrt(np.where(square_Ox1 == 0, 1, square_Ox1))


def _centre_each(given_GxTxD: np.ndarray, rows_GxTxD: np.ndarray) -> None:
    """Subtracts each group's mean."""
    # The first row is subtracted before the mean, so that rows that are nearly alike lose little.
    rows_GxTxD -= rows_GxTxD[:, :1].copy()
    rows_GxTxD -= rows_GxTxD.mean(axis=1, keepdims=True)
    # Asked of the rows as they were given, because equal ones may be scaled differently; and of
    # their first entries at first, which are nearly always enough to tell.
    same_G = (given_GxTxD[:, :, 0] == given_GxTxD[:, :1, 0]).all(axis=1)
    for group in np.flatnonzero(same_G):
        if _alike(given_GxTxD[group]):
            rows_GxTxD[group] = 0


def _centre_over_all(
    blocks: Callable[[Callable[[slice], np.ndarray]], np.ndarray],
    given_MxD: np.ndarray,
    rows_MxD: np.ndarray,
) -> None:
    """Scales all rows to unit length and subtracts their mean."""
    first_1xD = np.empty_like(given_MxD[:1])
    _scale_to_unit(given_MxD[:1], first_1xD)

    def move(block: slice) -> np.ndarray:
        rows_BxD = rows_MxD[block]
        _scale_to_unit(given_MxD[block], rows_BxD)
        rows_BxD -= first_1xD
        return rows_BxD.sum(axis=0).astype(np.float64)

    mean_D = (blocks(move) / len(rows_MxD)).astype(np.float32)
    rows_MxD -= mean_D
    if _alike(given_MxD):
        rows_MxD[:] = 0


def _alike(given_TxD: np.ndarray) -> bool:
    """Whether all rows are one row."""
    return bool((given_TxD[:, 0] == given_TxD[0, 0]).all() and (given_TxD == given_TxD[0]).all())
