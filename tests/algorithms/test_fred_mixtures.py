"""The best mixture of candidates: its gradient, and that no other mixture is nearer, in float64."""

import math

import numpy as np
import pytest

from jaxpfl.algorithms.frechet import Moments, distance, mixture, moments
from jaxpfl.algorithms.fred import FredPlan, PrivateMoments, best_mixture
from jaxpfl.algorithms.fred.query import MomentNoise
from jaxpfl.algorithms.fred.scores import distance_of_mixture, visible
from tests.algorithms.test_frechet import D, by_sqrtm, embeddings, gaussian
from tests.algorithms.test_fred_scores import released
from tests.refusals import refusal


def exact(target):
    """As if released without noise."""
    silent = MomentNoise(0.0, 0.0, 0.0, 0.0, 0.0)
    return PrivateMoments(target, silent, FredPlan.without_privacy())


@pytest.mark.parametrize("count", [200, 5])
def test_gradient_of_a_mixtures_distance_equals_differences(count):
    """Of `distance` on the plane where shares sum to 1; five texts have a singular covariance."""
    parts, target = [gaussian(seed) for seed in range(50, 54)], gaussian(60, count=count)
    share_K, step = np.array([0.1, 0.2, 0.3, 0.4]), 1e-6
    value, slope_K = distance_of_mixture(exact(target), parts)(share_K)
    assert value == pytest.approx(by_sqrtm(mixture(parts, share_K), target), rel=1e-5)
    for k in (1, 2, 3):
        by_K = step * (np.eye(4)[k] - np.eye(4)[0])
        ahead, behind = (distance(target, mixture(parts, [*(share_K + s * by_K)])) for s in (1, -1))
        expected = (ahead - behind) / (2 * step)
        assert slope_K[k] - slope_K[0] == pytest.approx(expected, rel=1e-5)


def test_the_best_mixture_of_two_is_the_one_that_was_drawn():
    """3,000 texts of one corpus and 7,000 of the other; a grid of shares finds no nearer one."""
    rows = [embeddings(seed, 300) for seed in (50, 51)]
    drawn = np.random.default_rng(9).integers(300, size=10_000)
    private = moments(np.concatenate([rows[0][drawn[:3_000]], rows[1][drawn[3_000:]]]), math.inf)
    parts = {name: moments(each, math.inf) for name, each in zip("ab", rows, strict=True)}
    found = best_mixture(exact(private), parts)
    assert list(found.shares) == ["b", "a"]
    assert found.shares["a"] == pytest.approx(0.3, abs=0.01)
    mixtures = [mixture(list(parts.values()), [k / 100, 1 - k / 100]) for k in range(101)]
    grid = [distance(each, private) for each in mixtures]
    assert found.distance <= min(grid) < 0.1 * found.nearest_distance
    assert (found.nearest, found.nearest_distance) == ("b", pytest.approx(grid[0]))


@pytest.mark.parametrize(("noise", "most"), [(20.0, 12), (400.0, 9), (3_000.0, 4), (1e6, 0)])
def test_noise_that_hides_the_covariance_does_not_draw_shares(noise, most):
    """To an even mixture, say: where nothing of the covariance is seen, the means tell them."""
    parts = {f"c{k}": gaussian(50 + k) for k in range(4)}
    drawn = mixture(list(parts.values()), [0.2, 0.8, 0.0, 0.0])
    clients = Moments(4_000, drawn.mean_D, drawn.covariance_DxD)
    for seed in range(5):
        found = released(clients, np.random.default_rng(seed), [1.0, 100.0, noise])
        best = best_mixture(found, parts)
        assert best.shares["c1"] == pytest.approx(0.8, abs=0.05)
        assert best.shares["c0"] == pytest.approx(0.2, abs=0.05)
        assert best.distance < best.nearest_distance
        assert len(visible(found)[0]) <= most


@pytest.mark.parametrize("number", [1, 3, 8])
def test_no_other_mixture_is_nearer(number):
    """Random ones, each corpus alone, and what lies on the way from the best one to these."""
    parts = {f"c{k}": gaussian(50 + k) for k in range(number)}
    for target in (gaussian(70), parts["c0"]):
        found, rng = best_mixture(exact(target), parts), np.random.default_rng(3)
        best_K = np.array([found.shares.get(name, 0.0) for name in parts])
        others = [*rng.dirichlet(np.full(number, 0.5), 100), *np.eye(number)]
        others += [0.99 * best_K + 0.01 * other_K for other_K in others]
        distances = [distance(mixture(list(parts.values()), each), target) for each in others]
        assert found.distance <= min(distances) + 1e-9
    assert list(found.shares) == ["c0"]
    assert found.distance == found.nearest_distance


def test_a_best_mixture_needs_candidates_of_the_clients_dimension():
    target = exact(gaussian(0, dimension=D))
    for parts, words in (({}, "no candidate"), ({"a": gaussian(1, dimension=3)}, "found [3]")):
        refusal(lambda parts=parts: best_mixture(target, parts), words)
