"""Moments and the Frechet distance against scipy, closed forms and plain loops, in float64."""

import math

import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg
from hypothesis import given
from hypothesis import strategies as st

from jaxpfl.algorithms.frechet import (
    Moments,
    Reference,
    RunningMoments,
    distance,
    mixture,
    moments,
    project_psd,
)
from jaxpfl.errors import InputError
from tests.refusals import refusal

D = 12


def embeddings(seed, count=200, dimension=D, dtype=np.float64):
    rng = np.random.default_rng(seed)
    axes_DxD = rng.normal(size=(dimension, dimension)) / math.sqrt(dimension)
    rows_NxD = rng.normal(size=(count, dimension)) @ axes_DxD + rng.normal(size=dimension)
    return rows_NxD.astype(dtype)


def gaussian(seed, **changes):
    return moments(embeddings(seed, **changes), math.inf)


def plain_moments(rows_NxD, clip_norm):
    """Mean and covariance by a loop over examples, in float64."""
    norms = [math.sqrt(sum(x * x for x in row_D)) for row_D in np.float64(rows_NxD)]
    factors = [min(1.0, clip_norm / norm) if norm else 1.0 for norm in norms]
    clipped = [row_D * factor for row_D, factor in zip(np.float64(rows_NxD), factors, strict=True)]
    mean_D = sum(clipped) / len(clipped)
    return mean_D, sum(np.outer(v_D - mean_D, v_D - mean_D) for v_D in clipped) / len(clipped)


def by_sqrtm(a, b):
    root_DxD = scipy.linalg.sqrtm(a.covariance_DxD @ b.covariance_DxD)
    shift_D = a.mean_D - b.mean_D
    return shift_D @ shift_D + np.trace(a.covariance_DxD + b.covariance_DxD - 2 * root_DxD.real)


def relative_error(found, expected):
    return np.linalg.norm(found - expected) / np.linalg.norm(expected)


# Moments


@pytest.mark.parametrize("clip_norm", [math.inf, 2.0, 0.3])
def test_moments_equal_a_loop(clip_norm):
    rows_NxD = embeddings(0)
    rows_NxD[7] = 0
    before_NxD = rows_NxD.copy()
    found = moments(rows_NxD, clip_norm)
    np.testing.assert_array_equal(rows_NxD, before_NxD)
    mean_D, covariance_DxD = plain_moments(rows_NxD, clip_norm)
    assert found.count == len(rows_NxD)
    np.testing.assert_allclose(found.mean_D, mean_D, rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(found.covariance_DxD, covariance_DxD, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize(
    ("mean", "later", "deviation"),
    [(0.0, 0.0, 0.01), (1.0, 0.0, 0.01), (100.0, 0.0, 0.01), (1.0, 30.0, 1.0)],
)
def test_float32_is_sound_with_a_large_common_mean(mean, later, deviation):
    """Also where later blocks have another one."""
    rng = np.random.default_rng(1)
    rows_NxD = (mean + deviation * rng.normal(size=(1500, D))).astype(np.float32)
    rows_NxD[1000:] += np.float32(later)
    running = RunningMoments(D, math.inf)
    running.add(rows_NxD)
    mean_D, covariance_DxD = plain_moments(rows_NxD, math.inf)
    assert relative_error(running.result().covariance_DxD, covariance_DxD) < 2e-6
    np.testing.assert_allclose(running.result().mean_D, mean_D, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("dtype", [np.float16, jnp.bfloat16, np.float32, np.float64])
def test_every_float_type_is_taken(dtype):
    rows_NxD = embeddings(2).astype(dtype)
    mean_D, covariance_DxD = plain_moments(rows_NxD.astype(np.float64), 1.0)
    assert relative_error(moments(rows_NxD, 1.0).covariance_DxD, covariance_DxD) < 1e-6
    assert relative_error(moments(jnp.asarray(rows_NxD), 1.0).mean_D, mean_D) < 1e-6


@given(
    cuts=st.lists(st.integers(0, 300), min_size=1, max_size=12), clip=st.sampled_from([1.0, 9.0])
)
def test_pieces_give_what_the_whole_gives(cuts, clip):
    rows_NxD = embeddings(3, count=sum(cuts) + 1, dtype=np.float32) + np.float32(3)
    running = RunningMoments(D, clip)
    start = 0
    for cut in [*cuts, 1]:
        running.add(rows_NxD[start : start + cut])
        start += cut
    found, whole = running.result(), moments(rows_NxD, clip)
    np.testing.assert_allclose(found.mean_D, whole.mean_D, rtol=1e-6)
    np.testing.assert_allclose(found.covariance_DxD, whole.covariance_DxD, rtol=1e-5, atol=1e-7)


def test_one_example_has_no_covariance():
    row_D = embeddings(7, count=1, dtype=np.float32)
    found = moments(row_D, math.inf)
    np.testing.assert_allclose(found.mean_D, row_D[0], rtol=1e-7)
    np.testing.assert_array_equal(found.covariance_DxD, np.zeros((D, D)))
    other = moments(embeddings(8, count=1, dtype=np.float32), math.inf)
    expected = np.sum((found.mean_D - other.mean_D) ** 2)
    assert distance(found, other) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("bad", "row"), [(math.nan, 0), (math.inf, 700), (-math.inf, 1999)])
def test_a_row_that_is_not_finite_is_named(bad, row):
    rows_NxD = embeddings(9, count=2000, dtype=np.float32)
    rows_NxD[row, 3] = bad
    running = RunningMoments(D, math.inf)
    with pytest.raises(InputError, match=f"row {row} "):
        for start in range(0, 2000, 250):
            running.add(rows_NxD[start : start + 250])


ROWS, WHOLE = np.zeros((3, 3), np.float32), np.zeros((3, 3), np.int32)
ONES, ZERO = np.eye(2), np.zeros(2)
REFUSED = {
    lambda: moments(ROWS[:0], 1.0): "at least one",
    lambda: moments(ROWS[0], 1.0): "[n, d]",
    lambda: moments(WHOLE, 1.0): "floating point int32",
    lambda: moments(ROWS, 0.0): "clip_norm 0",
    lambda: moments(ROWS, -math.inf): "clip_norm -inf",
    lambda: moments(ROWS, math.nan): "clip_norm nan",
    lambda: moments(np.full((3, 3), 1e30, np.float32), 1.0): "too large",
    lambda: RunningMoments(3, 1.0).add(np.zeros((2, 4), np.float32)): "[n, 3], found [2, 4]",
    lambda: Moments(0, ZERO, ONES): "count 0",
    lambda: Moments(math.nan, ZERO, ONES): "count nan",
    lambda: Moments(1, np.zeros((1, 2)), ONES): "mean_D [1, 2]",
    lambda: Moments(1, np.array([0, math.nan]), ONES): "mean_D finite",
    lambda: Moments(1, ZERO, np.eye(3)): "mean_D has 2",
    lambda: Moments(1, ZERO, np.zeros((2, 3))): "[d, d]",
    lambda: Moments(1, ZERO, np.full((2, 2), math.nan)): "not finite",
    lambda: Moments(1, ZERO, np.array([[1, 0.5], [0.4, 1]])): "not symmetric",
    lambda: Reference(gaussian(23)).distances([gaussian(24), gaussian(25, dimension=3)]): (
        "a candidate has dimension 3, but the reference has 12"
    ),
    lambda: distance(gaussian(23), gaussian(25, dimension=3)): "3, but the reference has 12",
    lambda: mixture([gaussian(37), gaussian(37)], [0.5, 0.4]): "must sum to 1",
    lambda: mixture([gaussian(37), gaussian(37)], [1.5, -0.5]): "share 1",
    lambda: mixture([gaussian(37), gaussian(37)], [math.nan, 1.0]): "share 0",
    lambda: mixture([gaussian(37), gaussian(37)], [1.0]): "needs 2 shares",
    lambda: mixture([], []): "found no corpus",
    lambda: mixture([gaussian(37), gaussian(37, dimension=3)], [0.5, 0.5]): "found [3, 12]",
}


@pytest.mark.parametrize(("call", "words"), REFUSED.items(), ids=REFUSED.values())
def test_what_is_unusable_is_refused(call, words):
    refusal(call, words)


# The distance


@pytest.mark.parametrize("seed", range(5))
def test_distance_equals_sqrtm(seed):
    a, b = gaussian(seed), gaussian(seed + 50)
    assert distance(a, b) == pytest.approx(by_sqrtm(a, b), rel=1e-9)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_distance_with_fewer_examples_than_dimensions(dtype):
    a, b = (gaussian(seed, count=5, dimension=20, dtype=dtype) for seed in (11, 12))
    # The same through the samples: Tr (C1 C2)^(1/2) is the nuclear norm of X1 X2^T / n.
    samples = (embeddings(seed, 5, 20) for seed in (11, 12))
    centred_a, centred_b = (rows - rows.mean(axis=0) for rows in samples)
    overlap = np.linalg.norm(centred_a @ centred_b.T / 5, "nuc")
    traces = np.trace(a.covariance_DxD) + np.trace(b.covariance_DxD)
    expected = np.sum((a.mean_D - b.mean_D) ** 2) + traces - 2 * overlap
    assert distance(a, b) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("count", [5, 200])
def test_distance_is_symmetric_even_after_noise(count):
    noise_DxD = np.random.default_rng(14).normal(size=(D, D))
    a, b = gaussian(15), gaussian(16, count=count)
    for scale in (0.0, 1.0):
        noisy = Moments(9, b.mean_D, b.covariance_DxD + scale * (noise_DxD + noise_DxD.T))
        assert distance(a, noisy) == pytest.approx(distance(noisy, a), rel=1e-7)
        assert distance(noisy, noisy) < 1e-6 * np.trace(project_psd(noisy.covariance_DxD))


def test_noisy_reference_is_its_projection():
    noise_DxD = np.random.default_rng(17).normal(size=(D, D))
    clean, candidate = gaussian(18), gaussian(19)
    noisy = Moments(9, clean.mean_D, clean.covariance_DxD + noise_DxD + noise_DxD.T)
    projected_DxD = project_psd(noisy.covariance_DxD)
    assert np.linalg.eigvalsh(noisy.covariance_DxD)[0] < -0.1  # there is something to project
    reference = Reference(noisy)
    assert reference.rank < D
    assert reference.trace == pytest.approx(np.trace(projected_DxD), rel=1e-12)
    # A little identity, because sqrtm cannot do singular products.
    projected = Moments(9, clean.mean_D, projected_DxD + 1e-12 * np.eye(D))
    expected = by_sqrtm(projected, candidate)
    assert reference.distance(candidate) == pytest.approx(expected, rel=1e-5)


# Mixtures


def test_mixture_equals_embedding_the_mixture():
    corpora = [embeddings(seed, count) for seed, count in ((26, 50), (27, 250), (28, 100))]
    corpora[1] += 40
    found = mixture([moments(rows, math.inf) for rows in corpora], [0.125, 0.625, 0.25])
    whole = moments(np.concatenate(corpora), math.inf)
    assert found.count == 400
    np.testing.assert_allclose(found.mean_D, whole.mean_D, rtol=1e-12)
    assert relative_error(found.covariance_DxD, whole.covariance_DxD) < 1e-13


def test_mixture_holds_no_more_than_its_scarcest_part():
    a, b = gaussian(29, count=100), gaussian(30, count=10)
    assert mixture([a, b], [0.5, 0.5]).count == 20
    pure = mixture([a, b], [1, 0])
    assert pure.count == 100
    np.testing.assert_allclose(pure.covariance_DxD, a.covariance_DxD, rtol=1e-14)


# The projection


def test_projection_is_the_nearest():
    rng = np.random.default_rng(42)
    matrix_DxD = rng.normal(size=(D, D))
    matrix_DxD += matrix_DxD.T
    projected_DxD = project_psd(matrix_DxD)
    away = np.linalg.norm(projected_DxD - matrix_DxD)
    # The semidefinite matrices are convex: were one nearer, a step towards it would help.
    for _ in range(200):
        factor_DxD = rng.normal(size=(D, D))
        towards_DxD = factor_DxD @ factor_DxD.T - projected_DxD
        for step in (1e-4, 1e-2, 1.0):
            assert np.linalg.norm(projected_DxD + step * towards_DxD - matrix_DxD) > away


def test_projection_leaves_semidefinite_matrices():
    definite_DxD = gaussian(43).covariance_DxD
    np.testing.assert_array_equal(project_psd(definite_DxD), definite_DxD)
    singular_DxD = gaussian(44, count=4).covariance_DxD
    np.testing.assert_allclose(project_psd(singular_DxD), singular_DxD, atol=1e-14)
    np.testing.assert_array_equal(project_psd(np.zeros((3, 3))), np.zeros((3, 3)))
