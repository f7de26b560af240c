"""Sums of whole steps: exact, moved by no more than the noise is for, at every layout.

The exact sum of a release is what its noise is bound to, and never leaves the process otherwise.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpfl.federated import ClientSteps, client_mesh
from jaxpfl.federated.release import door as door_module
from jaxpfl.federated.release.accumulators import ClipSteps
from jaxpfl.federated.release.sum_digest import noise_key_and_name
from jaxpfl.privacy.mechanisms import standard_normal
from tests.federated.cohorts import bucket_of, door, plan, through

WIDTH = 24
SHAPE = jax.ShapeDtypeStruct((WIDTH,), jnp.float32)
CLIP = 0.7
STEP = 2.0**-24


def as_held(broadcast, examples, key):
    return examples.batches["x"][0, 0]


class Sums:
    """What releases are bound to: vectors, numbers and the words of the noise's key."""

    def __init__(self, monkeypatch) -> None:
        self.made = []
        monkeypatch.setattr(door_module, "noise_key_and_name", self)

    def __call__(self, secret, vectors, numbers):
        key, name = noise_key_and_name(secret, vectors, numbers)
        self.made.append((jax.device_get(vectors), jax.device_get(numbers), key))
        return key, name

    def of(self, opened, buckets, **settings) -> np.ndarray:
        """The exact sum, float64 [WIDTH]."""
        through(opened, None, buckets, **settings)
        (high, low), *_ = self.made[-1]
        width = sum(leaf.size for leaf in jax.tree.leaves(opened.contribution))
        if high.dtype == np.int32:
            return ((np.int64(high) << 24) + low)[:width] * STEP
        return (np.float64(high) + low)[:width]


@pytest.fixture
def sums(monkeypatch) -> Sums:
    return Sums(monkeypatch)


# Slots of each bucket, devices and chunk: several subtotals on a device, and a chunk of several.
LAYOUTS = {
    "one by one": ([200], 1, 1),
    "side by side": ([200], 1, 8),
    "a chunk beyond a subtotal": ([200], 1, 200),
    "a prime chunk": ([201], 1, 67),
    "small buckets": ([40] * 5, 1, 4),
    "unequal buckets": ([16, 150, 34], 1, 2),
    "two devices": ([200], 2, 1),
    "small buckets on two devices": ([40] * 5, 2, 20),
}


def laid_out(values, sizes):
    edges = np.cumsum([0, *sizes])
    parts = (values[a:b] for a, b in zip(edges[:-1], edges[1:], strict=True))
    return [bucket_of(part, size) for part, size in zip(parts, sizes, strict=True) if len(part)]


def opened(layout, **changes):
    sizes, devices, chunk = LAYOUTS[layout]
    chosen = plan(clip_norm=CLIP, **changes)
    return sizes, door(as_held, chosen, SHAPE, mesh=client_mesh(devices), chunk=chunk)


def made_to_round(count: int) -> np.ndarray:
    """Contributions, each of which a float32 sum rounds up with the first and down without it."""
    rng, width = np.random.default_rng(0), WIDTH
    size = np.float32(CLIP * (1 - 1e-6) / width**0.5)
    values = [np.full(width, size)]
    with_it, without = values[0], np.zeros(width, np.float32)
    for _ in range(count - 1):
        choices = (size * (1 - 0.01 * rng.random((64, width)))).astype(np.float32)
        up = (with_it + choices) - (np.float64(with_it) + choices)
        down = (without + choices) - (np.float64(without) + choices)
        value = np.take_along_axis(choices, np.argmax(up - down, axis=0)[None], axis=0)[0]
        with_it, without = with_it + value, without + value
        values.append(value)
    return np.stack(values)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_client_moves_the_sum_by_what_the_noise_is_for(layout, sums):
    """TRUST 16: at random and in data made for it, to the clip's own 1e-6."""
    sizes, asked = opened(layout)
    rng = np.random.default_rng(0)
    drawn = rng.normal(size=(200, WIDTH)) * np.exp(rng.uniform(-9, 9, (200, 1)))
    for values in (made_to_round(200), drawn.astype(np.float32)):
        whole = sums.of(asked, laid_out(values, sizes))
        for left_out in (0, 7, 199):
            less = sums.of(asked, laid_out(np.delete(values, left_out, axis=0), sizes))
            norm = min(CLIP, float(np.linalg.norm(np.float64(values[left_out]))))
            moved = np.linalg.norm(whole - less)
            assert norm - WIDTH**0.5 * STEP <= moved * (1 + 1e-6)
            assert moved <= norm * (1 + 1e-6)


def test_the_sum_has_the_same_bits_for_every_order_and_layout(sums):
    """TRUST 22, 23: contributions within the clip norm are added as they are, to the bit."""
    values = np.random.default_rng(1).normal(size=(200, WIDTH))
    values *= CLIP * (1 - 1e-6) / np.linalg.norm(values, axis=1, keepdims=True)
    # All at the clip norm and alike: together more than an int32 has.
    aligned = np.zeros((200, WIDTH))
    aligned[:, 3] = -CLIP
    for each in (values.astype(np.float32), aligned.astype(np.float32)):
        expected = np.trunc(np.float64(each) / STEP).sum(0) * STEP
        sums.made.clear()
        for layout in LAYOUTS:
            sizes, asked = opened(layout)
            for order in (each, each[::-1].copy()):
                np.testing.assert_array_equal(sums.of(asked, laid_out(order, sizes)), expected)
        assert len({key.tobytes() for *_, key in sums.made}) == 1


@pytest.mark.parametrize("layout", ["one by one", "side by side"])
def test_what_is_not_finite_or_zero_leaves_no_trace(layout, sums):
    """TRUST 2: neither NaN and infinity, nor a negative zero, nor padding."""
    sizes, asked = opened(layout)
    values = np.random.default_rng(2).normal(size=(200, WIDTH)).astype(np.float32)
    nothing = values.copy()
    for row, bad in enumerate((np.nan, np.inf, -np.inf, 3e38, -0.0, 0.0)):
        values[5 * row], nothing[5 * row] = bad, 0.0
    found, expected = (sums.of(asked, laid_out(each, sizes)) for each in (values, nothing))
    np.testing.assert_array_equal(found, expected)


def test_the_noise_is_larger_by_what_the_clip_may_exceed(sums):
    """By 2^-16, which is more than 1e-6: seen where it leads to another multiple of the grid."""
    width, multiplier = 200_000, 1.3
    shape = jax.ShapeDtypeStruct((width,), jnp.float32)
    asked = door(as_held, plan(clip_norm=CLIP, noise_multiplier=multiplier), shape)
    value = (np.random.default_rng(3).normal(size=(1, width)) * 1e-3).astype(np.float32)
    released = through(asked, None, [bucket_of(value, 2)]).value
    (high, low), _, words = sums.made[-1]
    total = ((np.int64(high) << 24) + low) * STEP
    key = jax.random.wrap_key_data(jnp.asarray(words), impl="threefry4x32")
    key = jax.random.fold_in(key, 0)  # of the vector; the indicators have another
    grid = 2.0**-6
    off, drawn = [], np.float64(standard_normal(key, (high.size,)))
    for slack in (1, 1 + 2**-16):
        noisy = total + drawn * multiplier * CLIP * slack
        off.append(np.count_nonzero(np.round(noisy / grid)[:width] * grid != released))
    assert off[1] < 10 < 50 < off[0]


@given(exponent=st.integers(-39, 39), mantissa=st.sampled_from([1.0, 1 + 2**-23, 1.4, 2 - 2**-23]))
@settings(max_examples=60)
def test_steps_follow_from_the_clip_norm(exponent, mantissa):
    """A power of two, of which the clip norm has between 2^23 and 2^24."""
    clip_norm = np.float32(mantissa * 2.0**exponent)
    scale = float(ClipSteps().scale(jnp.float32(clip_norm), jnp.float32(1)))
    assert np.frexp(scale)[0] == 0.5
    assert 2**23 < float(clip_norm) * scale <= 2**24


@pytest.mark.parametrize("clip_norm", [1.1e-12, 1e-5, 1.0, 3e4, 1e6, 9e11])
def test_at_every_clip_norm_no_client_grows(clip_norm, sums):
    """Towards zero: no coordinate is longer than it was, and the smallest are not all lost."""
    asked = door(as_held, plan(clip_norm=clip_norm), SHAPE, mesh=client_mesh(1))
    rng = np.random.default_rng(4)
    scale = float(ClipSteps().scale(jnp.float32(clip_norm), jnp.float32(1))) * STEP
    for size in (1e-3, 1.0, 1e3):
        value = (rng.normal(size=(1, WIDTH)) * clip_norm * size).astype(np.float32)
        found = sums.of(asked, [bucket_of(value, 2)]) / scale
        norm = np.linalg.norm(np.float64(value[0]))
        clipped = np.float64(value[0]) * min(1.0, clip_norm / norm)
        assert np.all(np.abs(found) <= np.abs(clipped) * (1 + 1e-6))
        assert np.all(np.abs(found - clipped) <= 2.0**-23 * clip_norm + 1e-6 * np.abs(clipped))


def test_sums_of_2_to_the_26_clients_do_not_overflow():
    """TRUST 27: all at the clip norm and alike, on 512 devices."""
    steps, fold, devices = ClipSteps(), 2**11, 512
    most = np.array([2**30, -(2**30), 2**30 - 1, 5], np.int32)

    @jax.jit
    def total():
        sums = steps.zeros(jnp.zeros(4), 1)

        def add(_, sums):
            return steps.merge(sums, steps.start(sums) + most)

        sums = jax.lax.fori_loop(0, fold, add, sums)
        everywhere = jax.tree.map(lambda leaf: jnp.repeat(leaf, devices, axis=0), sums)
        return steps.join_devices(everywhere)

    found = jax.device_get(total())
    whole = most.astype(np.int64) * fold * devices
    assert whole.max() == 2**26 * 2**24
    # Full subtotals of the longest contributions, on a full low part, fit an int32.
    assert steps.most * (2**24 + 17) + 2**24 <= 2**31
    np.testing.assert_array_equal((np.int64(found.high) << 24) + found.low, whole)
    scale = jnp.float32(2.0**24)
    released = steps.add_noise(found, jnp.full(4, 0.25), scale)
    np.testing.assert_allclose(released, whole * 2.0**-24 + 0.25, rtol=2**-23)


# Several products, normalisation and a loop over steps, as training has.
def _step(broadcast, state, batch, mask, key):
    def loss(weights):
        hidden = jnp.tanh(batch["x"] @ weights["first"])
        return jnp.sum(jnp.where(mask, jnp.sum((hidden @ weights["second"]) ** 2, -1), 0.0))

    gradients = jax.grad(loss)(state)
    return jax.tree.map(lambda w, g: w - 0.1 * g / (1 + jnp.sum(jnp.square(g))), state, gradients)


def _weights(scale):
    rng = np.random.default_rng(5)
    shapes = {"first": (WIDTH, 16), "second": (16, 3)}
    return {
        name: jnp.asarray(scale * rng.normal(size=s), jnp.float32) for name, s in shapes.items()
    }


trained = ClientSteps(
    lambda broadcast, key: _weights(0.3),
    _step,
    lambda broadcast, state: jax.tree.map(jnp.subtract, state, _weights(0.3)),
)


def _beside(client, place, slots, rung, neighbours):
    """A bucket of one client with examples, at this place, beside others that add nothing."""
    batches = np.zeros((slots, rung, 4, WIDTH), np.float32)
    batches[...] = neighbours
    batches[place, : len(client)] = client
    batches[place, len(client) :] = 0
    steps = np.full(slots, rung if neighbours else 0, np.int32)
    steps[place] = len(client)
    mask = np.arange(rung)[None, :, None] < steps[:, None, None]
    weight = np.ones(slots, np.float32) if np.isnan(neighbours) or not neighbours else None
    real = np.arange(slots) == place
    return bucket_of(np.zeros((slots, 1), np.float32))._replace(
        batches={"x": batches},
        mask=np.broadcast_to(mask, (slots, rung, 4)).copy(),
        steps=steps,
        weight=np.float32(real) if weight is None else weight,
    )


@pytest.mark.parametrize("chunk", [1, 4, 32])
def test_a_contribution_has_the_same_bits_in_every_slot_and_rung(chunk, sums):
    """Beside any neighbours: without examples, not finite, or as large as a float32 can be."""
    like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), _weights(1))
    asked = door(trained, plan(clip_norm=CLIP), like, mesh=client_mesh(1), chunk=chunk)
    client = np.float32(np.random.default_rng(6).normal(size=(3, 4, WIDTH)))
    found = [
        sums.of(asked, [_beside(client, place, 32, rung, neighbours)])
        for rung in (3, 4, 9)
        for place in (0, 1, 17, 31)
        for neighbours in (0.0, np.nan, 1e30, 1e-3)
    ]
    assert np.linalg.norm(found[0]) > 0.01
    for other in found[1:]:
        np.testing.assert_array_equal(other, found[0])
