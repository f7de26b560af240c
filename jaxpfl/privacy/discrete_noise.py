"""Integer noise, drawn on the host: the discrete Gaussian, exactly.

Floating-point noise on floating-point values has gaps that depend on the value, which an attacker
may use (Mironov 2012, "On significance of the least significant bits for differential privacy").
Integers do not, and the noise of many clients adds up: see `privacy.secure_sum`.

All randomness comes from a stream of uniform 64-bit words (`Words`), and no draw is computed in
floating point.
"""

import hashlib

import numpy as np

from jaxpfl import checks
from jaxpfl.errors import InputError

LARGEST_DEVIATION = 2**16
"""Of one draw. Up to it, all products fit into 64 bits."""


class Words:
    """Uniform 64-bit words: SHAKE-256 of a seed and a counter.

    Args:
      seed: of at least 128 secret bits; equal seeds give equal words.
    """

    _BLOCK = 2**15

    def __init__(self, seed: bytes) -> None:
        if len(seed) < 16:
            raise InputError(f"a seed needs at least 16 bytes, found {len(seed)}")
        self._seed = seed
        self._blocks = 0
        self._left = np.empty(0, np.uint64)

    def take(self, count: int) -> np.ndarray:
        """Returns the next `count` words, uint64 [count]."""
        parts, missing = [], count
        while missing > 0:
            if not self._left.size:
                counter = self._blocks.to_bytes(8, "little")
                block = hashlib.shake_256(self._seed + counter).digest(8 * self._BLOCK)
                # Little-endian, so that every machine draws the same noise from a seed.
                self._left = np.frombuffer(block, "<u8").astype(np.uint64)
                self._blocks += 1
            parts.append(self._left[:missing])
            self._left = self._left[missing:]
            missing -= parts[-1].size
        return np.concatenate(parts) if parts else np.empty(0, np.uint64)

    def below(self, bound_N: np.ndarray) -> np.ndarray:
        """Returns uniform whole numbers in 0 .. bound - 1, int64 [N], for bounds 1 .. 2^63 - 1."""
        bound_N = bound_N.astype(np.uint64)
        drawn_N = self.take(bound_N.size)
        # The lowest 2^64 mod bound words are drawn again: a whole number of periods is left.
        surplus_N = (~bound_N + np.uint64(1)) % bound_N
        again = np.flatnonzero(drawn_N < surplus_N)
        while again.size:
            drawn_N[again] = self.take(again.size)
            again = again[drawn_N[again] < surplus_N[again]]
        return (drawn_N % bound_N).astype(np.int64)


def discrete_gaussian(words: Words, deviation: int, count: int) -> np.ndarray:
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
        drawn_N = _discrete_laplace(words, scale, 2 * missing + 64)
        off_N = np.abs(drawn_N) - scale
        kept_N = _exponential_coins(words, off_N**2, np.full(drawn_N.size, 2 * scale**2))
        found.append(drawn_N[kept_N][:missing])
        missing -= found[-1].size
    return np.concatenate(found) if found else np.empty(0, np.int64)


def _checked_deviation(deviation: int) -> int:
    scale = checks.positive_int("deviation", deviation)
    if scale > LARGEST_DEVIATION:
        raise InputError(f"deviation must be at most {LARGEST_DEVIATION}, found {scale}")
    return scale


def _discrete_laplace(words: Words, scale: int, count: int) -> np.ndarray:
    """Draws with P(x) proportional to exp(-|x| / scale); fewer than `count`, by rejection."""
    full = np.full(count, scale)
    rest_N = words.below(full)
    rest_N = rest_N[_exponential_coins(words, rest_N, full)]
    one = np.ones(rest_N.size, np.int64)
    wholes_N = np.zeros(rest_N.size, np.int64)
    going = np.arange(rest_N.size)
    while going.size:
        going = going[_exponential_coins(words, one[going], one[going])]
        wholes_N[going] += 1
    size_N = rest_N + scale * wholes_N
    negative_N = words.below(2 * one) == 1
    # Zero has one sign only.
    kept_N = ~(negative_N & (size_N == 0))
    return np.where(negative_N, -size_N, size_N)[kept_N]


def _exponential_coins(
    words: Words, numerator_N: np.ndarray, denominator_N: np.ndarray
) -> np.ndarray:
    """Coins that are true with probability exp(-numerator / denominator), bool [N]."""
    heads_N = np.ones(numerator_N.size, bool)
    wholes_N, rest_N = np.divmod(numerator_N, denominator_N)
    # exp(-wholes) is that many coins of exp(-1), of which the first tails decides.
    going = np.flatnonzero(wholes_N)
    tossed = 0
    while going.size:
        one = np.ones(going.size, np.int64)
        heads_N[going] = _small_exponential_coins(words, one, one)
        tossed += 1
        going = going[heads_N[going] & (wholes_N[going] > tossed)]
    last = np.flatnonzero(heads_N)
    heads_N[last] = _small_exponential_coins(words, rest_N[last], denominator_N[last])
    return heads_N


def _small_exponential_coins(
    words: Words, numerator_N: np.ndarray, denominator_N: np.ndarray
) -> np.ndarray:
    """As above, for fractions of at most 1.

    With coins of probability x / 1, x / 2, x / 3, ... tossed until the first tails, the number of
    tosses is odd with probability 1 - x + x^2 / 2 - x^3 / 6 + ... = exp(-x) (von Neumann 1951).
    """
    tosses_N = np.ones(numerator_N.size, np.int64)
    going = np.arange(numerator_N.size)
    while going.size:
        uniform = words.below(denominator_N[going] * tosses_N[going])
        going = going[uniform < numerator_N[going]]
        tosses_N[going] += 1
    return tosses_N % 2 == 1
