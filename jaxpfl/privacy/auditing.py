"""Lower bounds on epsilon, from guesses about who took part.

The game. A canary is put among the clients or left out, by a fair coin. An observer of everything
that is released gives it a score, which should be larger where it is in. Differential privacy
limits how well any observer can do, so that whoever does better refutes the stated epsilon. Each
bound holds with the stated confidence, whatever the scores are made of.

An event, such as "the score is above the threshold", has the probability p with the canary and r
without it, or the other way round. (epsilon, delta)-privacy implies p <= e^epsilon r + delta
(Kairouz, Oh, Viswanath 2015, Theorem 2.1). A quarter of the trials chooses the event, which so does
not depend on the others. These refute such inequalities by an exact test (`privacy.two_rates`).

    threshold   The largest epsilon that is refuted at the stated delta. Source, with two bounds on
                error rates in place of one test: Jagielski, Ullman, Oprea 2020; the separate part:
                Nasr et al. 2021.
    profile     One pair (epsilon, delta) of all that the stated events imply (`privacy.profile`) is
                chosen with the event. The least factor on all noise multipliers at which it is
                refuted has an epsilon at the stated delta, which is the bound. For Gaussians on
                everyone this is the idea of Nasr et al. 2023, "Tight auditing of differentially
                private machine learning". The bound is one on epsilon if the release is what was
                stated, but for the size of its noise. That it exceeds the stated epsilon needs no
                such assumption: it means that the stated profile was contradicted.
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
from jaxpfl.privacy.guarantee import Guarantee
from jaxpfl.privacy.profile import Scaled, scaled
from jaxpfl.privacy.two_rates import Counts, refuted, upper_rate

# For as many of the canaries one run guesses: those with the most extreme scores.
_GUESSED = 0.05

# Of many different scores, the thresholds that are tried: quantiles, and all of the extreme ones.
_QUANTILES, _EXTREMES = 512, 64

# Every fourth trial chooses what the others are asked. A choice goes by bounds on both rates, which
# hold with this probability each, because the best of many counts are those that were most lucky.
# Where nothing is sure enough, it is less careful.
_CHOOSING, _CAREFUL = 4, (0.9999, 0.9, 0.5)

_PRECISION = 2e-3


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
    choosing, judging = _parts(trials)
    for careful in _CAREFUL:
        events = _events(choosing, careful)
        epsilon_C = np.log(np.maximum(events.p_C - delta, 1e-300) / events.r_C)
        place = int(np.argmax(epsilon_C))
        if epsilon_C[place] > 0:
            break
    counts, weight = _counts(judging, events, place), math.exp(max(0.0, epsilon_C[place]))

    def refutes(epsilon: float) -> bool:
        growth = math.exp(epsilon)
        return refuted(counts, weight=weight, growth=growth, delta=delta, confidence=confidence)

    # No more is refuted where the choice was careful.
    found = _largest(refutes, 0.0, math.log(weight) + 3)
    return Bound(found or 0.0, "threshold", len(judging.present_N), confidence)


def by_profile(trials: Trials, stated: Guarantee, confidence: float) -> Bound:
    """Returns the bound of the estimator "profile"."""
    choosing, judging = _parts(trials)
    known = Scaled(stated.event)
    least, place, epsilon = known.factors_F[-1], 0, 0.0
    for careful in _CAREFUL:
        events = _events(choosing, careful)
        for number, tried in enumerate(known.epsilons_E):
            factor_C = known.factors(number, events.p_C - math.exp(tried) * events.r_C)
            if factor_C.min() < least:
                least, place, epsilon = factor_C.min(), int(np.argmin(factor_C)), float(tried)
        if least < known.factors_F[-1]:
            break
    counts, growth = _counts(judging, events, place), math.exp(epsilon)

    def refutes(reduction: float) -> bool:
        """Whether there is less noise than the stated one times exp(-reduction)."""
        delta = known.delta(math.exp(-reduction), epsilon)
        return refuted(counts, weight=growth, growth=growth, delta=delta, confidence=confidence)

    farthest = math.log(known.factors_F[-1])
    reduction = _largest(refutes, -farthest, farthest)
    if reduction is None:
        return Bound(0.0, "profile", len(judging.present_N), confidence)
    event = scaled(stated.event, math.exp(-reduction))
    found = dataclasses.replace(stated, event=event).epsilon()
    return Bound(found, "profile", len(judging.present_N), confidence)


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


class _Events(NamedTuple):
    """Events that might be judged, and bounds on their rates by the trials that choose.

    Attributes:
      score_C: which score each is about.
      cut_C: its threshold.
      above_C: True: "above the threshold", which should happen with the canary; False: "not above
        it", which should happen without.
      p_C, r_C: a lower bound on the rate where the event should happen, and an upper bound where it
        should not.
    """

    score_C: np.ndarray
    cut_C: np.ndarray
    above_C: np.ndarray
    p_C: np.ndarray
    r_C: np.ndarray


def _parts(trials: Trials) -> tuple[Trials, Trials]:
    """The trials that choose, and those that judge."""
    scores_SxN, present_N = trials
    chooses_N = np.arange(len(present_N)) % _CHOOSING == 0
    choosing, judging = (
        Trials(scores_SxN[:, part_N], present_N[part_N]) for part_N in (chooses_N, ~chooses_N)
    )
    return choosing, judging


def _events(choosing: Trials, careful: float) -> _Events:
    """What may be judged; the bounds on its rates hold with the probability `careful` each."""
    scores_SxN, present_N = choosing
    found = []
    for number, score_N in enumerate(scores_SxN):
        cut_C = _cuts(score_N)
        above = {}
        for present in (True, False):
            part_N = np.sort(score_N[present_N == present])
            above[present] = len(part_N) - part_N.searchsorted(cut_C, side="right"), len(part_N)
        for which in (True, False):
            # Above the threshold with the canary; or not above it, without.
            (should_C, shoulds), (other_C, others) = above[which], above[not which]
            if not which:
                should_C, other_C = shoulds - should_C, others - other_C
            found.append(
                _Events(
                    np.full(len(cut_C), number),
                    cut_C,
                    np.full(len(cut_C), which),
                    1 - upper_rate(shoulds - should_C, shoulds, careful),
                    upper_rate(other_C, others, careful),
                )
            )
    return _Events(*map(np.concatenate, zip(*found, strict=True)))


def _counts(judging: Trials, events: _Events, place: int) -> Counts:
    """How often the event at this place happened."""
    scores_SxN, present_N = judging
    happened_N = scores_SxN[events.score_C[place]] > events.cut_C[place]
    should_N = present_N
    if not events.above_C[place]:
        happened_N, should_N = ~happened_N, ~present_N
    first_N, second_N = happened_N[should_N], happened_N[~should_N]
    return Counts(int(first_N.sum()), len(first_N), int(second_N.sum()), len(second_N))


def _largest(holds: Callable[[float], bool], low: float, high: float) -> float | None:
    """About the largest number at which `holds`, and below it, too; None = not even at `low`."""
    if not holds(low):
        return None
    while high - low > _PRECISION:
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


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
