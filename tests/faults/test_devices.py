"""JAX without the device that is asked for, and processes that cannot use JAX: one sentence."""

import os
import subprocess
import sys

import jax
import pytest

from jaxpfl.cli import main

FORKED = """
import os, signal
import jax.numpy as jnp
from jaxpfl.errors import InputError
from jaxpfl.federated.mesh import client_mesh
early = os.fork()  # before JAX computes, all is well
if early == 0:
    print(client_mesh(1).devices.size, flush=True)
    os._exit(0)
os.waitpid(early, 0)
print(client_mesh(1).devices.size, flush=True)
late = os.fork()
if late == 0:
    signal.alarm(60)
    try:
        client_mesh(1)
    except InputError as error:
        print(error, flush=True)
    os._exit(0)
os.waitpid(late, 0)
"""


@pytest.mark.parametrize(
    "error", [RuntimeError("Unable to initialize backend 'x'"), AssertionError()]
)
def test_a_missing_device_is_one_sentence_and_leaves_no_run(
    tiny_config, tmp_path, monkeypatch, capsys, error
):
    """JAX raises either, by the platform."""

    def devices(*_):
        raise error

    monkeypatch.setattr(jax, "devices", devices)
    assert main(["run", str(tiny_config), "--out", str(tmp_path / "new" / "run")]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("error: JAX finds no device") and "JAX_PLATFORMS" in said
    assert not (tmp_path / "new").exists()


def test_a_process_that_was_forked_after_jax_began_says_so():
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-W", "ignore", "-c", FORKED]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    first, second, sentence = done.stdout.splitlines()
    assert first == second == "1"
    assert "forked after JAX had begun" in sentence


def test_windows_is_refused_in_a_sentence():
    command = [sys.executable, "-c", "import sys; sys.platform = 'win32'; import jaxpfl"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and "not on Windows" in done.stderr.splitlines()[-1]
