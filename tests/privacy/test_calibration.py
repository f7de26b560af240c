"""A calibrated plan has the least noise that reaches its target, or is refused."""

import dataclasses
import math

import dp_accounting
import numpy as np
import pytest

from jaxpfl.errors import InputError
from jaxpfl.privacy import (
    AdaptiveClip,
    Clip,
    Guarantee,
    Noise,
    Plan,
    Poisson,
    accounting,
    confirmation,
)
from tests.plans import TARGET, epsilon_of, flat_calibrated
from tests.privacy.ledgers import GAUSSIAN, poisson

CALIBRATIONS = [
    {},
    {"accountant": "rdp"},
    {"clients_per_round": 1000},
    pytest.param({"sampling": "fixed"}, marks=pytest.mark.long),
    {"sampling": "fixed", "clients_per_round": 1000},
    {"sampling": "cyclic", "noise": "banded"},
    {"prior_releases": GAUSSIAN(9.0), "sampling": "cyclic", "noise": "banded"},
]


@pytest.mark.parametrize("options", CALIBRATIONS, ids=str)
def test_a_calibrated_plan_has_the_least_noise_that_two_accountants_confirm(options):
    """TRUST 14: recomputed on the final z; 1% less noise would exceed the target."""
    plan = flat_calibrated(epsilon=2.0, **TARGET | options)
    prior = [options["prior_releases"]] if "prior_releases" in options else []

    def whole(plan):
        return Guarantee.of_events([*prior, plan.event()], plan.delta, accountant=plan.accountant)

    assert whole(plan).epsilon() <= 2.0
    assert whole(plan).confirmed_epsilon() <= 2.0
    less = dataclasses.replace(plan, noise=Noise(0.99 * plan.noise_multiplier, plan.noise.kind))
    assert whole(less).epsilon() > 2.0
    assert flat_calibrated(epsilon=2.0, **TARGET | options) == plan


def test_a_first_accountant_that_finds_too_little_is_caught(monkeypatch):
    """TRUST 14: a planted PLD that reports 0.9 of the truth fails the confirmation."""
    real = accounting._epsilon
    monkeypatch.setattr(accounting, "_epsilon", lambda *arguments: 0.9 * real(*arguments))
    with pytest.raises(InputError, match="the accountants disagree"):
        flat_calibrated(epsilon=2.0, **TARGET)


def test_calibration_keeps_every_option():
    adaptive = AdaptiveClip(target_quantile=0.7)
    plan = flat_calibrated(epsilon=2.0, adaptive_clip=adaptive, accountant="rdp", **TARGET)
    assert plan.clip.adaptive == adaptive
    assert plan.accountant == "rdp"
    assert {name: getattr(plan, name) for name in TARGET} == TARGET


def test_calibration_after_other_releases_meets_the_total():
    """Plan and Gaussians together reach the target, by PLD, by an FFT of our own, under RDP."""
    both = dp_accounting.ComposedDpEvent([GAUSSIAN(9.0), GAUSSIAN(12.0)])
    plan = flat_calibrated(epsilon=2.0, prior_releases=both, **TARGET)
    alone = flat_calibrated(epsilon=2.0, **TARGET)
    assert plan.noise_multiplier > alone.noise_multiplier
    assert plan.epsilon() < 2.0
    together = dp_accounting.ComposedDpEvent([both, plan.event()])
    total = epsilon_of(together, TARGET["delta"], "pld", "add_or_remove_one")
    assert 2.0 * (1 - 1e-3) < total <= 2.0
    mu = math.sqrt(1 / 81 + 1 / 144)
    rate = plan.participation.sampling_rate
    rounds = ((rate, plan.noise_multiplier, plan.rounds),)
    ours = confirmation.poisson_epsilon(rounds, plan.delta, mu)
    assert ours == pytest.approx(total, rel=1e-3)
    # Without the other releases the second accountant must see the difference.
    assert confirmation.poisson_epsilon(rounds, plan.delta) < total * (1 - 1e-3)


@pytest.mark.parametrize(
    ("prior", "options", "message"),
    [
        (poisson(0.1, 1.0), {}, "Gaussians on everyone"),
        (GAUSSIAN(0.5), {}, "prior releases alone cost"),
        (GAUSSIAN(9.0), {"sampling": "fixed"}, "cohorts of fixed size"),
    ],
)
def test_releases_that_a_plan_cannot_come_after_are_refused(prior, options, message):
    with pytest.raises(InputError, match=message):
        flat_calibrated(epsilon=2.0, prior_releases=prior, **TARGET | options)


def reference_delta(q: float, z: float, rounds: int, epsilon: float) -> float:
    """delta of Gaussian rounds on Poisson cohorts, by the losses' characteristic function.

    Gil-Pelaez 1951: P(loss > e) = 1/2 + 1/pi int Im(exp(-i t e) E exp(i t loss)) / t dt, by
    trapezoids in float64. Nothing is put on a grid of losses, so that many rounds cost no accuracy.
    """
    x = np.linspace(-14 * z, 1 + 14 * z, 3001)
    without = np.exp(-(x**2) / (2 * z**2))
    with_ = (1 - q) * without + q * np.exp(-((x - 1) ** 2) / (2 * z**2))
    loss = np.log1p(q * np.expm1((2 * x - 1) / (2 * z**2)))

    def above(weight: np.ndarray, loss: np.ndarray) -> float:
        share = weight / weight.sum()
        mean = share @ loss
        apart = loss - mean
        deviation = math.sqrt(rounds * (share @ apart**2))
        t = (np.arange(600) + 0.5) * 9.5 / 600 / deviation
        turned = np.outer(t, apart)
        # E exp(i t loss) - 1, without the cancellation of two numbers near 1.
        moved = -2 * np.sin(turned / 2) ** 2 @ share + 1j * ((np.sin(turned) - turned) @ share)
        waves = np.exp(rounds * np.log1p(moved) - 1j * t * (epsilon - rounds * mean))
        return 0.5 + (t[1] - t[0]) / math.pi * float(np.sum(waves.imag / t))

    removed = above(with_, loss) - math.exp(epsilon) * above(without, loss)
    added = above(without, -loss) - math.exp(epsilon) * above(with_, -loss)
    return max(removed, added)


@pytest.mark.parametrize("clients", [1, 10, 100])
@pytest.mark.parametrize(
    ("rounds", "epsilon"),
    [
        pytest.param(30_000, 1.0, marks=pytest.mark.long),
        pytest.param(30_000, 0.1, marks=pytest.mark.slow),
        pytest.param(100_000, 1.0, marks=pytest.mark.slow),
        pytest.param(300_000, 1.0, marks=pytest.mark.slow),
        pytest.param(1_000_000, 1.0, marks=pytest.mark.slow),
    ],
)
def test_noise_of_many_rounds_suffices_and_is_at_most_one_percent_above(rounds, epsilon, clients):
    cohort = Poisson(1_000, clients)
    given = dict(delta=1e-6, clip=Clip(1.0), participation=cohort, rounds=rounds)
    z, q = Plan.calibrated(epsilon=epsilon, **given).noise_multiplier, clients / 1_000
    assert reference_delta(q, z, rounds, epsilon) <= 1e-6 * (1 + 1e-3)
    assert reference_delta(q, z / 1.01, rounds, epsilon) > 1e-6
    # The reference is Balle and Wang's formula where everybody takes part.
    exact = float(confirmation.gaussian_delta(100 / 80, 1.0))
    assert reference_delta(1.0 - 1e-15, 80.0, 10_000, 1.0) == pytest.approx(exact, rel=1e-4)
