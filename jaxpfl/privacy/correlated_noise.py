"""Noise that is correlated between rounds: DP-FTRL's tree, and banded matrix factorisation.

A server optimiser uses the SUM of all releases so far. If round t gets the noise w_t - w_{t-1},
that sum only carries w_t, which is small if the noise of different rounds partly cancels. With C
the strategy matrix and Z independent Gaussians, the releases are C^-1 (C X + z S Z): the clients'
sums X, plus z S C^-1 Z. A client takes part once in an epoch of R rounds, always R rounds apart, so
that the columns of C for its rounds do not overlap. In an epoch it therefore moves C X by at most S
times C's largest column norm, which is 1 here. So an EPOCH costs as much as one Gaussian of
multiplier z, also with adaptively chosen releases (Denisov et al. 2022, Theorem 2.1).

| noise  | C                                                                | source          |
|--------|------------------------------------------------------------------|-----------------|
| tree   | the binary tree's nodes that a round lies in, / sqrt(levels);    | Kairouz et al.  |
|        | a new tree every epoch (restarts), none completed                | 2021, section 4 |
| banded | the square root of the prefix sums' matrix, its first R diagonals| Kalinin, Lampert|
|        | with columns of norm 1; goes on over all epochs                  | 2024, (8)       |

The tree has ceil(log2(R + 1)) levels. Every draw has an address, so that all noise is a function of
a key and the round. A round of the tree has few draws and is computed alone. Bands depend on the
rounds before: row t of C w = z is sum_k c_k w_{t-k} = z_t, so that

    w_t = (z_t - c_1 w_{t-1} - ... - c_{R-1} w_{t-R+1}) / c_0,

which needs the last R - 1 noises and one new draw (Choquette-Choo et al. 2023, "(Amplified) banded
matrix factorization", Algorithm 9). `NoiseStream` keeps them.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpfl import checks
from jaxpfl.privacy.gaussian import Correlation
from jaxpfl.privacy.keys import require_noise_key
from jaxpfl.privacy.mechanisms import standard_normal


class Terms(NamedTuple):
    """One round's noise in a tree: z S times a weighted sum of standard normal draws.

    Attributes:
      addresses: int64 [H, 3], the epoch, level and index of each draw.
      weights: float64 [H].
    """

    addresses: np.ndarray
    weights: np.ndarray


class NoiseStream:
    """Correlated noise at unit scale, round after round; z S times it is added to a sum.

    SECRET: whoever knows the stream or its key can remove the noise from every release. It is never
    written to a file. A resumed run makes it again from the key, with the same bits: one compiled
    loop goes through the rounds that were already done.

    Bands take memory for R - 1 times the float32 parameters. All rounds share one compiled program,
    and no call waits for the device.
    """

    def __init__(self, kind: Correlation, rounds_per_epoch: int, root_key: jax.Array, width: int):
        """Starts before round 1.

        Args:
          kind: "tree" or "banded"; others are refused.
          rounds_per_epoch: R >= 1, which is also the number of bands.
          root_key: typed threefry4x32 key, of this stream alone.
          width: P >= 1, the number of parameters.
        """
        self._kind = checks.one_of("kind", kind, ("tree", "banded"))
        self._rounds_per_epoch = checks.positive_int("rounds_per_epoch", rounds_per_epoch)
        require_noise_key(root_key)
        self._root = root_key
        self._width = checks.positive_int("width", width)
        self._start()

    def _start(self) -> None:
        self._round = 0
        if self._kind == "banded":
            self._ring = jnp.zeros((self._rounds_per_epoch - 1, self._width), jnp.float32)

    def noise(self, round: int) -> jax.Array:
        """Returns the noise of round 1, 2, ...: float32 [P].

        It is cheapest for the round after the last one; an earlier round starts again from round 1.
        """
        checks.positive_int("round", round)
        if self._kind == "tree":
            return self._of_tree(round)
        if round <= self._round:
            self._start()
        weights = band_weights(self._rounds_per_epoch).astype(np.float32)
        span = jnp.int32(self._round + 1), jnp.int32(round)
        noise_P, self._ring = _advance(self._root, *span, weights, self._ring)
        self._round = round
        return noise_P

    def _of_tree(self, round: int) -> jax.Array:
        made = tree_terms(round, self._rounds_per_epoch)
        # Padded with weights of zero, so that all rounds share one compiled program.
        spare = self._rounds_per_epoch.bit_length() + 1 - len(made.weights)
        addresses_Hx3 = np.pad(made.addresses, ((0, spare), (0, 0))).astype(np.uint32)
        weights_H = np.pad(made.weights, (0, spare)).astype(np.float32)
        return _weighted(self._root, addresses_Hx3, weights_H, self._width)


@partial(jax.jit, static_argnames=("width",))
def _weighted(
    root: jax.Array, addresses_Hx3: jax.Array, weights_H: jax.Array, width: int
) -> jax.Array:
    """The weighted sum of the draws at these addresses; memory does not grow with H."""

    def add(index, total_P):
        key = jax.lax.fori_loop(
            0, 3, lambda part, key: jax.random.fold_in(key, addresses_Hx3[index, part]), root
        )
        return total_P + standard_normal(key, (width,)) * weights_H[index]

    return jax.lax.fori_loop(0, len(weights_H), add, jnp.zeros(width, jnp.float32))


@partial(jax.jit, donate_argnames=("ring_BxP",))
def _advance(
    key: jax.Array,
    first: jax.Array,
    last: jax.Array,
    weights_R: jax.Array,
    ring_BxP: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Goes from round `first` to round `last`, and returns the noise [P] of `last` and the ring.

    Args:
      key: round t's draw has this key folded with t.
      first, last: int32 scalars.
      weights_R: 1 / c_0, then c_k / c_0.
      ring_BxP: the noise of the B = R - 1 rounds before `first`; that of round t is in row t mod B.
    """
    bands, width = ring_BxP.shape

    def step(round, carry):
        _, ring_BxP = carry
        noise_P = standard_normal(jax.random.fold_in(key, round), (width,)) * weights_R[0]
        if not bands:
            return noise_P, ring_BxP
        row = round % bands
        ago_B = (row - 1 - jnp.arange(bands)) % bands + 1
        noise_P = noise_P - jnp.matmul(weights_R[ago_B], ring_BxP, precision="highest")
        return noise_P, jax.lax.dynamic_update_index_in_dim(ring_BxP, noise_P, row, 0)

    start = jnp.zeros(width, jnp.float32), ring_BxP
    return jax.lax.fori_loop(first, last + 1, step, start)


def tree_terms(round: int, rounds_per_epoch: int) -> Terms:
    """The terms of round 1, 2, ...; at most bit_length(rounds_per_epoch) + 1."""
    epoch, place = divmod(round - 1, rounds_per_epoch)
    before, now = _nodes(place), _nodes(place + 1)
    # Nodes of both prefixes cancel.
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


def band_weights(bands: int) -> np.ndarray:
    """1 / c_0, then c_k / c_0 for k = 1, ..., bands - 1; float64."""
    coefficients = square_root(bands)
    weights = coefficients / coefficients[0]
    weights[0] = np.linalg.norm(coefficients) / coefficients[0]
    return weights


def square_root(count: int) -> np.ndarray:
    """The first coefficients of (1 - x)^(-1/2): the square root of the prefix sums' matrix."""
    steps = np.arange(1, count)
    return np.cumprod(np.concatenate([[1.0], (2 * steps - 1) / (2 * steps)]))
