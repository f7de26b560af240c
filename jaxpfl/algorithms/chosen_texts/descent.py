"""Weights of public texts by descent on the Frechet distance itself: the first form of the choice.

    w_i <- w_i exp(eta r_i),  at most 1 / n

r_i is `frechet.witness` of text i at the pool's present moments, against the clients' moments as
far as the release tells (`fred.scores.estimate`). The step eta grows by a tenth while the distance
falls and is halved where it rises. It stops early, and is no projection: nothing but the estimate
holds it back where the noise is large.
"""

import numpy as np

from jaxpfl.algorithms.chosen_texts.matching import Evidence, capped_softmax, weighted_moments
from jaxpfl.algorithms.frechet import Reference, witness
from jaxpfl.algorithms.fred.scores import estimate
from jaxpfl.algorithms.gaussian_moments import clipped

_STEP, _GROWTH, _LEAST_STEP = 8.0, 1.1, 0.5


def descend(evidence: Evidence, base_N: np.ndarray, cap: float, *, steps: int = 60) -> np.ndarray:
    """Returns the weights [N] after the descent from `base_N`, at most `cap` each."""
    released, rows_NxD = evidence
    rows_NxD = clipped(rows_NxD, released.plan.clip_norm)
    log_N = np.log(base_N)
    weights_N = capped_softmax(log_N, cap)
    current = weighted_moments(weights_N, rows_NxD)
    target = estimate(released, current)
    reference, step = Reference(target), _STEP
    distance = reference.distance(current)
    for _ in range(steps):
        moved_N = log_N + step * witness(target, current, rows_NxD)
        tried_N = capped_softmax(moved_N, cap)
        nearer = weighted_moments(tried_N, rows_NxD)
        if (tried := reference.distance(nearer)) < distance:
            log_N, weights_N, current, distance = moved_N, tried_N, nearer, tried
            step *= _GROWTH
        elif step < _LEAST_STEP:
            break
        else:
            step /= 2
    return weights_N
