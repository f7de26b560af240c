"""How certain FreD's distances are: intervals and ties against many simulated releases."""

import numpy as np
import pytest

from jaxpfl.algorithms.frechet import distance
from jaxpfl.algorithms.fred import FredPlan, PrivateMoments, score
from jaxpfl.algorithms.fred.query import MomentNoise
from jaxpfl.algorithms.gaussian_moments import Moments

D, COUNT = 12, 4_000
PLAN = FredPlan.calibrated(epsilon=1.0, delta=1e-5)


def world(seed=0):
    """The clients' moments, and candidates of which two are exactly as far away."""
    rng = np.random.default_rng(seed)
    root = rng.normal(size=(D, D)) * 0.5 ** np.arange(D) * 0.2
    covariance, mean = root @ root.T, 0.1 * rng.normal(size=D)

    def moved(by, stretched=1.0):
        shift = np.zeros(D)
        shift[0] = by
        return Moments(900.0, mean + shift, stretched * covariance)

    clients = Moments(COUNT, mean, covariance)
    candidates = {
        "near": moved(0.05),
        "one": moved(0.3, 1.2),
        "other": moved(-0.3, 1.2),  # as far, in the other direction
        "far": moved(0.6, 1.1),
    }
    return clients, candidates


def released(clients, rng, noise):
    """A release in plain numpy: sums with noise, divided by the noisy count."""
    count = clients.count + noise[0] * rng.normal()
    mean = (clients.count * clients.mean_D + noise[1] * rng.normal(size=D)) / count
    shift = np.outer(clients.mean_D - mean, clients.mean_D - mean)
    lower = np.tril(rng.normal(size=(D, D)) / np.sqrt(2), -1)
    drawn = lower + lower.T + np.diag(rng.normal(size=D))
    raw = (clients.count * (clients.covariance_DxD + shift) + noise[2] * drawn) / count
    stated = MomentNoise(
        count=noise[0],
        mean=noise[1] / count,
        diagonal=noise[2] / count,
        off_diagonal=noise[2] / count / np.sqrt(2),
        mean_bias=D * (noise[1] / count) ** 2,
    )
    return PrivateMoments(Moments(count, mean, raw), stated, PLAN)


@pytest.fixture(scope="module")
def trials():
    clients, candidates = world()
    noise = [z * s for z, s in zip(PLAN.multipliers, PLAN.sensitivities, strict=True)]
    rng = np.random.default_rng(1)
    return [score(released(clients, rng, noise), candidates) for _ in range(60)]


@pytest.fixture(scope="module")
def exact():
    clients, candidates = world()
    return {name: distance(clients, candidate) for name, candidate in candidates.items()}


def test_intervals_hold_the_distance_without_noise(trials, exact):
    held = [found.low <= exact[found.name] <= found.high for trial in trials for found in trial]
    assert np.mean(held) >= 0.95
    # They say something: distances of 0.003 to 0.4 are told apart by them.
    assert np.mean([found.high - found.low for trial in trials for found in trial]) < 0.1


def test_what_is_not_tied_is_in_the_right_order_and_equals_are_tied(trials, exact):
    """The order is that of the corrected distances."""
    claims, ties = [], []
    for trial in trials:
        corrected = [found.corrected for found in trial]
        assert corrected == sorted(corrected) and not trial[-1].tied
        for nearer, farther in zip(trial[:-1], trial[1:], strict=True):
            if {nearer.name, farther.name} == {"one", "other"}:
                ties.append(nearer.tied)
            elif not nearer.tied:
                claims.append(exact[nearer.name] < exact[farther.name])
    assert len(claims) > len(trials) and np.mean(claims) >= 0.95
    assert len(ties) > 50 and np.mean(ties) >= 0.95


def test_the_correction_takes_the_noises_bias_off(trials, exact):
    found = [(each, exact[each.name]) for trial in trials for each in trial]
    plain = np.mean([each.distance - true for each, true in found])
    corrected = np.mean([each.corrected - true for each, true in found])
    assert plain > 0.005 and abs(corrected) < 0.2 * plain


def test_without_noise_an_interval_is_a_point():
    clients, candidates = world()
    silent = MomentNoise(0.0, 0.0, 0.0, 0.0, 0.0)
    found = score(PrivateMoments(clients, silent, FredPlan.without_privacy()), candidates)
    for each in found:
        assert each.low == each.corrected == each.high == each.distance
        assert each.distance == pytest.approx(distance(clients, candidates[each.name]))
        assert not each.tied
    assert [each.name for each in found][::3] == ["near", "far"]
