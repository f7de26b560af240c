"""Noise that is correlated between rounds: DP-FTRL's tree, and banded matrix factorisation.

What a server optimiser uses is the SUM of all releases so far. With noise w_t - w_{t-1} added to
round t, that sum carries w_t alone, and w_t can be made small by giving the rounds noise that
partly cancels. With C the strategy matrix and Z independent Gaussians, the releases are
C^-1 (C X + z S Z): the clients' sums X, plus C^-1 Z. A client that takes part once in an epoch of R
rounds, at a distance of exactly R, moves C X by at most S times C's largest column norm, which is 1
here, an epoch: columns that far apart do not overlap. So an EPOCH costs what one Gaussian of
multiplier z does, adaptively chosen releases included (Denisov et al. 2022, Theorem 2.1).

| noise  | C                                                                | source          |
|--------|------------------------------------------------------------------|-----------------|
| tree   | the binary tree's nodes that a round lies in, / sqrt(levels);    | Kairouz et al.  |
|        | a new tree every epoch (restarts), none completed                | 2021, section 4 |
| banded | the square root of the prefix sums' matrix, its first R diagonals| Kalinin, Lampert|
|        | with columns of norm 1; goes on over all epochs                  | 2024, (8)       |

The tree's levels: ceil(log2(R + 1)). Every draw has an address, so a round's noise can be made
again alone, without the rounds before it.
"""

from typing import Literal, NamedTuple

import numpy as np

from jaxpfl import checks

Noise = Literal["independent", "tree", "banded"]
NOISES = ("independent", "tree", "banded")


class Terms(NamedTuple):
    """One round's noise: the sum of weights times standard normals, each known by its address.

    Attributes:
      addresses: int64 [H, 3].
      weights: float64 [H]; what is added is z S times the sum.
    """

    addresses: np.ndarray
    weights: np.ndarray


def terms(noise: Noise, round: int, rounds_per_epoch: int) -> Terms:
    """The terms of round 1, 2, ...; "independent" has one.

    Raises:
      InputError: a round before the first, which would have no noise.
    """
    checks.positive_int("round", round)
    if noise == "tree":
        return _tree(round, rounds_per_epoch)
    if noise == "banded":
        return _banded(round, rounds_per_epoch)
    return Terms(np.array([[round, 0, 0]]), np.ones(1))


def most_terms(noise: Noise, rounds: int, rounds_per_epoch: int) -> int:
    """The largest number of terms that a round has."""
    if noise == "tree":
        return rounds_per_epoch.bit_length() + 1
    return rounds if noise == "banded" else 1


def _tree(round: int, rounds_per_epoch: int) -> Terms:
    epoch, place = divmod(round - 1, rounds_per_epoch)
    before, now = _nodes(place), _nodes(place + 1)
    # What both prefixes contain cancels.
    changed = [(node, 1.0) for node in now if node not in before]
    changed += [(node, -1.0) for node in before if node not in now]
    scale = rounds_per_epoch.bit_length() ** 0.5
    addresses = np.array([[epoch, *node] for node, _ in changed])
    return Terms(addresses, np.array([sign * scale for _, sign in changed]))


def _nodes(count: int) -> list[tuple[int, int]]:
    """The tree's nodes, (level, index), that together cover the first `count` rounds."""
    found, covered = [], 0
    for level in reversed(range(count.bit_length())):
        if count >> level & 1:
            found.append((level, covered >> level))
            covered += 1 << level
    return found


def _banded(round: int, bands: int) -> Terms:
    coefficients = square_root(bands)
    inverse = inverse_series(coefficients / np.linalg.norm(coefficients), round)
    earlier = np.arange(1, round + 1)
    addresses = np.stack([earlier, np.zeros_like(earlier), np.zeros_like(earlier)], axis=1)
    return Terms(addresses, inverse[round - earlier])


def square_root(count: int) -> np.ndarray:
    """The first coefficients of (1 - x)^(-1/2): the square root of the prefix sums' matrix."""
    steps = np.arange(1, count)
    return np.cumprod(np.concatenate([[1.0], (2 * steps - 1) / (2 * steps)]))


def inverse_series(coefficients: np.ndarray, count: int) -> np.ndarray:
    """The first coefficients of 1 / (the power series): a Toeplitz matrix's inverse."""
    found = np.zeros(count)
    for place in range(count):
        reach = min(place, len(coefficients) - 1)
        total = float(place == 0)
        if reach:
            total -= coefficients[1 : reach + 1] @ found[place - reach : place][::-1]
        found[place] = total / coefficients[0]
    return found


class NoiseStream:
    def __init__(self, kind, rounds_per_epoch, root_key, like):
        raise NotImplementedError
