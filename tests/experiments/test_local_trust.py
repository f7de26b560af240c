"""`privacy.trust: local` in configs: of the rounds of training, and refused of everything else."""

import dataclasses

import pytest

from jaxpfl.experiments import registry
from jaxpfl.experiments.config import shipped
from jaxpfl.experiments.engine.build import build_plan
from tests.refusals import refusal


def test_a_config_plans_noise_of_clients():
    config = registry.load(shipped.find("digits_cnn"), ["--privacy.trust", "local"])
    plan = build_plan(config.privacy, config.training, 960)
    assert plan.local
    assert plan.adjacency == "replace_one"
    central = dataclasses.replace(config.privacy, trust="central")
    assert build_plan(central, config.training, 960).noise_multiplier < plan.noise_multiplier


@pytest.mark.parametrize(
    "config", ["quickstart", "gan_inversion", "oov_concatenation", "popri_small", "training_bias"]
)
def test_where_a_server_adds_other_noise_it_is_refused(config):
    name = "words.privacy.trust" if config == "oov_concatenation" else "privacy.trust"
    refusal(lambda: registry.load(shipped.find(config), [f"--{name}", "local"]), f"{name} local")
