"""How clipped contributions are added up: compensated float32, or fixed point.

A cohort arrives in buckets, so the sum is a running one and outlives many additions. It is kept as
a pair of numbers, and stays one until the noise has been added: joined into one float32, a sum over
1.35e8 examples moves in steps of 16, and one example of norm 1 may move it by several.

`Compensated` is a float32 and what rounding it lost, 48 bits together, so that the error does not
grow with the number of buckets. `FixedPoint` adds integers: the result does not depend on the order
of clients, chunks or devices to the last bit, which is also what a secure-aggregation protocol
would compute.

The running sums hold one partial sum per device, [devices, ...] over the `clients` axis. On a
device a bucket is added chunk by chunk to a subtotal (`start`, `add`), which then joins the
running sums (`merge`); `total` joins the devices, and `released` adds the noise and rounds.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxpfl import checks
from jaxpfl.errors import InputError

PyTree = Any


class Pair(NamedTuple):
    """Two arrays of the same shape that together hold one sum.

    Float32: their sum. Int32: high 2^16 + low, with low in [0, 2^16).
    """

    high: jax.Array
    low: jax.Array


def _map_pairs(function, pairs: PyTree, *rest: PyTree) -> PyTree:
    """Maps over the pairs of the first tree; the others have a leaf or a pair in each place."""
    return jax.tree.map(function, pairs, *rest, is_leaf=lambda node: isinstance(node, Pair))


def _two_sum(a: jax.Array, b: jax.Array) -> Pair:
    """a + b as a rounded sum and its exact rounding error (Knuth, TAOCP 4.2.2, Theorem B)."""
    total = a + b
    b_part = total - a
    return Pair(total, (a - (total - b_part)) + (b - b_part))


def _quick_two_sum(a: jax.Array, b: jax.Array) -> Pair:
    """`_two_sum` for |a| >= |b| or a = 0 (Dekker 1971)."""
    total = a + b
    return Pair(total, b - (total - a))


def _joined(parts: list[jax.Array]) -> Pair:
    """The sum of float32 arrays as the pair high = fl(sum), low = fl(sum - high).

    Each pass replaces the parts by others of exactly the same sum, every one but the last being a
    rounding error of those after it (Ogita, Rump, Oishi 2005, "Accurate sum and dot product",
    Algorithm 4.3). After three passes what is left over is some 2^-72 of the largest part, so that
    equal sums have equal bits, whatever parts they were made of, unless they nearly cancel.
    """
    parts = list(parts)
    for _ in range(3 if len(parts) > 2 else 0):
        for index in range(1, len(parts)):
            parts[index], parts[index - 1] = _two_sum(parts[index], parts[index - 1])
    rest = parts[0]
    for part in parts[1:-1]:
        rest = rest + part
    # Not a quick one: where parts cancel, the rest may be the larger.
    return _without_negative_zero(_two_sum(parts[-1], rest))


def _without_negative_zero(pair: Pair) -> Pair:
    return Pair(*(jnp.where(leaf == 0, jnp.float32(0), leaf) for leaf in pair))


def _scaled(leaf_C: jax.Array, factor_C: jax.Array) -> jax.Array:
    """float32 leaf [chunk, ...] times factor [chunk]."""
    return leaf_C.astype(jnp.float32) * factor_C.reshape((-1,) + (1,) * (leaf_C.ndim - 1))


@dataclasses.dataclass(frozen=True)
class Compensated:
    """Float32 sums as pairs, high + low with |low| at most half a unit in high's last place.

    Between buckets and devices: each addition loses at most 2^-47 of the running sum, and nothing
    at all while the sum has no bits below 2^-48 of itself. For an entry whose subtotals are float32
    of like magnitude that is: while buckets times (largest / smallest subtotal) is below 2^24. In
    the tests one example of norm 1 moves a total over 1.35e8 examples by at most 1 + 1e-6.

    Within a bucket, at most some tens of clients a device, additions are plain float32: a two-sum
    for each client would triple the memory traffic. Their rounding depends on what was added
    before, so that one client more moves a subtotal of k clients of norm S by up to
    S (1 + k^2 2^-24) if all of it falls in one direction, where a test finds less than
    S (1 + 1e-6): for k = 32 the bound is S (1 + 6e-5). Where the unit is the example, S is one
    example's norm and a client's contribution a sum itself: of b examples each, k clients move by
    up to S (1 + k^2 b 2^-24) with one example more, 1 + 1e-3 for k = 4 and b = 1,024, and by what
    the client function's own float32 sum adds to it; a test with numpy's sums finds 1 + 5e-5.

    The result may differ in the last bits between layouts.
    """

    def zeros(self, like: PyTree, devices: int) -> PyTree:
        def zero(leaf):
            array = jnp.zeros((devices, *leaf.shape), jnp.float32)
            return Pair(array, array)

        return jax.tree.map(zero, like)

    def start(self, sums: PyTree) -> PyTree:
        """Returns a bucket's subtotal, zeros [...], for running sums [1, ...]."""
        return _map_pairs(lambda pair: jnp.zeros_like(pair.high[0]), sums)

    def add(
        self, subtotal: PyTree, leaves_C: PyTree, factors_C: PyTree, clip_norm: jax.Array
    ) -> PyTree:
        """Adds float leaves [chunk, ...], each times its client's factor [chunk]."""
        del clip_norm

        def add(total, leaf_C, factor_C):
            return total + jnp.sum(_scaled(leaf_C, factor_C), axis=0)

        return jax.tree.map(add, subtotal, leaves_C, factors_C)

    def merge(self, sums: PyTree, subtotal: PyTree) -> PyTree:
        """Adds a bucket's subtotal to the running sums of its device."""

        def merge(pair, leaf):
            # Normalised at once (Joldes, Muller, Popescu 2017, "Tight and rigorous error bounds
            # for basic building blocks of double-word arithmetic", Algorithm 4): a low part that
            # only collects errors grows, and then loses bits itself.
            total = _two_sum(pair.high, leaf[None])
            return _quick_two_sum(total.high, pair.low + total.low)

        return _map_pairs(merge, sums, subtotal)

    def total(self, sums: PyTree) -> PyTree:
        """Joins the devices' partial sums [devices, ...] into float32 pairs of leaves [...]."""

        def join(pair):
            devices = range(pair.high.shape[0])
            return _joined([pair.low[d] for d in devices] + [pair.high[d] for d in devices])

        return _map_pairs(join, sums)

    def released(self, total: PyTree, noise: PyTree | None, clip_norm: jax.Array) -> PyTree:
        """Returns total and noise as float32 leaves [...], rounded once, after they were added.

        Args:
          total: from `total`.
          noise: float32 leaves [...], or None.
          clip_norm: S, float32 scalar.
        """
        del clip_norm
        if noise is None:
            return _map_pairs(lambda pair: pair.high + pair.low, total)
        return _map_pairs(_rounded_sum, total, noise)


def _rounded_sum(pair: Pair, noise: jax.Array) -> jax.Array:
    noisy = _two_sum(pair.high, noise)
    return noisy.high + (noisy.low + pair.low)


@dataclasses.dataclass(frozen=True)
class FixedPoint:
    """Exact integer sums: the same bits for every order, chunking and device layout.

    A clipped value v in [-S, S] is stored as trunc(v / S * 2^bits). Rounding is TOWARDS ZERO,
    so a contribution's L2 norm never grows and the sensitivity stays S. The integer is split
    into a low half of 16 bits and a signed high part, each summed in int32.

    Attributes:
      max_clients: the largest cohort that can occur (the population's size for Poisson
        sampling). The number of fraction bits is the largest for which no sum can overflow.
    """

    max_clients: int

    def __post_init__(self):
        checks.positive_int("max_clients", self.max_clients)
        if self.bits < 12:
            raise InputError(
                f"fixed-point sums over {self.max_clients} clients would keep {self.bits} fraction "
                "bits, at least 12 are needed: use compensated sums"
            )

    @property
    def bits(self) -> int:
        """Fraction bits: |high part| <= 2^(bits - 16) per client, summed below 2^30."""
        return min(29, 45 - math.ceil(math.log2(max(self.max_clients, 2))))

    def zeros(self, like: PyTree, devices: int) -> PyTree:
        def zero(leaf):
            array = jnp.zeros((devices, *leaf.shape), jnp.int32)
            return Pair(array, array)

        return jax.tree.map(zero, like)

    def start(self, sums: PyTree) -> PyTree:
        """Returns a bucket's subtotal, zeros [...], for running sums [1, ...]."""
        return jax.tree.map(lambda leaf: jnp.zeros_like(leaf[0]), sums)

    def add(
        self, subtotal: PyTree, leaves_C: PyTree, factors_C: PyTree, clip_norm: jax.Array
    ) -> PyTree:
        """Adds float leaves [chunk, ...], each times its client's factor [chunk].

        A client's scaled leaves have L2 norm at most `clip_norm`, so no value overflows.
        """
        scale = jnp.float32(2.0**self.bits) / clip_norm
        chunk = jax.tree.leaves(leaves_C)[0].shape[0]
        if chunk > 32_000:
            raise InputError(
                f"fixed-point sums take chunks of at most 32000 clients, found {chunk}"
            )

        def add(pair, leaf_C, factor_C):
            whole_C = jnp.trunc(_scaled(leaf_C, factor_C) * scale).astype(jnp.int32)
            low = pair.low + jnp.sum(whole_C & 0xFFFF, axis=0, dtype=jnp.int32)
            high = pair.high + jnp.sum(whole_C >> 16, axis=0, dtype=jnp.int32)
            # The low half is carried at once, so only the chunk's own size bounds it.
            return Pair(high + (low >> 16), low & 0xFFFF)

        return _map_pairs(add, subtotal, leaves_C, factors_C)

    def merge(self, sums: PyTree, subtotal: PyTree) -> PyTree:
        """Adds a bucket's subtotal to the running sums of its device."""

        def merge(pair, part):
            low = pair.low + part.low[None]
            return Pair(pair.high + part.high[None] + (low >> 16), low & 0xFFFF)

        return _map_pairs(merge, sums, subtotal)

    def total(self, sums: PyTree) -> PyTree:
        """Joins the devices' partial sums [devices, ...] into int32 pairs of leaves [...]."""

        def join(pair):
            low = jnp.sum(pair.low, axis=0, dtype=jnp.int32)
            high = jnp.sum(pair.high, axis=0, dtype=jnp.int32)
            return Pair(high + (low >> 16), low & 0xFFFF)

        return _map_pairs(join, sums)

    def released(self, total: PyTree, noise: PyTree | None, clip_norm: jax.Array) -> PyTree:
        """Returns total and noise as float32 leaves [...]; arguments as for `Compensated`."""
        # In whole numbers, where the sum is exact: what follows the noise may round as it likes.
        unit = clip_norm / jnp.float32(2.0**self.bits)
        scale = jnp.float32(2.0**self.bits) / clip_norm

        def in_float32(pair):
            # Both parts have at most 24 bits.
            upper = (pair.high >> 8).astype(jnp.float32) * jnp.float32(2.0**24)
            lower = ((pair.high & 0xFF) << 16) | pair.low
            return _two_sum(upper, lower.astype(jnp.float32))

        if noise is None:
            return _map_pairs(lambda pair: in_float32(pair).high * unit, total)
        return _map_pairs(
            lambda pair, noise: _rounded_sum(in_float32(pair), noise * scale) * unit, total, noise
        )


Accumulator = Compensated | FixedPoint
