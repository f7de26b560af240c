"""FreD's and the metrics' plans: the plans of their releases cost and do what they say."""

import dp_accounting
import pytest

from jaxpfl.algorithms.federated_metrics import MetricsPlan
from jaxpfl.algorithms.fred import FredPlan
from jaxpfl.privacy import Guarantee, confirmation, events

TARGET = dict(epsilon=0.6, delta=2e-6)
FRED = {
    "by client": FredPlan.calibrated(**TARGET, clip_norm=0.5),
    "by example": FredPlan.calibrated(**TARGET, clip_norm=0.5, unit="example"),
    "declared": FredPlan.calibrated(**TARGET, population=5_000),
    "without privacy": FredPlan.without_privacy(clip_norm=0.5),
}
every_plan = pytest.mark.parametrize("fred", FRED.values(), ids=FRED)


@every_plan
def test_releases_together_cost_what_the_query_says(fred):
    """TRUST 29: and in what the ledger is charged with, event by event."""
    plans = fred.plans(5_000)
    together = Guarantee.of_events([plan.charge_event() for plan in plans], fred.delta, fred.unit)
    assert together.epsilon() == fred.epsilon()
    if fred.private:
        assert events.counts(together.event) == events.counts(fred.guarantee().event)
        exact = confirmation.gaussian_epsilon(fred.mu, fred.delta)
        assert fred.epsilon() == pytest.approx(exact, rel=1e-6)
    assert {plan.private for plan in plans} == {fred.private}


@every_plan
def test_each_release_has_the_noise_of_its_multiplier_and_the_bound_of_its_client_function(fred):
    plans, moments = fred.plans(5_000), fred.moments
    assert moments == (("count", "sum", "second") if len(plans) == 3 else ("sum", "second"))
    rounding = 1 + 2**-7 if fred.unit == "example" else 1
    last = slice(-len(plans), None)
    numbers = fred.multipliers[last], fred.sensitivities[last], fred.noise_stds[last]
    for moment, plan, z, bound, std in zip(moments, plans, *numbers, strict=True):
        assert std == pytest.approx(z * bound * rounding, rel=1e-12)
        assert plan.value_noise_std(plan.clip_norm) == pytest.approx(std, rel=1e-12)
        found = plan.unit, plan.population, plan.participation.sampling_rate
        assert found == (fred.unit, 5_000, 1)
        assert plan.clip_norm == fred.client_fn(moment).example_bound


def test_a_client_gives_averages_which_need_no_cap_on_examples():
    """TRUST 16"""
    assert FRED["by client"].client_fn("second").average
    assert not FRED["by example"].client_fn("second").average
    for name in ("by client", "by example"):
        assert FRED[name].sensitivities == (1, 0.5, 0.25)


def test_metrics_are_one_release_of_norm_one_on_everyone():
    metrics = MetricsPlan.calibrated(0.5, 1e-5, 539)
    plan = metrics.release
    assert (plan.rounds, plan.clip_norm, plan.denominator) == (1, 1.0, 539.0)
    assert plan.charge_event() == dp_accounting.GaussianDpEvent(plan.noise_multiplier)
    assert plan.epsilon() == pytest.approx(0.5, rel=1e-3)
    assert plan.statement().endswith("accountant = exact Gaussian")
    assert not MetricsPlan.without_privacy(539).release.private
