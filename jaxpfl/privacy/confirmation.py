"""Second accountants, which share no code with dp-accounting and see numbers alone.

`privacy.guarantee` compares an epsilon with theirs before it is stated.
"""

import decimal
import functools
import math
from typing import cast

import numpy as np
import scipy

_ORDERS = (*(1 + x / 10 for x in range(1, 100)), *map(float, range(12, 64)))
Round = tuple[float, float, int] | tuple[float, float, float, float, int]
"""Sampling rate, noise multiplier and number; before the number, of a truncated cohort, how often
it is cut, and how often it then has the client."""


@functools.lru_cache(maxsize=1024)
def poisson_epsilon(
    rounds: tuple[Round, ...], delta: float, gaussian_mu: float = 0.0
) -> float | None:
    """Epsilon of Gaussian rounds on Poisson cohorts under add-or-remove-one, and of one Gaussian.

    Composes privacy losses by FFT (Koskela, Jalko, Honkela 2020, "Computing tight differential
    privacy guarantees using FFT"). Each kind of round is a sum over a grid of the noise's values,
    which is exact up to rounding for so smooth an integrand, and whose losses are spread over three
    points each, so that their mean and variance stay. All probabilities are tilted by e^(t loss)
    first, t as in the best Chernoff bound, so that errors are relative to delta. An estimate, not a
    bound; it agrees with bounds to 1e-6.

    Args:
      rounds: of each kind. A cohort that is cut is under zero-out-one.
      gaussian_mu: shift / std of the Gaussian, which is on everyone.

    Returns:
      None below a noise multiplier of 1e-3, where epsilon is above 100,000 and protects nobody.
    """
    if not rounds:
        return gaussian_epsilon(gaussian_mu, delta) if gaussian_mu else 0.0
    if min(z for _, z, *_ in rounds) < 1e-3:
        return None
    return max(_fourier_epsilon(rounds, gaussian_mu, delta, removed) for removed in (True, False))


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Exact epsilon of a Gaussian with shift / std = mu (Balle and Wang 2018, Theorem 8)."""
    low, high = 0.0, 1.0
    if gaussian_delta(mu, low) <= delta:
        return 0.0
    while gaussian_delta(mu, high) > delta:
        low, high = high, 2 * high
        if high > 1e30:
            return math.inf

    def excess(eps: float) -> float:
        return math.log(max(float(gaussian_delta(mu, eps)), 1e-300) / delta)

    return cast(float, scipy.optimize.brentq(excess, low, high, xtol=1e-10))


def gaussian_delta(mu: float, epsilon: np.ndarray | float) -> np.ndarray | float:
    """Exact delta of a Gaussian with shift / std = mu at an epsilon, or each of an array's."""
    first = scipy.special.ndtr(mu / 2 - epsilon / mu)
    return first - np.exp(epsilon + scipy.special.log_ndtr(-mu / 2 - epsilon / mu))


def renyi_epsilon(
    delta: float,
    *,
    gaussian_mu: float = 0.0,
    rho: float = 0.0,
    xi: float = 0.0,
    fixed_size: tuple[tuple[float, int, int, int], ...] = (),
) -> float:
    """Epsilon by Renyi divergences, at whole orders exactly and between them by convexity.

    Cohorts of fixed size are under replace-one: Theorem 27 of Wang, Balle, Kasiviswanathan 2018
    ("Subsampled Renyi Differential Privacy and Analytical Moments Accountant", arXiv:1808.00087)
    for the Gaussian, with its forward differences summed in 400-digit decimals instead of in
    logarithms; its Corollary 10 for fractional orders.

    Args:
      gaussian_mu: shift / std of a Gaussian on everyone.
      rho, xi: of releases whose divergence is at most xi + rho a at every whole order a.
      fixed_size: noise multiplier, relative to the shift that replacing one client makes (2 S),
        clients, population and number of each kind of round.
    """
    best = least = math.inf
    for order in _ORDERS:
        below, part = math.floor(order), order - math.floor(order)
        # (order - 1) times the divergence.
        moment = (order - 1) * order * gaussian_mu**2 / 2
        for share, whole in ((1 - part, below), (part, math.ceil(order))):
            moment += share * (whole - 1) * (xi + rho * whole)
            moment += share * sum(n * _moments(*kind)[whole] for *kind, n in fixed_size)
        # Canonne, Kamath, Steinke 2020, Proposition 12; then Bretagnolle and Huber's inequality.
        converted = (moment - math.log(delta * order)) / (order - 1) + math.log1p(-1 / order)
        best = min(best, converted)
        least = min(least, moment / (order - 1))
    return 0.0 if -math.expm1(-least) < delta**2 else max(best, 0.0)


@functools.lru_cache(maxsize=64)
def selected_epsilon(
    rounds: tuple[Round, ...], delta: float, gaussian_mu: float, mean: float, shape: float
) -> float:
    """Epsilon of the best of a random number of runs, by Renyi divergences (`privacy.selection`).

    Source: Papernot and Steinke 2022, Theorems 2 and 6.

    Args:
      rounds, gaussian_mu: what one run releases, as of `poisson_epsilon`.
      mean, shape: of the number of runs: 1 is geometric, 0 logarithmic, infinity Poisson.
    """
    one = {}
    for order in _ORDERS:
        one[order] = order * gaussian_mu**2 / 2
        for *kind, count in rounds:
            moments = (_losses(tuple(kind), order - 1, removed, 2**14) for removed in (True, False))
            logs = [_log_sum(weight + (order - 1) * loss) for weight, loss in moments]
            one[order] += count * max(logs) / (order - 1)

    def excess(log_stop: float) -> float:
        # The mean of the logarithmic law whose parameter is e^log_stop.
        return math.expm1(-log_stop) / -log_stop - mean

    log_stop = -math.log(mean)
    if shape == 0 and mean > 1:
        log_stop = cast(float, scipy.optimize.brentq(excess, -200.0, -1e-12, xtol=1e-14))
    chosen = min(((b - 1) * of_b - log_stop) / b for b, of_b in one.items())
    best = math.inf
    for order, of_order in one.items():
        whole = of_order + math.log(mean) / (order - 1)
        if math.isinf(shape):
            near = math.log(order / (order - 1))
            whole += mean * math.exp(min(_log_delta(b, of_b, near) for b, of_b in one.items()))
        else:
            whole += (1 + shape) * chosen
        # Canonne, Kamath, Steinke 2020, Proposition 12.
        best = min(best, whole - math.log(delta * order) / (order - 1) + math.log1p(-1 / order))
    return max(best, 0.0)


def _log_delta(order: float, divergence: float, epsilon: float) -> float:
    """log delta at an epsilon by one order: Canonne et al. 2020, or Bretagnolle and Huber."""
    gain = (order - 1) * (divergence - epsilon + math.log1p(-1 / order)) - math.log(order)
    return min(gain, math.log(-math.expm1(-divergence)) / 2 if divergence else -math.inf)


def banded_shift(weights_R: np.ndarray, per_epoch: int, epochs: int) -> float:
    """Returns how far one client moves C X of DP-FTRL, in S, if it takes part once in each epoch.

    C is the noise's own matrix, whose recurrence in `correlated_noise` has these weights (1 / c_0,
    c_1 / c_0, ...). A client's contributions to two epochs may point anywhere, so that products of
    C's columns count absolutely; they are largest for a client whose rounds come first.
    """
    column = np.concatenate([[1.0], weights_R[1:]]) / weights_R[0]
    apart = range(per_epoch, len(column), per_epoch)
    overlaps = [abs(np.dot(column[:-rounds], column[rounds:])) for rounds in apart]
    pairs = sum((epochs - k) * overlap for k, overlap in enumerate(overlaps[: epochs - 1], 1))
    return math.sqrt(epochs * np.dot(column, column) + 2 * pairs)


def buffered_shifts(
    decays: tuple[float, ...], scales: tuple[float, ...], rounds: int, separation: int
) -> np.ndarray:
    """Returns how far a client moves a BLT's C X in its first 1, 2, ... epochs, in S [epochs].

    C has the coefficients 1 and then sum_i scales[i] decays[i]^(k-1), which must be positive and
    not increase: the client who moves it furthest takes part every b rounds, from the first.
    """
    powers = np.array(decays)[:, None] ** np.arange(rounds - 1)
    column_T = np.concatenate([[1.0], np.array(scales) @ powers])
    if np.any(column_T < 0) or np.any(np.diff(column_T) > 0):
        return np.array([math.inf])
    moved_T, shifts = np.zeros(rounds), []
    for first in range(0, rounds, separation):
        moved_T[first:] += column_T[: rounds - first]
        shifts.append(np.linalg.norm(moved_T[: first + separation]))
    return np.array(shifts)


@functools.lru_cache(maxsize=64)
def _moments(noise_multiplier: float, clients: int, population: int) -> list[float]:
    """log E[(P/Q)^order] for integer orders up to 63; 0 at order 1."""
    with decimal.localcontext() as context:
        context.prec = 400
        context.Emax, context.Emin = decimal.MAX_EMAX, decimal.MIN_EMIN
        highest, zero = 63, decimal.Decimal(0)
        rate = decimal.Decimal(clients) / decimal.Decimal(population)
        half = 1 / (2 * decimal.Decimal(noise_multiplier) ** 2)
        # E[(P/Q)^k] of the Gaussian itself.
        plain = [(half * k * (k - 1)).exp() for k in range(highest + 2)]
        ternary = [
            sum(((-1) ** (k - i) * math.comb(k, i) * plain[i] for i in range(k + 1)), zero)
            for k in range(highest + 2)
        ]
        terms = [zero] * (highest + 1)
        terms[2] = rate**2 * min(4 * (plain[2] - 1), 2 * plain[2])
        for k in range(3, highest + 1):
            even = abs(ternary[2 * (k // 2)] * ternary[2 * ((k + 1) // 2)]).sqrt()
            terms[k] = rate**k * min(4 * even, 2 * plain[k])
        moments = [
            float(sum((math.comb(order, k) * terms[k] for k in range(2, order + 1)), 1 + zero).ln())
            for order in range(2, highest + 1)
        ]
    return [0.0, 0.0, *moments]


def _fourier_epsilon(rounds: tuple[Round, ...], mu: float, delta: float, removed: bool) -> float:
    """Epsilon of (1-q) N(0, z^2) + q N(1, z^2) against N(0, z^2) if `removed`, else the reverse."""

    def excess(epsilon: float) -> float:
        """How far delta is exceeded, by the losses of the loop below; as a logarithm."""
        above = slice(np.searchsorted(loss_L, epsilon, side="right"), None)
        # Not np.dot: for so long a vector BLAS wakes all its threads, which takes a thousand times
        # as long as the sum where the processor has other work.
        reached = -float((probability_L[above] * np.expm1(epsilon - loss_L[above])).sum())
        return math.log(max(reached, 1e-300) / delta)

    tilt_J, cumulant_J = _cumulants(rounds, mu, removed)
    upward = slice(np.searchsorted(tilt_J, 0.0) + 4, None)
    chernoff_J = (cumulant_J[upward] - math.log(delta)) / tilt_J[upward]
    # Half of the best tilt, four places below it: the losses then stay where the best one bounds
    # them, and nothing that counts is below 1e-3. For a large delta, a smaller one has losses that
    # reach down to epsilon.
    best = upward.start + int(np.argmin(chernoff_J)) - 4
    for place in range(best, upward.start - 5, -8):
        loss_L, probability_L = _composed(rounds, mu, removed, float(tilt_J[place]))
        low, high = max(float(loss_L[0]), 0.0), float(loss_L[-1])
        if high > low and excess(low) > 0:
            return cast(float, scipy.optimize.brentq(excess, low, high, xtol=1e-12))
        if low == 0.0:
            return 0.0
    return low


@functools.lru_cache(maxsize=64)
def _cumulants(
    rounds: tuple[Round, ...], mu: float, removed: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Tilts t [J], ascending and without 0, and log E e^(t loss) of the composition [J]."""
    # Beyond the last one the coarse grid would be coarser than the noise.
    most = math.log2(2000 * min(z for _, z, *_ in rounds))
    tilts = 2.0 ** np.arange(-24, most, 0.25)
    tilt_J = np.concatenate([-tilts[::-4], tilts])
    cumulant_J = mu**2 / 2 * (tilt_J**2 + tilt_J)
    for *kind, count in rounds:
        cumulant_J += count * _cumulants_of_one(tuple(kind), removed, tuple(tilt_J.tolist()))
    return tilt_J, cumulant_J


@functools.lru_cache(maxsize=64)
def _cumulants_of_one(
    kind: tuple[float, ...], removed: bool, tilts_J: tuple[float, ...]
) -> np.ndarray:
    """log E e^(t loss) of one round [J]; the same for any number of such rounds."""
    losses_J = ((tilt, *_losses(kind, tilt, removed, 2**12)) for tilt in tilts_J)
    return np.array([_log_sum(weight + tilt * loss) for tilt, weight, loss in losses_J])


@functools.lru_cache(maxsize=16)
def _composed(
    rounds: tuple[Round, ...], mu: float, removed: bool, tilt: float
) -> tuple[np.ndarray, np.ndarray]:
    """Losses [L], ascending, and their probabilities [L]."""
    tilt_J, cumulant_J = _cumulants(rounds, mu, removed)
    # By Chernoff's bound, e^-32 of the tilted probability lies outside.
    nats_J = cumulant_J - cumulant_J[tilt_J == tilt] + 32.0
    with np.errstate(divide="ignore"):
        bound_J = nats_J / (tilt_J - tilt)
    lowest, highest = bound_J[tilt_J < tilt].max(), bound_J[tilt_J > tilt].min()
    points = 2**16
    step = (highest - lowest) / points
    frequency = 2 * np.pi * np.arange(points // 2 + 1) / (highest - lowest)
    # Index 0 is the loss `middle`; indices go round.
    middle, total = mu**2 * (tilt + 0.5), mu**2 / 2 * (tilt**2 + tilt)
    spectrum = np.exp(-((frequency * mu) ** 2) / 2)
    for *kind, count in rounds:
        loss, probability, mean, norm = _tilted(tuple(kind), tilt, removed)
        place = (loss - mean) / step
        nearest = np.rint(place)
        part, index = place - nearest, nearest.astype(np.int64)
        mass, shares = np.zeros(points), (part * (part - 1) / 2, 1 - part**2, part * (part + 1) / 2)
        for move, share in zip((-1, 0, 1), shares, strict=True):
            mass += np.bincount((index + move) % points, probability * share, points)
        spectrum = spectrum * np.fft.rfft(mass) ** count
        middle += count * mean
        total += count * norm
    index = np.arange(points) + math.ceil((lowest - middle) / step)
    loss = middle + step * index
    # Far below the losses that count, the scale only has to be large.
    scale = np.minimum(total - tilt * loss, 600.0)
    return loss, np.exp(scale) * np.fft.irfft(spectrum, points)[index % points]


@functools.lru_cache(maxsize=8)
def _tilted(
    kind: tuple[float, ...], tilt: float, removed: bool
) -> tuple[np.ndarray, np.ndarray, float, float]:
    """Losses of one round, their tilted probabilities, the mean under these and log E e^(t loss).

    Cohorts of one plan differ in their number alone, and hardly in the tilt.
    """
    weight, loss = _losses(kind, tilt, removed, 2**17)
    norm = _log_sum(weight + tilt * loss)
    probability = np.exp(weight + tilt * loss - norm)
    return loss, probability, float((probability * loss).sum()), norm


def _losses(
    kind: tuple[float, ...], tilt: float, removed: bool, nodes: int
) -> tuple[np.ndarray, np.ndarray]:
    """Log probabilities and privacy losses of one round on a grid of its possible releases.

    The grid goes 12 deviations beyond where tilted probabilities may be. Where the cohort is cut, a
    client displaces another one: (1-p) N(0, z^2) + p N(2, z^2) against p N(-2, z^2).
    """
    q, z, *cut = kind
    far = tilt + 1 if removed else -tilt
    x = np.linspace(min(0.0, far) - 12 * z, max(1.0, far) + 12 * z, nodes)
    loss = np.logaddexp(math.log1p(-q), math.log(q) + (2 * x - 1) / (2 * z**2))
    weight = -(x**2) / (2 * z**2) + math.log((x[1] - x[0]) / (z * math.sqrt(2 * math.pi)))
    weight, loss = (weight + loss, loss) if removed else (weight, -loss)
    if not cut or not cut[0]:
        return weight, loss
    full, taken = cut
    far = 2 + 4 * tilt
    x = np.linspace(min(0.0, far) - 12 * z, max(2.0, far) + 12 * z, nodes)
    with np.errstate(divide="ignore"):
        left, there = np.log1p(-taken), np.log(taken)
    above, below = (np.logaddexp(left, there + (sign * 4 * x - 4) / (2 * z**2)) for sign in (1, -1))
    density = -(x**2) / (2 * z**2) + math.log((x[1] - x[0]) / (z * math.sqrt(2 * math.pi)))
    parts = (weight + math.log1p(-full), density + above + math.log(full))
    return np.concatenate(parts), np.concatenate([loss, above - below])


def _log_sum(exponents: np.ndarray) -> float:
    largest = float(exponents.max())
    return largest + math.log(float(np.exp(exponents - largest).sum()))
