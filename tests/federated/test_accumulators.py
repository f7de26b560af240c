"""Long sums: exact to the pair's last bit, and noised before they are rounded."""

import math
from fractions import Fraction
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpfl.federated.double_word import DoubleWord
from jaxpfl.federated.release.accumulators import Compensated, FixedPoint, noisy_halves
from jaxpfl.privacy.exact_noise import STEPS

DIM = 64
BLOCK = 4_096
BLOCKS = 32_959  # 1.35e8 examples
ONE = jnp.float32(1)

compensated = Compensated()


def in_float64(total) -> np.ndarray:
    """A float32 pair has at most 48 bits apart from gaps, so this is exact where it matters."""
    return np.asarray(total.high, np.float64) + np.asarray(total.low, np.float64)


def unit_vectors(count: int, seed: int = 0) -> np.ndarray:
    """float32 [count, DIM], around one direction, of norm 1 and by no rounding more."""
    rng = np.random.default_rng(seed)
    rows = 1 + 0.5 * rng.normal(size=(count, DIM))
    rows *= (1 - 1e-7) / np.linalg.norm(rows, axis=1, keepdims=True)
    return rows.astype(np.float32)


@jax.jit
def long_sum(subtotals_KxD, times, first_D):
    """The total of `first_D` and of `times` subtotals, taken in turn."""
    sums = compensated.merge(compensated.zeros(first_D, 1), first_D)

    def add(index, sums):
        return compensated.merge(sums, subtotals_KxD[index % subtotals_KxD.shape[0]])

    return compensated.join_devices(jax.lax.fori_loop(0, times, add, sums))


@pytest.mark.parametrize("kinds", [1, 97])
def test_one_example_moves_a_sum_over_135_million_by_one(kinds):
    """TRUST 16: at most S (1 + 1e-6), by the pair; rounded to one float32 it would be 3 S."""
    subtotals = unit_vectors(kinds) * np.float32(BLOCK)
    example = unit_vectors(1, seed=1)[0]
    without = long_sum(subtotals, BLOCKS, np.zeros(DIM, np.float32))
    length = np.linalg.norm(in_float64(without))
    assert length > 0.9 * BLOCK * BLOCKS or kinds > 1
    assert length > 1e8
    # First or last: what comes after it is rounded otherwise, or nothing is.
    first = long_sum(subtotals, BLOCKS, example)
    last = compensated.join_devices(
        compensated.merge(jax.tree.map(lambda leaf: leaf[None], without), example)
    )
    for with_it in (first, last):
        moved = np.linalg.norm(in_float64(with_it) - in_float64(without))
        assert abs(moved - np.linalg.norm(example.astype(np.float64))) <= 1e-6
        assert moved <= 1 + 1e-6
        joined = [
            np.asarray(compensated.add_noise(total, None, ONE), np.float64)
            for total in (with_it, without)
        ]
        assert np.linalg.norm(joined[0] - joined[1]) > 2.5


def summed(accumulator, leaves_KxD: np.ndarray, devices: int):
    """The total of K subtotals dealt to devices."""
    width = leaves_KxD.shape[1]
    sums = []
    for device in range(devices):
        part = accumulator.zeros(jax.ShapeDtypeStruct((width,), jnp.float32), 1)
        mine = jnp.asarray(leaves_KxD[device::devices])
        sums.append(merged(accumulator, part, mine))
    return joined(accumulator, sums)


@partial(jax.jit, static_argnums=0)
def joined(accumulator, sums):
    return accumulator.join_devices(jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *sums))


@partial(jax.jit, static_argnums=0)
def merged(accumulator, sums, leaves_KxD):
    def add(index, sums):
        row = jax.lax.dynamic_slice_in_dim(leaves_KxD, index, 1)
        scale = accumulator.scale(ONE, ONE)
        subtotal = accumulator.add(accumulator.start(sums), row, jnp.ones(1), scale)
        return accumulator.merge(sums, subtotal)

    return jax.lax.fori_loop(0, len(leaves_KxD), add, sums)


@pytest.mark.parametrize("devices", [1, 2, 8])
def test_sums_of_any_magnitude_are_as_good_as_48_bits(devices):
    """Against exact sums: terms from 2^-20 to 2^20 of both signs, half of them cancelling."""
    rng = np.random.default_rng(0)
    terms = (rng.normal(size=(4_000, 6)) * 2.0 ** rng.uniform(-20, 20, (4_000, 6))).astype(
        np.float32
    )
    terms[:, 3:] = np.concatenate([terms[:2_000, 3:], -terms[:2_000, 3:]])
    terms[-1, 3:] += np.float32(1e-3)
    total = in_float64(summed(compensated, terms, devices))
    for column in range(6):
        exact = float(sum(map(Fraction, terms[:, column].tolist())))
        largest = float(np.max(np.abs(np.cumsum(terms[:, column].astype(np.float64)))))
        assert abs(total[column] - exact) <= 4_000 * 2.0**-47 * largest
        if column < 3:
            plain = float(np.cumsum(terms[:, column], dtype=np.float32)[-1])
            assert abs(plain - exact) > 4_000 * 2.0**-47 * largest


@pytest.mark.parametrize("devices", [4, 40])
def test_the_devices_sums_may_cancel(devices):
    """To 2^-70 of the largest: what is left of them lies below the 48 bits of a pair."""
    rng = np.random.default_rng(0)
    half = (rng.normal(size=(devices // 2, 6)) * 2.0**40).astype(np.float32)
    high = np.concatenate([half, -half])
    low = (rng.normal(size=high.shape) * 2.0**-20).astype(np.float32)
    order = rng.permutation(devices)
    total = in_float64(compensated.join_devices(DoubleWord(jnp.array(high[order]), jnp.array(low))))
    largest = float(np.max(np.abs(high)))
    for column in range(6):
        terms = [*high[:, column].tolist(), *low[:, column].tolist()]
        exact = float(sum(map(Fraction, terms)))
        assert abs(total[column] - exact) <= 2.0**-70 * largest * devices + 2.0**-44 * abs(exact)


@pytest.mark.parametrize("accumulator", [compensated, FixedPoint()])
def test_equal_sums_have_equal_bits(accumulator):
    """Whatever the order and the devices: what the noise's key is bound to does not depend on them.

    Multiples of 2^-12, of which no running sum of a pair loses a bit.
    """
    rng = np.random.default_rng(0)
    size = 1e2 if isinstance(accumulator, FixedPoint) else 1e5
    terms = np.round(rng.normal(size=(999, 40)) * size * 2.0**12) * 2.0**-12
    terms[:, 0] = 0
    terms[500:999, 1] = -terms[:499, 1]
    terms = terms.astype(np.float32)
    first = summed(accumulator, terms, 1)
    exact = np.array([math.fsum(column) for column in terms.T.astype(np.float64)])
    if isinstance(accumulator, FixedPoint):
        whole = np.asarray(first.high, np.int64) * 2**16 + np.asarray(first.low)
        steps = np.trunc(terms * np.asarray(accumulator.scale(ONE, ONE))).astype(np.int64)
        np.testing.assert_array_equal(whole, steps.sum(0))
        assert np.all((np.asarray(first.low) >= 0) & (np.asarray(first.low) < 2**16))
    else:
        np.testing.assert_array_equal(in_float64(first), exact)
        np.testing.assert_array_equal(first.high, exact.astype(np.float32))
        assert np.any(np.asarray(first.low) != 0)
    for devices in (1, 3, 8, 40):  # 40 are added up in a loop
        for order in (slice(None), slice(None, None, -1)):
            other = summed(accumulator, terms[order], devices)
            for wanted, found in zip(jax.tree.leaves(first), jax.tree.leaves(other), strict=True):
                assert np.asarray(wanted).tobytes() == np.asarray(found).tobytes()


def test_a_negative_zero_and_a_positive_one_have_equal_bits():
    plus, minus = (DoubleWord(*[jnp.full((2, 1), zero, jnp.float32)] * 2) for zero in (0.0, -0.0))
    for zero in (plus, minus):
        for leaf in compensated.join_devices(zero):
            assert np.asarray(leaf).tobytes() == bytes(4)


def test_noise_is_added_before_anything_is_rounded():
    """Noise that cancels the high part leaves what a single float32 would have lost."""
    total = {"a": DoubleWord(jnp.full(2, 2.0**27), jnp.asarray([3.25, -3.5]))}
    noise = {"a": jnp.asarray([8 - 2.0**27, 40.0])}
    released = compensated.add_noise(total, noise, ONE)["a"]
    np.testing.assert_array_equal(released, np.float32([11.25, 2.0**27 + 32]))
    np.testing.assert_array_equal(
        compensated.add_noise(total, None, ONE)["a"], np.float32([2.0**27, 2.0**27])
    )


def test_whole_noise_is_added_before_anything_is_rounded():
    """Sums of 2^44 and noise that nearly cancels them; carries of both signs."""
    fixed = FixedPoint()
    whole = np.array([2**44 + 12_345, -(2**44) - 54_321, 2**30 - 1, 0, -1, 2**16 - 1])
    noise = np.array([-(2**30), 2**30, 3, 5, -(2**16), 1])
    for shift in (0, 2**44 - 2**30):
        moved = whole - np.sign(whole) * shift
        total = DoubleWord(*(jnp.asarray(x, jnp.int32) for x in (moved >> 16, moved & 0xFFFF)))
        released = fixed.add_noise(total, jnp.asarray(noise, jnp.int32), ONE)
        np.testing.assert_array_equal(released, (moved + noise).astype(np.float32))


def test_noise_has_its_scale_in_the_release():
    noise = np.random.default_rng(0).normal(size=1_000)
    floats, steps = (noise * 3).astype(np.float32), (noise * STEPS).astype(np.int32)
    for accumulator, drawn, at_scale in (
        (compensated, floats, floats),
        # z S = 2.1, as the plan has it, and by 2^-16 more.
        (FixedPoint(), steps, 2.1 * steps / STEPS),
    ):
        zero = accumulator.join_devices(accumulator.zeros(floats, 2))
        scale = accumulator.scale(jnp.float32(0.7), jnp.float32(3))
        released = accumulator.add_noise(zero, jnp.asarray(drawn), scale)
        np.testing.assert_allclose(released, at_scale, rtol=2e-5)


@pytest.mark.parametrize("std", [0.05, 2.5, 250.0, 17_000.0])
def test_a_sum_of_halves_has_at_least_the_noise_that_it_is_to_have(std):
    """TRUST 26: whole steps to a half; the sum is in it, and noise of `std` or hardly more."""
    steps = (np.random.default_rng(0).normal(size=100_000) * STEPS).astype(np.int32)
    for halves in (0.0, 7.5, -20.0 * std // 1):
        found = np.asarray(noisy_halves(jnp.float32(halves), jnp.asarray(steps), jnp.float32(std)))
        noise = found.astype(np.float64) - halves
        assert abs(noise.mean()) < 5 * std / len(steps) ** 0.5
        assert std * 0.99 < noise.std() < std * 1.05
