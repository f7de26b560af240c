"""Rewards from one release of moments: they are the distance's slope, and POPri follows them."""

import jax
import numpy as np
import pytest

from jaxpfl.algorithms import FredPlan, MomentRewards, popri
from jaxpfl.algorithms.frechet import Moments, distance, mixture, moments, witness
from jaxpfl.algorithms.fred import private_moments
from jaxpfl.algorithms.popri import with_adapters
from jaxpfl.errors import InputError
from jaxpfl.federated import RunSecret
from jaxpfl.privacy import Ledger
from jaxpfl.text.embed import embedder
from jaxpfl.text.generation.language_model import LanguageModel
from tests.algorithms.popri_parts import FAR, NEAR, SETTINGS, trained_generator
from tests.algorithms.test_popri import like_clients, near_clients


@pytest.fixture(scope="module")
def generator() -> LanguageModel:
    return trained_generator()


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
    noise_DxD = rng.normal(size=(32, 32))
    target = Moments(10.0, rng.normal(size=32), noise_DxD + noise_DxD.T)
    few = rng.normal(size=(2, 3, 32))
    for kind in ("frechet", "mean"):
        found = MomentRewards(target, 1, kind).of(few, np.ones((2, 3), bool))
        assert found.shape == (2, 3) and np.isfinite(found).all() and np.ptp(found) > 0


def test_the_mean_reward_is_the_slope_of_the_means_distance():
    rng = np.random.default_rng(2)
    target, few = moments(rng.normal(size=(9, 4)), np.inf), rng.normal(size=(2, 3, 4)) / 9
    used = np.array([[True, True, False], [True, False, True]])
    found = MomentRewards(target, 1, "mean").of(few, used)
    expected = few @ (target.mean_D - few[used].mean(axis=0))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda target: MomentRewards(target, 0), "rounds must be at least 1"),
        (lambda target: MomentRewards(target, 1, "cosine"), "kind must be one of"),
        (
            lambda target: MomentRewards(target, 1).of(np.zeros((1, 2, 3)), np.ones((1, 2), bool)),
            r"embeddings must be float \[prompts, responses, 4\] .* found \[1, 2, 3\]",
        ),
    ],
)
def test_what_does_not_fit_is_refused(make, message):
    target = Moments(1.0, np.zeros(4), np.eye(4))
    with pytest.raises(InputError, match=message):
        make(target)


@pytest.mark.long
def test_no_round_asks_a_client_and_the_ledger_has_one_release(generator, tmp_path):
    hashed = embedder("hashed:32")
    clients = near_clients(hashed)
    plan = FredPlan.calibrated(epsilon=7.0, delta=1e-3, clip_norm=1.0, max_examples=2)
    with Ledger(tmp_path / "ledger.jsonl", clients) as ledger:
        secret = RunSecret.reproducible(0)
        found = private_moments(clients, plan, ledger=ledger, run="look", secret=secret)
        charged = len(ledger.charges)
        algorithm = popri(
            generator, NEAR + FAR, MomentRewards(found.moments, rounds=4), hashed, SETTINGS
        )
        assert algorithm.queries == ()
        state, metrics = algorithm.init(jax.random.key(0)), []
        for round in range(1, 5):
            state, public = algorithm.step(state, None, round)
            metrics.append(public)
        assert len(ledger.charges) == charged
        assert ledger.spent(1e-3) <= 7.0
    tuned = with_adapters(generator, SETTINGS, algorithm.params(state))
    assert all(each["pairs"] > 0 and each["candidates"] == 1 for each in metrics)
    assert like_clients(tuned) > like_clients(generator) + 0.08
