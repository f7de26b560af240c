"""A lower bound on epsilon, from an attack that guesses the participants.

The game. A canary is put among the clients or left out, by a fair coin. An observer of everything
that is released gives it a score, which should be larger where it is in. Let the score be above a
threshold with the probability p if the canary is in, and r if it is out. For every (epsilon, delta)
that the stated releases imply (`deltas`; Kairouz, Oh, Viswanath 2015, Theorem 2.1),

    p <= e^epsilon r + delta    and    1 - r <= e^epsilon (1 - p) + delta.

A quarter of the trials chooses score and threshold. The others give a lower bound on p and an upper
one on r (Clopper and Pearson 1934; Jagielski, Ullman, Oprea 2020), which hold together with the
stated confidence. The bound is the epsilon, at the stated delta, of the most noise whose
inequalities stand, as a factor on the stated noise (of Gaussians on everyone: Nasr et al. 2023,
"Tight auditing of differentially private machine learning").

It bounds epsilon if the release is as stated, but for the size of its noise. If it EXCEEDS the
stated epsilon, no such assumption is needed: a stated pair is contradicted. All epsilons are tried,
because a contradiction shows with far fewer observations at a large delta than at a small one.

Canaries that share a run, but no coordinate of the releases, are independent if noise is, as
stated, drawn for each coordinate.

| releases                  | delta at an epsilon                                               |
|---------------------------|-------------------------------------------------------------------|
| Gaussians on everyone     | exact (Balle and Wang 2018, Theorem 8)                            |
| with Poisson cohorts      | an upper bound, by privacy loss distributions on a coarse grid    |
| cohorts of fixed size     | an upper bound, by Renyi divergences (Canonne et al. 2020)        |
| with a secure sum         | the same                                                          |
| any release without noise | 1                                                                 |

The coarse grid makes the bounds weaker by some thousandths and never invalid.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import dp_accounting
import numpy as np
from scipy import special

from jaxpfl import checks
from jaxpfl.errors import InputError
from jaxpfl.privacy import accounting, confirmation, events
from jaxpfl.privacy.guarantee import Guarantee

# Every fourth trial chooses. The best of many events was lucky, so that the choice goes by bounds
# on rates, which hold with this probability each.
_CHOOSING, _CAREFUL = 4, 0.999
# The thresholds that are tried among many scores: quantiles, and all of the extreme ones.
_QUANTILES, _EXTREMES = 512, 64

_EPSILONS = np.concatenate([np.arange(0, 3, 0.05), np.arange(3, 20, 0.25)])
# The most points of one release's privacy loss on a grid: more would only cost time.
_POINTS = 20_000
# The search for the logarithm of the factor on the noise: its range and precision.
_FARTHEST, _PRECISION = math.log(64), 2e-3


class Trials(NamedTuple):
    """S scores of each of N canaries, float64; and whether it was in, by a fair coin of its own."""

    scores_SxN: np.ndarray
    present_N: np.ndarray


class Bound(NamedTuple):
    """With probability `confidence` or more, epsilon is at least this, by `trials` canaries."""

    epsilon: float
    trials: int
    confidence: float


def lower_bound(trials: Trials, stated: Guarantee, *, confidence: float = 0.99) -> Bound:
    """Returns a lower bound on the epsilon of the releases, at the delta of their stated cost.

    Raises:
      InputError: the trials do not fit together, are too few or have a score that is NaN, the
        confidence is out of range, or nothing is stated that could be refuted.
    """
    confidence = checks.open_fraction("confidence", confidence)
    if not stated.private:
        raise InputError("an audit needs a stated epsilon, found a release without noise")
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
    chooses_N = np.arange(len(present_N)) % _CHOOSING == 0
    score, cut = _chosen(scores_SxN[:, chooses_N], present_N[chooses_N])
    above_N, present_N = scores_SxN[score, ~chooses_N] > cut, present_N[~chooses_N]
    p, r = _bounds(
        above_N.sum(where=present_N),
        above_N.sum(where=~present_N),
        present_N,
        1 - (1 - confidence) / 2,
    )

    def contradicted(log_factor: float) -> bool:
        """Whether the release has less noise than the stated one times the factor."""
        delta_E = deltas(scaled(stated.event, math.exp(log_factor)), _EPSILONS)
        growth_E = np.exp(_EPSILONS)
        seen_E = np.maximum(p - growth_E * r, 1 - r - growth_E * (1 - p))
        return bool(np.any(seen_E > delta_E))

    least, most = -_FARTHEST, _FARTHEST
    if not contradicted(most):
        return Bound(0.0, len(above_N), confidence)
    while most - least > _PRECISION:
        middle = (least + most) / 2
        least, most = (least, middle) if contradicted(middle) else (middle, most)
    event = scaled(stated.event, math.exp(most))
    return Bound(dataclasses.replace(stated, event=event).epsilon(), len(above_N), confidence)


def weight_trials(with_RxN: np.ndarray, without_RxN: np.ndarray, planted_RxM: np.ndarray) -> Trials:
    """Trials of chosen texts: does the weight of a pool text show a client who holds it?

    Texts that are chosen from a public pool by released moments are public whatever the clients
    hold; what can leak is the choice. The scores are a planted text's log-weight, and the share of
    the texts that no client was given that weigh less. Trials of R releases are independent; those
    of one release are so only as far as its M texts do not move each other's weights, which is the
    caller's to say.

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


def upper_rate(events: np.ndarray, trials: int, confidence: float) -> np.ndarray:
    """Returns Clopper and Pearson's upper bounds on a rate, given numbers of events."""
    left = trials - np.asarray(events)
    rates = special.betaincinv(np.asarray(events) + 1.0, np.maximum(left, 1e-9), confidence)
    return np.where(left > 0, rates, 1.0)


def _chosen(scores_SxN: np.ndarray, present_N: np.ndarray) -> tuple[int, float]:
    """The score and the threshold that seem to separate the canaries best."""
    best, score_and_cut = -math.inf, (0, 0.0)
    for number, score_N in enumerate(scores_SxN):
        cut_C = _cuts(score_N)
        ins_C, outs_C = (
            part.size - np.sort(part).searchsorted(cut_C, side="right")
            for part in (score_N[present_N], score_N[~present_N])
        )
        p_C, r_C = _bounds(ins_C, outs_C, present_N, _CAREFUL)
        # The shift / noise of a Gaussian mechanism with these rates.
        mu_C = special.ndtri(p_C) - special.ndtri(r_C)
        place = int(np.argmax(mu_C))
        if mu_C[place] > best:
            best, score_and_cut = float(mu_C[place]), (number, float(cut_C[place]))
    return score_and_cut


def _bounds(
    ins: Any, outs: Any, present_N: np.ndarray, confidence: float
) -> tuple[np.ndarray, np.ndarray]:
    """A lower bound on p and an upper one on r, by how often a score was above the threshold."""
    number = int(present_N.sum())
    lower = 1 - upper_rate(number - ins, number, confidence)
    return lower, upper_rate(outs, len(present_N) - number, confidence)


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


def scaled(event: dp_accounting.DpEvent, factor: float) -> dp_accounting.DpEvent:
    """Returns the same releases with `factor` times their noise.

    A secure sum's divergences are divided by the factor's square, as those of Gaussians are.
    """
    grows = {"noise_multiplier": factor, "rho": factor**-2, "xi": factor**-2}

    def scaled_part(part: Any) -> Any:
        if isinstance(part, list):
            return [scaled_part(entry) for entry in part]
        if not isinstance(part, dict):
            return part
        return {
            name: value * grows[name] if name in grows else scaled_part(value)
            for name, value in part.items()
        }

    return events.from_json(scaled_part(events.to_json(event)))


def deltas(event: dp_accounting.DpEvent, epsilons_E: np.ndarray) -> np.ndarray:
    """Returns a delta, float64 [E], for each epsilon >= 0, with which the event is private."""
    releases = events.counts(event)
    if any(isinstance(leaf, dp_accounting.NonPrivateDpEvent) for leaf in releases):
        return np.ones(len(epsilons_E))
    concentrated = any(isinstance(leaf, dp_accounting.ZCDpEvent) for leaf in releases)
    if concentrated or events.adjacency(event) == "replace_one":
        order_O = np.array(accounting.RDP_ORDERS)
        divergence_O = np.array(accounting.renyi_divergences(releases.items()))
        constant_O = (order_O - 1) * np.log1p(-1 / order_O) - np.log(order_O)
        # Proposition 12.
        log_OxE = constant_O[:, None] + np.outer(order_O - 1, -epsilons_E)
        log_E = np.min(log_OxE + ((order_O - 1) * divergence_O)[:, None], axis=0)
        return np.exp(np.minimum(log_E, 0.0))
    precision, sampled = accounting.gaussians_apart(releases.items())
    if not sampled:
        mu = math.sqrt(precision)
        delta_E = confirmation.gaussian_delta(mu, epsilons_E) if mu else 0.0 * epsilons_E
        return np.clip(delta_E, 0.0, 1.0)
    step = min(_step(leaf, count) for leaf, count in sampled)
    if step > accounting.LARGEST_STEP:
        # Losses so large protect nobody, and a step of theirs has no exponential. Delta 1 holds.
        return np.ones(len(epsilons_E))
    composed = accounting.composed(sampled, precision, step)
    return np.clip(composed.get_delta_for_epsilon(epsilons_E.tolist()), 0.0, 1.0)


def _step(leaf: dp_accounting.DpEvent, count: int) -> float:
    """The step of the grid for `count` releases of this kind.

    Rounding overestimates a loss by about step^2 / 8 in each release, and its deviation by as much
    relative to the deviation itself, so that both bound the step.
    """
    q, z = accounting.rate_and_multiplier(leaf)
    deviation = q * math.sqrt(math.expm1(min(z**-2, 50.0)))
    largest = (1 / z + 20) / (2 * z)
    return max(min(math.sqrt(8e-3 / count), deviation / 4), largest / _POINTS)
