"""Lower bounds on epsilon: never above the epsilon of a mechanism that is known, and near it."""

import dataclasses

import dp_accounting
import numpy as np
import pytest
from scipy import stats

from jaxpfl.errors import InputError
from jaxpfl.privacy import Guarantee, auditing
from jaxpfl.privacy.auditing import Trials, lower_bound, upper_rate
from tests.plans import epsilon_of
from tests.privacy.ledgers import GAUSSIAN, fixed, poisson

DELTA = 1e-5
NOTHING = dp_accounting.NonPrivateDpEvent()


def gaussian(mu: float) -> Guarantee:
    return Guarantee(dp_accounting.GaussianDpEvent(1 / mu), DELTA)


def coins(number: int, seed: int) -> tuple[np.random.Generator, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng, rng.random(number) < 0.5


def shifted(mu: float, number: int, seed: int) -> Trials:
    """What a Gaussian mechanism of shift / noise = mu shows."""
    rng, present = coins(number, seed)
    seen = rng.standard_normal(number) + mu * present
    return Trials((mu * seen - mu**2 / 2)[None], present)


@pytest.mark.parametrize(("events", "trials"), [(0, 10), (3, 10), (9, 10), (5, 4_000)])
def test_an_upper_rate_is_that_at_which_so_few_events_are_improbable(events, trials):
    rate = float(upper_rate(np.array(events), trials, 0.99))
    assert stats.binom.cdf(events, trials, rate) == pytest.approx(0.01, rel=1e-6)
    assert upper_rate(np.array(trials), trials, 0.99) == 1
    assert upper_rate(np.array(0), 0, 0.99) == 1


@pytest.mark.parametrize(
    "mu", [1.0, *(pytest.param(mu, marks=pytest.mark.long) for mu in (0.3, 3.0))]
)
def test_the_gaussian_mechanism_is_bounded_by_its_epsilon_and_nearly_reaches_it(mu):
    stated = gaussian(mu)
    found = [lower_bound(shifted(mu, 1_000, seed), stated, confidence=0.9) for seed in range(30)]
    # At 90 % confidence, 3 may exceed it; 9 do in 1 of 500 such series.
    assert sum(each.epsilon > stated.epsilon() for each in found) < 9
    many = lower_bound(shifted(mu, 400_000, 0), stated)
    assert many.epsilon > (0.85 if mu < 1 else 0.95) * stated.epsilon()
    assert (many.trials, many.confidence) == (300_000, 0.99)


def test_two_thirds_of_the_noise_are_noticed():
    """At a large epsilon, too, where the stated delta alone would need exp(12) trials."""
    stated = gaussian(3.0)
    assert lower_bound(shifted(4.5, 8_000, 0), stated).epsilon > stated.epsilon() > 10


@pytest.mark.long
def test_a_bound_on_subsampled_rounds_needs_their_own_profile():
    """As if Gaussian, outputs that are hardly ever informative would seem to cost too much."""
    q, z, rounds, number = 0.05, 0.7, 6, 60_000
    event = dp_accounting.SelfComposedDpEvent(poisson(q, z), rounds)
    stated = Guarantee(event, DELTA)
    rng, present = coins(number, 0)
    took_part = (rng.random((rounds, number)) < q) & present
    seen = took_part + z * rng.standard_normal((rounds, number))
    score = np.log1p(q * np.expm1((2 * seen - 1) / (2 * z**2))).sum(axis=0)
    trials = Trials(score[None], present)
    assert 0.6 * stated.epsilon() < lower_bound(trials, stated).epsilon <= stated.epsilon()
    # With one round of six charged.
    less = dataclasses.replace(stated, event=event.event)
    assert lower_bound(trials, less).epsilon > less.epsilon()


@pytest.mark.parametrize(
    "event",
    [
        GAUSSIAN(0.8),
        dp_accounting.SelfComposedDpEvent(poisson(0.1, 0.7), 30),
        dp_accounting.ComposedDpEvent([GAUSSIAN(2.0), poisson(0.3, 1.0)]),
        fixed(1000, 100, 0.9),
    ],
    ids=["everyone", "poisson", "both", "fixed"],
)
def test_a_profile_has_the_deltas_of_the_accountants_epsilons(event):
    """Or slightly more, where its grid is coarser."""
    stated = Guarantee.of_events([event], 1e-3)
    for delta in (1e-3, 1e-2, 0.1):
        epsilon = epsilon_of(event, delta, stated.accountant, stated.adjacency)
        (found,) = auditing.deltas(event, np.array([epsilon]))
        assert delta * (1 - 1e-3) <= found <= 1.15 * delta
    twice = auditing.scaled(event, 2.0)
    epsilon = np.array([0.0, 0.3])
    assert np.all(auditing.deltas(twice, epsilon) < auditing.deltas(event, epsilon))
    assert auditing.deltas(NOTHING, epsilon).tolist() == [1, 1]


def test_the_profile_of_a_secure_sum_is_that_of_its_renyi_divergences():
    """Not below that of a Gaussian that has them exactly, and with others at the sum of both."""
    rho, epsilons = 0.5, np.array([0.5, 2.0, 4.0])
    sums = dp_accounting.ZCDpEvent(rho, 0.0)
    found = auditing.deltas(sums, epsilons)
    exact = auditing.deltas(dp_accounting.GaussianDpEvent(1.0), epsilons)
    assert np.all(exact < found) and np.all(found < 5 * exact)
    both = dp_accounting.ComposedDpEvent([sums, dp_accounting.GaussianDpEvent(1.0)])
    twice = auditing.deltas(dp_accounting.ZCDpEvent(2 * rho, 0.0), epsilons)
    # A secure sum's divergences are known at whole orders alone, and so a little larger.
    assert auditing.deltas(both, epsilons) == pytest.approx(twice, rel=0.15)
    assert np.all(auditing.deltas(both, epsilons) <= twice)
    assert auditing.scaled(sums, 2.0) == dp_accounting.ZCDpEvent(rho / 4, 0.0)


@pytest.mark.parametrize(
    ("trials", "stated", "words"),
    [
        (Trials(np.zeros((1, 3)), np.ones(3, bool)), gaussian(1.0), "at least 4"),
        (Trials(np.zeros(8), np.ones(8, bool)), gaussian(1.0), "scores"),
        (Trials(np.zeros((1, 8)), np.ones(8)), gaussian(1.0), "booleans"),
        (Trials(np.full((1, 8), np.nan), np.ones(8, bool)), gaussian(1.0), "NaN"),
        (shifted(1.0, 8, 0), Guarantee(NOTHING, 0.0), "stated epsilon"),
    ],
)
def test_what_cannot_be_audited_is_refused(trials, stated, words):
    with pytest.raises(InputError, match=words):
        lower_bound(trials, stated)


def test_scores_that_tell_nothing_bound_nothing():
    _, present = coins(100, 0)
    for scores in (np.zeros((2, 100)), np.full((1, 100), np.inf)):
        assert lower_bound(Trials(scores, present), gaussian(1.0)).epsilon == 0
