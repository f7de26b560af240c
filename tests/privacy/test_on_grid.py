"""The low bits of a release say nothing: its values are on a grid that its noise fills."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpfl as jp
from benchmarks.micro.float_attack import impossible, out_of_the_grid
from jaxpfl.federated.double_word import DoubleWord
from jaxpfl.federated.release.accumulators import rounded_sum
from jaxpfl.privacy.mechanisms import on_grid, standard_normal

STDS = (1.0, 0.7, 1.999, 1e-12, 3e8)


def step_of(std: float) -> float:
    """The largest power of two that is no larger than a 32nd of the deviation."""
    return 2.0 ** (np.floor(np.log2(np.float32(std))) - 5)


@pytest.mark.parametrize("std", STDS)
def test_values_are_the_nearest_of_the_grid(std):
    noisy = np.float32(std) * np.random.default_rng(0).normal(size=1_000).astype(np.float32)
    found = np.asarray(on_grid(jnp.asarray(noisy), jnp.float32(std))).astype(np.float64)
    steps = found / step_of(std)
    np.testing.assert_array_equal(steps, np.round(steps))
    assert np.abs(found - noisy).max() <= step_of(std) / 2
    assert np.std(found) == pytest.approx(np.std(noisy), rel=1e-2)


def test_what_has_no_noise_and_what_is_large_stays():
    values = jnp.asarray([0.0, -1.5, 3e-8, 2.0**30 + 2.0**8], jnp.float32)
    np.testing.assert_array_equal(on_grid(values, jnp.float32(0)), values)
    np.testing.assert_array_equal(on_grid(values[3:], jnp.float32(1)), values[3:])


def _contribution(broadcast, examples, key):
    del key
    return broadcast * jnp.sum(jnp.where(examples.mask, examples.batches["x"], jnp.float32(0)))


@pytest.mark.parametrize("z", [1.0, 0.3])
def test_every_release_is_on_it(z, tmp_path):
    clients = jp.data.from_clients({"a": {"x": [1.0]}, "b": {"x": [0.5]}})
    plan = jp.Plan(
        rounds=1, clip=jp.Clip(0.8), noise=jp.Noise(z), participation=jp.Poisson(2, 2), delta=1e-5
    )
    broadcast = jnp.full(50, jnp.float32(0.01))
    given = dict(ledger=tmp_path / "ledger.jsonl", broadcast=broadcast)
    value = jp.release(_contribution, clients, plan, **given).value
    steps = np.float64(value) / step_of(np.float32(z) * np.float32(0.8))
    np.testing.assert_array_equal(steps, np.round(steps))
    assert len(set(steps)) > 10


def test_the_attack_finds_the_sum_in_float32_noise_and_not_on_the_grid():
    """Mironov 2012; `python -m benchmarks.micro.float_attack` has the whole attack."""
    right, wrong = (0.01 * np.random.default_rng(i).normal(size=4_000) for i in range(2))
    high = right.astype(np.float32)
    low = (right - high).astype(np.float32)
    noise = standard_normal(jax.random.key(0, impl="threefry4x32"), (4_000,))
    noisy = rounded_sum(DoubleWord(jnp.asarray(high), jnp.asarray(low)), noise)
    known = high.astype(np.float64) + low.astype(np.float64)
    assert not impossible(np.asarray(noisy), known).any()
    assert impossible(np.asarray(noisy), wrong).mean() > 0.005
    shown = np.asarray(on_grid(noisy, jnp.float32(1)))
    for each in (known, wrong):
        assert not out_of_the_grid(shown, each, 1 / 32).any()
