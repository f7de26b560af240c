"""FreD's cost: what its plans compose to, what is charged and when."""

import math

import dp_accounting
import numpy as np
import pytest

from benchmarks.micro.fred_noise import printed
from jaxpfl.algorithms.fred import FredPlan, fred, private_moments
from jaxpfl.data import from_clients
from jaxpfl.federated import RunSecret
from jaxpfl.privacy import Ledger, accounting
from jaxpfl.privacy.confirmation import gaussian_epsilon
from tests.algorithms.asking import asked
from tests.algorithms.fred_queries import DIM, clients, plan_of, query


def test_the_exact_gaussian_of_the_papers_budget():
    """SPEC A.2: mu = 0.1527 for (0.6, 2e-6); 9.26 for each of two equal releases."""
    plan = plan_of(population=1000)
    assert plan.mu == pytest.approx(0.1527, abs=5e-5)
    assert plan.multipliers[0] == math.inf
    assert plan.multipliers[1] == plan.multipliers[2] == pytest.approx(9.26, abs=5e-3)


@pytest.mark.parametrize("target", [(0.6, 2e-6), (8.0, 1e-5), (0.1, 1e-7)])
def test_the_default_split_composes_to_the_target(target):
    """By three accountants: the closed form, dp-accounting's own on the event, and RDP above."""
    epsilon, delta = target
    plan = plan_of(epsilon=epsilon, delta=delta)
    assert epsilon * (1 - 1e-3) < plan.epsilon() <= epsilon
    total = accounting.epsilon(plan.guarantee().event, delta, "pld", "add_or_remove_one")
    assert total == pytest.approx(epsilon, rel=1e-3)
    accountant = dp_accounting.pld.PLDAccountant()
    accountant.compose(plan.guarantee().event)
    assert accountant.get_epsilon(delta) == pytest.approx(epsilon, rel=2e-3)
    assert total <= accounting.epsilon(plan.guarantee().event, delta, "rdp", "add_or_remove_one")
    # A split that forgets a release costs visibly less.
    assert gaussian_epsilon(1 / plan.multipliers[1], delta) < 0.9 * epsilon


def test_algorithm_1_as_printed_really_costs_what_the_specification_found():
    """SPEC A.1: the mean at (0.3, 1e-6) costs 344 at n = 150,000 and 18.9 at n = 3,000."""
    large, small = (printed(0.3, 1e-6, n, 3_000) for n in (150_000, 3_000))
    assert large["mean"].epsilon == pytest.approx(344, abs=0.5)
    assert small["mean"].epsilon == pytest.approx(18.9, abs=0.05)
    assert large["covariance"].epsilon < 0.01
    # d = 768: the noise inflates the trace by 58 c^2, against 1.06 with one Gaussian.
    radius = 2 * large["covariance"].std * math.sqrt(768)
    positive_half = 768 * 2 * radius / (3 * math.pi)  # of Wigner's semicircle
    assert positive_half == pytest.approx(58, rel=0.01)
    assert positive_half / math.sqrt(3_000) == pytest.approx(1.06, rel=0.01)


@pytest.mark.parametrize("declared", [None, 40])
def test_the_ledger_is_charged_what_the_plan_says(tmp_path, declared):
    population = clients()
    plan = plan_of(delta=1e-3, population=declared)
    with Ledger(tmp_path / "ledger.jsonl", population) as ledger:
        found = private_moments(population, plan, ledger=ledger)
        labels = ["fred count", "fred sum", "fred second"]
        assert [charge.label for charge in ledger.charges] == labels[declared is not None :]
        assert ledger.spent(1e-3) == pytest.approx(plan.epsilon(), rel=1e-4)
    # As declared, to the last digit.
    assert (found.moments.count == 40) == (declared is not None)


def test_a_query_that_broke_off_between_its_releases_goes_on_at_no_further_cost(tmp_path):
    """The covariance alone is left: count and mean are made again, to the bit."""
    population = clients()
    algorithm = fred(plan_of(), units=40, dimension=DIM)

    def crashing(state, release, round):
        def asked_but_the_last(query, broadcast):
            if query.label == "second":
                raise RuntimeError("crash")
            return release(query, broadcast)

        return algorithm.step(state, asked_but_the_last, round)

    with pytest.raises(RuntimeError, match="crash"):
        asked(algorithm._replace(step=crashing), population, tmp_path)
    resumed = asked(algorithm, population, tmp_path)
    assert len(resumed.ledger) == 3
    straight = asked(algorithm, population, tmp_path, ledger="straight.jsonl")
    for one, other in zip(resumed.state, straight.state, strict=True):
        np.testing.assert_array_equal(one, other)


def test_which_examples_of_a_client_are_used_is_secret(tmp_path):
    """With a public choice by index, one client's removal would change the others' subsets."""
    population = from_clients(
        {f"{i}": {"embedding": np.float32(np.random.default_rng(i).normal(size=(9, 3)))}
         for i in range(5)}
    )  # fmt: skip
    exact = FredPlan.without_privacy(max_examples=2, clip_norm=10.0)
    secrets = [RunSecret.reproducible(k) for k in (0, 0, 1)]
    means = [query(population, exact, tmp_path, secret).moments.mean_D for secret in secrets]
    np.testing.assert_array_equal(means[0], means[1])
    assert not np.allclose(means[0], means[2])


def test_a_simulated_plan_has_the_larger_populations_noise_of_the_mean_and_says_so():
    """Its charges are those of its own clients, whose epsilon is no useful one."""
    plan = FredPlan.calibrated(epsilon=7.0, delta=1e-6)
    small = plan.simulated_by(600, 1e-4, larger=72_000)
    for large, here in zip(plan.plans(72_000), small.plans(600), strict=True):
        assert here.value_noise_std(1.0) / 600 == pytest.approx(large.value_noise_std(1.0) / 72_000)
        assert here.simulates is not None and here.simulates.population == 72_000
        assert here.scaled_to(here.simulates).epsilon() == pytest.approx(large.epsilon())
    assert small.delta == 1e-4 and small.epsilon() > 1_000
    assert small.statement().startswith("SIMULATED: noise as if 72,000 clients took part; no")
