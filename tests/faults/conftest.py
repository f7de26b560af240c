"""Runs of a tiny private text experiment whose data is full of canaries."""

from pathlib import Path

import pytest

from tests.experiments.conftest import tiny_config as tiny_config
from tests.faults.runs import config_of, run_and_count, run_and_watch


@pytest.fixture(scope="session")
def counted(tiny_config, tmp_path_factory) -> tuple[Path, int]:
    """The directory of an uninterrupted run, and how many instants it could die at."""
    out = tmp_path_factory.mktemp("straight") / "run"
    return out, run_and_count(tiny_config, out)


@pytest.fixture(scope="session")
def straight(counted) -> Path:
    return counted[0]


@pytest.fixture(scope="session")
def drawn() -> list[bytes]:
    """What `finished` drew from the operating system: its secrets, among other things."""
    return []


@pytest.fixture(scope="session")
def finished(tiny_config, tmp_path_factory, drawn) -> Path:
    """The directory of a run whose noise does not follow from its seed."""
    out = tmp_path_factory.mktemp("finished") / "run"
    drawn += run_and_watch(config_of(tiny_config, ["--run.reproducible_noise", "False"]), out)
    return out
