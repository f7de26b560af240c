"""Adaptive clipping: the clip norm finds the quantile, and each round's noise uses its own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpfl.data import from_clients
from jaxpfl.data.cohort import CohortSpec
from jaxpfl.federated import Execution, Query, client_mesh
from jaxpfl.federated.release.door import next_clip_norm
from jaxpfl.privacy import AdaptiveClip, Clip, Plan, Poisson
from jaxpfl.privacy.clipping import LARGEST_CLIP_NORM, SMALLEST_CLIP_NORM, clip_factors
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
from tests.federated.releases import releasing


def with_norms(norms):
    """One client for each norm, in random directions."""
    rng = np.random.default_rng(0)
    values = rng.normal(size=(len(norms), DIM))
    values *= (np.asarray(norms) / np.linalg.norm(values, axis=1))[:, None]
    return bucket_of(values.astype(np.float32))


@pytest.mark.parametrize("start", [pytest.param(0.02, marks=pytest.mark.long), 10.0])
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
        opened = door(held_vector, chosen, SHAPE)
        clip_norm, path = jnp.float32(start), []
        for index in range(40):
            clip_norm = through(opened, ZERO, [bucket], keys(index), clip_norm=clip_norm).clip_norm
            path.append(float(clip_norm))
        assert abs(np.mean(path[-20:]) - 2 * quantile) < 0.15


def test_a_rounds_noise_and_clip_use_the_rounds_own_clip_norm():
    """TRUST 26: the new clip norm is for the NEXT round."""
    wide = {"a": jax.ShapeDtypeStruct((100_000,), jnp.float32)}
    chosen = plan(
        clip_norm=4.0,
        noise_multiplier=1.0,
        adaptive_clip=AdaptiveClip(target_quantile=0.9, learning_rate=0.9),
    )
    opened = door(held_vector, chosen, wide)
    clip_norm = jnp.float32(chosen.clip_norm)
    for index in range(3):
        used = float(clip_norm)
        found = through(opened, ZERO, [], keys(index), clip_norm=clip_norm)
        expected = chosen.value_noise_std(used)
        assert abs(np.asarray(found.value["a"]).std() / expected - 1) < 0.02
        clip_norm = found.clip_norm
        assert abs(float(clip_norm) / used - 1) > 0.05  # it moved, so the test can tell


def noise_of_indicators(chosen, clip_norm) -> float:
    """C exp(-eta (b - gamma)) with b = noise / n + 1/2, solved for the noise; eta is 1."""
    return -float(np.log(np.float64(clip_norm))) * chosen.denominator


# A vector of sums is padded to a multiple of 512, whose last coordinate is a leaf's own at most.
@pytest.mark.parametrize("width", [DIM, 512])
def test_the_indicators_noise_is_no_noise_of_the_sum(width):
    """Noise that two releases share cancels in their difference, and protects neither.

    Both are on grids of up to 1/32 of their noise's deviation: shared noise differs by 0.04.
    """
    adaptive = AdaptiveClip(target_quantile=0.5, learning_rate=1.0, indicator_noise=1.0)
    chosen = plan(adaptive_clip=adaptive)
    opened = door(held_vector, chosen, {"a": jax.ShapeDtypeStruct((width,), jnp.float32)})
    apart = np.zeros(width)
    for index in range(6):
        found = through(opened, ZERO, [], keys(index), clip_norm=jnp.float32(1.0))
        drawn = noise_of_indicators(chosen, found.clip_norm)
        value_D = np.asarray(found.value["a"], np.float64) / chosen.value_noise_std(1.0)
        assert abs(drawn) > 1e-3
        apart = np.maximum(apart, np.abs(np.abs(value_D) - abs(drawn)))
    assert apart.min() > 0.05


def test_the_indicators_noise_has_the_plans_size():
    """TRUST 18, 26: the cost of the quantile is that of this noise."""
    adaptive = AdaptiveClip(target_quantile=0.5, learning_rate=1.0, indicator_noise=4.0)
    chosen = plan(adaptive_clip=adaptive)
    opened = door(held_vector, chosen, SHAPE)
    found = [
        noise_of_indicators(chosen, through(opened, ZERO, [], keys(index)).clip_norm)
        for index in range(200)
    ]
    # Its standard error is 5 %.
    assert np.std(found) == pytest.approx(4.0, rel=0.15)


def test_without_adaptive_clipping_the_clip_norm_stays():
    opened = door(held_vector, plan(), SHAPE)
    assert float(through(opened, ZERO, [with_norms([3.0, 4.0])]).clip_norm) == 1.0


@pytest.mark.parametrize(("norm", "below"), [(3.0, 0), (0.5, 5)])
@pytest.mark.parametrize("chunk", [1, 32])
def test_clients_of_padding_are_not_counted(chunk, norm, below, tmp_path):
    """TRUST 23, 26: 27 of 32 slots are empty, and in one chunk with 5 clients."""
    clients = from_clients({f"client {k}": {"x": [norm]} for k in range(5)})
    adaptive = AdaptiveClip(target_quantile=0.5, learning_rate=0.5)
    everyone = dict(rounds=1, participation=Poisson(5, 5))
    asked = Query(
        "sum",
        lambda broadcast, examples, key: jnp.sum(
            jnp.where(examples.mask, examples.batches["x"], 0.0)
        ),
        Plan.without_privacy(clip=Clip(1.0, adaptive=adaptive), **everyone),
        CohortSpec(1, 1, clients_per_bucket=32),
        execution=Execution(mesh=client_mesh(1), chunk=chunk),
    )
    with releasing(tmp_path / "ledger.jsonl", clients) as releaser:
        found = releaser.release(asked, round=1)
    assert float(found.clip_norm) == pytest.approx(np.exp(-0.5 * (below / 5 - 0.5)), rel=1e-6)


@pytest.mark.parametrize("below", [1.0, 0.0])
def test_thousands_of_rounds_stay_where_the_clip_is_exact(below):
    """TRUST 3, 16: all updates within C (all are empty), or none; then one that is not comes."""
    chosen = plan(adaptive_clip=AdaptiveClip(target_quantile=0.5, learning_rate=0.2))
    noisy_below = jnp.float32((below - 0.5) * chosen.denominator)
    step = jax.jit(lambda clip_norm: next_clip_norm(chosen, clip_norm, noisy_below))
    clip_norm, path = jnp.float32(1.0), []
    for _ in range(3_000):
        clip_norm = step(clip_norm)
        path.append(float(clip_norm))
    assert min(path) >= SMALLEST_CLIP_NORM and max(path) <= LARGEST_CLIP_NORM
    limit = SMALLEST_CLIP_NORM if below else LARGEST_CLIP_NORM
    assert path[-1] == path[-2] == pytest.approx(limit, rel=1e-6)
    for scale in (1e6, 2.0, 1e-3):
        update = np.full(50, scale * limit / 50**0.5, np.float32)
        factors, _, counts = clip_factors({"x": update}, clip_norm)
        norm = np.linalg.norm(np.asarray(update * factors["x"], np.float64))
        assert bool(counts)
        assert norm == pytest.approx(min(scale, 1) * limit, rel=1e-6)
    # A plan that begins where this one ended is accepted, and it finds back.
    assert isinstance(plan(clip_norm=path[-1]), Plan)
    other_way = jnp.float32((0.5 - below) * chosen.denominator)
    assert abs(np.log(float(next_clip_norm(chosen, clip_norm, other_way)) / path[-1])) > 0.09
