"""A calibrated plan has the least noise that reaches its target, or is refused."""

import dataclasses
import math

import dp_accounting
import pytest

from jaxpfl.errors import InputError
from jaxpfl.privacy import (
    AdaptiveClip,
    Guarantee,
    Noise,
    accounting,
    confirmation,
)
from tests.plans import TARGET, flat_calibrated

CALIBRATIONS = [
    {},
    {"accountant": "rdp"},
    {"clients_per_round": 1000},
    pytest.param({"sampling": "fixed"}, marks=pytest.mark.long),
    {"sampling": "fixed", "clients_per_round": 1000},
]


@pytest.mark.parametrize("options", CALIBRATIONS, ids=str)
def test_a_calibrated_plan_has_the_least_noise_that_two_accountants_confirm(options):
    """TRUST 14: recomputed on the final z; 1% less noise would exceed the target."""
    plan = flat_calibrated(epsilon=2.0, **TARGET | options)
    assert plan.epsilon() <= 2.0
    assert plan.guarantee().confirmed_epsilon() <= 2.0
    less = dataclasses.replace(plan, noise=Noise(0.99 * plan.noise_multiplier))
    assert less.epsilon() > 2.0
    assert flat_calibrated(epsilon=2.0, **TARGET | options) == plan


def test_a_calibration_that_the_second_accountant_denies_is_refused(monkeypatch):
    """TRUST 14: a planted accountant that finds 1% more than the first."""
    real = Guarantee.confirmed_epsilon
    monkeypatch.setattr(Guarantee, "confirmed_epsilon", lambda self: 1.01 * real(self))
    with pytest.raises(InputError, match="the accountants disagree"):
        flat_calibrated(epsilon=2.0, **TARGET | {"clients_per_round": 1000})


def test_a_first_accountant_that_finds_too_little_is_caught(monkeypatch):
    """TRUST 14: a planted PLD that reports 0.9 of the truth fails the confirmation."""
    real = accounting._epsilon
    monkeypatch.setattr(accounting, "_epsilon", lambda *arguments: 0.9 * real(*arguments))
    with pytest.raises(InputError, match="the accountants disagree"):
        flat_calibrated(epsilon=2.0, **TARGET)


def test_calibration_keeps_every_option():
    adaptive = AdaptiveClip(target_quantile=0.7)
    plan = flat_calibrated(epsilon=2.0, adaptive_clip=adaptive, accountant="rdp", **TARGET)
    assert plan.adaptive_clip == adaptive
    assert plan.accountant == "rdp"
    assert {name: getattr(plan, name) for name in TARGET} == TARGET


def test_calibration_after_other_releases_meets_the_total():
    """Plan and Gaussians together reach the target, by PLD, by an FFT of our own, under RDP."""
    both = dp_accounting.ComposedDpEvent(
        [dp_accounting.GaussianDpEvent(9.0), dp_accounting.GaussianDpEvent(12.0)]
    )
    plan = flat_calibrated(epsilon=2.0, prior_releases=both, **TARGET)
    alone = flat_calibrated(epsilon=2.0, **TARGET)
    assert plan.noise_multiplier > alone.noise_multiplier
    assert plan.epsilon() < 2.0
    together = dp_accounting.ComposedDpEvent([both, plan.event()])
    total = accounting.epsilon(together, TARGET["delta"], "pld", "add_or_remove_one")
    assert 2.0 * (1 - 1e-3) < total <= 2.0
    mu = math.sqrt(1 / 81 + 1 / 144)
    rate = plan.participation.sampling_rate
    ours = confirmation.poisson_epsilon(
        plan.noise_multiplier, rate, plan.rounds, plan.delta, reach=5.0, gaussian_mu=mu
    )
    assert ours == pytest.approx(total, rel=1e-3)
    # Without the other releases the second accountant must see the difference.
    without = confirmation.poisson_epsilon(
        plan.noise_multiplier, rate, plan.rounds, plan.delta, reach=5.0
    )
    assert without < total * (1 - 1e-3)


def test_releases_that_a_plan_cannot_come_after_are_refused():
    sampled = dp_accounting.PoissonSampledDpEvent(0.1, dp_accounting.GaussianDpEvent(1.0))
    with pytest.raises(InputError, match="Gaussians on everyone"):
        flat_calibrated(epsilon=2.0, prior_releases=sampled, **TARGET)
    with pytest.raises(InputError, match="prior releases alone cost"):
        flat_calibrated(epsilon=2.0, prior_releases=dp_accounting.GaussianDpEvent(0.5), **TARGET)
    with pytest.raises(InputError, match="cohorts of fixed size"):
        flat_calibrated(
            epsilon=2.0,
            prior_releases=dp_accounting.GaussianDpEvent(9.0),
            sampling="fixed",
            **TARGET,
        )
