"""A run that Slurm or Ray starts on two hosts is the run of one process with as many devices."""

import os
import signal
import time

import pytest

from tests.experiments.test_shared_systems import EXACT, ledgers
from tests.federated.test_hosts import CONFIG
from tests.federated.two_processes import ended, start

# As Slurm's: it sets what `jax.distributed` reads, of two nodes that are both this machine.
SRUN = """#!/bin/sh
export SLURM_STEP_NUM_NODES="${1#*=}" SLURM_NTASKS="${2#*=}" SLURM_JOB_ID=$$ SLURM_LOCALID=0
export SLURM_STEP_NODELIST=localhost,other
shift 4
SLURM_PROCID=1 "$@" > /dev/null &
echo $! > "$0.second"
SLURM_PROCID=0 "$@" && wait $!
"""


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    srun = tmp_path / "srun"
    srun.write_text(SRUN)
    srun.chmod(0o755)
    monkeypatch.setenv("PATH", os.pathsep.join([str(tmp_path), os.environ["PATH"]]))
    return srun


@pytest.fixture
def ray(monkeypatch):
    pytest.importorskip("ray", reason="Ray is not installed (pip install 'jaxpfl[ray]')")
    from ray.cluster_utils import Cluster  # pyright: ignore[reportMissingImports]

    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    nodes.add_node(num_cpus=1)
    monkeypatch.setenv("RAY_ADDRESS", nodes.address)
    yield
    nodes.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["slurm", "ray"])
def test_a_run_is_started_on_two_nodes(launcher, tmp_path, request):
    request.getfixturevalue(launcher)
    (config := tmp_path / "config.yaml").write_text(CONFIG.replace("rounds: 30", "rounds: 3"))
    command = ["-m", "jaxpfl", "run", str(config), *EXACT, "--run.reproducible_noise", "true"]
    command += ["--training.model_devices", "2"]
    alone = start([*command, "--out", str(tmp_path / "alone"), "--run.devices", "4"])
    shared = ["--out", str(tmp_path / "run"), "--launcher", launcher, "--hosts", "2"]
    for code, said, errors in ended([alone, start([*command, *shared])], seconds=900):
        assert code == 0, errors
        assert said.count("report: ") == 1, said
    assert ledgers(tmp_path / "alone") == ledgers(tmp_path / "run")
    assert sum("release" in line for line in ledgers(tmp_path / "run").popitem()[1]) == 3


@pytest.mark.slow
def test_a_sweep_of_runs_on_two_nodes_goes_on_after_one_is_killed(slurm, tmp_path):
    """With the noise of DP-FTRL in floating point at the first point."""
    (tmp_path / "config.yaml").write_text(CONFIG.replace("rounds: 30", "rounds: 3"))
    grid, out = tmp_path / "grid.yaml", tmp_path / "out"
    grid.write_text("{base: config.yaml, metric: epsilon, grid: {privacy.noise: [banded, exact]}}")
    command = ["-m", "jaxpfl", "sweep", str(grid), "--privacy.sampling", "cyclic"]
    command += ["--run.reproducible_noise", "true", "--out"]
    shared = [*command, str(out), "--launcher", "slurm", "--hosts", "2"]
    alone = start([*command, str(tmp_path / "alone"), "--run.devices", "4"])
    first = start(shared)
    while first.poll() is None and not any(ledgers(out).values()):
        time.sleep(0.1)
    os.kill(int(slurm.with_name("srun.second").read_text()), signal.SIGKILL)
    (code, _, errors), (failed, said, _) = ended([alone, first], seconds=900)
    assert (code, failed) == (0, 4) and "its processes ended with status 1" in said, errors + said
    ((code, _, errors),) = ended([start(shared)], seconds=900)
    assert code == 0, errors
    assert len(ledgers(out)) == 2 and ledgers(out) == ledgers(tmp_path / "alone")
