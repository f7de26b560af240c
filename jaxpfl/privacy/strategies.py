"""Strategies of correlated noise for a minimum separation: what they cost, and how good they are.

The releases are C^-1 (C X + u z S Z), as in `privacy.correlated_noise`. Here a client takes part at
most once in any b rounds, and C's columns overlap, so that a client moves C X further than in each
of its rounds alone. In the first j epochs of b rounds it moves C X by at most S s_j, and the unit u
is the largest of s_j / sqrt(j). So j epochs cost at most j Gaussians of multiplier z, whenever the
run ends: one Gaussian of multiplier z / sqrt(j).

| strategy | C                                             | state of the noise, in parameters |
|----------|-----------------------------------------------|-----------------------------------|
| "blt"    | Toeplitz: 1, then sum_i scale_i decay_i^(k-1) | a buffer for each i               |
| "tree"   | a row of ones for each node of a binary tree  | nothing                           |

A BLT (buffered linear Toeplitz matrix; Dvijotham et al. 2024, "Efficient and near-optimal noise
generation for streaming differential privacy"; McMahan, Xu, Zhang 2024, "A hassle-free algorithm
for private learning in practice") has positive coefficients that do not increase, so that those
clients move C X furthest who take part every b rounds, from the first (Kalinin, Lampert 2024,
"Banded square root matrix factorization", Theorem 2).

The tree is DP-FTRL's first form (Kairouz et al. 2021), for comparison. Its nodes are those that a
prefix of rounds consists of: of 2^l rounds each, the first, third, fifth, ... of level l.
"""

import functools
import math
from dataclasses import dataclass

import numpy as np

from jaxpfl.checked import Checked, NonNegative
from jaxpfl.errors import InputError
from jaxpfl.privacy import confirmation

MOST_BUFFERS = 8


@dataclass(frozen=True)
class BufferedToeplitz(Checked):
    """The coefficients of a BLT: 1, and after k >= 1 rounds sum_i scales[i] decays[i]^(k-1).

    As `privacy.blt` in a config, which a run writes with those that it has found.

    Attributes:
      decays: below 1, one for each buffer.
      scales: their sum is at most 1.
    """

    decays: tuple[NonNegative, ...]
    scales: tuple[NonNegative, ...]

    def check_fields(self) -> None:
        for name in ("decays", "scales"):
            # Rounded as the noise has them, so that the unit is of these; lists, from a file.
            rounded = np.asarray(getattr(self, name), np.float32)
            object.__setattr__(self, name, tuple(rounded.astype(float).tolist()))
        number = len(self.decays)
        if not 1 <= number <= MOST_BUFFERS or len(self.scales) != number:
            raise InputError(
                f"a BLT needs as many decays as scales, 1 to {MOST_BUFFERS}, found {number} and "
                f"{len(self.scales)}"
            )
        if not max(self.decays) < 1 or not math.fsum(self.scales) <= 1:
            raise InputError(
                "the coefficients of a BLT must not increase: its decays must be below 1 and the "
                f"sum of its scales at most 1, found {max(self.decays):g} and "
                f"{math.fsum(self.scales):g}"
            )

    @classmethod
    @functools.lru_cache(maxsize=64)
    def best(cls, rounds: int, separation: int, buffers: int = 3) -> "BufferedToeplitz":
        """Returns the one of least mean squared error of the prefix sums, as far as it is found.

        It is cut to 9 decimals, which costs no privacy: the unit is that of what is returned.
        """
        from scipy import optimize

        # From memories of a few rounds to all of them.
        gaps = np.geomspace(min(2 / rounds, 0.3), 0.5, buffers)
        start = np.concatenate([np.log(1 / gaps - 1), np.full(buffers, math.log(0.6 / buffers))])

        def cost(point: np.ndarray) -> float:
            decays, scales = 1 / (1 + np.exp(-point[:buffers])), np.exp(point[buffers:])
            if not np.sum(scales) <= 1 - 1e-6 or not decays.max() < 1 - 1e-6:
                return 1e3
            blt = cls(tuple(decays.tolist()), tuple(scales.tolist()))
            moved = blt.shifts(rounds, separation)[-1]
            return math.log(moved * math.sqrt(np.mean(blt.errors(rounds))))

        settings = {"xatol": 1e-5, "fatol": 1e-9, "maxfev": 4_000, "adaptive": True}
        for _ in range(2):  # once more from where it ended, with a new simplex
            start = optimize.minimize(cost, start, method="Nelder-Mead", options=settings).x
        decays, scales = 1 / (1 + np.exp(-start[:buffers])), np.exp(start[buffers:])
        order = np.argsort(-decays)
        parts = (np.floor(part[order] * 1e9) / 1e9 for part in (decays, scales))
        return cls(*(tuple(part.tolist()) for part in parts))

    def errors(self, rounds: int) -> np.ndarray:
        """The variance of the unit noise in the sum of the first t releases, float64 [t]."""
        return np.cumsum(self._filtered(np.ones(rounds), inverse=True) ** 2)

    def shifts(self, rounds: int, separation: int) -> np.ndarray:
        """s_1, s_2, ...: how far a client moves C X in the first epochs, in S; float64 [epochs]."""
        moved = self._filtered((np.arange(rounds) % separation == 0).astype(float))
        ends = np.minimum(np.arange(separation, rounds + separation, separation), rounds)
        return np.sqrt(np.cumsum(moved**2)[ends - 1])

    def _filtered(self, values_T: np.ndarray, inverse: bool = False) -> np.ndarray:
        """C, or C^-1, times a vector: a recursive filter, whose memory are the buffers."""
        from scipy import signal

        below = np.poly(self.decays)  # of prod_i (1 - decay_i x)
        above = below.copy()
        for index, scale in enumerate(self.scales):
            above[1:] += scale * np.poly(np.delete(self.decays, index))
        above, below = (below, above) if inverse else (above, below)
        return np.asarray(signal.lfilter(above, below, values_T))


def tree_shifts(rounds: int, separation: int) -> np.ndarray:
    """Bounds on s_1, s_2, ... of the tree, float64 [epochs].

    In a node of 2^l rounds a client takes part at most c = ceil(2^l / b) times, and j times in all.
    The squares of its counts in the nodes of a level then add up to at most j min(c, j), and to
    min(c, j)^2 for each node.
    """
    squared = []
    for epochs in range(1, -(-rounds // separation) + 1):
        done, total = min(epochs * separation, rounds), 0
        for level in range(done.bit_length()):
            most = min(-(-(2**level) // separation), epochs)
            nodes = ((done >> level) + 1) // 2
            total += min(epochs * most, nodes * most**2)
        squared.append(total)
    return np.sqrt(np.array(squared, float))


def tree_errors(rounds: int) -> np.ndarray:
    """As `BufferedToeplitz.errors`, of the tree: a node for each 1 in the binary form of t."""
    return np.array([float(t.bit_count()) for t in range(1, rounds + 1)])


def unit_of(shifts_E: np.ndarray) -> float:
    """u, rounded up: the largest of s_j / sqrt(j)."""
    relative_E = shifts_E / np.sqrt(np.arange(1, len(shifts_E) + 1))
    return float(relative_E.max()) * (1 + 1e-9)


def unit(blt: BufferedToeplitz | None, rounds: int, separation: int) -> float:
    """u of a BLT, or of the tree if that is None.

    Raises:
      InputError: computed a second time, a client moves C X further than is paid for.
    """
    if blt is None:
        return unit_of(tree_shifts(rounds, separation))
    charged = unit_of(blt.shifts(rounds, separation))
    again_E = confirmation.buffered_shifts(blt.decays, blt.scales, rounds, separation)
    if not charged * (1 + 1e-6) >= unit_of(again_E):
        raise InputError(
            "the accountants disagree: with a BLT a client moves the sums by "
            f"{unit_of(again_E):.6g} S in each of its rounds, and {charged:.6g} S are charged"
        )
    return charged
