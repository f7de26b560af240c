"""Draws noise that is correlated between rounds: DP-FTRL by matrix factorisation.

A server optimiser uses the SUM of all releases so far. If round t gets the noise w_t - w_{t-1},
that sum only carries w_t, which is small if the noise of different rounds partly cancels. With C
the strategy matrix and Z independent Gaussians, the releases are C^-1 (C X + z S Z): the clients'
sums X, plus z S C^-1 Z. A client takes part once in an epoch of R rounds, always R rounds apart, so
that the columns of C for its rounds do not overlap. In an epoch it therefore moves C X by at most S
times C's largest column norm, which is 1 here. So an EPOCH costs as much as one Gaussian of
multiplier z, also with adaptively chosen releases (Denisov et al. 2022, Theorem 2.1).

C has the first R diagonals of the square root of the prefix sums' matrix, with columns of norm 1
(Kalinin, Lampert 2024, (8)), or as many as there are rounds. Row t of C w = z is
sum_k c_k w_{t-k} = z_t, so that

    w_t = (z_t - c_1 w_{t-1} - ... - c_{R-1} w_{t-R+1}) / c_0,

which needs the last R - 1 noises and one new draw (Choquette-Choo et al. 2023, "(Amplified) banded
matrix factorization", Algorithm 9). All noise is a function of a key and the round.

The exact form computes nothing in floating point and costs the same. Its c_0 is 1, its other
coefficients are c_k = m_k / 2^16 with whole m_k, and its columns have the norm n (`column_norm`).
Sums X are whole numbers of steps of n z S / `exact_noise.STEPS`. In steps / 2^16, let

    v_t = floor(2^16 STEPS N) - ceil(sum_k m_k v_{t-k} / 2^16)

with standard normal N. Then V_t = 2^16 X_t + v_t is floor(2^16 (C X)_t + 2^16 STEPS N) -
ceil(sum_k m_k V_{t-k} / 2^16), because the m_k X_{t-k} and 2^16 (C X)_t are whole. So V, and the
releases floor(V_t / 2^16) = X_t + floor(v_t / 2^16), are computed from the Gaussian mechanism's
output: rounding v adds nothing to delta, and only its draws count (`exact_noise`).

For a minimum separation, the noise of `privacy.strategies` is drawn at the scale of their unit u.
Row t of C w = u z of a BLT is w_t + sum_i scale_i b_i = u z_t, where the buffer b_i is the sum of
decay_i^(s-1) w_{t-s} over s >= 1. So

    w_t = u z_t - sum_i scale_i b_i,    b_i <- decay_i b_i + w_t,

which is float32 arithmetic on one array for each buffer (Dvijotham et al. 2024, Algorithm 1). A
node of the tree has one draw, whose address is its level and its place. The first t rounds are the
nodes for the ones in the binary form of t, and round t's noise is that of the nodes that prefix t
has and prefix t - 1 has not, less that of those it has no more.
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpfl import checks
from jaxpfl.errors import InputError
from jaxpfl.privacy import confirmation, strategies
from jaxpfl.privacy.exact_noise import exact_cells
from jaxpfl.privacy.keys import require_noise_key
from jaxpfl.privacy.mechanisms import standard_normal
from jaxpfl.privacy.strategies import BufferedToeplitz

MOST_BANDS = 10_000  # of exact noise


class _Stream:
    """Noise at unit scale, round after round; z S times it is added to a sum.

    SECRET: whoever knows the stream or its key can remove the noise from every release. It is never
    written to a file. A resumed run makes it again from the key, with the same bits. All rounds
    share one compiled program, and no call waits for the device.

    Args:
      root_key: typed threefry4x32 key, of this stream alone.
      width: P >= 1, the number of parameters.
      step: `(coefficients, key, round, state) -> (noise [P], state)`, of one round and its own key.
      state: shape, before its last axis [P], and dtype.
    """

    def __init__(
        self, root_key: jax.Array, width: int, step: Any, coefficients: Any, state: Any
    ) -> None:
        require_noise_key(root_key)
        self._root, self._advance = root_key, partial(_advance, step, coefficients)
        shape, dtype = state
        self._start = partial(jnp.zeros, (*shape, checks.positive_int("width", width)), dtype)
        self._round, self._state = 0, self._start()

    def noise(self, round: int) -> jax.Array:
        """Returns the noise of round 1, 2, ...: float32 [P]; int32 if it is exact.

        It is cheapest for the round after the last one; an earlier round starts again from round 1.
        """
        if checks.positive_int("round", round) <= self._round:
            self._round, self._state = 0, self._start()
        span = jnp.int32(self._round + 1), jnp.int32(round)
        noise_P, self._state = self._advance(self._root, *span, self._state)
        self._round = round
        return noise_P


class NoiseStream(_Stream):
    """Banded noise, of `Plan.bands`. Its memory is bands - 1 times the parameters: 4 bytes each.

    Exact noise has 6, and is in steps of 1 / `STEPS` of a draw's deviation, z S `column_norm`.
    """

    def __init__(self, bands: int, root_key: jax.Array, width: int, exact: bool = False) -> None:
        before = checks.positive_int("bands", bands) - 1
        weights = whole_weights(bands) if exact else band_weights(bands).astype(np.float32)
        state = ((before, 6), jnp.uint8) if exact else ((before,), jnp.float32)
        super().__init__(root_key, width, _banded, weights, state)


class BufferedStream(_Stream):
    """A BLT's noise, whose buffers have 4 bytes each for every parameter; `unit` is u."""

    def __init__(self, blt: BufferedToeplitz, unit: float, root_key: jax.Array, width: int) -> None:
        scales_D, decays_D = (np.array(part, np.float32) for part in (blt.scales, blt.decays))
        coefficients = np.float32(unit), scales_D, decays_D
        super().__init__(root_key, width, _buffered, coefficients, (scales_D.shape, jnp.float32))


class TreeStream:
    """The tree's noise, of any round by itself; `unit` is u."""

    def __init__(self, unit: float, root_key: jax.Array, width: int) -> None:
        require_noise_key(root_key)
        self._root, self._unit = root_key, np.float32(unit)
        self._width = checks.positive_int("width", width)

    def noise(self, round: int) -> jax.Array:
        """Returns the noise of round 1, 2, ..., float32 [P]."""
        level = (checks.positive_int("round", round) & -round).bit_length() - 1
        return self._unit * _of_tree(self._root, jnp.int32(round), jnp.int32(level), self._width)


def stream_of(plan: Any, root_key: jax.Array, width: int) -> _Stream | TreeStream:
    """The noise that the rounds of a `Plan` share, of this many parameters. SECRET."""
    noise = plan.noise
    if not noise.overlaps:
        return NoiseStream(plan.bands, root_key, width, plan.exact)
    unit = strategies.unit(noise.blt, plan.rounds, plan.participation.rounds_per_epoch)
    if noise.blt is None:
        return TreeStream(unit, root_key, width)
    return BufferedStream(noise.blt, unit, root_key, width)


@partial(jax.jit, static_argnames=("step",), donate_argnames=("state",))
def _advance(
    step: Any, coefficients: Any, key: jax.Array, first: jax.Array, last: jax.Array, state: Any
) -> tuple[jax.Array, jax.Array]:
    """Goes from round `first` to round `last`, and returns the noise [P] of `last` and the state.

    Round t's draw has the key folded with t.
    """

    def advance(round, carry):
        return step(coefficients, jax.random.fold_in(key, round), round, carry[1])

    dtype = jnp.int32 if state.dtype == jnp.uint8 else jnp.float32
    return jax.lax.fori_loop(first, last + 1, advance, (jnp.zeros(state.shape[-1], dtype), state))


def _banded(weights_R: jax.Array, key: Any, round: Any, ring: jax.Array) -> tuple[Any, jax.Array]:
    """A round of banded noise.

    Args:
      weights_R: `band_weights`; or `whole_weights`, of exact noise.
      ring: the noise of the B = R - 1 rounds before; that of round t is in row t mod B. Float32
        [B, P]; or uint8 [B, 6, P], see `_next_exact`.
    """
    bands = ring.shape[0]
    row = round % max(bands, 1)
    ago_B = (row - 1 - jnp.arange(bands)) % max(bands, 1) + 1
    if ring.dtype == jnp.uint8:
        noise_P, newest = _next_exact(key, weights_R[ago_B], ring)
    else:
        noise_P = standard_normal(key, ring.shape[1:]) * weights_R[0]
        newest = noise_P = noise_P - jnp.matmul(weights_R[ago_B], ring, precision="highest")
    if bands:
        ring = jax.lax.dynamic_update_index_in_dim(ring, newest, row, 0)
    return noise_P, ring


def _next_exact(
    key: jax.Array, weights_B: jax.Array, ring_Bx6xP: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns floor(v / 2^16), int32 [P], and v, uint8 [6, P]: 48 bits of two's complement.

    Bytes, the lowest first, are multiplied and summed in int32, which holds 255 times the weights'
    sum, 2^17 sqrt(R / pi), for up to `MOST_BANDS`. |v| is below 2^42: no draw is beyond 14
    deviations, and the absolute values in a column of C^-1 have a sum below 2.2.
    """
    whole_P, part_P = exact_cells(key, jnp.arange(ring_Bx6xP.shape[-1]))
    drawn = [((part_P >> shift) & 0xFF).astype(jnp.int32) for shift in (0, 8, 16, 24)]
    sign_6x1 = jnp.array([[0], [0], [0], [0], [0], [0x80]])

    def subtract(left_6xP, before):
        weight, bytes_6xP = before
        return left_6xP - weight * ((bytes_6xP.astype(jnp.int32) ^ sign_6x1) - sign_6x1), None

    # In 2^-16 of v's unit.
    start_6xP = jnp.stack([jnp.zeros_like(whole_P)] * 2 + drawn)
    left_6xP, _ = jax.lax.scan(subtract, start_6xP, (weights_B, ring_Bx6xP), unroll=16)
    carry_P, low_bytes = jnp.int32(0), []
    for byte_P in left_6xP:
        low_bytes.append((byte_P + carry_P) & 0xFF)
        carry_P = (byte_P + carry_P) >> 8
    whole_P += carry_P
    bytes_6xP = jnp.stack([*low_bytes[2:], whole_P & 0xFF, (whole_P >> 8) & 0xFF])
    noise_P = (whole_P << 16) | (low_bytes[5] << 8) | low_bytes[4]
    return noise_P, bytes_6xP.astype(jnp.uint8)


def _buffered(coefficients: Any, key: Any, _: Any, buffers_DxP: Any) -> tuple[Any, jax.Array]:
    """A round of a BLT's noise, by its unit, scales and decays."""
    unit, scales_D, decays_D = coefficients
    drawn_P = standard_normal(key, buffers_DxP.shape[1:]) * unit
    noise_P = drawn_P - jnp.matmul(scales_D, buffers_DxP, precision="highest")
    return noise_P, decays_D[:, None] * buffers_DxP + noise_P[None]


@partial(jax.jit, static_argnames=("width",))
def _of_tree(key: jax.Array, round: jax.Array, level: jax.Array, width: int) -> jax.Array:
    """The level's node that ends with the round, less those below that end with the one before."""

    def draw(level, place):
        return standard_normal(jax.random.fold_in(jax.random.fold_in(key, level), place), (width,))

    def take_away(below, noise_P):
        return noise_P - draw(below, (round - 1) >> below)

    return jax.lax.fori_loop(0, level, take_away, draw(level, round >> level))


def band_weights(bands: int) -> np.ndarray:
    """1 / c_0, then c_k / c_0 for k = 1, ..., bands - 1; float64."""
    coefficients = square_root(bands)
    weights = coefficients / coefficients[0]
    weights[0] = np.linalg.norm(coefficients) / coefficients[0]
    return weights


def whole_weights(bands: int) -> np.ndarray:
    """The exact form's m_k = 2^16 c_k, k = 0, ..., bands - 1; int32."""
    return np.round(2**16 * square_root(bands)).astype(np.int32)


def column_norm(bands: int) -> float:
    """n of the exact form, rounded up."""
    squared = sum(m * m for m in whole_weights(bands).tolist())
    return math.nextafter(math.sqrt(squared), math.inf) / 2**16


def check_shift(plan: Any) -> None:
    """Computes from a plan's weights of noise how far a client moves C X, a second time.

    Raises:
      InputError: it is further than one Gaussian an epoch is charged for, or exact noise has so
        many bands that it could overflow.
    """
    bands, epochs = plan.bands, plan.charge_number(plan.rounds)
    if plan.exact and bands > MOST_BANDS:
        raise InputError(
            f"noise = 'exact_banded' needs at most {MOST_BANDS:,} rounds per epoch, found {bands:,}"
        )
    weights = band_weights(bands)
    if plan.exact:
        weights = np.concatenate([[column_norm(bands)], whole_weights(bands)[1:] / 2**16])
    per_epoch = plan.participation.rounds_per_epoch
    squared = confirmation.banded_shift(weights, per_epoch, epochs) ** 2
    if not squared <= epochs * (1 + 1e-6):
        raise InputError(
            f"the accountants disagree: in {epochs} epochs with correlated noise a client moves "
            f"the sums by {math.sqrt(squared):.6g} S, and {math.sqrt(epochs):.6g} S are charged"
        )


def square_root(count: int) -> np.ndarray:
    """The first coefficients of (1 - x)^(-1/2): the square root of the prefix sums' matrix."""
    steps = np.arange(1, count)
    return np.cumprod(np.concatenate([[1.0], (2 * steps - 1) / (2 * steps)]))
