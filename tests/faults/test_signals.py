"""SIGTERM and SIGINT stop a run so that it can be resumed, whenever they come."""

import os
import signal
from pathlib import Path

import pytest

from jaxpfl.experiments import carry_out
from jaxpfl.experiments.engine.run_directory import RunDirectory
from jaxpfl.experiments.engine.signals import Interrupted
from jaxpfl.federated import asked
from tests.faults.runs import assert_same, config_of


@pytest.fixture(scope="module")
def straight(tiny_config, tmp_path_factory) -> Path:
    """The run directory of an uninterrupted run."""
    out = tmp_path_factory.mktemp("straight") / "run"
    carry_out.run(config_of(tiny_config), out, progress=False)
    return out


def test_sigterm_saves_and_stops(tiny_config, tmp_path, straight, monkeypatch):
    """A stop signal ends the round, saves, and leaves a run that resumes to the same bits."""
    real = asked.Cohort

    def signalling(*arguments, round, **options):
        if round == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(*arguments, round=round, **options)

    out = tmp_path / "run"
    with monkeypatch.context() as patched:
        patched.setattr(asked, "Cohort", signalling)
        with pytest.raises(Interrupted, match="after round 3") as caught:
            carry_out.run(config_of(tiny_config), out, progress=False)
    assert caught.value.number == signal.SIGTERM
    assert (out / "checkpoints" / "round_00000003").is_dir()
    assert (out / "private" / "secret.json").exists()
    carry_out.resume(out, progress=False)
    assert_same(out, straight)


def test_a_signal_after_the_last_round_still_stops_what_would_follow(
    tiny_config, tmp_path, straight, monkeypatch
):
    """Else the next stage, or the next point of a sweep, would begin."""
    real = RunDirectory.end

    def signalling(*arguments):
        os.kill(os.getpid(), signal.SIGTERM)
        return real(*arguments)

    out = tmp_path / "run"
    with monkeypatch.context() as patched:
        patched.setattr(RunDirectory, "end", signalling)
        with pytest.raises(Interrupted, match=f"after the last round; .* {out}$") as caught:
            carry_out.run(config_of(tiny_config), out, progress=False)
    assert caught.value.number == signal.SIGTERM
    carry_out.resume(out, progress=False)
    assert_same(out, straight)
