"""How clipped contributions are added up: as whole steps, or in compensated float32.

A cohort's buckets are added one after the other to a running sum, which is kept as a pair of
numbers until the noise has been added. In a single float32, a sum over 1.35e8 examples would have
steps of 16, so that one example of norm 1 might move it by several.

| accumulator   | plans                              | a number is a multiple of               |
|---------------|------------------------------------|-----------------------------------------|
| `ClipSteps`   | unit client, with noise            | 2^-24 of the clip norm, a power of two  |
| `Messages`    | local noise, see `local_noise`     | 2^-24 of the largest message            |
| `FixedPoint`  | unit client, with `exact` noise    | 2^-20 of the noise's standard deviation |
| `Compensated` | unit example, or without noise     | nothing; a float32 and its error        |

Sums of whole steps are exact: their bits do not depend on the order of clients, on chunks or on
devices, and nobody moves another's rounding.

The running sums hold one partial sum per device, [devices, ...] over the `clients` axis. On a
device a bucket is added chunk by chunk to subtotals of at most `most` clients, on a CPU at most
`rows` of them at a time. `scale` says how many steps of the accumulator a value of 1 has. `slack`
is how much larger than the plan's the noise is, because a clipped contribution may be longer than
the clip norm by 1e-6 of it.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jaxpfl.errors import InputError
from jaxpfl.federated.double_word import DoubleWord, is_pair, plus, two_sum
from jaxpfl.federated.mesh import PyTree
from jaxpfl.privacy.exact_noise import STEPS
from jaxpfl.privacy.plan import Plan

BLOCKS = 8
"""The most blocks of examples that are added up in plain float32."""

_FEW_ROWS = 4  # devices whose sums are added up without a loop


def map_pairs(function, pairs: PyTree, *rest: PyTree) -> PyTree:
    """Maps over the pairs of the first tree and the leaves or pairs of the others."""
    return jax.tree.map(function, pairs, *rest, is_leaf=is_pair)


def _joined(parts: list[jax.Array]) -> DoubleWord:
    """The sum of float32 arrays as the pair high = fl(sum), low = fl(sum - high).

    Each pass keeps the exact sum, and makes every part but the last a rounding error of those after
    it (Ogita, Rump, Oishi 2005, "Accurate sum and dot product", Algorithm 4.3). The error after
    three passes is some 2^-72 of the largest part, so that equal sums have equal bits, whatever
    their parts, unless these nearly cancel. The parts of `Compensated` are rounded before.
    """
    parts = list(parts)
    for _ in range(3 if len(parts) > 2 else 0):
        for index in range(1, len(parts)):
            parts[index], parts[index - 1] = two_sum(parts[index], parts[index - 1])
    rest = parts[0]
    for part in parts[1:-1]:
        rest = rest + part
    # Not `quick_two_sum`: if parts cancel, the rest may be larger than the last one.
    pair = two_sum(parts[-1], rest)
    # A negative zero becomes a positive one.
    return DoubleWord(*(jnp.where(leaf == 0, jnp.float32(0), leaf) for leaf in pair))


def _few(rows: DoubleWord) -> list[jax.Array]:
    """Float32 arrays [...] with the sum of all rows [rows, ...] of a pair, as good as `_joined`'s.

    Few rows are left as they are. Many go one after the other through three sums, each of the
    rounding errors of the one before: the three passes at once, without an array of all errors and
    in a loop, because 256 rows would take minutes to compile.
    """
    number = rows.high.shape[0]
    if number <= _FEW_ROWS:
        return [half[row] for half in (rows.low, rows.high) for row in range(number)]

    def add(sums, part):
        *exact, rest = sums
        for level, total in enumerate(exact):
            exact[level], part = two_sum(total, part)
        return (*exact, rest + part), None

    sums = (jnp.zeros_like(rows.high[0]),) * 4
    for half in (rows.low, rows.high):
        sums, _ = jax.lax.scan(add, sums, half)
    return list(reversed(sums))


def _carried(high: jax.Array, low: jax.Array, bits: int) -> DoubleWord:
    """high 2^bits + low, with `bits` bits in the low part."""
    return DoubleWord(high + (low >> bits), low & ((1 << bits) - 1))


# A step that `release.information_flow` recognises, hence compiled by itself, as the addition
# of noise is.
@jax.jit
def scaled(leaf_C: jax.Array, factor_C: jax.Array, counts_C: jax.Array | None = None) -> jax.Array:
    """float32 leaf [chunk, ...] times factor [chunk]; zero where `counts_C` is False."""
    # Zero times NaN is NaN. After the product, a mask would keep XLA from one rounding of both.
    leaf_C, rows = leaf_C.astype(jnp.float32), (-1,) + (1,) * (leaf_C.ndim - 1)
    if counts_C is not None:
        mask_C = jnp.where(counts_C, jnp.uint32(0xFFFFFFFF), jnp.uint32(0))
        bits_C = jax.lax.bitcast_convert_type(leaf_C, jnp.uint32) & mask_C.reshape(rows)
        leaf_C = jax.lax.bitcast_convert_type(bits_C, jnp.float32)
    return leaf_C * factor_C.reshape(rows)


class _Sums:
    """Sums of trees; a subclass has the arithmetic of one leaf."""

    ordered_norms: ClassVar[bool] = False
    exact: ClassVar[bool] = False
    local: ClassVar[bool] = False
    slack: ClassVar[float] = 1.0
    rows: ClassVar[int] = 10
    dtype: ClassVar[Any] = jnp.int32
    _start: ClassVar[Callable[[DoubleWord], Any]]
    _add: ClassVar[Callable[..., Any]]
    _merge: ClassVar[Callable[..., DoubleWord]]
    _join: ClassVar[Callable[..., DoubleWord]]
    _add_noise: ClassVar[Callable[..., jax.Array]]

    def zeros(self, like: PyTree, devices: int) -> PyTree:
        """Running sums of nothing, [devices, ...] for each leaf."""
        zeros = jax.tree.map(lambda leaf: jnp.zeros((devices, *leaf.shape), self.dtype), like)
        return jax.tree.map(DoubleWord, zeros, zeros)

    def start(self, sums: PyTree) -> PyTree:
        """Returns the subtotal [...] of nobody, to be merged with these running sums [1, ...]."""
        return map_pairs(self._start, sums)

    def add(self, subtotal: PyTree, leaves_C: PyTree, factors_C, scale, counts_C=None) -> PyTree:
        """Adds float leaves [chunk, ...] of who counts, each times its client's factor [chunk]."""

        def add(total, leaf_C, factor_C):
            return self._add(scale, total, scaled(leaf_C, factor_C, counts_C))

        return map_pairs(add, subtotal, leaves_C, factors_C)

    def merge(self, sums: PyTree, subtotal: PyTree) -> PyTree:
        """Adds a subtotal to the running sums of its device, for which it was started."""
        return map_pairs(self._merge, sums, subtotal)

    def join_devices(self, sums: PyTree) -> PyTree:
        """Adds the devices' partial sums [devices, ...] up to pairs of leaves [...]."""
        return map_pairs(self._join, sums)

    def add_noise(self, total: PyTree, noise: PyTree | None, scale: jax.Array) -> PyTree:
        """Returns total + noise as float32 leaves [...], rounded once, after the addition.

        `total` is from `join_devices`; the noise, float32 leaves [...], or None; if `exact`, int32
        leaves, in steps.
        """
        if noise is None:
            return map_pairs(lambda pair: pair.high + pair.low, total)
        return map_pairs(partial(self._add_noise, scale), total, noise)


@dataclasses.dataclass(frozen=True)
class Compensated(_Sums):
    """Float32 sums as pairs, high + low with |low| at most half a unit in high's last place.

    Between subtotals and devices, each addition loses at most 2^-47 of the running sum, and nothing
    while the sum has no bits below 2^-48 of itself. Within a subtotal additions are plain float32,
    because a two-sum for each client would triple the memory traffic. Without noise it is a whole
    bucket; of blocks of examples it is a few, and `release.example_rounding` has the bound.

    The last bits of the result may depend on the layout of devices and chunks.

    Attributes:
      most: clients, or blocks of examples, in a subtotal.
    """

    most: int = 2**30

    dtype: ClassVar[Any] = jnp.float32
    # XLA's CPU backend does not vectorise sums of several rows with zeros for who does not count.
    rows: ClassVar[int] = 1

    def scale(self, clip_norm: jax.Array, noise_multiplier: jax.Array) -> jax.Array:
        """1: values are added as they are."""
        return jnp.float32(1)

    def _start(self, pair) -> jax.Array:
        return jnp.zeros_like(pair.high[0])

    def _add(self, scale, total, value_C) -> jax.Array:
        return total + jnp.sum(value_C, axis=0)

    def _merge(self, pair, part) -> DoubleWord:
        return plus(pair, part[None])

    def _join(self, pair) -> DoubleWord:
        return _joined(_few(pair))

    def _add_noise(self, scale, pair, noise) -> jax.Array:
        return rounded_sum(pair, noise)


@jax.jit
def rounded_sum(pair: DoubleWord, noise: jax.Array) -> jax.Array:
    """The sum of a float32 pair and the noise, rounded once."""
    noisy = two_sum(pair.high, noise)
    return noisy.high + (noisy.low + pair.low)


@dataclasses.dataclass(frozen=True)
class ClipSteps(_Sums):
    """Exact integer sums, of plans with float noise: the sum of the contributions as computed.

    A clipped value is counted in steps of 2^(ceil(log2 S) - 24) of the round's clip norm S, and
    rounded TOWARDS ZERO, as a conversion to int32 does: no coordinate grows, and no norm. So one
    client moves the sum by at most S (1 + 1e-6), the clip's own bound, whoever else takes part, and
    the noise is larger by more than that.

    A contribution has at most 2^24 + 17 steps. A pair, high 2^24 + low, holds 2^30 of them, and a
    subtotal, which goes on from the low part, 126 beside it.
    """

    most: ClassVar[int] = 126
    slack: ClassVar[float] = 1 + 2**-16

    def scale(self, clip_norm: jax.Array, noise_multiplier: jax.Array) -> jax.Array:
        """Steps of a value of 1, a power of two."""
        bits = jax.lax.bitcast_convert_type(clip_norm, jnp.uint32)
        # The mantissa carries over into the exponent, unless S is a power of two.
        bits = (bits + jnp.uint32(0x007FFFFF)) & jnp.uint32(0x7F800000)
        return jnp.float32(2.0**24) / jax.lax.bitcast_convert_type(bits, jnp.float32)

    def _start(self, pair) -> jax.Array:
        return pair.low[0]

    def _add(self, scale, total, value_C) -> jax.Array:
        # `jnp.trunc` before the conversion would take far longer.
        whole_C = (value_C * scale).astype(jnp.int32)
        return total + jnp.sum(whole_C, axis=0, dtype=jnp.int32)

    def _merge(self, pair, part) -> DoubleWord:
        return _carried(pair.high, part[None], 24)

    def _join(self, pair) -> DoubleWord:
        # By halves of the low parts, so that those of 2^19 devices fit.
        high, middle, low = (
            jnp.sum(part, axis=0, dtype=jnp.int32)
            for part in (pair.high, pair.low >> 12, pair.low & 0xFFF)
        )
        middle, low = _carried(middle, low, 12)
        high, middle = _carried(high, middle, 12)
        return DoubleWord(high, (middle << 12) | low)

    def _add_noise(self, scale, pair, noise) -> jax.Array:
        # The sum becomes a float32 pair, exactly up to 2^48 steps.
        high = pair.high.astype(jnp.float32)
        low = ((pair.high - high.astype(jnp.int32)) << 24) + pair.low
        pair = DoubleWord(high * jnp.float32(2.0**24), low.astype(jnp.float32))
        return rounded_sum(DoubleWord(*(leaf / scale for leaf in pair)), noise)


@dataclasses.dataclass(frozen=True)
class FixedPoint(_Sums):
    """Exact integer sums, of plans with exact noise: the same bits for every order and layout.

    A contribution is multiplied by its clip factor before it becomes integers. Its norm is
    therefore added up in one order (`privacy.clipping.clip_factors`), which takes longer: XLA
    chooses another order for each chunk and for a split model.

    A clipped value is counted in steps of the noise's standard deviation / `exact_noise.STEPS`. It
    is rounded TOWARDS ZERO, so that a contribution's L2 norm never grows and the sensitivity stays
    S. The integer is split into a low half of 16 bits and a signed high part, each summed in int32.
    """

    ordered_norms: ClassVar[bool] = True
    exact: ClassVar[bool] = True
    most: ClassVar[int] = 32_000

    @staticmethod
    def require_room(plan: Plan) -> None:
        """Refuses steps in which everyone's values, or four rounds' indicators, could overflow."""
        least = max(plan.population / 2**26, 2**-9)
        few, std = plan.clients_per_round / 1000, plan.indicator_noise_std
        for name, value, needed in (
            ("noise multiplier", plan.value_noise_std(1.0), least),
            ("indicator_noise", std or few, few),
        ):
            if value < needed:
                raise InputError(
                    f"exact noise needs a larger {name} for so many clients, at least {needed:g}, "
                    f"found {value:g}: sums in steps of it could overflow"
                )

    def scale(self, clip_norm: jax.Array, noise_multiplier: jax.Array) -> jax.Array:
        """Steps of a value of 1, fewer by what rounding may add to a clipped contribution."""
        return jnp.float32(STEPS * (1 - 2**-16)) / (noise_multiplier * clip_norm)

    def _start(self, pair) -> DoubleWord:
        return DoubleWord(pair.high[0], pair.low[0])

    def _add(self, scale, pair, value_C) -> DoubleWord:
        # No value overflows: scaled leaves have norm at most S.
        whole_C = jnp.trunc(value_C * scale).astype(jnp.int32)
        low = pair.low + jnp.sum(whole_C & 0xFFFF, axis=0, dtype=jnp.int32)
        high = pair.high + jnp.sum(whole_C >> 16, axis=0, dtype=jnp.int32)
        # Carried each time, so that the low half has room for `most` rows.
        return _carried(high, low, 16)

    def _merge(self, pair, part) -> DoubleWord:
        return DoubleWord(part.high[None], part.low[None])

    def _join(self, pair) -> DoubleWord:
        low = jnp.sum(pair.low, axis=0, dtype=jnp.int32)
        return _carried(jnp.sum(pair.high, axis=0, dtype=jnp.int32), low, 16)

    def _add_noise(self, scale, pair, noise) -> jax.Array:
        return whole_sum(pair, noise) / scale


@jax.jit
def whole_sum(pair: DoubleWord, noise: jax.Array) -> jax.Array:
    """The exact sum of whole numbers, high and low parts, and int32 noise; then as float32."""
    low = pair.low + (noise & 0xFFFF)
    high = pair.high + (noise >> 16) + (low >> 16)
    # Both parts have at most 24 bits.
    upper = (high >> 8).astype(jnp.float32) * jnp.float32(2.0**24)
    lower = ((high & 0xFF) << 16) | (low & 0xFFFF)
    return upper + lower.astype(jnp.float32)


def noisy_halves(halves: jax.Array, noise: jax.Array, std: jax.Array) -> jax.Array:
    """A sum of halves, float32, plus int32 noise in steps of at least std / `STEPS`."""
    half = jnp.float32(STEPS / 2 * (1 - 2**-16)) / jnp.maximum(std, jnp.float32(1e-3))
    half = half.astype(jnp.int32)
    total = (halves * jnp.float32(2)).astype(jnp.int32) * half + noise
    return total.astype(jnp.float32) / (jnp.int32(2) * half).astype(jnp.float32)


Accumulator = Compensated | ClipSteps | FixedPoint
