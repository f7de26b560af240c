"""A disk that is really full: a run on a small tmpfs, in a mount namespace of its own. Linux."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from tests.faults.runs import assert_same

# Runs on a tmpfs of so many bytes; then makes room, and goes on as a user would. Prints what each
# command returned and said, and copies the finished run to where it can be seen from outside.
SCRIPT = """
import contextlib, io, json, pathlib, shutil, subprocess, sys
config, disk, size, finished = sys.argv[1:]
mount = ["mount", "-t", "tmpfs", "tmpfs", disk]
subprocess.run([*mount, "-o", f"size={size}"], check=True)
from jaxpfl.cli import main

def command(*arguments):
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
        try:
            code = main([*arguments])
        except Exception as error:
            code = repr(error)
    return code, errors.getvalue()

out = pathlib.Path(disk) / "run"
answers = [command("run", config, "--out", str(out))]
saved = sorted(path.name for path in (out / "checkpoints").glob("round_*"))
subprocess.run(["mount", "-o", "remount,size=1g", disk], check=True)
if (out / "config.yaml").exists() and (out / "run.json").exists():
    answers.append(command("resume", str(out)))
else:
    shutil.rmtree(out, ignore_errors=True)
    answers.append(command("run", config, "--out", str(out)))
shutil.copytree(out, finished)
print(json.dumps({"answers": answers, "saved": saved}))
"""


def _namespaces() -> bool:
    """Whether this process may mount file systems in a namespace of its own."""
    if shutil.which("unshare") is None:
        return False
    return subprocess.run(["unshare", "-Urm", "true"], capture_output=True).returncode == 0


@pytest.mark.skipif(not _namespaces(), reason="no mount namespace for an ordinary user")
@pytest.mark.parametrize(
    "share",
    [
        pytest.param(0.6, marks=pytest.mark.long),
        *(pytest.param(tenth / 10, marks=pytest.mark.slow) for tenth in (0.2, 1, 2, 3, 4, 5, 7, 8)),
    ],
)
def test_a_run_on_a_full_disk_stops_with_a_sentence_and_goes_on_with_room(
    tiny_config, tmp_path, straight, share
):
    """TRUST 36: clean stop, last good checkpoint intact, no charge lost or made twice."""
    pages = [-(-path.stat().st_size // 4096) for path in straight.rglob("*") if path.is_file()]
    size = max(4096, int(share * 4096 * sum(pages)))
    disk, finished = tmp_path / "disk", tmp_path / "finished"
    disk.mkdir()
    child = subprocess.run(
        ["unshare", "-Urm", sys.executable, "-c", SCRIPT]
        + [str(tiny_config), str(disk), str(size), str(finished)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert child.returncode == 0, child.stderr
    found = json.loads(child.stdout.splitlines()[-1])
    (code, message), (resumed, said) = found["answers"]
    assert code == 1, (code, message)
    assert "No space left on device" in message and str(disk) in message
    assert "Traceback" not in message and "jaxpfl resume" in message, message
    assert resumed == 0, said
    assert_same(finished, straight)
