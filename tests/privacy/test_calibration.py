"""A calibrated plan has the least noise that reaches its target, or is refused."""

import dataclasses
import math

import dp_accounting
import pytest

from jaxpfl.errors import InputError
from jaxpfl.privacy import AdaptiveClip, Guarantee, Noise, accounting, confirmation
from tests.plans import TARGET, flat_calibrated
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
    total = accounting.epsilon(together, TARGET["delta"], "pld", "add_or_remove_one")
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
