"""How clipped contributions are added up: compensated float32, or fixed point.

A cohort arrives in buckets, so the sum is a running one and outlives many additions.

`Compensated` keeps a second float32 array with what rounding lost (Knuth's two-sum), so that
the error does not grow with the number of buckets. `FixedPoint` adds integers: the result does
not depend on the order of clients, chunks or devices to the last bit, which is also what a
secure-aggregation protocol would compute.

The running sums hold one partial sum per device, [devices, ...] over the `clients` axis. On a
device a bucket is added chunk by chunk to a subtotal (`start`, `add`), which then joins the
running sums (`merge`); `total` joins the devices.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxpfl import checks
from jaxpfl.errors import InputError

PyTree = Any


class _Pair(NamedTuple):
    """Two arrays of the same shape that together hold one running sum."""

    high: jax.Array
    low: jax.Array


def _map_pairs(function, pairs: PyTree, *rest: PyTree) -> PyTree:
    """Maps over the pairs of the first tree; the others have a leaf or a pair in each place."""
    return jax.tree.map(function, pairs, *rest, is_leaf=lambda node: isinstance(node, _Pair))


def _two_sum(a: jax.Array, b: jax.Array) -> _Pair:
    """a + b as a rounded sum and its exact rounding error (Knuth, TAOCP 4.2.2, Theorem B)."""
    total = a + b
    b_part = total - a
    return _Pair(total, (a - (total - b_part)) + (b - b_part))


def _scaled(leaf_C: jax.Array, factor_C: jax.Array) -> jax.Array:
    """float32 leaf [chunk, ...] times factor [chunk]."""
    return leaf_C.astype(jnp.float32) * factor_C.reshape((-1,) + (1,) * (leaf_C.ndim - 1))


@dataclasses.dataclass(frozen=True)
class Compensated:
    """Float32 sums with a running error term.

    Within a bucket, at most some tens of clients a device, additions are plain float32: a two-sum
    for each client would triple the memory traffic. Between buckets and devices nothing is
    lost. The result may differ in the last bits between layouts.
    """

    def zeros(self, like: PyTree, devices: int) -> PyTree:
        def zero(leaf):
            array = jnp.zeros((devices, *leaf.shape), jnp.float32)
            return _Pair(array, array)

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
            total = _two_sum(pair.high, leaf[None])
            return _Pair(total.high, pair.low + total.low)

        return _map_pairs(merge, sums, subtotal)

    def total(self, sums: PyTree, clip_norm: jax.Array) -> PyTree:
        """Joins the devices' partial sums [devices, ...] into float32 leaves [...]."""
        del clip_norm

        def join(pair):
            total, lost = pair.high[0], pair.low[0]
            for device in range(1, pair.high.shape[0]):
                joined = _two_sum(total, pair.high[device])
                total, lost = joined.high, lost + joined.low + pair.low[device]
            return total + lost

        return _map_pairs(join, sums)


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
            return _Pair(array, array)

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
            return _Pair(high + (low >> 16), low & 0xFFFF)

        return _map_pairs(add, subtotal, leaves_C, factors_C)

    def merge(self, sums: PyTree, subtotal: PyTree) -> PyTree:
        """Adds a bucket's subtotal to the running sums of its device."""

        def merge(pair, part):
            low = pair.low + part.low[None]
            return _Pair(pair.high + part.high[None] + (low >> 16), low & 0xFFFF)

        return _map_pairs(merge, sums, subtotal)

    def total(self, sums: PyTree, clip_norm: jax.Array) -> PyTree:
        unit = clip_norm / jnp.float32(2.0**self.bits)

        def join(pair):
            low = jnp.sum(pair.low, axis=0, dtype=jnp.int32)
            high = jnp.sum(pair.high, axis=0, dtype=jnp.int32) + (low >> 16)
            low = low & 0xFFFF
            return (high.astype(jnp.float32) * 65536.0 + low.astype(jnp.float32)) * unit

        return _map_pairs(join, sums)


Accumulator = Compensated | FixedPoint
