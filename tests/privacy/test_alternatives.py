"""The mechanisms that a deployment can choose from, by their noise at one epsilon."""

from typing import get_args

import numpy as np
import pytest

from jaxpfl import cli
from jaxpfl.privacy import Clip, Cyclic, Noise, Plan, correlated_noise
from jaxpfl.privacy.alternatives import alternatives, sum_variances
from jaxpfl.privacy.participation import Sampling
from tests.refusals import refusal

TERMS = {"epsilon": 4.0, "delta": 1e-4, "rounds": 6, "check_in_rate": 0.25}


@pytest.mark.parametrize(("population", "rounds"), [(40, 12), (40, 3), (10, 5)])
def test_the_noise_of_sums_is_that_of_the_noise_that_is_added(population, rounds):
    """By the recurrence that draws it, written as a matrix."""
    plan = Plan(rounds, Clip(1.0), Noise(2.0, "banded"), Cyclic(population, 10), 1e-3)
    weights = correlated_noise.band_weights(plan.bands)
    noise_TxT = np.zeros((rounds, rounds))
    for t in range(rounds):
        noise_TxT[t, t] = weights[0]
        for ago in range(1, min(plan.bands, t + 1)):
            noise_TxT[t] -= weights[ago] * noise_TxT[t - ago]
    sums_TxT = np.cumsum(noise_TxT, axis=0)
    found = sum_variances(plan)
    assert found == pytest.approx(np.square(sums_TxT).sum(axis=1), rel=1e-9)
    # Independent noise adds up.
    plain = Plan(rounds, Clip(1.0), Noise(2.0), Cyclic(population, 10), 1e-3)
    assert sum_variances(plain) == pytest.approx(np.arange(1, rounds + 1))


def test_each_mechanism_is_calibrated_to_the_one_epsilon():
    every, found, population = alternatives(**TERMS, populations=(80, 160)), [], 80
    while population == 80:  # each takes long: of the second population the first one
        found.append(next(every))
        population = found[-1].plan.population
    # Whatever a plan can be of is compared.
    assert {one.mechanism.split(",")[0] for one in found[:-1]} == set(get_args(Sampling))
    assert "cyclic, banded" in {one.mechanism for one in found[:-1]}
    for one in found:
        population = 80 if one in found[:-1] else 160
        assert one.plan.population == population
        assert 0.98 * 4 < one.plan.epsilon() <= 4
        assert one.plan.clients_per_round == population // 4
        assert one.ratio == one.plan.noise_multiplier / one.plan.denominator
    # What is drawn in whole numbers costs the same, and is no row of its own.
    assert not any("exact" in one.mechanism for one in found)
    fewer = next(iter(alternatives(**TERMS, populations=(80,), most_clients=5)))
    assert fewer.plan.clients_per_round == 5
    everyone = list(alternatives(**TERMS | {"check_in_rate": 1.0}, populations=(80,)))
    assert {one.plan.clients_per_round for one in everyone} == {80}
    # Cyclic cohorts have no choice: everyone takes part once in N / n rounds.
    wait = {"cyclic": 4, "min_separation": 3, "cyclic_poisson": 3}
    for one in alternatives(**TERMS, populations=(80,), separation=3):
        assert one.row()["separation"] == wait.get(one.plan.sampling)


def test_nobody_checks_in():
    refusal(lambda: list(alternatives(**TERMS | {"check_in_rate": 1e-3}, populations=(80,))), "80")
    refusal(lambda: list(alternatives(**TERMS | {"check_in_rate": 1.5})), "check-in rate")


def test_calibrate_answers_in_a_table_and_a_picture(capsys, tmp_path):
    picture = tmp_path / "new" / "mechanisms.png"
    command = "calibrate --epsilon 4 --delta 1e-4 --rounds 6 --check-in-rate 0.25 --population 80"
    assert cli.main([*command.split(), "--out", str(picture)]) == 0
    text = capsys.readouterr().out
    assert " least" in text
    assert "noise-to-batch ratio" in text and "replace one" in text
    assert picture.read_bytes().startswith(b"\x89PNG")
    for wrong in ("--accountant rdp", "--sampling fixed"):
        assert cli.main([*command.split(), *wrong.split()]) == 2
        assert "--check-in-rate" in capsys.readouterr().err
    without = command.replace("--check-in-rate 0.25 ", "")
    assert cli.main(without.split()) == 2
    assert "--clients-per-round" in capsys.readouterr().err
