"""Second accountants, which share no code with dp-accounting.

A calibrated noise multiplier is only used if one of them confirms it (`Guarantee.confirms`).
"""

import decimal
import functools
import math
from collections.abc import Callable
from typing import cast

import numpy as np
import scipy


@functools.lru_cache(maxsize=1024)
def poisson_epsilon(
    noise_multiplier: float,
    sampling_rate: float,
    rounds: int,
    delta: float,
    *,
    reach: float,
    gaussian_mu: float = 0.0,
) -> float:
    """Epsilon of Gaussian rounds on Poisson cohorts under add-or-remove-one.

    Discretises the privacy loss to the nearest of 2^19 grid points, composes by FFT and inverts
    the hockey-stick divergence (Koskela, Jalko, Honkela 2020, "Computing tight differential
    privacy guarantees using FFT"), with the grid shifted so that the mean loss is exact (Gopi, Lee,
    Wutschitz 2021, "Numerical composition of differential privacy"). An estimate, not a bound.
    Below a noise multiplier of 1e-3, epsilon is above 100,000 and protects nobody: it is then that
    of rounds on everyone, an upper bound.

    Args:
      reach: an upper bound on epsilon; losses far beyond it are treated as infinite.
      gaussian_mu: shift / std of one more Gaussian release, on everyone.
    """
    if sampling_rate == 1 or noise_multiplier < 1e-3:
        both = math.hypot(math.sqrt(rounds) / noise_multiplier, gaussian_mu)
        return gaussian_epsilon(both, delta)
    z, q = noise_multiplier, sampling_rate
    exponent = (18 * z + 1) / (2 * z**2)  # the loss of one round, 9 standard deviations out
    single = exponent + math.log(q) if exponent > 600 else math.log1p(q * math.expm1(exponent))
    width = 3 * (reach + single)
    return max(
        _fft_epsilon(z, q, rounds, delta, width, removed, gaussian_mu) for removed in (True, False)
    )


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Exact epsilon of a Gaussian with shift / std = mu (Balle and Wang 2018, Theorem 8)."""
    return _invert(lambda epsilon: float(gaussian_delta(mu, epsilon)), delta)


def gaussian_delta(mu: float, epsilon: np.ndarray | float) -> np.ndarray | float:
    """Exact delta of a Gaussian with shift / std = mu at an epsilon, or each of an array's."""
    first = scipy.special.ndtr(mu / 2 - epsilon / mu)
    return first - np.exp(epsilon + scipy.special.log_ndtr(-mu / 2 - epsilon / mu))


def concentrated_epsilon(rho: float, xi: float, delta: float) -> float:
    """Epsilon of Renyi divergences of at most xi + rho a at every whole order a from 2 on.

    The smallest over the whole orders up to 4,096 of the conversion by Canonne, Kamath, Steinke
    2020, Proposition 12.
    """
    order = np.arange(2.0, 4097.0)
    converted = rho * order + xi + np.log1p(-1 / order) - np.log(delta * order) / (order - 1)
    return max(0.0, float(converted.min()))


@functools.lru_cache(maxsize=1024)
def fixed_size_epsilon(
    noise_multiplier: float, clients: int, population: int, rounds: int, delta: float
) -> float:
    """Epsilon of Gaussian rounds on cohorts of fixed size under replace-one.

    Theorem 27 of Wang, Balle, Kasiviswanathan 2018 ("Subsampled Renyi Differential Privacy and
    Analytical Moments Accountant", arXiv:1808.00087) for the Gaussian, with its forward
    differences summed in 400-digit decimals instead of in logarithms; fractional orders by
    convexity (its Corollary 10). The noise multiplier is relative to the shift that replacing one
    client makes (2 S).
    """
    if clients == population:
        return gaussian_epsilon(math.sqrt(rounds) / noise_multiplier, delta)
    moments = _moments(noise_multiplier, clients, population)
    best = math.inf
    for order in (*(1 + x / 10 for x in range(1, 100)), *range(12, 64)):
        below = math.floor(order)
        part = order - below
        moment = (1 - part) * moments[below] + part * moments[math.ceil(order)]
        divergence = rounds * moment / (order - 1)
        # Canonne, Kamath, Steinke 2020, Proposition 12.
        converted = divergence + math.log1p(-1 / order) - math.log(delta * order) / (order - 1)
        best = min(best, converted)
    return max(best, 0.0)


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


def _fft_epsilon(
    z: float, q: float, rounds: int, delta: float, width: float, removed: bool, mu: float
) -> float:
    """Epsilon of (1-q) N(0, z^2) + q N(1, z^2) against N(0, z^2) if `removed`, else the reverse.

    With mu > 0, one plain Gaussian is composed with it, whose loss is N(mu^2 / 2, mu^2) either way.
    """
    points = 2**19
    edges = np.linspace(-width, width, points + 1)
    step = edges[1] - edges[0]

    def place(loss: np.ndarray) -> np.ndarray:
        """The x at which log((1-q) + q exp((2x - 1) / (2 z^2))) equals `loss`."""
        inner = np.expm1(np.minimum(loss, 700.0)) + q
        with np.errstate(divide="ignore", invalid="ignore"):
            # exp(700) is near the largest double, and beyond it the other terms do not count.
            log_inner = np.where(loss > 700.0, loss, np.log(inner))
            return np.where(inner > 0, z**2 * (log_inner - math.log(q)) + 0.5, -np.inf)

    if removed:
        x = place(edges)
        above = (1 - q) * scipy.special.ndtr(-x / z) + q * scipy.special.ndtr(-(x - 1) / z)
    else:
        above = scipy.special.ndtr(place(-edges) / z)  # this loss falls with x
    mass = np.clip(-np.diff(above), 0.0, None)
    infinite = -math.expm1(rounds * math.log1p(-float(above[-1])))
    # The cell with middle step / 2 moves to index 0; composition adds `rounds` of these halves.
    spectrum = np.fft.rfft(np.roll(mass, -(points // 2)))
    spectrum = spectrum**rounds
    middles = (edges[:-1] + edges[1:]) / 2
    rounding = _mean_loss(z, q, removed) - float(np.dot(mass, middles))
    moved = rounds * (step / 2 + rounding)
    if mu > 0:
        plain = np.diff(scipy.special.ndtr((edges - mu**2 / 2) / mu))
        spectrum = spectrum * np.fft.rfft(np.roll(plain, -(points // 2)))
        moved += step / 2 + mu**2 / 2 - float(np.dot(plain, middles))
    composed = np.clip(np.roll(np.fft.irfft(spectrum, points), points // 2), 0.0, None)
    losses = edges[:-1] + moved

    def delta_of(eps: float) -> float:
        first = int(np.searchsorted(losses, eps, side="right"))
        return infinite - float(np.dot(composed[first:], np.expm1(eps - losses[first:])))

    return _invert(delta_of, delta)


def _mean_loss(z: float, q: float, removed: bool) -> float:
    x = np.arange(-12 * z, 1 + 12 * z, z / 100)
    exponent = (2 * x - 1) / (2 * z**2)
    loss = np.logaddexp(math.log1p(-q), math.log(q) + exponent)

    def density(mean: float) -> np.ndarray:
        return np.exp(-((x - mean) ** 2) / (2 * z**2)) / (100 * math.sqrt(2 * math.pi))

    if removed:
        return float(np.dot((1 - q) * density(0.0) + q * density(1.0), loss))
    return -float(np.dot(density(0.0), loss))


def _invert(delta_of: Callable[[float], float], delta: float) -> float:
    """The smallest epsilon >= 0 with delta_of(epsilon) <= delta; `delta_of` falls."""
    low, high = 0.0, 1.0
    if delta_of(low) <= delta:
        return 0.0
    while delta_of(high) > delta:
        low, high = high, 2 * high
        if high > 1e9:
            return math.inf

    def excess(eps: float) -> float:
        return math.log(max(delta_of(eps), 1e-300) / delta)

    return cast(float, scipy.optimize.brentq(excess, low, high, xtol=1e-10))
