"""The sweeps that come with jaxpfl and need no data."""

import json

import pytest

from jaxpfl import cli
from jaxpfl.experiments.config import shipped
from jaxpfl.experiments.sweep.config import load_sweep


def test_clients_per_round_compares_three_methods_at_one_epsilon():
    sweep = load_sweep(shipped.find("sweeps/clients_per_round"), seeds=3)
    assert len(sweep.points) == 3 * 6 * 3
    configs = [point.config for point in sweep.points]
    assert {config.privacy.epsilon for config in configs} == {7.0}
    assert {config.training.clients_per_round for config in configs} >= {50, 2000}
    sent = {(each.method, each.privacy.sampling, each.privacy.noise) for each in configs}
    assert sent == {
        ("fed_avg", "poisson", "independent"),
        ("fed_avg", "cyclic", "banded"),
        ("popri", "poisson", "independent"),
    }
    assert sweep.x == "training.clients_per_round"


@pytest.mark.slow
def test_its_small_form_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["sweep", "sweeps/clients_per_round_test", "--out", "out"]) == 0
    record = json.loads((tmp_path / "out" / "sweep.json").read_text())
    assert [row["runs"] for row in record["rows"]] == [1] * 6
    assert all(row["private"] for row in record["rows"])


def test_the_simulated_sweep_has_fewer_clients_than_its_noise_is_for():
    configs = [
        point.config
        for point in load_sweep(shipped.find("sweeps/clients_per_round_simulated")).points
    ]
    assert {config.method for config in configs} == {"fed_avg", "popri"}
    assert {config.training.clients_per_round for config in configs} == {500}
    assert {each.simulated.clients_per_round for each in configs} == {500, 5_000, 50_000}
