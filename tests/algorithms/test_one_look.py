"""Rewards from one release of moments: they are the distance's slope, and POPri follows them."""

import jax
import numpy as np
import pytest

from jaxpfl.algorithms import FredPlan, MomentRewards, popri
from jaxpfl.algorithms.frechet import Moments, distance, mixture, moments, witness
from jaxpfl.algorithms.fred import private_moments
from jaxpfl.algorithms.fred.query import MomentNoise, PrivateMoments
from jaxpfl.algorithms.popri import with_adapters
from jaxpfl.federated import RunSecret
from jaxpfl.privacy import Ledger
from tests.algorithms.popri_parts import FAR, HASHED, NEAR, SETTINGS, near_clients
from tests.algorithms.test_popri import like_clients
from tests.refusals import refusal


def released(target: Moments, entry: float = 0.0) -> PrivateMoments:
    """As if released with noise of this standard deviation on the covariance's entries."""
    noise = MomentNoise(0, 0, entry * 2**0.5, entry, 0)
    return PrivateMoments(target, noise, FredPlan.without_privacy())


def symmetric_noise(rng: np.random.Generator, dimension: int, entry: float) -> np.ndarray:
    noise_DxD = rng.normal(size=(dimension, dimension)) * entry / 2**0.5
    return noise_DxD + noise_DxD.T


def test_the_witness_is_the_slope_of_the_distance():
    """By the distance itself, of mixtures with a little of one embedding."""
    rng = np.random.default_rng(0)
    target = moments(rng.normal(size=(400, 6)) @ rng.normal(size=(6, 6)) + 1, np.inf)
    rows_NxD = rng.normal(size=(300, 6)) @ rng.normal(size=(6, 6))
    current, share = moments(rows_NxD, np.inf), 1e-6
    found = witness(target, current, rows_NxD[:8])
    slopes = []
    for row_D in rows_NxD[:8]:
        copies = Moments(1.0, row_D, np.zeros((6, 6)))
        nearer = mixture([current, copies], [1 - share, share])
        slopes.append((distance(current, target) - distance(nearer, target)) / share)
    # Up to what is the same for all, and to the ridge.
    found, slopes = found - found.mean(), np.array(slopes) - np.mean(slopes)
    np.testing.assert_allclose(found, slopes, atol=0.05 * np.abs(slopes).max())
    assert np.argmax(found) == np.argmax(slopes)


def test_noise_and_few_texts_leave_rewards_finite():
    """A covariance with negative eigenvalues, and moments of fewer texts than dimensions."""
    rng = np.random.default_rng(1)
    target = Moments(10.0, rng.normal(size=32), symmetric_noise(rng, 32, 1.4))
    few = rng.normal(size=(2, 3, 32))
    for kind, entry in (("frechet", 0.0), ("frechet", 1.4), ("mean", 0.0)):
        rewards = MomentRewards(released(target, entry), 1, kind)
        found = rewards.of(few, np.ones((2, 3), bool))
        assert found.shape == (2, 3) and np.isfinite(found).all() and np.ptp(found) > 0


def test_noise_that_hides_the_covariance_does_not_choose():
    """Rewards under much noise are nearly those without noise; those of its covariance are not."""
    rng = np.random.default_rng(3)
    rows_NxD = rng.normal(size=(400, 48)) / 7
    exact = moments(rng.normal(size=(400, 48)) / 7 + 0.1, np.inf)
    noisy_DxD = exact.covariance_DxD + symmetric_noise(rng, 48, 0.02)
    noisy = Moments(exact.count, exact.mean_D, noisy_DxD)

    def likeness(target: PrivateMoments) -> float:
        few, used = rows_NxD[:96].reshape(12, 8, 48), np.ones((12, 8), bool)
        of = [MomentRewards(each, 1).of(few, used).ravel() for each in (released(exact), target)]
        return float(np.corrcoef(of)[0, 1])

    assert likeness(released(noisy, 0.02)) > 0.9 > likeness(released(noisy)) + 0.1


def test_the_mean_reward_is_the_slope_of_the_means_distance():
    rng = np.random.default_rng(2)
    target, few = moments(rng.normal(size=(9, 4)), np.inf), rng.normal(size=(2, 3, 4)) / 9
    used = np.array([[True, True, False], [True, False, True]])
    found = MomentRewards(released(target), 1, "mean").of(few, used)
    expected = few @ (target.mean_D - few[used].mean(axis=0))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_what_does_not_fit_is_refused():
    target = released(Moments(1.0, np.zeros(4), np.eye(4)))
    three, used = np.zeros((1, 2, 3)), np.ones((1, 2), bool)
    wrong = "embeddings must be float [prompts, responses, 4] found [1, 2, 3]"
    for call, words in (
        (lambda: MomentRewards(target, 0), "rounds must be at least 1"),
        (lambda: MomentRewards(target, 1, "cosine"), "kind must be one of"),
        (lambda: MomentRewards(target, 1).of(three, used), wrong),
    ):
        refusal(call, words)


@pytest.mark.long
def test_no_round_asks_a_client_and_the_ledger_has_one_release(generator, tmp_path):
    clients = near_clients()
    plan = FredPlan.calibrated(epsilon=7.0, delta=1e-3, clip_norm=1.0, max_examples=2)
    with Ledger(tmp_path / "ledger.jsonl", clients) as ledger:
        secret = RunSecret.reproducible(0)
        found = private_moments(clients, plan, ledger=ledger, run="look", secret=secret)
        charged = len(ledger.charges)
        algorithm = popri(generator, NEAR + FAR, MomentRewards(found, rounds=4), HASHED, SETTINGS)
        assert algorithm.queries == ()
        state, metrics = algorithm.init(jax.random.key(0)), []
        for round in range(1, 5):
            state, public = algorithm.step(state, None, round)
            metrics.append(public)
        assert len(ledger.charges) == charged
        assert ledger.spent(1e-3) <= 7.0
    tuned = with_adapters(generator, SETTINGS, algorithm.params(state))
    assert all(each["pairs"] > 0 and each["candidates"] > 0.9 for each in metrics)
    assert like_clients(tuned) > like_clients(generator) + 0.08
