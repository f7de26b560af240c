"""The noise of a release: its size, drawn once, and bound to the exact sum and its scale."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpfl.federated import client_mesh
from jaxpfl.privacy import AdaptiveClip
from tests.federated.cohorts import (
    DIM,
    SHAPE,
    ZERO,
    bucket_of,
    door,
    held_vector,
    keys,
    plan,
    through,
)

WIDTH, SIGMA, CLIP = 200_000, 1.7, 1_000.0
STEP = np.float32(2.0**-14)  # in which contributions of that norm are counted
WIDE = jax.ShapeDtypeStruct((WIDTH,), jnp.float32)
ONE_CLIENT = [bucket_of(np.zeros((1, DIM), np.float32), slots=2)]


def as_broadcast(broadcast, examples, key):
    """What the client is sent: with one client, the sum to the bit."""
    return broadcast


def opened(**changes):
    """Noise of standard deviation SIGMA, on contributions that are not clipped."""
    return door(as_broadcast, plan(clip_norm=CLIP, noise_multiplier=SIGMA / CLIP, **changes), WIDE)


@pytest.fixture(scope="module")
def total() -> np.ndarray:
    return np.random.default_rng(0).normal(size=WIDTH).astype(np.float32)


def released(total, **settings) -> np.ndarray:
    return np.float64(through(opened(), total, ONE_CLIENT, **settings).value)


def looks_like(values: np.ndarray, std: float) -> bool:
    """Whether independent draws have this standard deviation, within 1 % (6 standard errors)."""
    if abs(values.std() / std - 1) > 0.01 or abs(values.mean()) > 0.02 * std:
        return False
    return bool(abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.015)


def independent(first: np.ndarray, second: np.ndarray, std: float = SIGMA) -> bool:
    """Whether the noises of two releases of nearly the same sum are independent."""
    return looks_like(first - second, std * 2**0.5) and looks_like(first + second, std * 2**0.5)


def test_noise_has_the_plans_size(total):
    """TRUST 18: z S, and neither two thirds nor three halves of it."""
    noise = released(total) - total
    assert looks_like(noise, SIGMA)
    assert not looks_like(noise, SIGMA * 2 / 3)
    assert not looks_like(noise, SIGMA * 3 / 2)


def test_noise_is_drawn_once_over_devices():
    """TRUST 22: one draw in total; no share of the coordinates has the noise of another."""
    draws = []
    for mesh in (client_mesh(1), client_mesh(2)):
        made = door(held_vector, plan(noise_multiplier=SIGMA), WIDE, mesh=mesh)
        draws.append([np.float64(through(made, ZERO, [], keys(round)).value) for round in (0, 1)])
    np.testing.assert_array_equal(draws[0], draws[1])
    first, second = draws[0]
    assert looks_like(first, SIGMA) and looks_like(second, SIGMA)
    assert independent(first, second)
    assert independent(first[: WIDTH // 2], first[WIDTH // 2 :])


def test_sums_that_differ_in_one_step_get_independent_noise(total):
    """No difference of two releases has less noise than sigma sqrt(2)."""
    first = released(total) - total
    for place in (0, 123_456, WIDTH - 1):
        other = total.copy()
        other[place] += STEP
        second = released(other) - other
        assert independent(first, second)
    # The test can fail: one noise for both, or for a part of both.
    assert not independent(first, first)
    assert not independent(first, 0.2 * first + 0.96**0.5 * second)


def test_one_sum_at_two_scales_gets_independent_noise(total):
    """A noise known at two scales would be known."""
    near = jnp.float32(CLIP * (1 + 2**-20))
    first, second = (released(total, clip_norm=clip) - total for clip in (None, near))
    assert independent(first, second)
    # Another multiplier, the same clip norm.
    louder = door(as_broadcast, plan(clip_norm=CLIP, noise_multiplier=2 * SIGMA / CLIP), WIDE)
    noise = np.float64(through(louder, total, ONE_CLIENT).value) - total
    assert looks_like(noise, 2 * SIGMA)
    assert independent(first, noise / 2)


def test_what_a_float32_does_not_show_decides_too():
    """Sums that are equal once rounded; and equal sums of another number of clients."""
    made = door(held_vector, plan(noise_multiplier=SIGMA, clip_norm=10.0), SHAPE)
    fours, zeros = np.full((16, DIM), 4, np.float32), np.zeros((1, DIM), np.float32)
    several = {
        "plain": [bucket_of(fours), bucket_of(zeros, 2)],
        # A step, where a float32 has 2^-17.
        "a little more": [bucket_of(fours), bucket_of(zeros + np.float32(2**-20), 2)],
        "one client fewer": [bucket_of(fours)],
    }
    found = {name: through(made, ZERO, buckets) for name, buckets in several.items()}
    values = [np.asarray(each.value["a"]) for each in found.values()]
    for index, first in enumerate(values):
        for second in values[index + 1 :]:
            # Of a grid of steps of half a unit, one coordinate may be the same.
            assert np.count_nonzero(first != second) >= DIM - 1
    assert len({np.asarray(each.name).tobytes() for each in found.values()}) == len(several)


def test_the_quantiles_noise_is_bound_alike():
    """TRUST 26: under adaptive clipping the indicators are a part of what is released."""
    adaptive = AdaptiveClip(target_quantile=0.5, learning_rate=0.2)
    made = door(held_vector, plan(adaptive_clip=adaptive), SHAPE)
    zeros = np.zeros((2, DIM), np.float32)
    one, two = (through(made, ZERO, [bucket_of(zeros[:count], 2)]) for count in (1, 2))
    again = through(made, ZERO, [bucket_of(zeros[:1], 2)])
    assert float(one.clip_norm) == float(again.clip_norm) != float(two.clip_norm)
    assert np.median(np.abs(np.asarray(one.value["a"]) - np.asarray(two.value["a"]))) > 1e-3


def test_names_are_equal_for_the_same_release_and_no_other(total):
    """A name tells apart what was released, and is no part of the noise."""
    other = total.copy()
    other[5] += STEP
    halves = [np.concatenate([keys(a).noise[:4], keys(b).noise[4:]]) for a, b in ((0, 1), (1, 0))]
    asked = opened()
    again = total.copy()
    found = [
        through(asked, sent, ONE_CLIENT, key, clip_norm=clip).name
        for sent, key, clip in (
            (total, keys(), None),
            (other, keys(), None),
            (total, keys(round=1), None),
            *((total, keys()._replace(noise=half), None) for half in halves),
            (total, keys(), jnp.float32(2 * CLIP)),
            (again, keys(), None),
        )
    ]
    words = [np.asarray(name).tobytes() for name in found]
    assert words[-1] == words[0]
    assert len(set(words)) == len(words) - 1
    assert all(np.asarray(name).shape == (4,) for name in found)
