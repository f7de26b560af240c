"""Lower bounds on epsilon: never above the epsilon of a mechanism that is known, and near it."""

import dataclasses
import math

import dp_accounting
import numpy as np
import pytest
from scipy import special, stats

from jaxpfl.errors import InputError
from jaxpfl.privacy import Guarantee, accounting, auditing, profile
from jaxpfl.privacy.auditing import Trials, lower_bounds, one_run_probability, strongest
from jaxpfl.privacy.confirmation import gaussian_epsilon

DELTA = 1e-5


def gaussian(mu: float) -> Guarantee:
    return Guarantee(dp_accounting.GaussianDpEvent(1 / mu), DELTA)


def coins(number: int, seed: int) -> tuple[np.random.Generator, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng, rng.random(number) < 0.5


def randomised_response(epsilon: float, number: int, seed: int, revealed: float = 0.0) -> Trials:
    """The coin, or its opposite so often that it is (epsilon, revealed)-private, exactly."""
    rng, present = coins(number, seed)
    honest = rng.random(number) < special.expit(epsilon)
    score = np.where(honest == present, 1.0, -1.0)
    shown = rng.random(number) < revealed
    score = np.where(shown, np.where(present, 2.0, -2.0), score)
    return Trials(score[None], present)


def shifted(mu: float, number: int, seed: int) -> Trials:
    """What a Gaussian mechanism of shift / noise = mu shows."""
    rng, present = coins(number, seed)
    seen = rng.standard_normal(number) + mu * present
    return Trials((mu * seen - mu**2 / 2)[None], present)


@pytest.mark.parametrize("epsilon", [0.5, 1.0, 3.0])
def test_randomised_response_is_bounded_by_its_epsilon_and_nearly_reaches_it(epsilon):
    """By the two bounds that assume no shape: at 99 % confidence, some one in 100 may exceed it."""
    many, few = 200_000, 2_000
    for estimator in (auditing.by_threshold, auditing.by_one_run):
        found = [
            estimator(randomised_response(epsilon, few, seed), 0.0, 0.99).epsilon
            for seed in range(16)
        ]
        assert sum(bound > epsilon for bound in found) <= 2
        assert estimator(randomised_response(epsilon, many, 0), 0.0, 0.99).epsilon > 0.85 * epsilon


def test_outputs_that_reveal_the_coin_with_probability_delta_are_allowed_for():
    found = [
        auditing.by_threshold(randomised_response(1.0, 20_000, seed, 0.05), 0.05, 0.99).epsilon
        for seed in range(6)
    ]
    assert max(found) <= 1.0
    # The same without the delta that it has.
    assert auditing.by_threshold(randomised_response(1.0, 20_000, 0, 0.05), 0.0, 0.99).epsilon > 1.2


@pytest.mark.parametrize("mu", [0.3, 1.0, 2.0])
def test_the_gaussian_mechanism_is_bounded_by_its_epsilon(mu):
    stated = gaussian(mu)
    for seed in range(8):
        found = strongest(lower_bounds(shifted(mu, 4_000, seed), stated))
        assert found.epsilon <= stated.epsilon()
    found = strongest(lower_bounds(shifted(mu, 400_000, 0), stated))
    assert found.epsilon > (0.85 if mu < 1 else 0.95) * stated.epsilon()
    assert (found.estimator, found.trials, found.confidence) == ("profile", 300_000, 0.99)


def test_two_thirds_of_the_noise_are_noticed():
    """At a large epsilon, too, where error rates alone could only show it with exp(12) trials."""
    stated = gaussian(3.0)
    found = {each.estimator: each for each in lower_bounds(shifted(4.5, 8_000, 0), stated)}
    assert found["profile"].epsilon > stated.epsilon() > 10
    assert found["threshold"].epsilon < stated.epsilon()


def test_for_gaussians_the_profile_comes_near_the_best_test_of_two_rates():
    """From rates at the best threshold, which is known, and their normal errors."""
    mu, trials, confidence = 1.0, 200_000, 0.99
    stated = gaussian(mu)
    found = auditing.by_profile(shifted(mu, trials, 3), stated, confidence).epsilon
    # "Above 1/2" has the rates p and 1 - p; three of eight of the trials judge each.
    p = float(special.ndtr(mu / 2))
    # The rates themselves are off by two standard deviations, seldom by more.
    error = (stats.norm.ppf(confidence) + 2) * math.sqrt(2 * p * (1 - p) / (0.375 * trials))
    least = 2 * special.ndtri((1 + 2 * p - 1 - error) / 2)
    assert found > 0.95 * gaussian_epsilon(float(least), DELTA)


@pytest.mark.parametrize("mu", [0.5, 2.0])
def test_a_profile_bound_is_seldom_wrong(mu):
    """At 90 % confidence, 4 in 40 may exceed the truth; 10 do in 4 of 1,000 such series."""
    stated = gaussian(mu)
    found = [
        auditing.by_profile(shifted(mu, 1_000, seed), stated, 0.9).epsilon for seed in range(40)
    ]
    assert sum(bound > stated.epsilon() for bound in found) < 10


def test_a_bound_on_subsampled_rounds_needs_their_own_profile():
    """As if Gaussian, outputs that are hardly ever informative would seem to cost too much."""
    q, z, rounds, number = 0.05, 0.7, 6, 60_000
    event = dp_accounting.SelfComposedDpEvent(
        dp_accounting.PoissonSampledDpEvent(q, dp_accounting.GaussianDpEvent(z)), rounds
    )
    stated = Guarantee(event, DELTA)
    rng, present = coins(number, 0)
    took_part = (rng.random((rounds, number)) < q) & present
    seen = took_part + z * rng.standard_normal((rounds, number))
    score = np.log1p(q * np.expm1((2 * seen - 1) / (2 * z**2))).sum(axis=0)
    trials = Trials(score[None], present)
    found = auditing.by_profile(trials, stated, 0.99).epsilon
    assert 0.6 * stated.epsilon() < found <= stated.epsilon()
    # With one round of six charged.
    less = dataclasses.replace(stated, event=event.event)
    assert auditing.by_profile(trials, less, 0.99).epsilon > less.epsilon()


def test_the_one_run_bound_is_its_formula_by_plain_loops():
    canaries, guesses, epsilon, delta = 60, 12, 0.8, 1e-3
    right = math.exp(epsilon) / (1 + math.exp(epsilon))

    def f(v: int) -> float:
        ks = range(max(v, 0), guesses + 1)
        return sum(math.comb(guesses, k) * right**k * (1 - right) ** (guesses - k) for k in ks)

    for v in range(guesses + 1):
        worst = max(((f(v - i) - f(v)) / i for i in range(1, canaries + 1)), default=0)
        expected = min(1.0, f(v) + 2 * canaries * delta * worst)
        found = one_run_probability(v, guesses, canaries, epsilon, delta)
        assert found == pytest.approx(expected, abs=1e-12)


def test_no_mechanism_has_more_right_guesses_than_the_one_run_bound_allows():
    """One that reveals each coin with probability delta, and else answers at random; exactly."""
    number, epsilon = 30, 0.5
    for delta in (0.0, 1e-3, 0.1):
        right = delta + (1 - delta) * special.expit(epsilon)
        for v in range(number + 1):
            exact = stats.binom.sf(v - 1, number, right)
            assert exact <= one_run_probability(v, number, number, epsilon, delta) + 1e-12


@pytest.mark.parametrize(
    "event",
    [
        dp_accounting.GaussianDpEvent(0.8),
        dp_accounting.SelfComposedDpEvent(
            dp_accounting.PoissonSampledDpEvent(0.1, dp_accounting.GaussianDpEvent(0.7)), 30
        ),
        dp_accounting.ComposedDpEvent(
            [
                dp_accounting.GaussianDpEvent(2.0),
                dp_accounting.PoissonSampledDpEvent(0.3, dp_accounting.GaussianDpEvent(1.0)),
            ]
        ),
        dp_accounting.SampledWithoutReplacementDpEvent(
            1000, 100, dp_accounting.GaussianDpEvent(0.9)
        ),
    ],
    ids=["everyone", "poisson", "both", "fixed"],
)
def test_a_profile_has_the_deltas_of_the_accountants_epsilons(event):
    """Or slightly more, where its grid is coarser."""
    stated = Guarantee.of_events([event], 1e-3)
    for delta in (1e-3, 1e-2, 0.1):
        epsilon = accounting.epsilon(event, delta, stated.accountant, stated.adjacency)
        (found,) = profile.deltas(event, np.array([epsilon]))
        assert delta * (1 - 1e-3) <= found <= 1.15 * delta
    twice = profile.scaled(event, 2.0)
    epsilon = np.array([0.0, 0.3])
    assert np.all(profile.deltas(twice, epsilon) < profile.deltas(event, epsilon))
    none = dp_accounting.NonPrivateDpEvent()
    assert profile.deltas(none, epsilon).tolist() == [1, 1]


def test_the_profile_of_a_secure_sum_is_that_of_its_renyi_divergences():
    """Not below that of a Gaussian that has them exactly, and with others at the sum of both."""
    rho, epsilons = 0.5, np.array([0.5, 2.0, 4.0])
    sums = dp_accounting.ZCDpEvent(rho, 0.0)
    found = profile.deltas(sums, epsilons)
    exact = profile.deltas(dp_accounting.GaussianDpEvent(1.0), epsilons)
    assert np.all(exact < found) and np.all(found < 5 * exact)
    both = dp_accounting.ComposedDpEvent([sums, dp_accounting.GaussianDpEvent(1.0)])
    twice = profile.deltas(dp_accounting.ZCDpEvent(2 * rho, 0.0), epsilons)
    # A secure sum's divergences are known at whole orders alone, and so a little larger.
    assert profile.deltas(both, epsilons) == pytest.approx(twice, rel=0.15)
    assert np.all(profile.deltas(both, epsilons) <= twice)
    assert profile.scaled(sums, 2.0) == dp_accounting.ComposedDpEvent(
        [dp_accounting.SelfComposedDpEvent(dp_accounting.ZCDpEvent(rho / 4, 0.0), 1)]
    )


@pytest.mark.parametrize(
    ("trials", "words"),
    [
        (Trials(np.zeros((1, 3)), np.ones(3, bool)), "at least 4"),
        (Trials(np.zeros(8), np.ones(8, bool)), "scores"),
        (Trials(np.zeros((1, 8)), np.ones(8)), "booleans"),
        (Trials(np.full((1, 8), np.nan), np.ones(8, bool)), "NaN"),
    ],
)
def test_what_is_no_trials_is_refused(trials, words):
    with pytest.raises(InputError, match=words):
        lower_bounds(trials, gaussian(1.0))


def test_without_a_stated_epsilon_there_is_nothing_to_refute():
    stated = Guarantee(dp_accounting.NonPrivateDpEvent(), 0.0)
    with pytest.raises(InputError, match="stated epsilon"):
        lower_bounds(shifted(1.0, 8, 0), stated)


def test_scores_that_tell_nothing_bound_nothing():
    _, present = coins(100, 0)
    for scores in (np.zeros((2, 100)), np.full((1, 100), np.inf)):
        found = lower_bounds(Trials(scores, present), gaussian(1.0))
        assert [each.epsilon for each in found] == [0, 0, 0]
