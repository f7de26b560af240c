"""Integer noise, drawn on the host: the discrete Gaussian, exactly.

Floating-point noise on floating-point values has gaps that depend on the value, which an attacker
may use (Mironov 2012, "On significance of the least significant bits for differential privacy").
Integers do not, and the noise of many clients adds up: see `privacy.secure_sum`.

All randomness is of whole numbers below whole bounds, which numpy's generators draw without bias
(by rejection), and no draw is computed in floating point.
"""

import numpy as np

from jaxpfl import checks
from jaxpfl.errors import InputError

LARGEST_DEVIATION = 2**16
"""Of one draw. Up to it, all products fit into 64 bits."""


def discrete_gaussian(generator: np.random.Generator, deviation: int, count: int) -> np.ndarray:
    """Returns exact draws, int64 [count], with P(x) proportional to exp(-x^2 / (2 deviation^2)).

    Rejection from a discrete Laplace distribution, with coins whose probabilities are exponentials
    of fractions, all in whole numbers (Canonne, Kamath, Steinke 2020, "The discrete Gaussian for
    differential privacy", Algorithms 1 to 3).

    Args:
      deviation: a whole number in 1 .. 65,536.
    """
    scale = _checked_deviation(deviation)
    found, missing = [], count
    while missing > 0:
        drawn_N = _discrete_laplace(generator, scale, 2 * missing + 64)
        off_N = np.abs(drawn_N) - scale
        kept_N = _exponential_coins(generator, off_N**2, np.full(drawn_N.size, 2 * scale**2))
        found.append(drawn_N[kept_N][:missing])
        missing -= found[-1].size
    return np.concatenate(found) if found else np.empty(0, np.int64)


def _checked_deviation(deviation: int) -> int:
    scale = checks.positive_int("deviation", deviation)
    if scale > LARGEST_DEVIATION:
        raise InputError(f"deviation must be at most {LARGEST_DEVIATION}, found {scale}")
    return scale


def _discrete_laplace(generator: np.random.Generator, scale: int, count: int) -> np.ndarray:
    """Draws with P(x) proportional to exp(-|x| / scale); fewer than `count`, by rejection."""
    full = np.full(count, scale)
    rest_N = generator.integers(0, full)
    rest_N = rest_N[_exponential_coins(generator, rest_N, full)]
    one = np.ones(rest_N.size, np.int64)
    wholes_N = np.zeros(rest_N.size, np.int64)
    going = np.arange(rest_N.size)
    while going.size:
        going = going[_exponential_coins(generator, one[going], one[going])]
        wholes_N[going] += 1
    size_N = rest_N + scale * wholes_N
    negative_N = generator.integers(0, 2 * one) == 1
    # Zero has one sign only.
    kept_N = ~(negative_N & (size_N == 0))
    return np.where(negative_N, -size_N, size_N)[kept_N]


def _exponential_coins(
    generator: np.random.Generator, numerator_N: np.ndarray, denominator_N: np.ndarray
) -> np.ndarray:
    """Coins that are true with probability exp(-numerator / denominator), bool [N]."""
    heads_N = np.ones(numerator_N.size, bool)
    wholes_N, rest_N = np.divmod(numerator_N, denominator_N)
    # exp(-wholes) is that many coins of exp(-1), of which the first tails decides.
    going = np.flatnonzero(wholes_N)
    tossed = 0
    while going.size:
        one = np.ones(going.size, np.int64)
        heads_N[going] = _small_exponential_coins(generator, one, one)
        tossed += 1
        going = going[heads_N[going] & (wholes_N[going] > tossed)]
    last = np.flatnonzero(heads_N)
    heads_N[last] = _small_exponential_coins(generator, rest_N[last], denominator_N[last])
    return heads_N


def _small_exponential_coins(
    generator: np.random.Generator, numerator_N: np.ndarray, denominator_N: np.ndarray
) -> np.ndarray:
    """As above, for fractions of at most 1.

    With coins of probability x / 1, x / 2, x / 3, ... tossed until the first tails, the number of
    tosses is odd with probability 1 - x + x^2 / 2 - x^3 / 6 + ... = exp(-x) (von Neumann 1951).
    """
    tosses_N = np.ones(numerator_N.size, np.int64)
    going = np.arange(numerator_N.size)
    while going.size:
        uniform = generator.integers(0, denominator_N[going] * tosses_N[going])
        going = going[uniform < numerator_N[going]]
        tosses_N[going] += 1
    return tosses_N % 2 == 1
