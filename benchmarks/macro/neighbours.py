"""Precision and recall of written texts by their nearest neighbours in a space of embeddings.

Kynkaanniemi et al. 2019, "Improved precision and recall metric for assessing generative models",
section 2: a text counts as likely if it lies in one of the balls around the other side's texts that
reach to their own k-th neighbour. Precision is the share of the written texts that are likely by
the real ones; recall that of the real ones that are likely by the written ones. Both grow with the
number of texts: compare equal numbers only, beside real texts against other real texts.
"""

from typing import NamedTuple

import numpy as np
from scipy.spatial.distance import cdist

from jaxpfl.errors import InputError

# The distances in memory at a time.
_ROWS = 1_000


class PrecisionRecall(NamedTuple):
    precision: float
    recall: float


def precision_recall(
    written_NxD: np.ndarray, real_MxD: np.ndarray, *, k: int = 5
) -> PrecisionRecall:
    """Precision and recall of written texts by `k` nearest neighbours, from embeddings."""
    if min(len(written_NxD), len(real_MxD)) <= k:
        raise InputError(
            f"precision and recall need more than {k} texts a side, found {len(written_NxD)} and "
            f"{len(real_MxD)}"
        )
    return PrecisionRecall(_covered(written_NxD, real_MxD, k), _covered(real_MxD, written_NxD, k))


def _covered(rows_NxD: np.ndarray, centres_MxD: np.ndarray, k: int) -> float:
    """The share of rows in a ball around a centre that reaches to its k-th neighbour."""
    covered_N = np.zeros(len(rows_NxD), bool)
    for start in range(0, len(centres_MxD), _ROWS):
        block_BxD = centres_MxD[start : start + _ROWS]
        # A centre is its own nearest row, at place 0.
        reach_B = np.partition(cdist(block_BxD, centres_MxD), k, axis=1)[:, k]
        covered_N |= (cdist(block_BxD, rows_NxD) <= reach_B[:, None]).any(axis=0)
    return float(covered_N.mean())
