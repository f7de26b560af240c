"""Trials of chosen texts: does the weight of a pool text show a client who holds it?

Texts that are chosen from a public pool by released moments are public whatever the clients hold.
What can leak is the choice. So clients are put among the others, or left out, each of whom holds a
text of the pool; everything is released and chosen anew, and the observer reads these texts'
weights.
"""

import numpy as np

from jaxpfl.errors import InputError
from jaxpfl.privacy.auditing import Trials


def weight_trials(with_RxN: np.ndarray, without_RxN: np.ndarray, planted_RxM: np.ndarray) -> Trials:
    """Trials for `privacy.auditing.lower_bound`, by log-weights of a pool of N texts.

    The scores are a planted text's log-weight, and the share of the texts that no client was given
    that weigh less. Trials of R releases are independent; those of one release are so only as far
    as its M texts do not move each other's weights, which is the caller's to say.

    Args:
      with_RxN: log-weights of R releases, in which M clients hold the texts `planted_RxM`.
      without_RxN: of as many in which these clients were left out; the same texts are looked up.
      planted_RxM: places in the pool, of which it has more.

    Raises:
      InputError: the shapes differ, or a planted text is not in the pool.
    """
    shapes = with_RxN.shape, without_RxN.shape, planted_RxM.shape
    if shapes[0] != shapes[1] or planted_RxM.ndim != 2 or shapes[2][0] != shapes[0][0]:
        raise InputError(
            "an audit of weights needs log-weights [releases, texts] with and without the clients, "
            f"and places [releases, planted], found {shapes}"
        )
    texts = with_RxN.shape[1]
    if not np.all((planted_RxM >= 0) & (planted_RxM < texts)):
        raise InputError(f"planted texts must lie in 0 .. {texts - 1}, the pool's places")
    others_RxN = np.ones(with_RxN.shape, bool)
    np.put_along_axis(others_RxN, planted_RxM, False, axis=1)
    scores = []
    for weight_RxN in (with_RxN, without_RxN):
        own_RxM = np.take_along_axis(weight_RxN, planted_RxM, axis=1)
        below_RxM = [
            np.searchsorted(np.sort(row_N[others_N]), own_M) / others_N.sum()
            for row_N, others_N, own_M in zip(weight_RxN, others_RxN, own_RxM, strict=True)
        ]
        scores.append(np.stack([own_RxM.ravel(), np.ravel(below_RxM)]))
    # In a random order: every fourth trial chooses the event, and both kinds must be among them.
    trials = planted_RxM.size
    order = np.random.default_rng(0).permutation(2 * trials)
    return Trials(np.concatenate(scores, axis=1)[:, order], order < trials)
