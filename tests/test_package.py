"""What holds for the package as a whole: imports, layers, files, forbidden things."""

import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools import architecture

ROOT = Path(__file__).parents[1]


def _run(code: str) -> str:
    finished = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, cwd=ROOT
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


def test_import_initialises_no_backend_and_changes_no_jax_setting():
    printed = _run(
        "import jax\n"
        "before = dict(jax.config.values)\n"
        "import jaxpfl\n"
        "from jax._src import xla_bridge\n"
        "print(xla_bridge.backends_are_initialized(), dict(jax.config.values) == before)"
    )
    assert printed == "False True\n"


def test_no_config_initialises_a_backend_when_it_is_read():
    """JAX takes the number of devices, which a config holds, only before its backend is there."""
    printed = _run(
        "from pathlib import Path\n"
        "from jax._src import xla_bridge\n"
        "from jaxpfl.experiments import registry\n"
        "from jaxpfl.experiments.config.reader import read_mapping\n"
        "from jaxpfl.experiments.sweep.config import load_sweep\n"
        f"for path in Path({str(ROOT)!r}, 'configs').glob('*.yaml'):\n"
        "    read = load_sweep if 'base' in read_mapping(path) else registry.load\n"
        "    read(path)\n"
        "    assert not xla_bridge.backends_are_initialized(), path\n"
        "print('read')"
    )
    assert printed == "read\n"


@pytest.mark.parametrize(
    ("used", "most_modules", "most_lines"),
    [
        ("jp.release", 60, 10_500),
        ("jp.run; jp.algorithms.fed_avg", 130, 20_000),
    ],
)
def test_who_uses_little_loads_little(used: str, most_modules: int, most_lines: int):
    printed = _run(
        f"import sys\nimport jaxpfl as jp\n{used}\n"
        "names = [name for name in sys.modules if name.split('.')[0] == 'jaxpfl']\n"
        "files = [sys.modules[name].__file__ for name in names]\n"
        "print(len(files), sum(len(open(each, encoding='utf-8').readlines()) for each in files))"
    )
    modules, lines = map(int, printed.split())
    assert modules <= most_modules, printed
    assert lines <= most_lines, printed


def test_import_prints_nothing_and_every_public_name_exists():
    assert (
        _run("import jaxpfl\nfor name in getattr(jaxpfl, '__all__', []): getattr(jaxpfl, name)")
        == ""
    )
    # A function keeps its name where a folder of its name is loaded.
    assert not _run("import jaxpfl.algorithms.fred.plan; assert callable(jaxpfl.algorithms.fred)")


def test_the_package_keeps_the_rules_of_its_architecture():
    """TRUST 39 among them: no pickle, safe YAML only, no remote code.

    Nothing goes around the release either: who charges, samples, opens the door and draws noise.
    """
    faults = architecture.check(ROOT)
    assert not faults, "\n".join(f"{path}:{line}: {sentence}" for path, line, sentence in faults)


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
