"""Noise that is correlated between rounds: DP-FTRL by banded matrix factorisation.

A server optimiser uses the SUM of all releases so far. If round t gets the noise w_t - w_{t-1},
that sum only carries w_t, which is small if the noise of different rounds partly cancels. With C
the strategy matrix and Z independent Gaussians, the releases are C^-1 (C X + z S Z): the clients'
sums X, plus z S C^-1 Z. A client takes part once in an epoch of R rounds, always R rounds apart, so
that the columns of C for its rounds do not overlap. In an epoch it therefore moves C X by at most S
times C's largest column norm, which is 1 here. So an EPOCH costs as much as one Gaussian of
multiplier z, also with adaptively chosen releases (Denisov et al. 2022, Theorem 2.1).

C has the first R diagonals of the square root of the prefix sums' matrix, with columns of norm 1
(Kalinin, Lampert 2024, (8)), or as many as there are rounds. Over 64 rounds of an epoch, the sums'
noise has less than a quarter of the variance that the binary tree of DP-FTRL's first form gives
them (Kairouz et al. 2021, section 4, without completion). Row t of C w = z is
sum_k c_k w_{t-k} = z_t, so that

    w_t = (z_t - c_1 w_{t-1} - ... - c_{R-1} w_{t-R+1}) / c_0,

which needs the last R - 1 noises and one new draw (Choquette-Choo et al. 2023, "(Amplified) banded
matrix factorization", Algorithm 9). `NoiseStream` keeps them. All noise is a function of a key and
the round.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxpfl import checks
from jaxpfl.privacy.keys import require_noise_key
from jaxpfl.privacy.mechanisms import standard_normal


class NoiseStream:
    """Correlated noise at unit scale, round after round; z S times it is added to a sum.

    SECRET: whoever knows the stream or its key can remove the noise from every release. It is never
    written to a file. A resumed run makes it again from the key, with the same bits: one compiled
    loop goes through the rounds that were already done.

    It takes memory for bands - 1 times the float32 parameters. All rounds share one compiled
    program, and no call waits for the device.
    """

    def __init__(self, bands: int, root_key: jax.Array, width: int):
        """Starts before round 1.

        Args:
          bands: diagonals of C >= 1: the rounds of an epoch, or all rounds if they are fewer.
          root_key: typed threefry4x32 key, of this stream alone.
          width: P >= 1, the number of parameters.
        """
        self._bands = checks.positive_int("bands", bands)
        require_noise_key(root_key)
        self._root = root_key
        self._width = checks.positive_int("width", width)
        self._start()

    def _start(self) -> None:
        self._round = 0
        self._ring = jnp.zeros((self._bands - 1, self._width), jnp.float32)

    def noise(self, round: int) -> jax.Array:
        """Returns the noise of round 1, 2, ...: float32 [P].

        It is cheapest for the round after the last one; an earlier round starts again from round 1.
        """
        if checks.positive_int("round", round) <= self._round:
            self._start()
        weights = band_weights(self._bands).astype(np.float32)
        span = jnp.int32(self._round + 1), jnp.int32(round)
        noise_P, self._ring = _advance(self._root, *span, weights, self._ring)
        self._round = round
        return noise_P


@partial(jax.jit, donate_argnames=("ring_BxP",))
def _advance(
    key: jax.Array, first: jax.Array, last: jax.Array, weights_R: jax.Array, ring_BxP: jax.Array
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
