"""Sweeps whose points come to invented results at once."""

import pytest

from jaxpfl import files
from jaxpfl.experiments import carry_out
from jaxpfl.experiments.sweep.config import load_sweep
from tests.experiments.sweep.three_points import BASE, written


@pytest.fixture
def invented(monkeypatch):
    """Makes every run come to what a function of its config and folder returns, or raises."""

    def invent(result_of):
        begun = []

        def carried_out(config, out, **_):
            begun.append(out.name)
            with files.exclusive(out):
                files.write_json(out / "result.json", result_of(config, out))

        monkeypatch.setattr(carry_out, "run", carried_out)
        return begun

    return invent


@pytest.fixture
def path(tmp_path):
    """A sweep of three points; the base begins with seed 7."""
    three = {"grid": {"training.clients_per_round": [5, 10, 20]}}
    return written(tmp_path, three, BASE | {"run": {"seed": 7}})


@pytest.fixture
def sweep(path):
    return load_sweep(path)
