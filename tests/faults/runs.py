"""Runs that are killed at a chosen instant, and in what a resumed run must be equal."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import jaxpfl as jp
from jaxpfl.algorithms import Algorithm
from jaxpfl.data import from_clients
from jaxpfl.data.population import Population
from jaxpfl.experiments import carry_out, registry
from jaxpfl.experiments.systems.federated_training.config import Config
from jaxpfl.federated.release import prepared_query
from jaxpfl.privacy.chain import Chain
from jaxpfl.privacy.ledger import Charge, Ledger
from tests.experiments.crashes import stopped
from tests.experiments.ledgers import same_but_heads

# Charges, metrics, and every step of saving and deleting checkpoints are such operations.
DURABLE = ("fsync", "rename", "replace", "mkdir", "rmdir")
# Kills itself with SIGKILL before its n-th durable operation.
VICTIM = f"""
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
for name in {DURABLE}:
    setattr(os, name, deadly(getattr(os, name)))
from jaxpfl.experiments import registry
from jaxpfl.experiments import carry_out
carry_out.run(registry.load(config), out, progress=False)
"""


def run_and_count(config: Path, out: Path) -> int:
    """Carries out a run that nothing interrupts; returns how many durable operations it had."""
    calls = []

    def counting(real):
        return lambda *arguments, **options: calls.append(0) or real(*arguments, **options)

    with pytest.MonkeyPatch.context() as patched:
        for name in DURABLE:
            patched.setattr(os, name, counting(getattr(os, name)))
        carry_out.run(config_of(config), out, progress=False)
    return len(calls)


def start_victim(config: Path, out: Path, fatal: int) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", VICTIM, str(config), str(out), str(fatal)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )


def charges_of(out: Path) -> list[Charge]:
    return Ledger.read(out / "ledger.jsonl").charges


def releases_of(out: Path) -> list[tuple[str, str]]:
    """Every release that the ledger recorded, by identity."""
    lines = Chain.read(out / "ledger.jsonl").lines
    return sorted((line["identity"], line["release"]) for line in lines if "release" in line)


def assert_same(out: Path, straight: Path) -> None:
    """Parameters, metrics, charges and releases are the same bits; the ledgers' keys differ."""
    for name in ("metrics.jsonl", "config.yaml", "vocabulary.json", "run.json"):
        assert same_but_heads(out / name, straight / name), name
    assert charges_of(out) == charges_of(straight)
    assert [charge.round for charge in charges_of(out)] == list(range(1, 8))
    assert releases_of(out) == releases_of(straight)
    assert len(releases_of(out)) == 7
    assert not (out / "private" / "secret.json").exists()
    assert json.loads((out / "result.json").read_text()) == json.loads(
        (straight / "result.json").read_text()
    )
    last = max((straight / "checkpoints").iterdir())
    # Nothing else, and none after it.
    assert all(path.name.startswith("round_") for path in (out / "checkpoints").iterdir())
    assert max(path.name for path in (out / "checkpoints").iterdir()) == last.name
    for path in (path for path in last.rglob("*") if path.is_file()):
        assert same_but_heads(out / path.relative_to(straight), path), path


def continue_run(config: Path, out: Path) -> None:
    """What a user does after a crash: resume, or run again where nothing was begun."""
    if (out / "config.yaml").exists():
        carry_out.resume(out, progress=False)
    else:
        carry_out.run(config_of(config), out, progress=False)


def run_and_watch(config: Config, out: Path) -> list[bytes]:
    """Carries out a run; returns what it drew from the operating system, its secrets included."""
    drawn, real = [], os.urandom

    def watching(size):
        drawn.append(real(size))
        return drawn[-1]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "urandom", watching)
        carry_out.run(config, out, progress=False)
    return drawn


def config_of(path: Path, overrides: list[str] | None = None) -> Config:
    config = registry.load(path, overrides or [])
    assert isinstance(config, Config)
    return config


def adding(
    rounds: int, after_release: Callable[[int], object] = lambda round: None
) -> tuple[Algorithm, Population]:
    """Adds up what 50 clients release, with `after_release` called in each round."""
    clients = from_clients({f"canary {i}": {"x": np.full(2, i, np.float32)} for i in range(50)})
    plan = jp.Plan(rounds, jp.Clip(1.0), jp.Noise(2.0), jp.Poisson(50, 50), 1e-3)

    def client_fn(broadcast, examples, key):
        return jnp.where(examples.mask, examples.batches["x"], 0).sum()

    query = jp.Query("s", client_fn, plan, jp.CohortSpec(2, 4))

    def step(state, release, round):
        value = release(query).value
        after_release(round)
        return state + np.asarray(value), {"value": value}

    return Algorithm("a", lambda key: jnp.float32(0), step, (query,)), clients


def in_round(number: int) -> AbstractContextManager[None]:
    """What is inside ends after a round's charge, before any client's data is read."""
    return stopped(prepared_query, "Cohort", when=lambda *_, round, **__: round == number)
