"""An installation that was interrupted, or is of another Python, is made anew."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "tools" / "environment.sh"
# A Python whose `venv` makes folders, and whose `pip` does what $PIP says.
PYTHON = """\
#!/bin/bash
case "$2" in
venv) mkdir -p "$3/bin" && echo made >> "$3/made" && cp "$0" "$3/bin/python" ;;
pip) eval "$PIP" ;;
*) exec {python} "$@" ;;
esac
"""


@pytest.fixture
def install(tmp_path):
    """Installs into an environment with this Python; returns the exit code."""
    python, shell = tmp_path / "python", tmp_path / "bin"
    python.write_text(PYTHON.format(python=sys.executable))
    python.chmod(0o755)
    shell.mkdir()
    for tool in ("bash", "dirname", "mkdir", "cp", "rm", "touch"):  # and no uv
        (shell / tool).symlink_to(f"/bin/{tool}")

    def run(pip: str) -> int:
        environment = {"PATH": str(shell), "PIP": pip}
        command = [str(SCRIPT), str(tmp_path / "env"), "", str(python)]
        return subprocess.run(command, env=environment, capture_output=True).returncode

    return run


@pytest.mark.parametrize("killed", ["kill -9 $$", "kill -9 $PPID $$", "kill -TERM $PPID $$"])
def test_an_installation_that_was_killed_is_made_anew(install, tmp_path, killed):
    assert install("true") == 0
    assert install(f"echo half > {tmp_path}/env/package; {killed}") != 0
    assert (tmp_path / "env" / "package").exists()
    assert install("true") == 0
    assert not (tmp_path / "env" / "package").exists()


@pytest.mark.parametrize("content", [[], ["bin"], ["bin", "bin/python"]])
def test_what_is_no_environment_is_made_anew(install, tmp_path, content):
    (tmp_path / "env").mkdir()
    for name in content:
        (tmp_path / "env" / name).mkdir() if name == "bin" else (tmp_path / "env" / name).touch()
    assert install("true") == 0 and (tmp_path / "env" / "made").exists()


def test_an_environment_that_is_whole_stays(install, tmp_path):
    """Also where the network failed: pip leaves the packages as they were."""
    assert [install("true"), install("exit 1"), install("true")] == [0, 1, 0]
    assert (tmp_path / "env" / "made").read_text() == "made\n"
    assert sorted(os.listdir(tmp_path)) == ["bin", "env", "python"]
