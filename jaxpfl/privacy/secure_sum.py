"""Secure summation: the cost of its arithmetic in privacy and in precision. A simulation.

In a deployment with secure aggregation (Bonawitz et al. 2017) the server only learns the SUM of the
clients' messages modulo a power of two, and each client adds a share of integer noise to its own.
This module holds no cryptography: whoever runs it sees every message.

The sum of the shares is what protects a client. It is accounted for by zero-concentrated
differential privacy, that is by Renyi divergences

    at most a D2^2 / 2 + tau P,  and a (D2 + tau sqrt(P))^2 / 2,  of order a of one sum,
    with tau = 10 sum_{k<n} exp(-2 pi^2 s^2 k / (k + 1))  (Kairouz, Liu, Steinke 2021)

of n discrete Gaussian shares of standard deviation s steps over P coordinates, D2 in deviations of
the noise, for whole orders a. Neighbours differ in one client's update, which is replaced by zero;
its noise share stays, as does that of each other client that has not dropped out. A client whose
noise share the adversary knows, because it planted that client, counts among the dropouts. If more
clients drop out than was planned for, nothing is released.

A sum that leaves the range of 2^bits numbers wraps around, which costs no privacy, but is wrong;
`overflow_probability` bounds how often.
"""

import dataclasses
import math
from collections.abc import Iterable

import dp_accounting
import numpy as np

from jaxpfl.checked import Checked, NonNegativeInt, Positive, PositiveInt
from jaxpfl.errors import InputError

_LARGEST_DEVIATION = 2**16
"""The largest deviation of one draw: up to it, all products fit into 64 bits."""


@dataclasses.dataclass(frozen=True)
class SecureSum(Checked):
    """The arithmetic of one secure sum, all of it public.

    Attributes:
      clients: n, all of whom send a message unless they drop out.
      clip_norm: S, the L2 bound of an update.
      noise_multiplier: z. The shares of the clients that are left when `dropouts` have dropped out
        add up to noise of standard deviation z S; with fewer dropouts there is more.
      dropouts: the most clients that may drop out, or whose noise shares the adversary may know,
        together; fewer than half of all.
      bits: messages are numbers modulo 2^bits, 8 to 62.
      deviation: the standard deviation of a client's noise share in quantisation steps, which sets
        the step. Coarser steps need fewer bits, and make the sensitivity larger by rounding: by a
        factor of 1 + z sqrt(P / (n - dropouts)) / (2 deviation).

    Raises:
      InputError: a value is out of range.
    """

    clients: PositiveInt
    clip_norm: Positive
    noise_multiplier: Positive
    dropouts: NonNegativeInt = 0
    bits: PositiveInt = 32
    deviation: PositiveInt = 1024

    def check_fields(self) -> None:
        if not self.dropouts < self.clients / 2:
            raise InputError(
                f"dropouts must be fewer than half of the {self.clients} clients, found "
                f"{self.dropouts}"
            )
        if not 8 <= self.bits <= 62:
            raise InputError(f"bits must lie in 8 .. 62, found {self.bits}")
        # Below 2, sums of discrete Gaussians are no longer close to one, and tau is not small.
        if not 2 <= self.deviation <= _LARGEST_DEVIATION:
            raise InputError(
                f"deviation must lie in 2 .. {_LARGEST_DEVIATION} quantisation steps, found "
                f"{self.deviation}"
            )
        if not 0 < self.step < math.inf or not self.clip_norm / self.step < 2**50:
            raise InputError(
                f"clip_norm = {self.clip_norm:g} and noise_multiplier = {self.noise_multiplier:g} "
                "give quantisation steps that double precision cannot represent"
            )

    @property
    def step(self) -> float:
        """The value of one quantisation step."""
        left = self.clients - self.dropouts
        return self.noise_multiplier * self.clip_norm / (math.sqrt(left) * self.deviation)

    def sensitivity(self, coordinates: int) -> float:
        """Returns the largest L2 norm of a quantised update of P coordinates, in steps.

        Rounding moves an update by at most sqrt(P) / 2.
        """
        exact = self.clip_norm / self.step + math.sqrt(coordinates) / 2
        return exact * (1 + 1e-9)  # for the rounding of the clip itself

    def message(self, update_P: np.ndarray, generator: np.random.Generator) -> np.ndarray:
        """Returns what one client sends, uint64 [P], below 2^bits.

        The update has real numbers [P], at least one; with a NaN or an infinity it counts as zero.
        The generator is the client's own randomness, for this message alone.

        Raises:
          InputError: the update is not a vector.
        """
        update_P = np.asarray(update_P, np.float64)
        if update_P.ndim != 1 or not update_P.size:
            raise InputError(f"an update must be a vector, found shape {update_P.shape}")
        noise_P = discrete_gaussian(generator, self.deviation, update_P.size)
        sent_P = self._quantised(update_P) + noise_P
        # Two's complement: the lowest bits of a negative number are its residue.
        return sent_P.astype(np.uint64) & np.uint64(2**self.bits - 1)

    def add(self, messages: Iterable[np.ndarray]) -> np.ndarray:
        """Returns the sum of messages modulo 2^bits, uint64 [P]: all that a server learns.

        There is one of each client that did not drop out, for which the protocol is to see.

        Raises:
          InputError: messages have different lengths; or there are more of them than clients, or
            fewer than are left after the planned dropouts. Nothing may then be released.
        """
        total_P, count, mask = np.zeros(0, np.uint64), 0, np.uint64(2**self.bits - 1)
        for message_P in messages:
            if count and message_P.shape != total_P.shape:
                raise InputError(
                    f"messages must have equal lengths, found {total_P.shape} and {message_P.shape}"
                )
            total_P = (total_P + message_P) & mask if count else message_P
            count += 1
        least = self.clients - self.dropouts
        if not least <= count <= self.clients:
            raise InputError(
                f"{count} clients sent a message, but the noise is planned for {least} to "
                f"{self.clients}: nothing is released"
            )
        return total_P

    def value(self, total_P: np.ndarray) -> np.ndarray:
        """Returns a sum modulo 2^bits as real numbers, float64 [P]: the released noisy sum."""
        lifted_P = total_P.astype(np.int64)
        lifted_P = np.where(lifted_P >= 2 ** (self.bits - 1), lifted_P - 2**self.bits, lifted_P)
        return lifted_P * self.step

    def event(self, coordinates: int) -> dp_accounting.ZCDpEvent:
        """Returns what one sum of P coordinates costs: Renyi divergences of at most xi + rho a."""
        left = self.clients - self.dropouts
        variance = float(left * self.deviation**2)
        # The one with the smaller divergence at order 10, near which epsilons are found.
        bounds = _renyi_bounds(self.sensitivity(coordinates), variance, left, coordinates)
        rho, xi = min(bounds, key=lambda bound: bound[1] + 10 * bound[0])
        return dp_accounting.ZCDpEvent(rho, xi)

    def overflow_probability(self, coordinates: int) -> float:
        """Returns an upper bound on the probability that any of P coordinates wraps around.

        For the worst updates, where all clients put their whole norm into one coordinate, with
        Chernoff's bound on the noise.
        """
        signal = self.clients * (self.clip_norm / self.step + 0.5)
        room = 2.0 ** (self.bits - 1) - 1 - signal
        if room <= 0:
            return 1.0
        variance = float(self.clients * self.deviation**2)
        exponent = -(room**2) / (2 * variance)
        return min(1.0, 2 * coordinates * math.exp(max(exponent, -700.0)))

    def _quantised(self, update_P: np.ndarray) -> np.ndarray:
        """The clipped update in whole steps, int64 [P], of norm at most `sensitivity`."""
        if not np.isfinite(update_P).all():
            return np.zeros(update_P.size, np.int64)
        # Scaled before it is squared, so that no square overflows or underflows.
        largest = float(np.abs(update_P).max())
        norm = largest * float(np.linalg.norm(update_P / largest)) if largest else 0.0
        factor = min(1.0, self.clip_norm / norm) if norm else 1.0
        steps_P = np.rint(update_P * (factor / self.step)).astype(np.int64)
        # So the accounted sensitivity holds for every message, even if the clip were wrong.
        if not np.linalg.norm(steps_P.astype(np.float64)) <= self.sensitivity(steps_P.size):
            return np.zeros(update_P.size, np.int64)
        return steps_P


def _renyi_bounds(
    sensitivity: float, variance: float, shares: int, coordinates: int
) -> list[tuple[float, float]]:
    """Bounds (rho, xi) on sums of discrete Gaussians (Kairouz, Liu, Steinke 2021, Theorem 1)."""
    share = variance / shares
    k = np.arange(1, shares)
    tau = 10 * float(np.exp(-2 * math.pi**2 * share * k / (k + 1)).sum())
    shift = sensitivity / math.sqrt(variance)
    return [
        (shift**2 / 2, tau * coordinates),
        ((shift + tau * math.sqrt(coordinates)) ** 2 / 2, 0.0),
    ]


def discrete_gaussian(generator: np.random.Generator, deviation: int, count: int) -> np.ndarray:
    """Returns exact draws, int64 [count], with P(x) proportional to exp(-x^2 / (2 deviation^2)).

    Rejection from a discrete Laplace distribution, with coins whose probabilities are exponentials
    of fractions, all in whole numbers (Canonne, Kamath, Steinke 2020, "The discrete Gaussian for
    differential privacy", Algorithms 1 to 3). The generator's bounded whole numbers are unbiased
    (by rejection); the deviation is in 1 .. 65,536.
    """
    parts, missing = [], count
    while missing > 0:
        drawn_N = _discrete_laplace(generator, deviation, 2 * missing + 64)
        off_N = np.abs(drawn_N) - deviation
        variance_N = np.full(drawn_N.size, 2 * deviation**2)
        accepted_N = _exponential_coins(generator, off_N**2, variance_N)
        parts.append(drawn_N[accepted_N][:missing])
        missing -= parts[-1].size
    return np.concatenate(parts) if parts else np.empty(0, np.int64)


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
    accepted_N = ~(negative_N & (size_N == 0))
    return np.where(negative_N, -size_N, size_N)[accepted_N]


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
