"""Draws the noise of `privacy.strategies`: a BLT's by a few buffers, a tree's without a state.

Both are functions of a key and the round, at the scale of their unit u, and have the protocol of
`correlated_noise.NoiseStream`. SECRET: whoever knows the key can remove the noise.

Row t of C w = u z of a BLT is w_t + sum_i scale_i b_i = u z_t, where the buffer b_i is the sum of
decay_i^(s-1) w_{t-s} over s >= 1. So

    w_t = u z_t - sum_i scale_i b_i,    b_i <- decay_i b_i + w_t,

which is float32 arithmetic on one array for each buffer (Dvijotham et al. 2024, Algorithm 1). A
node of the tree has one draw, whose address is its level and its place. The first t rounds are the
nodes for the ones in the binary form of t, and round t's noise is that of the nodes that prefix t
has and prefix t - 1 has not, less that of those it has no more.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpfl import checks
from jaxpfl.privacy import strategies
from jaxpfl.privacy.correlated_noise import NoiseStream
from jaxpfl.privacy.keys import require_noise_key
from jaxpfl.privacy.mechanisms import standard_normal
from jaxpfl.privacy.strategies import BufferedToeplitz


class BufferedStream:
    """A BLT's noise, round after round; a resumed run makes it again, with the same bits.

    Args:
      blt: the strategy.
      unit: u, so that z S times the noise is what is added to a sum.
      root_key: typed threefry4x32 key, of this stream alone.
      width: P >= 1, the number of parameters. The buffers have 4 bytes each for every one.
    """

    def __init__(self, blt: BufferedToeplitz, unit: float, root_key: jax.Array, width: int) -> None:
        require_noise_key(root_key)
        self._root, self._unit = root_key, np.float32(unit)
        self._width = checks.positive_int("width", width)
        self._weights = [np.array(part, np.float32) for part in (blt.scales, blt.decays)]
        self._start()

    def _start(self) -> None:
        self._round = 0
        self._buffers = jnp.zeros((len(self._weights[0]), self._width), jnp.float32)

    def noise(self, round: int) -> jax.Array:
        """Returns the noise of round 1, 2, ..., float32 [P]; an earlier round starts again."""
        if checks.positive_int("round", round) <= self._round:
            self._start()
        span = jnp.int32(self._round + 1), jnp.int32(round)
        noise_P, self._buffers = _advance(
            self._root, *span, self._unit, *self._weights, self._buffers
        )
        self._round = round
        return noise_P


@partial(jax.jit, donate_argnames=("buffers_DxP",))
def _advance(
    key: jax.Array,
    first: jax.Array,
    last: jax.Array,
    unit: jax.Array,
    scales_D: jax.Array,
    decays_D: jax.Array,
    buffers_DxP: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Goes from round `first` to round `last`; round t's draw has the key folded with t."""

    def step(round, carry):
        _, buffers_DxP = carry
        drawn_P = standard_normal(jax.random.fold_in(key, round), buffers_DxP.shape[1:]) * unit
        noise_P = drawn_P - jnp.matmul(scales_D, buffers_DxP, precision="highest")
        return noise_P, decays_D[:, None] * buffers_DxP + noise_P[None]

    start = jnp.zeros(buffers_DxP.shape[1:], jnp.float32), buffers_DxP
    return jax.lax.fori_loop(first, last + 1, step, start)


class TreeStream:
    """The tree's noise: of any round by itself, as a function of the key and the round.

    Args:
      unit, root_key, width: as of `BufferedStream`.
    """

    def __init__(self, unit: float, root_key: jax.Array, width: int) -> None:
        require_noise_key(root_key)
        self._root, self._unit = root_key, np.float32(unit)
        self._width = checks.positive_int("width", width)

    def noise(self, round: int) -> jax.Array:
        """Returns the noise of round 1, 2, ..., float32 [P]."""
        checks.positive_int("round", round)
        level = (round & -round).bit_length() - 1
        return self._unit * _of_tree(self._root, jnp.int32(round), jnp.int32(level), self._width)


@partial(jax.jit, static_argnames=("width",))
def _of_tree(key: jax.Array, round: jax.Array, level: jax.Array, width: int) -> jax.Array:
    """The node of this level that ends with the round, less those of the levels below it that end
    with the round before."""

    def draw(level, place):
        return standard_normal(jax.random.fold_in(jax.random.fold_in(key, level), place), (width,))

    def take_away(below, noise_P):
        return noise_P - draw(below, (round - 1) >> below)

    return jax.lax.fori_loop(0, level, take_away, draw(level, round >> level))


def stream_of(
    plan: Any, root_key: jax.Array, width: int
) -> BufferedStream | TreeStream | NoiseStream:
    """The noise that the rounds of a `Plan` share, of this many parameters. SECRET."""
    noise = plan.noise
    if not noise.overlaps:
        return NoiseStream(plan.bands, root_key, width, plan.exact)
    unit = strategies.unit(noise.blt, plan.rounds, plan.participation.rounds_per_epoch)
    if noise.blt is None:
        return TreeStream(unit, root_key, width)
    return BufferedStream(noise.blt, unit, root_key, width)
