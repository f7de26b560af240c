"""A run of a tiny private text experiment whose data is full of canaries."""

from pathlib import Path

import pytest

from jaxpfl.experiments import carry_out
from tests.experiments.conftest import tiny_config as tiny_config
from tests.faults.runs import config_of


@pytest.fixture(scope="session")
def straight(tiny_config, tmp_path_factory) -> Path:
    """The run directory of an uninterrupted run."""
    out = tmp_path_factory.mktemp("straight") / "run"
    carry_out.run(config_of(tiny_config), out, progress=False)
    return out
