"""What is shipped: the same bytes from one commit, pinned tools, and audits that are honest."""

import hashlib
import json
import subprocess
import tomllib
from pathlib import Path

import pytest

from tools import vulnerabilities, wheel

ROOT = Path(__file__).parents[2]


def test_what_builds_the_wheel_is_one_version_everywhere():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (backend,) = project["build-system"]["requires"]
    assert backend in (ROOT / "constraints.txt").read_text().splitlines()
    assert backend in project["project"]["optional-dependencies"]["dev"]
    lines = (ROOT / "tools" / "supply.txt").read_text().splitlines()
    assert all("==" in line or line.startswith("#") for line in lines)
    assert {"cyclonedx-bom", "pip_audit"} <= {line.partition("==")[0] for line in lines}


@pytest.mark.long
@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="an sdist has no history to clone")
def test_two_clones_give_the_same_bytes(tmp_path):
    pytest.importorskip("hatchling", reason="comes with the environment of `make test`")
    wheel.main(tmp_path)
    sums = dict(line.split()[::-1] for line in (tmp_path / wheel.SUMS).read_text().splitlines())
    assert len(sums) == 2
    for name, digest in sums.items():
        assert hashlib.sha256((tmp_path / name).read_bytes()).hexdigest() == digest


def test_builds_that_differ_are_not_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(wheel, "built", lambda number, place: {"a.whl": bytes([number])})
    with pytest.raises(SystemExit, match="a.whl differs between two builds of one commit"):
        wheel.main(tmp_path / "dist")
    assert not (tmp_path / "dist").exists()


AUDITED = {"name": "a", "version": "1", "vulns": []}
FOUND = AUDITED | {"vulns": [{"id": "X-1", "fix_versions": ["2"]}]}
SKIPPED = {"name": "b", "skip_reason": "not found"}


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        ({"dependencies": [AUDITED, FOUND]}, "^1 known vulnerabilities"),
        ({"dependencies": [AUDITED, SKIPPED]}, "^nothing is known of 1 of the 2 packages"),
        (None, "^nothing is known of the versions .*: no network$"),
    ],
)
def test_what_is_not_known_is_not_called_safe(monkeypatch, capsys, said, sentence):
    done = subprocess.CompletedProcess([], 1, json.dumps(said) if said else "", "no network\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
    with pytest.raises(SystemExit, match=sentence):
        vulnerabilities.main("pypi")
    found = said is not None and FOUND in said["dependencies"]
    assert ("a 1: X-1, fixed in 2" in capsys.readouterr().out) == found
    sound = subprocess.CompletedProcess([], 0, json.dumps({"dependencies": [AUDITED]}), "")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: sound)
    vulnerabilities.main("pypi")
    assert "no known vulnerability of the 1 packages" in capsys.readouterr().out
