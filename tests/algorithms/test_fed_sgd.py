"""DP-SGD against a plain loop in numpy; sampling by example."""

import numpy as np
import optax
import pytest

import jaxpfl as jp
from jaxpfl.data import from_clients
from jaxpfl.federated import Execution, client_mesh
from tests.algorithms.asking import asked
from tests.algorithms.systems import Linear
from tests.algorithms.test_fed_avg import CLIP, SIZES, population
from tests.federated.test_clipped_gradients import clipped
from tests.federated.test_local_training import DIM
from tests.plans import flat_plan, flat_without_privacy
from tests.refusals import refusal

TOTAL = sum(SIZES)
SERVER = optax.sgd(0.5)


def exact(**changes):
    settings = dict(population=TOTAL, clients_per_round=TOTAL, rounds=3, clip_norm=CLIP)
    return flat_without_privacy(**{**settings, "unit": "example", **changes})


def algorithm(plan=None, *, server=SERVER, cohort=None, execution=None):
    return jp.algorithms.fed_sgd(
        Linear(), server=server, plan=plan or exact(), cohort=cohort, execution=execution
    )


def by_hand(rounds=3):
    """Float64, all examples in every round."""
    held = population()
    x, y = np.float64(held.columns["x"]), np.float64(held.columns["y"])
    weights = np.zeros(DIM + 1)
    for _ in range(rounds):
        error = x @ weights[:DIM] + weights[DIM] - y
        every = error[:, None] * np.concatenate([x, np.ones((len(x), 1))], axis=1)
        weights = weights - 0.5 * clipped(every, CLIP) / TOTAL
    return weights


@pytest.mark.parametrize(
    ("cohort", "devices"), [(None, None), (jp.CohortSpec(4, 8, clients_per_bucket=2), 2)]
)
def test_rounds_are_what_a_plain_loop_gives(cohort, devices, tmp_path):
    """Whoever holds the examples, however they are batched and dealt to devices."""
    execution = None if devices is None else Execution(client_mesh(devices))
    chosen = algorithm(cohort=cohort, execution=execution)
    found = asked(chosen, population(), tmp_path)
    params = np.append(found.state.params["w"], found.state.params["b"])
    np.testing.assert_allclose(params, by_hand(), rtol=1e-5, atol=1e-6)
    first = found.metrics[0]["update_norm"]
    assert first == pytest.approx(np.linalg.norm(by_hand(1)) / 0.5, rel=1e-5)


@pytest.mark.parametrize(
    ("cohort", "blocks", "waste"), [(None, 2, 1 / 28), (jp.CohortSpec(5, 10), 3, 1 - 27 / 30)]
)
def test_blocks_of_examples_are_full_but_the_last(cohort, blocks, waste, tmp_path):
    """27 examples on two devices: by default, blocks of 14 and 13, and one slot is empty."""
    records = []
    chosen = algorithm(cohort=cohort, execution=Execution(client_mesh(2)))
    asked(chosen, population(), tmp_path, rounds=1, observe=records.append)
    assert records[0]["clients"] == blocks
    assert records[0]["padding_waste"] == pytest.approx(waste)


def test_examples_are_sampled_by_themselves_and_the_denominator_is_the_plans(tmp_path):
    """TRUST 13, 15, 24: sums over rounds of different, and empty, sizes, divided by the plan's n.

    All examples are alike, so that a round's step tells how many took part. They belong to three
    clients: were these sampled, there would be multiples of ten.
    """
    rows = np.ones((10, DIM), np.float32)
    # A residual of -100: every gradient has the norm of the clip.
    alike = from_clients({f"{i}": {"x": rows, "y": 100 * rows[:, 0]} for i in range(3)})
    # A cohort is empty with 0.13: in one of 120 rounds, but for 7e-8 of all machines.
    rounds, planned = 120, 2
    plan = exact(population=30, clients_per_round=planned, rounds=rounds)
    found = asked(algorithm(plan), alike, tmp_path)
    one = CLIP / planned
    taken = [float(metrics["update_norm"]) / one for metrics in found.metrics]
    np.testing.assert_allclose(taken, np.round(taken), atol=1e-3)
    assert 0 in np.round(taken)
    assert np.any(np.round(taken) % 10)
    assert np.mean(taken) == pytest.approx(planned, abs=1.0)


def test_the_noise_is_the_plans_and_the_ledger_is_charged_for_sampling(tmp_path):
    """TRUST 18, 29: a release is noise of z S alone where no example has a gradient."""
    settings = dict(population=400, clients_per_round=40, rounds=40, clip_norm=CLIP)
    plan = flat_plan(**settings, noise_multiplier=1.5, delta=1e-3, unit="example", accountant="rdp")
    zeros = {"x": np.zeros((200, DIM), np.float32), "y": np.zeros(200, np.float32)}
    # So small a rate that the weights stay where no example has a gradient.
    chosen = algorithm(plan, server=optax.sgd(1e-6))
    found = asked(chosen, from_clients({"a": zeros, "b": zeros}), tmp_path)
    assert found.ledger.unit == "example"
    assert [charge.event for charge in found.ledger.charges] == [plan.charge_event()] * 40
    norms = np.array([public["update_norm"] for public in found.metrics])
    # Of 160 draws a standard deviation is known to 1 / sqrt(320): five of these are 28 percent.
    assert np.sqrt(np.mean(norms**2) / (DIM + 1)) == pytest.approx(1.5 * CLIP / 40, rel=0.28)


def test_a_plan_by_client_is_refused():
    plan = flat_without_privacy(population=6, rounds=1)
    refusal(lambda: algorithm(plan), "unit = 'example'")
