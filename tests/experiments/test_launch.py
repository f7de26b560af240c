"""A run that Slurm or Ray starts on two hosts is the run of one process with as many devices."""

import os
import sys
from pathlib import Path

import pytest

from jaxpfl import cli
from tests.experiments.test_shared_systems import EXACT, ledgers
from tests.federated.test_hosts import CONFIG
from tests.federated.two_processes import ended, start

# As Slurm's: it sets what `jax.distributed` reads, of two nodes that are both this machine.
SRUN = """#!{python}
import os, subprocess, sys
given = [each for each in sys.argv[1:] if each.startswith("--")]
nodes, tasks, output, kill = (each.partition("=") for each in given[:4])
assert [nodes[0], tasks[0], output[0], kill[0]] == [
    "--nodes", "--ntasks", "--output", "--kill-on-bad-exit"]
started = []
for index in range(int(tasks[2])):
    known = {{"JOB_ID": os.getpid(), "STEP_NODELIST": "localhost,other", "NTASKS": tasks[2],
             "PROCID": index, "LOCALID": 0, "STEP_NUM_NODES": nodes[2]}}
    there = os.environ | {{"SLURM_" + name: str(value) for name, value in known.items()}}
    out = None if str(index) == output[2] else subprocess.DEVNULL
    started.append(subprocess.Popen(sys.argv[5:], env=there, stdout=out))
sys.exit(max(each.wait() for each in started))
"""


def launched(folder: Path, launcher: str) -> dict:
    """The ledgers of a run on two hosts, which are those of one process."""
    config = folder / "config.yaml"
    config.write_text(CONFIG.replace("rounds: 30", "rounds: 3"))
    command = ["-m", "jaxpfl", "run", str(config), *EXACT, "--run.reproducible_noise", "true"]
    command += ["--run.checkpoint_every", "2"]
    alone = start([*command, "--out", str(folder / "alone"), "--run.devices", "4"])
    shared = ["--out", str(folder / "run"), "--launcher", launcher, "--hosts", "2"]
    for code, said, errors in ended([alone, start([*command, *shared])], seconds=900):
        assert code == 0, errors
        assert said.count("report: ") == 1, said
    assert ledgers(folder / "alone") == ledgers(folder / "run")
    return ledgers(folder / "run")


@pytest.mark.slow
def test_slurm_starts_a_run_on_two_nodes(tmp_path, monkeypatch):
    srun = tmp_path / "bin" / "srun"
    srun.parent.mkdir()
    srun.write_text(SRUN.format(python=sys.executable))
    srun.chmod(0o755)
    monkeypatch.setenv("PATH", os.pathsep.join([str(srun.parent), os.environ["PATH"]]))
    (lines,) = launched(tmp_path, "slurm").values()
    assert sum("release" in line for line in lines) == 3


@pytest.mark.slow
def test_ray_starts_a_run_on_two_nodes(tmp_path, monkeypatch):
    pytest.importorskip("ray", reason="Ray is not installed (pip install 'jaxpfl[ray]')")
    from ray.cluster_utils import Cluster  # pyright: ignore[reportMissingImports]

    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    try:
        nodes.add_node(num_cpus=1)
        monkeypatch.setenv("RAY_ADDRESS", nodes.address)
        (lines,) = launched(tmp_path, "ray").values()
    finally:
        nodes.shutdown()
    assert sum("release" in line for line in lines) == 3


@pytest.mark.parametrize("given", [("--launcher", "ray"), ("--hosts", "2")])
def test_a_launcher_needs_the_number_of_hosts(given, capsys, tmp_path):
    assert cli.main(["run", "quickstart", "--out", str(tmp_path / "run"), *given]) == 2
    assert "--launcher and --hosts go together" in capsys.readouterr().err
