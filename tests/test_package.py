"""What holds for the package as a whole: imports, layers, files, forbidden things."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "jaxpfl"

# What each part may import of jaxpfl besides itself and the leaves; "cli" may import all.
LEAVES = {"errors", "checks", "compilation_cache", "files", "progress"}
FOUNDATIONS = {"data", "privacy", "models"}
ALLOWED = {
    **{leaf: set() for leaf in LEAVES},
    "data": set(),
    "privacy": set(),
    "models": set(),
    "federated": FOUNDATIONS,
    "text": FOUNDATIONS,
    "algorithms": FOUNDATIONS | {"federated", "text"},
    "experiments": FOUNDATIONS | {"federated", "text", "algorithms"},
    "cli": FOUNDATIONS | {"federated", "text", "algorithms", "experiments"},
    "__main__": {"cli"},
}


def _run(code: str) -> str:
    finished = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, cwd=ROOT
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


def _modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def _part(path: Path) -> str:
    """The part of the house that a module belongs to; "" for the table of contents."""
    first = path.relative_to(PACKAGE).parts[0]
    return "" if first == "__init__.py" else first.removesuffix(".py")


def _imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and absolute dotted name of every import, also of those inside functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            yield from (
                (node.lineno, "." * node.level + f"{node.module or ''}.{alias.name}")
                for alias in node.names
            )


def _layer_violations(part: str, source: str) -> list[str]:
    """The imports in `source`, a module of `part`, that go against DESIGN's one way."""
    faults = []
    for line, name in _imports(ast.parse(source)):
        if name.startswith("."):
            faults.append(f"line {line}: relative import {name}")
        pieces = name.split(".")
        if pieces[0] != "jaxpfl" or not part:
            continue
        # `from jaxpfl import data` and `import jaxpfl.data` alike name a part second.
        target = pieces[1] if len(pieces) > 1 else ""
        if target not in ALLOWED[part] | LEAVES | {part}:
            faults.append(f"line {line}: {part} imports {target or 'the whole package'}")
    return faults


FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "joblib"}
FORBIDDEN_CALLS = {"yaml.load", "yaml.unsafe_load", "yaml.full_load", "eval", "exec"}


def _unsafe_loading(source: str) -> list[str]:
    """Whatever in `source` could run code found in a file."""
    tree = ast.parse(source)
    faults = [
        f"line {line}: import of {name}"
        for line, name in _imports(tree)
        if name.split(".")[0] in FORBIDDEN_MODULES
    ]
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        if ast.unparse(node.func) in FORBIDDEN_CALLS:
            faults.append(f"line {node.lineno}: call of {ast.unparse(node.func)}")
        for keyword in node.keywords:
            literal = keyword.value.value if isinstance(keyword.value, ast.Constant) else None
            if keyword.arg in ("allow_pickle", "trust_remote_code") and literal is not False:
                faults.append(f"line {node.lineno}: {keyword.arg} is not False")
    return faults


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


def test_import_prints_nothing_and_every_public_name_exists():
    assert (
        _run("import jaxpfl\nfor name in getattr(jaxpfl, '__all__', []): getattr(jaxpfl, name)")
        == ""
    )


def test_every_part_is_known_and_imports_go_one_way():
    faults = []
    for path in _modules():
        part = _part(path)
        assert not part or part in ALLOWED, f"jaxpfl/{part} has no place in the order of imports"
        found = _layer_violations(part, path.read_text("utf-8"))
        faults += [f"{path.relative_to(ROOT)}, {fault}" for fault in found]
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize(
    ("part", "source"),
    [
        ("federated", "from jaxpfl.text import vocabulary"),
        ("federated", "def f():\n    import jaxpfl.text.tokenisers.vocabulary"),
        ("privacy", "from jaxpfl import data"),
        ("models", "import jaxpfl.federated"),
        ("data", "import jaxpfl"),
        ("algorithms", "from jaxpfl.experiments.run import run"),
        ("text", "from . import vocabulary"),
    ],
)
def test_an_import_against_the_order_is_found(part: str, source: str):
    assert _layer_violations(part, source)


def test_nothing_unpickles_or_evaluates_what_a_file_says():
    """TRUST 39: no pickle, safe YAML only, no remote code."""
    faults = [
        f"{path.relative_to(ROOT)}, {fault}"
        for path in [*_modules(), *(ROOT / "benchmarks").rglob("*.py")]
        for fault in _unsafe_loading(path.read_text("utf-8"))
    ]
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from joblib import load",
        "import yaml\nyaml.load(text)",
        "np.load(path, allow_pickle=True)",
        "np.load(path, allow_pickle=flag)",
        "AutoModel.from_pretrained(name, trust_remote_code=True)",
        "eval(text)",
    ],
)
def test_unsafe_loading_is_found(source: str):
    """TRUST 39: the check above can fail."""
    assert _unsafe_loading(source)


RELEASE, DOOR = "federated/release.py", "federated/door.py"
# What only the release does, and what it is made of: a pattern of what is called, and where.
CALLS = {
    "charge": (r"\.charge$", {RELEASE}),
    "record": (r"\.record$", {RELEASE}),
    "sample a cohort": (r"plan\.sample$", {RELEASE}),
    "pack a cohort": (r"(^|\.)Cohort$", {RELEASE}),
    "open the door": (r"(^|\.)Door$", {RELEASE}),
    "make shared noise": (r"(^|\.)NoiseStream$", {RELEASE}),
    "draw noise": (
        r"(^|mechanisms\.)(gaussian_noise_like|standard_normal)$",
        # In scores: what is added to a release for comparisons, a function of the release.
        {DOOR, "privacy/correlated_noise.py", "privacy/mechanisms.py", "federated/scores.py"},
    ),
}
IMPORTS = {"federated.door": {RELEASE}, "federated.checksum": {DOOR}}


def _acts(source: str) -> set[str]:
    """Which of `CALLS` and `IMPORTS` a module does."""
    tree = ast.parse(source)
    names = [name.removeprefix("jaxpfl.") for _, name in _imports(tree)]
    calls = [ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)]
    found = {
        act for act, (pattern, _) in CALLS.items() if any(re.search(pattern, c) for c in calls)
    }
    return found | {
        module
        for module in IMPORTS
        if any(name == module or name.startswith(f"{module}.") for name in names)
    }


def test_one_place_charges_and_one_draws_noise_for_clients_sums():
    """Nothing goes around the release: who charges, records, packs cohorts, opens the door."""
    expected = {act: where for act, (_, where) in CALLS.items()} | IMPORTS
    done: dict[str, set[str]] = {act: set() for act in expected}
    for path in _modules():
        for act in _acts(path.read_text("utf-8")):
            done[act].add(path.relative_to(PACKAGE).as_posix())
    assert done == expected


@pytest.mark.parametrize(
    ("source", "act"),
    [
        ("ledger.charge(event, 'label', run=run)", "charge"),
        ("def f(self):\n    self._ledger.record(identity, name)", "record"),
        ("chosen = self.plan.sample(seed, round)", "sample a cohort"),
        ("cohort = Cohort(clients, chosen, spec, seed=0, round=0)", "pack a cohort"),
        ("cohort = data.Cohort(clients, chosen, spec, seed=0, round=0)", "pack a cohort"),
        ("Door(query, shapes)(broadcast, buckets, clip_norm, keys)", "open the door"),
        ("stream = correlated_noise.NoiseStream(kind, 3, key, like)", "make shared noise"),
        ("noise = gaussian_noise_like(key, tree, std)", "draw noise"),
        ("def f():\n    return mechanisms.standard_normal(key, shape)", "draw noise"),
        ("from jaxpfl.federated.door import Door", "federated.door"),
        ("from jaxpfl.federated import door", "federated.door"),
        ("import jaxpfl.federated.door", "federated.door"),
    ],
)
def test_a_way_around_the_release_is_found(source: str, act: str):
    """The test above can fail."""
    assert act in _acts(source)


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
