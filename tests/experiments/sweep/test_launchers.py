"""Launchers: points in processes of Ray and jobs of Slurm come to what one process comes to."""

import importlib.util
import json
import os
import shlex
import stat

import pytest
import yaml

from jaxpfl import cli
from jaxpfl.errors import InputError
from tests.experiments.sweep.three_points import BASE

CONFIG = {
    **BASE,
    "training": BASE["training"] | {"rounds": 1},
    # So that two runs of a point come to the same numbers.
    "run": {"reproducible_noise": True, "devices": 2},
}


@pytest.fixture
def path(tmp_path):
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(CONFIG))
    grid = {
        "base": "base.yaml",
        "metric": "loss",
        "grid": {"training.clients_per_round": [5, 10, 20]},
    }
    path = tmp_path / "a grid.yaml"
    path.write_text(yaml.safe_dump(grid))
    return path


def sweep(path, out, *options):
    code = cli.main(["sweep", str(path), "--out", str(out), *options])
    record = out / "sweep.json"
    return code, json.loads(record.read_text())["rows"] if record.exists() else None


@pytest.fixture
def sbatch(tmp_path, monkeypatch):
    """A program that says that it took a job, and keeps what it was given; returns its file."""
    folder, given = tmp_path / "bin", tmp_path / "given"
    folder.mkdir()
    program = folder / "sbatch"
    program.write_text(f'#!/bin/sh\necho "$@" >> {shlex.quote(str(given))}\necho "77;cluster"\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    return given


def commands(script):
    """The arguments of the program that a script ends with."""
    *_, last = script.read_text().splitlines()
    assert last.startswith("exec ")
    words = shlex.split(last)
    return words[words.index("jaxpfl") + 1 :]


def test_slurm_gets_a_task_for_each_unfinished_point(path, tmp_path, invented, sbatch, capsys):
    def result_of(config, _):
        if config.training.clients_per_round == 10:
            raise InputError("no such file")
        loss = config.training.clients_per_round
        return {"metrics": {"loss": loss}, "private": True, "privacy": ""}

    begun = invented(result_of)
    out = tmp_path / "the out"
    code, rows = sweep(path, out, "--launcher", "slurm", "--workers", "2")
    assert (code, rows, begun) == (0, None, [])
    assert "submitted 3 of 3 points as array job 77" in capsys.readouterr().out
    array, collecting = sbatch.read_text().splitlines()
    folder = out / "private" / "slurm"
    assert array == f"--parsable --array=1-3%2 {folder / 'array.sh'}"
    assert collecting == f"--parsable --dependency=afterany:77 {folder / 'collect.sh'}"
    # The logs have durations.
    assert folder.stat().st_mode & 0o077 == 0
    assert f'#SBATCH --output="{folder}/%A_%a.log"' in (folder / "array.sh").read_text()
    # The array's tasks, as Slurm would run them.
    task = commands(folder / "array.sh")
    for number, code in ((1, 0), (2, 4), (3, 0)):
        given = [word.replace("$SLURM_ARRAY_TASK_ID", str(number)) for word in task]
        assert cli.main(given) == code
    assert begun == [f"clients_per_round={number}" for number in (5, 10, 20)]
    assert cli.main(commands(folder / "collect.sh")) == 4
    rows = json.loads((out / "sweep.json").read_text())["rows"]
    assert [row["mean"] for row in rows] == [5, None, 20]
    # What failed is submitted again.
    sbatch.unlink()
    cli.main(["sweep", str(out), "--launcher", "slurm"])
    assert "--array=2 " in sbatch.read_text()


def test_what_slurm_refuses_is_said(path, tmp_path, sbatch, capsys, monkeypatch):
    program = tmp_path / "bin" / "sbatch"
    program.write_text("#!/bin/sh\necho 'invalid account' >&2\nexit 1\n")
    assert sweep(path, tmp_path / "out", "--launcher", "slurm")[0] == 2
    assert "array.sh: invalid account" in capsys.readouterr().err
    monkeypatch.setenv("PATH", str(tmp_path))
    assert sweep(path, tmp_path / "out", "--launcher", "slurm")[0] == 2
    assert "needs the program sbatch" in capsys.readouterr().err


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="Ray is installed")
def test_without_ray_it_says_how_to_get_it(path, tmp_path, capsys):
    assert sweep(path, tmp_path / "out", "--launcher", "ray") == (2, None)
    assert "pip install 'jaxpfl[ray]'" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


# Ray forks to start programs, of which JAX warns as of every fork; and it leaves files open.
@pytest.mark.filterwarnings(
    "ignore:os.fork",
    "ignore::pytest.PytestUnraisableExceptionWarning",
    "ignore::ResourceWarning",
)
@pytest.mark.long
def test_two_workers_of_ray_come_to_the_same_numbers(path, tmp_path, capsys):
    pytest.importorskip("ray", reason="Ray is not installed (pip install 'jaxpfl[ray]')")
    mapping = yaml.safe_load(path.read_text())
    # Refused only when the data is read.
    mapping["cases"] = {"good": {}, "bad": {"data.source": "digits?clients=no"}}
    path.write_text(yaml.safe_dump(mapping, sort_keys=False))
    code, alone = sweep(path, tmp_path / "alone")
    assert code == 4
    code, found = sweep(path, tmp_path / "ray", "--launcher", "ray", "--workers", "2")
    assert code == 4
    assert found == alone
    assert [row["runs"] for row in found] == [1, 1, 1, 0, 0, 0]
    assert "failed: case=bad,clients_per_round=5" in capsys.readouterr().out
