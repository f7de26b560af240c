"""What holds for the package as a whole: imports, layers, files, forbidden things."""

import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def _run(code: str) -> str:
    finished = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, cwd=ROOT
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


# One process, because each that imports JAX takes a second. What little use loads is counted first.
IMPORTS = f"""
import sys
from pathlib import Path
import jax
from jax._src import xla_bridge

def loaded():
    names = [name for name in sys.modules if name.split(".")[0] == "jaxpfl"]
    files = [sys.modules[name].__file__ for name in names]
    return len(files), sum(len(Path(each).read_text("utf-8").splitlines()) for each in files)

before = dict(jax.config.values)
import jaxpfl as jp
assert not xla_bridge.backends_are_initialized()
assert dict(jax.config.values) == before
jp.release
modules, lines = loaded()
assert modules <= 58 and lines <= 10_830, (modules, lines)
jp.run; jp.algorithms.fed_avg
modules, lines = loaded()
assert modules <= 98 and lines <= 17_300 and "scipy.stats" not in sys.modules, (modules, lines)
# What is loaded late is whole for others.
from dp_accounting import *
assert pld.PLDAccountant
# A function keeps its name where a folder of its name is loaded.
import jaxpfl.algorithms.fred.plan
assert callable(jp.algorithms.fred)
for name in jp.__all__:
    getattr(jp, name)
# JAX takes the number of devices, which a config holds, only before its backend is there.
from jaxpfl.experiments import registry
from jaxpfl.experiments.config.reader import read_mapping
from jaxpfl.experiments.sweep.config import load_sweep
for path in Path({str(ROOT)!r}, "configs").glob("*.yaml"):
    read = load_sweep if "base" in read_mapping(path) else registry.load
    read(path)
    assert not xla_bridge.backends_are_initialized(), path
"""


def test_import_is_small_prints_nothing_initialises_no_backend_and_neither_does_a_config():
    assert _run(IMPORTS) == ""


def test_constraints_pin_every_requirement_exactly_and_name_no_registry():
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    for line in pins:
        assert "==" in line.split(";")[0], f"constraints.txt: {line!r} is no exact pin"
        assert "://" not in line, f"constraints.txt: {line!r} names an address"
        assert not line.startswith("-"), f"constraints.txt: {line!r} is an option"
    pinned = {line.split("==")[0].lower() for line in pins}

    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = project["optional-dependencies"].values()
    wanted = [*project["dependencies"], *(name for extra in extras for name in extra)]
    for requirement in wanted:
        name = requirement.replace("[", " ").replace("=", " ").replace(">", " ").split()[0]
        assert name.lower() in pinned, f"constraints.txt: {name} of pyproject.toml is not pinned"


def test_the_wheel_holds_configs_and_data_and_the_sdist_what_its_tests_read(tmp_path: Path):
    """So that `pip install jaxpfl` and `jaxpfl run quickstart` are all that a first run needs."""
    pytest.importorskip("hatchling", reason="comes with the environment of `make test`")
    printed = _run(
        f"import os\nfrom hatchling import build\nos.chdir({str(ROOT)!r})\n"
        f"print(build.build_wheel({str(tmp_path)!r}))\nprint(build.build_sdist({str(tmp_path)!r}))"
    )
    wheel, sdist = (tmp_path / name for name in printed.split())
    files = {path.relative_to(ROOT).as_posix() for path in _files()}
    with zipfile.ZipFile(wheel) as opened:
        held = set(opened.namelist())
    assert {name for name in files if name.startswith("jaxpfl/")} <= held
    assert {f"jaxpfl/{name}" for name in files if name.startswith("configs/")} <= held
    assert all(name.startswith(("jaxpfl/", "jaxpfl-")) for name in held)
    with tarfile.open(sdist) as opened:
        held = {name.partition("/")[2] for name in opened.getnames()}
    assert files <= held, files - held


def test_no_file_names_a_registry_or_a_path_of_one_machine():
    # Spelt in pieces, so that this file passes its own test.
    forbidden = [
        "py" + "pi.org",
        "python" + "hosted",
        "--index" + "-url",
        "/wo" + "rk/",
        "/ro" + "ot/",
    ]
    faults = [
        f"{path.relative_to(ROOT)} contains {word}"
        for path in _files()
        for word in forbidden
        if word.encode() in path.read_bytes()
    ]
    assert not faults, "\n".join(faults)


def _files() -> Iterator[Path]:
    """The project's own files; not environments, caches and runs beside them."""
    for folder in ("jaxpfl", "tests", "configs", "benchmarks", "docs", "notebooks", "tools", ".ci"):
        for path in (ROOT / folder).rglob("*"):
            if path.is_file() and path.suffix != ".pyc":
                yield path
    yield from (path for path in ROOT.iterdir() if path.is_file() and path.name != ".git")
