"""Lower bounds on epsilon, from guesses about who took part.

The game. A canary is put among the clients or left out, by a fair coin. An observer of everything
that is released gives it a score, which should be larger where it is in. Differential privacy
limits how well any observer can do, so that whoever does better refutes the stated epsilon. Each
bound holds with the stated confidence, whatever the scores are made of.

    threshold   Of the trials' first half, the threshold is chosen that says most. Of the second
                half, Clopper-Pearson bounds on both error rates, false positives a and false
                negatives b, hold together with the confidence. (epsilon, delta)-privacy implies
                1 - b <= e^epsilon a + delta, and the same with a and b exchanged (Kairouz, Oh,
                Viswanath 2015, Theorem 2.1), so that epsilon >= log((1 - delta - b) / a).
                Source: Jagielski, Ullman, Oprea 2020; the separate half: Nasr et al. 2021.
    profile     The same error rates, against every pair (epsilon, delta) that the stated events
                imply (`privacy.profile`). The least factor on all noise multipliers whose profile
                they contradict has an epsilon at the stated delta, which is the bound. For
                Gaussians on everyone it is that of mu = Phi^-1(1 - a) - Phi^-1(b), as in Nasr et
                al. 2023, "Tight auditing of differentially private machine learning". The bound is
                one on epsilon if the release is what was stated, but for the size of its noise.
                That it exceeds the stated epsilon needs no such assumption: it means that the
                stated profile was contradicted.
    one run     Many canaries in one run, with a coin each, and k guesses; for the others nothing is
                guessed. It holds for any dependence among canaries. Source: Steinke, Nasr,
                Jagielski 2023, "Privacy auditing with one (1) training run", Theorem 5.2.

Trials are independent where each has a run of its own. Canaries that share a run, but no coordinate
of what is released, are independent if noise is, as stated, drawn for each coordinate: the first
two bounds then refute the statement, whichever part of it is false.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple, cast

import numpy as np
from scipy import optimize, special, stats

from jaxpfl import checks
from jaxpfl.errors import InputError
from jaxpfl.privacy import profile
from jaxpfl.privacy.guarantee import Guarantee

# For as many of the canaries one run guesses: those with the most extreme scores.
_GUESSED = 0.05

# Of many different scores, the thresholds that are tried: quantiles, and all of the extreme ones.
_QUANTILES, _EXTREMES = 512, 64

_EPSILONS = np.concatenate([np.arange(0, 2, 0.02), np.arange(2, 20, 0.2)])
_MOST_FACTOR = 64.0


class Trials(NamedTuple):
    """What was observed of N canaries.

    Attributes:
      scores_SxN: S different scores of each canary, float64. The first is a logarithm of
        likelihoods, in against out, or at least has its sign.
      present_N: bool, which canaries were in, each by a fair coin of its own.
    """

    scores_SxN: np.ndarray
    present_N: np.ndarray


@dataclasses.dataclass(frozen=True)
class Bound:
    """With probability `confidence` or more, epsilon is at least this.

    Attributes:
      estimator: "threshold", "profile" or "one run".
      trials: the canaries that it was judged by.
    """

    epsilon: float
    estimator: str
    trials: int
    confidence: float


def lower_bounds(
    trials: Trials, stated: Guarantee, *, confidence: float = 0.99
) -> tuple[Bound, ...]:
    """Returns the bounds of all three estimators, which hold TOGETHER with the confidence.

    Each has a third of the probability of error (Bonferroni), so that the largest one may be taken.

    Args:
      stated: what the releases are said to cost; its delta is that of the bounds.

    Raises:
      InputError: the trials do not fit together, are too few or have a score that is NaN, the
        confidence is out of range, or nothing is stated that could be refuted.
    """
    confidence = checks.open_fraction("confidence", confidence)
    if not stated.private:
        raise InputError("an audit needs a stated epsilon, found a release without noise")
    _check(trials)
    each = 1 - (1 - confidence) / 3
    found = (
        by_threshold(trials, stated.delta, each),
        by_profile(trials, stated, each),
        by_one_run(trials, stated.delta, each),
    )
    return tuple(dataclasses.replace(bound, confidence=confidence) for bound in found)


def strongest(bounds: tuple[Bound, ...]) -> Bound:
    """Returns the largest of several bounds that hold together."""
    return max(bounds, key=lambda bound: bound.epsilon)


def by_threshold(trials: Trials, delta: float, confidence: float) -> Bound:
    """Returns the bound of the estimator "threshold"."""
    rates, judged = _error_rates(trials, confidence, lambda a, b: _epsilons(a, b, delta))
    return Bound(float(_epsilons(*rates, delta)), "threshold", judged, confidence)


def by_profile(trials: Trials, stated: Guarantee, confidence: float) -> Bound:
    """Returns the bound of the estimator "profile"."""
    # What separates two Gaussians best separates most others well.
    (false_positive, false_negative), judged = _error_rates(
        trials, confidence, lambda a, b: special.ndtri(1 - a) - special.ndtri(b)
    )

    def refuted(factor: float) -> bool:
        delta_E = profile.deltas(profile.scaled(stated.event, factor), _EPSILONS)
        growth_E = np.exp(_EPSILONS)
        one_E = 1 - false_negative - growth_E * false_positive
        other_E = 1 - false_positive - growth_E * false_negative
        return bool(np.any(np.maximum(one_E, other_E) > delta_E))

    low, high = 1 / _MOST_FACTOR, _MOST_FACTOR
    if not refuted(high):
        return Bound(0.0, "profile", judged, confidence)
    if refuted(low):
        high = low
    while high / low > 1.005:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if refuted(middle) else (middle, high)
    scaled = dataclasses.replace(stated, event=profile.scaled(stated.event, high))
    return Bound(scaled.epsilon(), "profile", judged, confidence)


def by_one_run(trials: Trials, delta: float, confidence: float) -> Bound:
    """Returns the bound of the estimator "one run"."""
    score_N = trials.scores_SxN[0]
    number = len(score_N)
    guesses = max(1, round(_GUESSED * number))
    guessed = np.argsort(-np.abs(score_N), kind="stable")[:guesses]
    correct = int(np.sum((score_N[guessed] > 0) == trials.present_N[guessed]))

    def surplus(epsilon: float) -> float:
        return one_run_probability(correct, guesses, number, epsilon, delta) - (1 - confidence)

    if surplus(0.0) >= 0:
        return Bound(0.0, "one run", number, confidence)
    most = 1.0
    while surplus(most) < 0:
        most *= 2
    # The lower end, so that rounding leaves a bound.
    root = cast(float, optimize.brentq(surplus, 0.0, most, xtol=1e-6))
    return Bound(max(root - 1e-6, 0.0), "one run", number, confidence)


def one_run_probability(
    correct: int, guesses: int, canaries: int, epsilon: float, delta: float
) -> float:
    """Returns an upper bound on the probability of `correct` or more right guesses.

    Under pure differential privacy, a guess is right with probability at most p = e^epsilon /
    (1 + e^epsilon), whatever is known of the other canaries, so that the number W of right ones is
    dominated by a binomial. With f(v) = P[Binomial(guesses, p) >= v] and m canaries,

        P[W >= v] <= f(v) + 2 m delta max_{i = 1 .. v} (f(v - i) - f(v)) / i.

    Source: Steinke, Nasr, Jagielski 2023, Theorem 5.2.
    """
    right = special.expit(epsilon)
    below_V = stats.binom.pmf(np.arange(correct - 1, -1, -1), guesses, right)
    rise_V = np.cumsum(below_V) / np.arange(1, correct + 1)
    worst = float(rise_V.max()) if correct else 0.0
    exactly = float(stats.binom.sf(correct - 1, guesses, right))
    return min(1.0, exactly + 2 * canaries * delta * worst)


def upper_rate(errors: np.ndarray, trials: int, confidence: float) -> np.ndarray:
    """Returns Clopper and Pearson's upper bounds on a rate, given numbers of errors.

    The rate at which so few errors, or fewer, would have the probability 1 - confidence.
    """
    left = trials - np.asarray(errors)
    found = special.betaincinv(np.asarray(errors) + 1.0, np.maximum(left, 1), confidence)
    return np.where(left > 0, found, 1.0)


def _check(trials: Trials) -> None:
    scores_SxN, present_N = trials
    if scores_SxN.ndim != 2 or scores_SxN.shape[1:] != present_N.shape or present_N.dtype != bool:
        raise InputError(
            "trials must be scores [scores, canaries] and booleans [canaries], found "
            f"{list(scores_SxN.shape)} and {present_N.dtype} {list(present_N.shape)}"
        )
    if len(present_N) < 4:
        raise InputError(f"an audit needs at least 4 canaries, found {len(present_N)}")
    if np.isnan(scores_SxN).any():
        raise InputError("the scores of an audit must be numbers, found NaN")


def _error_rates(
    trials: Trials, confidence: float, worth: Callable[[np.ndarray, np.ndarray], np.ndarray]
) -> tuple[tuple[float, float], int]:
    """Upper bounds on false positives and false negatives, which hold together, and their trials.

    Args:
      worth: of pairs of such bounds; the threshold that is worth most on the first half is judged
        by the second.
    """
    each = 1 - (1 - confidence) / 2
    best, chosen = -math.inf, (0, 0.0)
    for number, score_N in enumerate(trials.scores_SxN):
        cut_C = _cuts(score_N[0::2])
        rates = _rates(score_N[0::2], trials.present_N[0::2], cut_C, each)
        worth_C = worth(*rates)
        place = int(np.argmax(worth_C))
        if worth_C[place] > best:
            best, chosen = float(worth_C[place]), (number, float(cut_C[place]))
    number, cut = chosen
    score_N, present_N = trials.scores_SxN[number, 1::2], trials.present_N[1::2]
    positive, negative = _rates(score_N, present_N, np.array([cut]), each)
    return (float(positive[0]), float(negative[0])), len(present_N)


def _rates(
    score_N: np.ndarray, present_N: np.ndarray, cut_C: np.ndarray, confidence: float
) -> tuple[np.ndarray, np.ndarray]:
    """Upper bounds on both error rates of the rule "in if the score is above the cut"."""
    absent, present = np.sort(score_N[~present_N]), np.sort(score_N[present_N])
    false_positive_C = len(absent) - np.searchsorted(absent, cut_C, side="right")
    false_negative_C = np.searchsorted(present, cut_C, side="right")
    return (
        upper_rate(false_positive_C, len(absent), confidence),
        upper_rate(false_negative_C, len(present), confidence),
    )


def _cuts(score_N: np.ndarray) -> np.ndarray:
    """Thresholds half way between neighbouring scores, so that equal scores stay together."""
    different = np.unique(score_N)
    if len(different) == 1:
        return different
    # Halves are added, because the sum of two large scores might overflow.
    cut_C = different[:-1] / 2 + different[1:] / 2
    if len(cut_C) <= _QUANTILES + 2 * _EXTREMES:
        return cut_C
    inner = np.linspace(0, len(cut_C) - 1, _QUANTILES).astype(int)
    ends = np.arange(_EXTREMES)
    return cut_C[np.unique(np.concatenate([ends, inner, len(cut_C) - 1 - ends]))]


def _epsilons(
    false_positive: np.ndarray | float, false_negative: np.ndarray | float, delta: float
) -> np.ndarray:
    """The least epsilon, 0 or more, with which such error rates are compatible."""
    with np.errstate(divide="ignore", invalid="ignore"):
        one = np.log(np.maximum(1 - delta - np.asarray(false_negative), 0) / false_positive)
        other = np.log(np.maximum(1 - delta - np.asarray(false_positive), 0) / false_negative)
    return np.maximum(np.maximum(one, other), 0.0)
