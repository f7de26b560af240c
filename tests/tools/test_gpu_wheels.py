"""The folder of wheels for a machine without network: nothing that is needed is forgotten."""

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tools import gpu_wheels

ROOT = Path(__file__).parents[2]


def test_every_dependency_is_in_the_folder_or_on_the_machine():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needed = {Requirement(line).name for line in project["dependencies"]}
    assert needed <= {*gpu_wheels.THERE, *gpu_wheels.MISSING}


def test_versions_are_the_pinned_ones_for_the_python_of_the_machine():
    names = [name for package, needs in gpu_wheels.MISSING.items() for name in (package, *needs)]
    lines = gpu_wheels.pinned(names)
    assert len(lines) == len(set(lines)) == len(names)
    text = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    assert f"{lines[names.index('contourpy')]} ; python_full_version >= '3.12'" in text


def test_a_package_without_a_pinned_version_is_named():
    with pytest.raises(SystemExit, match="no version of unheard-of"):
        gpu_wheels.pinned(["tyro", "unheard-of"])
