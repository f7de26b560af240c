"""From scores to preferences: which response to a prompt is chosen, and which is rejected.

Source: POPri (Hou et al. 2025), Algorithm 1 and section 5: of a prompt's J responses the one with
the highest score is chosen, and the one of rank l (5 of 10 in the paper) is rejected. In its
ablation rejecting the last rank gives worse results than rejecting a middle one.
"""

from typing import NamedTuple

import numpy as np

from jaxpfl.checks import positive_int
from jaxpfl.errors import InputError


class Preferences(NamedTuple):
    """The places, 0 .. J - 1, of each prompt's chosen and rejected response: int64 [K]."""

    chosen_K: np.ndarray
    rejected_K: np.ndarray


def preferences(scores_KxJ: np.ndarray, rejected_rank: int) -> Preferences:
    """The best of each prompt's responses, and the one of rank `rejected_rank` (the best has 1).

    Responses are identified by their places, so that equal texts keep their own scores; equal
    scores are ranked by place.

    Raises:
      InputError: a rank that is not in 2 .. J, scores that are not [K, J] or not finite.
    """
    scores_KxJ = np.asarray(scores_KxJ)
    if scores_KxJ.ndim != 2:
        raise InputError(f"scores must be [prompts, responses], found shape {scores_KxJ.shape}")
    if not np.isfinite(scores_KxJ).all():
        raise InputError("scores must be finite numbers")
    responses = scores_KxJ.shape[1]
    if not 2 <= positive_int("rejected_rank", rejected_rank) <= responses:
        raise InputError(
            f"rejected_rank must lie in 2 .. {responses}, the number of responses to a prompt, "
            f"found {rejected_rank}"
        )
    order_KxJ = np.argsort(-scores_KxJ, axis=1, kind="stable")
    return Preferences(order_KxJ[:, 0], order_KxJ[:, rejected_rank - 1])
