"""Sums as pairs of numbers: the second one holds the part that the first cannot."""

from typing import NamedTuple

import jax


class DoubleWord(NamedTuple):
    """Two arrays of the same shape that together hold one sum.

    Float32: their sum. Int32: high 2^16 + low, with low in [0, 2^16).
    """

    high: jax.Array
    low: jax.Array


def is_pair(node: object) -> bool:
    """Whether a tree's node is one sum."""
    return isinstance(node, DoubleWord)


def two_sum(a: jax.Array, b: jax.Array) -> DoubleWord:
    """a + b as a rounded sum and its exact rounding error (Knuth, TAOCP 4.2.2, Theorem B)."""
    total = a + b
    b_part = total - a
    return DoubleWord(total, (a - (total - b_part)) + (b - b_part))


def quick_two_sum(a: jax.Array, b: jax.Array) -> DoubleWord:
    """`two_sum` for |a| >= |b| or a = 0 (Dekker 1971)."""
    total = a + b
    return DoubleWord(total, b - (total - a))


def plus(pair: DoubleWord, value: jax.Array) -> DoubleWord:
    """A float32 pair and a float32 array added up: exactly, if the sum has at most 48 bits.

    Normalised each time (Joldes, Muller, Popescu 2017, "Tight and rigorous error bounds for basic
    building blocks of double-word arithmetic", Algorithm 4): otherwise the low part would grow with
    the errors that it collects, and lose bits itself.
    """
    total = two_sum(pair.high, value)
    return quick_two_sum(total.high, pair.low + total.low)
