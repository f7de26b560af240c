"""Adaptive clipping: the clip norm finds the quantile, and each round's noise uses its own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpfl.federated import private_sum
from jaxpfl.privacy import AdaptiveClip
from tests.federated.cohorts import DIM, SHAPE, ZERO, bucket_of, held_vector, keys, plan


def with_norms(norms):
    """One client for each norm, in random directions."""
    rng = np.random.default_rng(0)
    values = rng.normal(size=(len(norms), DIM))
    values *= (np.asarray(norms) / np.linalg.norm(values, axis=1))[:, None]
    return bucket_of(values.astype(np.float32))


@pytest.mark.parametrize("start", [0.02, 50.0])
def test_clip_norm_converges_to_the_quantile_from_both_sides(start):
    """TRUST 26: norms are spread evenly over (0, 2); their median is 1, the 80% quantile 1.6."""
    bucket = with_norms(np.linspace(0.0, 2.0, 202)[1:-1])
    for quantile in (0.5, 0.8):
        chosen = plan(
            clients_per_round=200,
            clip_norm=start,
            noise_multiplier=0.5,
            adaptive_clip=AdaptiveClip(target_quantile=quantile, learning_rate=0.5),
        )
        opened = private_sum(held_vector, chosen, SHAPE)
        state, path = opened.init(), []
        for index in range(80):
            _, state = opened(ZERO, [bucket], state, keys(index))
            path.append(float(state.clip_norm))
        assert abs(np.mean(path[-30:]) - 2 * quantile) < 0.15


def test_a_rounds_noise_and_clip_use_the_rounds_own_clip_norm():
    """TRUST 26: the new clip norm is for the NEXT round."""
    wide = {"a": jax.ShapeDtypeStruct((100_000,), jnp.float32)}
    chosen = plan(
        clip_norm=4.0,
        noise_multiplier=1.0,
        adaptive_clip=AdaptiveClip(target_quantile=0.9, learning_rate=0.9),
    )
    opened = private_sum(held_vector, chosen, wide)
    state = opened.init()
    for index in range(3):
        used = float(state.clip_norm)
        release, state = opened(ZERO, [], state, keys(index))
        expected = chosen.value_noise_std(used)
        assert abs(np.asarray(release["a"]).std() / expected - 1) < 0.02
        assert abs(float(state.clip_norm) / used - 1) > 0.05  # it moved, so the test can tell


def test_without_adaptive_clipping_the_clip_norm_stays():
    opened = private_sum(held_vector, plan(), SHAPE)
    _, state = opened(ZERO, [with_norms([3.0, 4.0])], opened.init(), keys())
    assert float(state.clip_norm) == 1.0
