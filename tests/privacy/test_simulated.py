"""Noise as if more clients took part: its scale, what it costs, and what it says of itself."""

import dataclasses
import json

import numpy as np
import pytest

import jaxpfl as jp
from jaxpfl.errors import InputError
from jaxpfl.privacy.ledger import Ledger
from jaxpfl.privacy.simulated import LargerPopulation
from tests.federated.cohorts import held_vector
from tests.federated.releases import releasing

LABEL = (
    "SIMULATED: noise of 8 clients scaled as if 2,000 of 1,000,000 took part; no guarantee for "
    "these clients' data"
)
HERE, LARGER = jp.Poisson(40, 8), jp.Poisson(1_000_000, 2_000)
CLIP = jp.Clip(0.5)


def larger(noise=1.0, participation=LARGER, clip=CLIP):
    return jp.Plan(
        rounds=3, noise=jp.Noise(noise), clip=clip, participation=participation, delta=1e-7
    )


@pytest.mark.parametrize("clients", [8, 7, 3])
@pytest.mark.parametrize("multiplier", [1.0, 0.7354, 12.1])
@pytest.mark.parametrize("adaptive", [None, jp.AdaptiveClip()])
def test_the_mean_has_the_noise_of_the_larger_populations_mean(clients, multiplier, adaptive):
    planned = larger(multiplier, clip=jp.Clip(0.5, adaptive=adaptive))
    simulation = planned.simulated_by(jp.Poisson(40, clients), delta=1e-3)
    for of in (lambda plan: plan.value_noise_std(0.5), lambda plan: plan.indicator_noise_std):
        assert of(simulation) / clients == pytest.approx(of(planned) / 2_000, rel=1e-12)
    back = simulation.scaled_to(LargerPopulation(1_000_000, 2_000, 1e-7))
    # Never less noise than the stated epsilon is of.
    assert (
        planned.noise_multiplier <= back.noise_multiplier <= planned.noise_multiplier * (1 + 1e-14)
    )
    assert dataclasses.replace(back, noise=planned.noise) == planned


def test_a_plan_states_both_epsilons_and_which_is_no_guarantee():
    planned = larger(60.0)
    simulation = planned.simulated_by(HERE, delta=1e-3)
    same = jp.Plan(
        rounds=3, noise=jp.Noise(60 * 8 / 2_000), clip=jp.Clip(0.5), participation=HERE, delta=1e-3
    )
    assert simulation.statement() == (
        f"{LABEL}; the larger population would have {planned.statement()}; these clients have "
        f"{same.statement()}"
    )
    assert simulation.epsilon() == pytest.approx(same.epsilon())
    assert simulation.epsilon() > 1_000 * planned.epsilon()
    assert simulation.charge_event() == same.charge_event()
    written = json.loads(json.dumps(simulation.to_dict()))
    assert jp.Plan.from_dict(written) == simulation
    assert "simulates" not in same.to_dict(), "which would change the identities of other runs"


def test_the_ledger_is_charged_what_the_release_costs_and_names_the_simulation(tmp_path):
    clients = jp.data.from_clients({str(k): {"x": np.ones((1, 5), np.float32)} for k in range(40)})
    plan = larger().simulated_by(HERE, delta=1e-3)
    query = jp.Query("sum", held_vector, plan, jp.CohortSpec(1, 1, clients_per_bucket=8))
    path = tmp_path / "ledger.jsonl"
    with releasing(path, clients) as releaser:
        releaser.release(query, np.zeros(5, np.float32), round=1)
    (charge,) = Ledger.read(path).charges
    assert charge.label == "sum (SIMULATED)"
    assert charge.event == HERE.event(plan.noise_multiplier)
    assert "SIMULATED" in path.read_text()


@pytest.mark.parametrize(
    ("planned", "participation", "expected"),
    [
        (larger(), jp.Poisson(2_000_000, 8), r"simulated.population must be at least .* 2000000"),
        (larger(), jp.Poisson(4_000, 3_000), r"simulated.clients_per_round must be at least"),
        (
            larger(participation=jp.Cyclic(1_000_000, 2_000)),
            jp.Cyclic(40, 8),
            "'cyclic' cannot be simulated by fewer clients",
        ),
        (larger(), jp.FixedSize(40, 8), "needs a plan with noise and sampling = 'fixed'"),
        (jp.Plan.without_privacy(rounds=1, participation=jp.Poisson(9, 9)), HERE, "without noise"),
        (
            larger(clip=jp.Clip(0.5, adaptive=jp.AdaptiveClip(indicator_noise=100.0))),
            HERE,
            "indicator_noise = None",
        ),
    ],
)
def test_what_fewer_clients_cannot_simulate_is_refused(planned, participation, expected):
    with pytest.raises(InputError, match=expected):
        planned.simulated_by(participation, delta=1e-8)


@pytest.mark.parametrize(
    ("field", "value"), [("population", 0), ("clients_per_round", 2.5), ("delta", 1.5)]
)
def test_a_larger_population_out_of_range_is_refused(field, value):
    with pytest.raises(InputError, match=rf"^{field} must"):
        dataclasses.replace(LargerPopulation(10, 5, 0.01), **{field: value})


def test_the_larger_populations_delta_is_checked_as_that_of_any_plan():
    plan = jp.Plan(rounds=1, noise=jp.Noise(0.1), clip=jp.Clip(0.5), participation=HERE, delta=1e-3)
    with pytest.raises(InputError, match="not below 1 / population"):
        dataclasses.replace(plan, simulates=LargerPopulation(1_000_000, 2_000, 1e-5))
