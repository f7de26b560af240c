"""Kill -9 at any instant, then resume: the same bits as the run that was never interrupted."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxpfl.errors import InputError
from jaxpfl.experiments import config_file, loop
from jaxpfl.experiments.environment import environment
from jaxpfl.experiments.execute import resume_run, run_config
from jaxpfl.privacy import plan
from jaxpfl.privacy.ledger import Ledger

# Kills itself with SIGKILL before its n-th durable operation: charges, metrics, and every step of
# saving and deleting checkpoints are such operations. Prints how many there were if it lives.
VICTIM = """
import os, pathlib, signal, sys
config, out, fatal = sys.argv[1], sys.argv[2], int(sys.argv[3])
calls = 0
def deadly(real):
    def call(*arguments, **options):
        global calls
        calls += 1
        if calls == fatal:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments, **options)
    return call
for name in ("fsync", "rename", "replace", "mkdir", "rmdir"):
    setattr(os, name, deadly(getattr(os, name)))
from jaxpfl.experiments import config_file
from jaxpfl.experiments.execute import run_config
run_config(config_file.load(config), out, shown=False)
print(calls)
"""


def _victim(config: Path, out: Path, fatal: int) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", VICTIM, str(config), str(out), str(fatal)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )


@pytest.fixture(scope="module")
def straight(tiny_config, tmp_path_factory) -> tuple[Path, int]:
    """The run directory of an uninterrupted run, and how many instants it could die at."""
    out = tmp_path_factory.mktemp("straight") / "run"
    victim = _victim(tiny_config, out, -1)
    printed, errors = victim.communicate()
    assert victim.returncode == 0, errors
    return out, int(printed)


def _arrays(out: Path) -> dict[str, np.ndarray]:
    from jaxpfl.experiments.checkpoint import _read_arrays

    latest = sorted((out / "checkpoints").glob("round_*"))[-1]
    meta = json.loads((latest / "meta.json").read_text())
    return {"round": np.array(meta["round"]), **_read_arrays(latest / "state", meta["leaves"])}


def _assert_same(out: Path, straight: Path) -> None:
    for name in ("metrics.jsonl", "ledger.jsonl", "config.yaml", "vocabulary.json", "run.json"):
        assert (out / name).read_bytes() == (straight / name).read_bytes(), name
    assert json.loads((out / "result.json").read_text()) == json.loads(
        (straight / "result.json").read_text()
    )
    found, expected = _arrays(out), _arrays(straight)
    assert found.keys() == expected.keys()
    for name in expected:
        assert found[name].dtype == expected[name].dtype
        np.testing.assert_array_equal(found[name], expected[name], err_msg=name)
    rubbish = [p for p in (out / "checkpoints").iterdir() if not p.name.startswith("round_")]
    assert rubbish == []


def _go_on(config: Path, out: Path) -> None:
    """What a user does after a crash: resume, or run again where nothing was begun."""
    if (out / "config.yaml").exists():
        resume_run(out, shown=False)
    else:
        run_config(config_file.load(config), out, shown=False)


def _kill_and_resume(config: Path, out: Path, straight: Path, fatal: int) -> None:
    victim = _victim(config, out, fatal)
    victim.communicate()
    assert victim.returncode == -signal.SIGKILL
    _go_on(config, out)
    _assert_same(out, straight)


@pytest.mark.parametrize("place", [0.5, 0.93])
def test_a_run_killed_at_a_durable_operation_resumes_to_the_same_bits(
    tiny_config, tmp_path, straight, place
):
    """TRUST 33: SIGKILL between any two writes, mid-save and mid-delete too."""
    out, instants = straight
    _kill_and_resume(tiny_config, tmp_path / "run", out, max(1, round(place * instants)))


@pytest.mark.slow
@pytest.mark.parametrize("number", range(24))
def test_a_run_killed_at_many_durable_operations_resumes(tiny_config, tmp_path, straight, number):
    """TRUST 33: the same, spread over the whole run."""
    out, instants = straight
    fatal = 1 + (number * instants) // 24
    _kill_and_resume(tiny_config, tmp_path / "run", out, fatal)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(12))
def test_a_run_killed_twice_at_random_times_resumes(tiny_config, tmp_path, straight, number):
    """TRUST 33: random instants, a resumed run killed again."""
    generator = random.Random(number)
    out = tmp_path / "run"
    for _ in range(2):
        if (out / "config.yaml").exists():
            break
        victim = _victim(tiny_config, out, -1)
        time.sleep(generator.uniform(4, 12))
        victim.kill()
        victim.communicate()
    _go_on(tiny_config, out)
    _assert_same(out, straight[0])


@pytest.fixture
def run_to(tiny_config, tmp_path, monkeypatch):
    """Runs in this process up to a crash in the middle of round n; returns the directory."""

    def run(crash: int) -> Path:
        out = tmp_path / "run"
        real = plan.round_keys

        def crashing(train, noise, number):
            if number == crash:
                raise RuntimeError("crash")
            return real(train, noise, number)

        with monkeypatch.context() as patched:
            patched.setattr(plan, "round_keys", crashing)
            with pytest.raises(RuntimeError, match="crash"):
                run_config(config_file.load(tiny_config), out, shown=False)
        return out

    return run


def _ledger_lines(out: Path) -> int:
    return len((out / "ledger.jsonl").read_text().splitlines())


def test_the_charge_is_on_the_disk_before_the_round_and_is_not_repeated(run_to, straight):
    """TRUST 34: a round that was charged and not released is replayed without a second charge."""
    out = run_to(4)
    header = _ledger_lines(straight[0]) - 7
    assert _ledger_lines(out) - header == 4
    assert len((out / "metrics.jsonl").read_text().splitlines()) < 4 + 1
    resume_run(out, shown=False)
    _assert_same(out, straight[0])


def test_a_replayed_round_with_another_output_is_charged_again(run_to, straight, capsys):
    """TRUST 34: where the recorded hash differs, two releases were made: both are paid."""
    out = run_to(6)
    lines = (out / "metrics.jsonl").read_text().splitlines()
    record = json.loads(lines[5 if len(lines) > 5 else -1])
    assert record["round"] == 5 or len(lines) == 5
    # Round 4 is in the checkpoint; forge the record of a round that will be replayed.
    (out / "metrics.jsonl").write_text("\n".join(lines[:5]) + "\n")
    forged = {**json.loads(lines[4]), "round": 5, "output_hash": "0" * 16}
    with open(out / "metrics.jsonl", "a") as file:
        file.write(json.dumps(forged) + "\n")
    resume_run(out, shown=False)
    assert "charged again" in capsys.readouterr().err
    assert _ledger_lines(out) == _ledger_lines(straight[0]) + 1
    # All but the epsilon, which contains the second release.
    hashes = [
        [json.loads(line).get("output_hash") for line in lines.splitlines()]
        for lines in ((folder / "metrics.jsonl").read_text() for folder in (out, straight[0]))
    ]
    assert hashes[0] == hashes[1]


def _back_to_round_4(out: Path) -> None:
    """Without its latest checkpoint, a run has several rounds to replay."""
    for path in (out / "checkpoints").iterdir():
        if path.is_dir() and "6" in path.name:
            shutil.rmtree(path)


def test_every_recorded_round_that_comes_out_otherwise_is_charged_again(run_to, straight):
    """TRUST 34: rounds 5 and 6 were released, and are released again, otherwise: two charges more.

    The stated epsilon contains them: it is the ledger's."""
    out = run_to(7)
    _back_to_round_4(out)
    path = out / "metrics.jsonl"
    lines = path.read_text().splitlines()[:5]
    for number in (5, 6):
        forged = {**json.loads(lines[4]), "round": number, "output_hash": f"{number}" * 16}
        lines.append(json.dumps(forged))
    path.write_text("\n".join(lines) + "\n")
    resumed = resume_run(out, shown=False)
    assert _ledger_lines(out) == _ledger_lines(straight[0]) + 2
    # The metrics tell of the charges; all else is as in a run without them.
    ledger = Ledger.read(out / "ledger.jsonl")
    settings = json.loads((out / "run.json").read_text())["plan"]
    spent = ledger.spent(settings["delta"], settings["accountant"])
    assert resumed.metrics["epsilon"] == pytest.approx(spent, rel=1e-6)
    assert "of which 2 made again after a crash" in resumed.privacy
    result = json.loads((straight[0] / "result.json").read_text())
    assert resumed.metrics["epsilon"] > result["metrics"]["epsilon"]


def test_a_line_that_differs_in_its_evaluation_alone_is_no_second_release(run_to, straight):
    """TRUST 34: what is compared is the release; later lines stay, to be compared too."""
    out = run_to(7)
    _back_to_round_4(out)
    path = out / "metrics.jsonl"
    lines = path.read_text().splitlines()[:5]
    same = (straight[0] / "metrics.jsonl").read_text().splitlines()
    other = {**json.loads(same[5]), "evaluation": {"accuracy": 0.0}}
    forged = {**json.loads(same[6]), "output_hash": "6" * 16}
    path.write_text("\n".join([*lines, json.dumps(other), json.dumps(forged)]) + "\n")
    resume_run(out, shown=False)
    assert _ledger_lines(out) == _ledger_lines(straight[0]) + 1


def test_noise_is_another_where_the_computation_may_round_otherwise(run_to, monkeypatch):
    """TRUST 34: two releases with the same noise would show the difference of their sums.

    Rounds 5 and 6 are replayed by another version: the noise is new, and both are charged."""
    out = run_to(7)
    _back_to_round_4(out)
    lines = (out / "metrics.jsonl").read_text().splitlines()
    recorded = len(lines) - 1
    assert recorded >= 5
    elsewhere = {**environment(), "jaxlib": "0.0.0"}
    monkeypatch.setattr(loop, "environment", lambda: elsewhere)
    resume_run(out, shown=False)
    again = (out / "metrics.jsonl").read_text().splitlines()
    assert json.loads(again[4])["output_hash"] == json.loads(lines[4])["output_hash"]
    assert json.loads(again[5])["output_hash"] != json.loads(lines[5])["output_hash"]
    charges = Ledger.read(out / "ledger.jsonl").charges
    made_again = [charge for charge in charges if "released again" in charge.label]
    assert len(made_again) == recorded - 4


def test_a_torn_last_line_of_the_metrics_is_replaced(run_to, straight):
    """TRUST 33: a crash inside a write."""
    out = run_to(6)
    content = (out / "metrics.jsonl").read_bytes()
    (out / "metrics.jsonl").write_bytes(content + b'{"round": 5, "clip')
    resume_run(out, shown=False)
    _assert_same(out, straight[0])


def test_a_damaged_checkpoint_falls_back_and_still_ends_in_the_same_bits(run_to, straight, capsys):
    """TRUST 35: the previous good step is tried, the message names both."""
    out = run_to(6)
    latest = sorted((out / "checkpoints").iterdir())[-1]
    assert latest.name == "round_00000004"
    (latest / "meta.json").write_text("{}")
    resume_run(out, shown=False)
    message = capsys.readouterr().err
    assert "round_00000004" in message
    assert "round_00000002" in message
    _assert_same(out, straight[0])


@pytest.mark.parametrize("damage", ["edit", "delete", "reorder", "replace"])
def test_a_tampered_ledger_blocks_the_resume(run_to, damage):
    """TRUST 40: an edited, reordered, deleted or replaced ledger line is found."""
    out = run_to(6)
    path = out / "ledger.jsonl"
    lines = path.read_text().splitlines()
    if damage == "edit":
        lines[-2], edits = re.subn(r'("round": ?)\d+', r"\g<1>99", lines[-2])
        assert edits == 1
    elif damage == "delete":
        del lines[2]
    elif damage == "reorder":
        lines[-1], lines[-2] = lines[-2], lines[-1]
    else:
        lines = lines[:2]
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(InputError, match="ledger"):
        resume_run(out, shown=False)


def test_a_changed_config_or_noise_key_blocks_the_resume(run_to):
    out = run_to(4)
    config = out / "config.yaml"
    text = config.read_text()
    config.write_text(text.replace("seed: 0", "seed: 1"))
    with pytest.raises(InputError, match="not the one this run began with"):
        resume_run(out, shown=False)
    config.write_text(text)
    (out / "private" / "noise_key.json").unlink()
    config.write_text(text.replace("reproducible_noise: true", "reproducible_noise: false"))
    with pytest.raises(InputError, match="not the one this run began with"):
        resume_run(out, shown=False)


def test_a_finished_run_resumes_to_itself(straight, tmp_path):
    import shutil

    out = tmp_path / "run"
    shutil.copytree(straight[0], out)
    resume_run(out, shown=False)
    _assert_same(out, straight[0])


def test_os_noise_differs_between_runs_and_resumes_to_the_same_bits(
    tiny_config, tmp_path, monkeypatch
):
    """TRUST 21: the noise never follows the seed unless asked for."""
    config = config_file.load(tiny_config, ["--run.reproducible_noise", "False"])
    first = run_config(config, tmp_path / "first", shown=False)
    second = run_config(config, tmp_path / "second", shown=False)
    assert first.metrics["output_hash"] != second.metrics["output_hash"]
    assert "NOT PRIVATE" not in first.privacy
    assert jax.device_count() == 2


def test_sigterm_saves_and_stops(tiny_config, tmp_path, straight, monkeypatch):
    """A stop signal ends the round, saves, and leaves a run that resumes to the same bits."""
    real = plan.round_keys

    def signalling(train, noise, number):
        if number == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(train, noise, number)

    out = tmp_path / "run"
    with monkeypatch.context() as patched:
        patched.setattr(plan, "round_keys", signalling)
        with pytest.raises(loop.Interrupted, match="after round 3") as caught:
            run_config(config_file.load(tiny_config), out, shown=False)
    assert caught.value.number == signal.SIGTERM
    assert (out / "checkpoints" / "round_00000003").is_dir()
    resume_run(out, shown=False)
    _assert_same(out, straight[0])
