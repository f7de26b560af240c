"""Noise that each client adds itself: what is released is the sum of noisy messages.

TRUST 2, 18, 22, 23, 34. A sum is compared with the clipped contributions by numpy; the rest is
noise, whose deviation must be the plan's for as many clients as took part.
"""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from jaxpfl.data.cohort import CohortSpec
from jaxpfl.errors import InformationLeak
from jaxpfl.experiments import deployment
from jaxpfl.experiments.engine.cost import with_larger
from jaxpfl.federated import Execution
from jaxpfl.federated.flow.check import check_program
from jaxpfl.federated.mesh import client_mesh
from jaxpfl.federated.release import identity, local_noise
from jaxpfl.federated.release.information_flow import local_steps
from jaxpfl.privacy import Ledger, MinSeparation, Noise, Poisson, verify
from jaxpfl.privacy.certificate import certificate, certify
from jaxpfl.privacy.local_trust import client_multiplier, of_sums
from tests.federated import test_planted_leaks as planted
from tests.federated.releases import (
    CLIENTS,
    DIM,
    ask,
    half_of_it,
    plan,
    population,
    query,
    releasing,
)
from tests.federated.test_client_states import Counting
from tests.refusals import refusal

OF_ONE = 0.5  # the deviation of one client's noise, S = 1
LOCAL = plan(noise=Noise(OF_ONE * math.sqrt(CLIENTS), trust="local"))


def exact_sum(clients) -> np.ndarray:
    held = clients.columns["x"].astype(np.float64)
    norms = np.linalg.norm(held, axis=1, keepdims=True)
    return np.sum(held * np.minimum(1, 1 / norms), axis=0)


def require_deviation(noise: np.ndarray, expected: float) -> None:
    """Within six standard errors, which 2 / 3 and 3 / 2 of it are far from."""
    assert np.std(noise) == pytest.approx(expected, rel=6 / math.sqrt(2 * noise.size))
    assert abs(np.mean(noise)) < 6 * expected / math.sqrt(noise.size)


def test_a_sum_has_the_noise_of_all_its_clients(ledger_path):
    noise = ask(ledger_path, query(of=LOCAL))[0] - exact_sum(population())
    require_deviation(noise, LOCAL.value_noise_std(1.0))
    # Gaussian: a normal has 68.27 % within a deviation; the standard error is 0.33 points.
    within = np.mean(np.abs(noise) < LOCAL.value_noise_std(1.0))
    assert within == pytest.approx(0.6827, abs=0.02)


def test_each_client_has_noise_of_its_own(tmp_path):
    """Cohorts of half of the clients have half of the variance; other halves, other noise."""
    half = plan(noise=LOCAL.noise, participation=Poisson(CLIENTS, CLIENTS // 2))
    assert client_multiplier(half) == pytest.approx(OF_ONE * math.sqrt(2))
    seen, asked = [], query(of=half)
    with releasing(tmp_path / "ledger", observe=seen.append) as releaser:
        rounds = [
            np.asarray(releaser.release(asked, jnp.float32(0), round=n).value) for n in (1, 2)
        ]
    for value, facts in zip(rounds, seen, strict=True):
        # What is not noise is at most a ten-thousandth of a coordinate's deviation.
        require_deviation(value, client_multiplier(half) * math.sqrt(facts["clients"]))
    assert abs(np.corrcoef(rounds[0], rounds[1])[0, 1]) < 6 / math.sqrt(DIM)


def test_a_client_whose_contribution_is_not_finite_sends_its_noise(ledger_path):
    """The number of those who sent nothing would else be seen in the noise."""
    clients = population()
    held = np.full_like(clients.columns["x"], np.nan)
    all_bad = clients.with_columns({"x": held})
    found, _ = ask(ledger_path, query(of=LOCAL), clients=all_bad)
    assert np.isfinite(found).all()
    require_deviation(found, LOCAL.value_noise_std(1.0))


def test_every_layout_releases_the_same_bits(tmp_path, monkeypatch):
    """Layouts are part of an identity, and so of the noise, unless one pretends otherwise."""
    monkeypatch.setattr(identity, "described", lambda *_: "always the same")
    found = []
    for slots, devices, chunk in ((8, 1, 1), (8, 1, 4), (32, 2, 4)):
        execution = Execution(client_mesh(devices), chunk)
        asked = query(
            of=LOCAL, cohort=CohortSpec(1, 1, clients_per_bucket=slots), execution=execution
        )
        found.append(ask(tmp_path / f"{slots} {chunk}", asked)[0])
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_array_equal(found[0], found[2])


def test_a_replay_is_the_same_release_and_another_sum_is_refused(tmp_path, monkeypatch):
    """Noise that clients draw again would, in the difference of two sums, be gone."""
    path = tmp_path / "ledger"
    monkeypatch.setattr(identity, "described", lambda *_: "always the same")
    first, charges = ask(path, query(of=LOCAL))
    again, after = ask(path, query(of=LOCAL))
    np.testing.assert_array_equal(first, again)
    assert len(charges) == len(after) == 1
    refusal(lambda: ask(path, query(half_of_it, of=LOCAL)), "was replayed")
    assert len(Ledger.read(path).charges) == 1


def test_a_rounds_charge_is_that_of_a_message(tmp_path):
    _, charges = ask(tmp_path / "ledger", query(of=LOCAL))
    ledger = Ledger.read(tmp_path / "ledger")
    assert ledger.adjacency == "replace_one"
    assert [charge.event for charge in charges] == [LOCAL.charge_event()]
    # Releases under add or remove one have no common epsilon with it.
    refusal(lambda: ask(tmp_path / "ledger", query(of=plan())), "replace one no common epsilon")


@pytest.mark.parametrize("separated", [False, True])
def test_a_certificate_of_local_noise_is_verified(separated, tmp_path):
    own = plan(
        noise=LOCAL.noise, rounds=2,
        participation=MinSeparation(CLIENTS, 8, separation=2) if separated else Poisson(CLIENTS, 8),
    )  # fmt: skip
    path = tmp_path / "ledger"
    ask(path, query(of=own), round=1)
    ask(path, query(of=own), round=2)
    ledger = Ledger.read(path)
    stated = with_larger([own], own.guarantee().statement())
    assert stated.startswith("LOCAL NOISE")
    record = certificate("own", {"ledger": ledger}, own.delta, statement=stated, stamp="")
    verify.check(record)
    certify(tmp_path, "own", [own], statement=stated, stamp="", ledgers=[path])
    model = deployment.entry(tmp_path)["deployment"]["deployment_model"]
    assert model["model_name"] == "Local"
    again = verify.cost_of(record["ledgers"][0]["charges"])(own.delta)
    assert again == pytest.approx(own.epsilon(), rel=2e-3)
    # Nobody may state for the messages what holds for a plan's sums alone.
    sums = of_sums(own)
    assert (sums is None) == (not separated)
    if sums is not None:
        short = f"(epsilon = {sums.epsilon():.4g}, delta = {own.delta:g})"
        for forged in (own.statement(), sums.statement(), short, f"{short}, unit = client"):
            with pytest.raises(verify.Unfit):
                verify.check(record, [forged])


def test_a_contribution_without_its_noise_is_found_by_the_flow():
    def sums(noisy):
        def program(given):
            factors_C = planted.factors_of(given.clients, given.clip_norm)
            real_C = jnp.ones(planted.CLIENTS, bool)
            words_Cx2 = jnp.zeros((planted.CLIENTS, 2), jnp.uint32)
            rows = [given.clients]
            if noisy:
                clients = real_C, real_C, words_Cx2, given.secrets, given.clip_norm
                rows = local_noise.noisy_rows(rows, [factors_C], *clients)
            return jnp.sum(rows[0], axis=0)

        return program

    check_program(sums(True), planted.GIVEN, local_steps())
    with pytest.raises(InformationLeak, match="otherwise than by a noisy sum"):
        check_program(sums(False), planted.GIVEN, local_steps())
    with pytest.raises(InformationLeak, match="otherwise than by a noisy sum"):
        check_program(planted.total_of, planted.GIVEN, local_steps())


def test_a_client_function_with_a_state_is_refused():
    refusal(lambda: query(Counting(), of=LOCAL), "trust 'local' state of each client")
