"""Scores of canaries' coordinates: the likelihood of "in", and a sum over rounds.

A game (`audits.canaries`) observes a canary's coordinate in every round, in clip norms: 1 or 0 and
noise. Two scores say how much all rounds look like "in":

    likelihood   the logarithm of the likelihoods of all rounds, in against out, as stated by the
                 plans: the best score there is, if the release does what is stated. It averages
                 over cohorts where they are secret. In cyclic participation, which amplifies
                 nothing, it uses the cohorts.
    sum          of all rounds but the last of an odd number. Noise that rounds share cancels in it.
"""

import math
from collections.abc import Sequence

import numpy as np
from scipy import linalg, special

from jaxpfl.privacy.correlated_noise import band_weights
from jaxpfl.privacy.plan import Plan


def alternating(round: int) -> int:
    """The sign of canaries' contributions in round 1, 2, ...: 1, -1, ..."""
    return 1 if round % 2 else -1


def scores_of(
    plans: tuple[Plan, ...],
    observed: Sequence[np.ndarray | None],
    places: Sequence[np.ndarray | None],
) -> np.ndarray:
    """The scores "likelihood" and "sum" of each canary, float64 [2, canaries].

    Args:
      observed: for each plan [rounds, canaries]: sign times coordinate, in clip norms; None = the
        plan's releases show no canary alone.
      places: for each plan with cyclic participation int64 [canaries], from 0: the place in all
        epochs, if it is known; None = unknown, and for other plans.
    """
    likelihood_M, sum_M = 0.0, 0.0
    for plan, seen_TxM, place_M in zip(plans, observed, places, strict=True):
        if seen_TxM is None:
            continue
        rounds = len(seen_TxM)
        paired = rounds if rounds == 1 else rounds - rounds % 2
        z = plan.value_noise_std(1.0)
        likelihood_M = likelihood_M + _likelihood(plan, z, seen_TxM, place_M)
        sum_M = sum_M + seen_TxM[:paired].sum(axis=0) / z**2
    return np.stack([likelihood_M, sum_M])


def _likelihood(
    plan: Plan, z: float, seen_TxM: np.ndarray, place_M: np.ndarray | None
) -> np.ndarray:
    """The logarithm of the likelihood of "in" divided by that of "out", float64 [canaries]."""
    if plan.sampling == "cyclic":
        # A client has one place in all epochs, and noise may be correlated.
        place_RxT, root_TxT = _contributions(plan, len(seen_TxM))
        seen_TxM = linalg.solve_triangular(root_TxT, seen_TxM, lower=True)
        exponent_RxM = (place_RxT @ seen_TxM - 0.5 * np.sum(place_RxT**2, axis=1)[:, None]) / z**2
        if place_M is not None:
            return exponent_RxM[place_M, np.arange(len(place_M))]
        return special.logsumexp(exponent_RxM, axis=0) - math.log(len(place_RxT))
    q = plan.participation.sampling_rate
    with np.errstate(divide="ignore"):
        left, taken = np.log1p(-q), math.log(q)

    def mixture(moved: float) -> np.ndarray:
        """The likelihood that a coordinate is moved with probability q, against never."""
        return np.logaddexp(left, taken + (2 * moved * seen_TxM - 1) / (2 * z**2))

    present_TxM = mixture(1.0)
    absent = mixture(-1.0) if plan.participation.adjacency == "replace_one" else 0.0
    return (present_TxM - absent).sum(axis=0)


def shown_best(plan: Plan, rounds: int) -> np.ndarray:
    """The places in an epoch that so many rounds show best, bool [rounds per epoch].

    With cyclic participation a client has one place in all epochs. Some take part less often than
    others in rounds that are no whole epochs, and noise that rounds share hides some places more.
    """
    square_R = np.sum(_contributions(plan, rounds)[0] ** 2, axis=1)
    return square_R >= 0.999 * square_R.max()


def _contributions(plan: Plan, rounds: int) -> tuple[np.ndarray, np.ndarray]:
    """The contributions of a client of each place [places, rounds], where noise is independent.

    Returns also the matrix [rounds, rounds] by which the observations are divided for that.
    """
    cycle = plan.participation.rounds_per_epoch
    place_RxT = (np.arange(rounds)[None, :] % cycle == np.arange(cycle)[:, None]).astype(float)
    sign_T = np.array([alternating(round) for round in range(1, rounds + 1)])
    if not plan.correlated:
        return place_RxT, np.eye(rounds)
    # Divided by a root of the noise's covariance, the rounds have independent noise. The
    # observations are multiplied by signs and the noise is not, so that the root needs them, too.
    root_TxT = noise_root(plan.bands, rounds)
    place_RxT = linalg.solve_triangular(root_TxT, (place_RxT * sign_T).T, lower=True).T
    return place_RxT, sign_T[:, None] * root_TxT


def noise_root(bands: int, rounds: int) -> np.ndarray:
    """A lower triangular root of the covariance of rounds' correlated noise, at unit scale."""
    weights, rows_TxD = band_weights(bands), np.zeros((rounds, rounds))
    for row in range(rounds):
        rows_TxD[row, row] = weights[0]
        for back in range(1, min(row, bands - 1) + 1):
            rows_TxD[row] -= weights[back] * rows_TxD[row - back]
    return rows_TxD
