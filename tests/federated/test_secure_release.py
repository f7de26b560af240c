"""One secure sum of clients' updates: charged, summed, and refused when too many drop out."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import jaxpfl as jp
from tests.federated.cohorts import held_vector, vectors
from tests.refusals import refusal

CLIENTS = 7
SECURE = jp.SecureSum(CLIENTS, clip_norm=2.0, noise_multiplier=1e-3, dropouts=2)


def population():
    values_CxD = vectors(CLIENTS, scale=2.0)
    rows = {f"c{i}": {"x": values_CxD[i : i + 1]} for i in range(CLIENTS)}
    return jp.data.from_clients(rows), values_CxD


def release(folder, secure=SECURE, **changes):
    given = {"delta": 1e-3, "ledger": folder / "ledger.jsonl", "broadcast": np.zeros(5, np.float32)}
    clients, _ = population()
    cohort = jp.CohortSpec(1, 1, clients_per_bucket=4)
    client_fn = changes.pop("client_fn", held_vector)
    return jp.secure_release(client_fn, clients, secure, cohort=cohort, **{**given, **changes})


def charges(folder):
    return jp.Ledger.read(folder / "ledger.jsonl").charges


def test_the_sum_of_all_clients_is_released_and_charged_once(tmp_path):
    found = release(tmp_path)
    _, values_CxD = population()
    norms_C = np.linalg.norm(values_CxD, axis=1, keepdims=True)
    expected_D = (values_CxD * np.minimum(1, 2.0 / norms_C)).sum(0)
    # Twelve standard deviations of the noise, and the rounding of the steps.
    np.testing.assert_allclose(found.value["a"], expected_D, atol=0.03)
    (charge,) = charges(tmp_path)
    assert charge.event == SECURE.event(5)
    assert float(found.privacy.rpartition("overflows with probability ")[2]) < 1e-9
    assert "RDP" in found.privacy and "RDP" in found.ledger


def test_the_noise_has_the_planned_size_and_each_client_its_own(tmp_path):
    """Of seven shares, where five would add up to z S; one share for all would be too large."""

    def nothing(broadcast, examples, key):
        return 0 * jnp.sum(examples.batches["x"]) + jnp.zeros(20_000)

    found = release(tmp_path, client_fn=nothing)
    assert np.std(found.value) == pytest.approx(1e-3 * 2.0 * np.sqrt(7 / 5), rel=0.03)


def test_each_call_is_another_release(tmp_path):
    first, second = release(tmp_path), release(tmp_path)
    assert len(charges(tmp_path)) == 2
    assert not np.array_equal(first.value["a"], second.value["a"])


def test_planned_dropouts_are_left_out_and_more_of_them_end_it(tmp_path):
    release(tmp_path, dropped=2)
    refusal(lambda: release(tmp_path, dropped=3), "nothing is released")
    # Both were begun, and so both are charged.
    assert len(charges(tmp_path)) == 2


def test_a_budget_holds(tmp_path):
    costly = dataclasses.replace(SECURE, noise_multiplier=0.01)
    with pytest.raises(jp.BudgetExhausted):
        release(tmp_path, costly, budget=jp.Budget(1.0, 1e-3))
    assert not charges(tmp_path)


def test_another_number_of_clients_is_refused(tmp_path):
    refusal(lambda: release(tmp_path, dataclasses.replace(SECURE, clients=8)), "another number")
    assert not (tmp_path / "ledger.jsonl").exists()
