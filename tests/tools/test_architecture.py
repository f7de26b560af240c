"""Each rule about how the package is built finds what breaks it, in a small copy of the house."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tools import architecture

# A package that keeps all rules: by place, what the module says.
CLEAN = {
    "__init__.py": "import jaxpfl.cli\n",
    "errors.py": "",
    "files.py": "from jaxpfl.errors import InputError\n",
    "memory.py": "library = ctypes.CDLL(None)\n",
    "data/__init__.py": "from jaxpfl.data.population import Population\n",
    "data/population.py": "from jaxpfl import files\n",
    "data/readers/one.py": "",
    "data/readers/other.py": "",
    "data/stored/two.py": "from jaxpfl.data.readers import other\n",
    "privacy/mechanisms.py": "",
    "privacy/correlated_noise.py": "from jaxpfl.privacy import mechanisms\n"
    "def draw(key):\n    return mechanisms.standard_normal(NoiseStream(key))\n",
    "privacy/exact_noise.py": "def draw(key):\n    return exact_cells(key, places)\n",
    "federated/release/sum_digest.py": "",
    "federated/clients/scores.py": "noise = standard_normal(key, shape) * std\n",
    "federated/release/local_noise.py": "noise = standard_normal(key, shape) * std\n",
    "federated/release/door.py": "from jaxpfl.federated.release.sum_digest import sum_digest\n"
    "from jaxpfl.federated.release.summing import accumulate\n"
    "class Door:\n    def noise(self, key):\n        return standard_normal(key)\n",
    "federated/release/prepared_query.py": "from jaxpfl.federated.release.door import Door\n"
    "def sum(plan):\n    Door(Cohort(plan.sample(0, 1)), NoiseStream(plan))\n",
    "federated/audits/rehearsal.py": "from jaxpfl.federated.release import prepared_query\n",
    "federated/release/information_flow.py": "from jaxpfl.federated.release.door import Keys\n"
    "from jaxpfl.federated.release.sum_digest import bound_to_bits\n",
    "federated/hosts/shared_rounds.py": "from jaxpfl.federated.release import prepared_query\n"
    "def follow(shared):\n    SharedRounds().sum()\n    shared.sum()\n",
    "federated/release/releaser.py": "from jaxpfl.federated.release import prepared_query\n"
    "def release(self, plan):\n"
    "    RunSecret()\n"
    "    self.ledger.charge(plan)\n"
    "    self.ledger.record(plan)\n"
    "    prepared.sum()\n",
    "federated/release/secure_release.py": "from jaxpfl.federated.release import prepared_query\n"
    "def secure_release():\n    releaser.charge_secure_sum()\n    Cohort()\n"
    "    Releaser(clients, RunSecret())\n",
    "federated/audits/canaries.py": "Releaser(clients)\n",
    "algorithms/base.py": "Releaser(clients)\n",
    "experiments/release.py": "Releaser(clients)\n",
    "algorithms/one.py": "from jaxpfl.federated.release.query import Query\n",
    "experiments/__init__.py": "",
    "experiments/config/reader.py": "",
    "experiments/engine/rounds.py": "from jaxpfl.algorithms.one import one\n",
    "experiments/engine/run_directory.py": "Releaser(clients)\nRunSecret()\nforget_secret(path)\n"
    "RunSecret.reproducible(0)\nsaved_secret(path)\n",
    "experiments/systems/base.py": "from jaxpfl.experiments.engine import rounds\n",
    "experiments/systems/first/__init__.py": "from jaxpfl.experiments.systems.first import study\n",
    "experiments/systems/first/study.py": "from jaxpfl.experiments.systems.base import System\n"
    "from jaxpfl.experiments.config import reader\nNAME = 'first'\n",
    "experiments/systems/second/__init__.py": "NAME = 'second'\n",
    "experiments/registry.py": "SYSTEMS = {'first': 'jaxpfl.experiments.systems.first'}\n",
    "experiments/carry_out.py": "from jaxpfl.experiments.registry import SYSTEMS\n",
    "experiments/sweep/points.py": "from jaxpfl.experiments.carry_out import run\n"
    "memory.give_back_after_compiling()\n",
    "experiments/sweep/selection.py": "ledger.charge(event)\nsaved_secret(path)\n",
    "cli/__init__.py": "def main():\n    from jaxpfl.experiments import carry_out\n",
    "cli/common.py": "memory.give_back_after_compiling()\n",
    "cli/begin.py": "memory.give_back_after_compiling()\n",
}


@pytest.fixture
def house(tmp_path: Path) -> Callable[..., list[architecture.Fault]]:
    """Builds the clean package with some modules changed; the faults that are found."""

    def faults(**changes: str) -> list[architecture.Fault]:
        (tmp_path / "benchmarks").mkdir(exist_ok=True)
        for place, source in {**CLEAN, **changes}.items():
            path = tmp_path / ("jaxpfl" if not place.startswith("benchmarks") else "") / place
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(source)
        return architecture.check(tmp_path)

    return faults


def _function(parameters: int, indent: str = "") -> str:
    names = ", ".join(f"a{number}" for number in range(parameters))
    return f"{indent}def f({names}):\n{indent}    pass\n"


FIRST = "jaxpfl.experiments.systems.first"
METHOD = "class A:\n    @staticmethod\n"
# By place: text of a module, and the line and words of the fault that it must be found with.
PLANTED = {
    # Layers.
    "federated/release/query.py": [
        ("def f():\n    import jaxpfl.text.words\n", 2, "federated imports text"),
        ("from jaxpfl.federated.release import sum_digest\n", 1, "federated.release.sum_digest"),
    ],
    "privacy/plan.py": [("from jaxpfl import data\n", 1, "privacy imports data")],
    "data/open.py": [("import jaxpfl\n", 1, "the whole package")],
    "files.py": [("from jaxpfl.data import population\n", 1, "files imports data")],
    "text/words.py": [("from . import vocabulary\n", 1, "is relative")],
    "attic/old.py": [("", 1, "attic has no place")],
    # Layers among experiments.
    "experiments/engine/rounds.py": [("import jaxpfl.experiments.report.page\n", 1, "report")],
    "experiments/config/reader.py": [("from jaxpfl.experiments.sweep import a\n", 1, "sweep")],
    "experiments/central/fit.py": [("import jaxpfl.experiments.systems.base\n", 1, "systems")],
    "experiments/systems/second/study.py": [
        ("from jaxpfl.experiments.registry import SYSTEMS\n", 1, "imports experiments.registry")
    ],
    "experiments/odd.py": [("", 1, "odd has no place")],
    # Circles, also by types alone and inside functions.
    "data/population.py": [("from jaxpfl.data import Population\n", 1, "in a circle")],
    "errors.py": [
        ("if TYPE_CHECKING:\n    from jaxpfl.files import X\n", 2, "in a circle"),
        ("def f():\n    from jaxpfl import files\n", 2, "in a circle"),
    ],
    "experiments/systems/first/study.py": [(f"import {FIRST}\n", 1, "in a circle")],
    "data/stored/two.py": [("import jaxpfl.data.stored.two\n", 1, "two -> two")],
    # Circles of folders, at every depth, of whose modules none imports itself.
    "data/readers/one.py": [
        ("from jaxpfl.data.stored import two\n", 1, "readers -> stored -> readers")
    ],
    "federated/clients/client.py": [
        ("import jaxpfl.federated.flow.rules\n", 1, "federated.clients")
    ],
    "federated/mesh.py": [("import jaxpfl.federated.release.query\n", 1, "federated.mesh")],
    "federated/odd/new.py": [("", 1, "odd has no place among the folders of federated")],
    # Sizes.
    "data/long.py": [("\n" * 451, 451, "451 lines")],
    "data/wide.py": [
        ("def f(a, b, *c, d, e, f, g, h, i, j, **k):\n    pass\n", 1, "11 parameters"),
        ("class A:\n" + _function(12, "    "), 2, "f takes 11 parameters"),
        (METHOD + _function(11, "    "), 3, "f takes 11 parameters"),
    ],
    # Systems.
    "experiments/systems/second/__init__.py": [
        (f"from {FIRST} import study\n", 1, "the system first is imported")
    ],
    "cli.py": [
        ("def f():\n    import jaxpfl.experiments.systems.second\n", 2, "the system second")
    ],
    "experiments/registry.py": [
        ("from jaxpfl.experiments.systems import first\n", 1, "the system first is imported")
    ],
    "experiments/carry_out.py": [
        ("if name == 'first':\n    pass\n", 1, "'first' names a system"),
        ("import_module('jaxpfl.experiments.systems.second')\n", 1, "names a system"),
    ],
    # Ways around the release.
    "algorithms/one.py": [
        ("ledger.charge(event, 'label', run=run)\n", 1, "charges a ledger"),
        ("releaser.charge_secure_sum(query)\n", 1, "charges a secure sum"),
        ("def f(self):\n    self._ledger.record(name)\n", 2, "records a release"),
        ("releaser = Releaser(clients, ledger)\n", 1, "asks clients"),
        ("def f():\n    secret = RunSecret()\n", 2, "draws a secret"),
        ("secret.RunSecret.reproducible(3)\n", 1, "takes a secret from a seed"),
        ("words = saved_secret(path)\n", 1, "keeps or deletes a secret"),
        ("run_directory.forget_secret(path, ledger)\n", 1, "keeps or deletes a secret"),
        ("chosen = self.plan.sample(seed, round)\n", 1, "samples a cohort"),
        ("cohort = Cohort(clients, chosen)\n", 1, "packs a cohort"),
        ("Door(query, shapes)(broadcast, buckets)\n", 1, "opens the door"),
        ("correlated_noise.NoiseStream(kind, 3, key)\n", 1, "rounds share"),
        ("noise = standard_normal(key, shape) * std\n", 1, "draws noise"),
        ("def f():\n    mechanisms.standard_normal(key, shape)\n", 2, "draws noise"),
        ("def f():\n    exact_noise.exact_normal(key, count, mesh)\n", 2, "draws noise"),
        ("drawn = exact_cells(key, places)\n", 1, "draws noise"),
        ("from jaxpfl.federated.release.door import Door\n", 1, "imports federated.release"),
        ("import jaxpfl.federated.release.door\n", 1, "imports federated.release"),
        ("import jaxpfl.federated.release.prepared_query\n", 1, "release.prepared_query"),
        ("self._processes.sum(query, broadcast, work)\n", 1, "sums clients"),
        ("library = ctypes.CDLL(None)\n", 1, "opens the C library"),
        ("def f():\n    give_back_after_compiling()\n", 2, "sets malloc"),
    ],
    "experiments/run.py": [("shared_rounds.SharedRounds(group)\n", 1, "shares rounds")],
    "federated/clients/scores.py": [("", 1, "clients/scores.py no longer draws noise")],
    # Loading that could run code.
    "data/read.py": [
        ("import pickle\n", 1, "pickle"),
        ("from joblib import load\n", 1, "joblib"),
        ("import yaml\nyaml.load(text)\n", 2, "yaml.load"),
        ("np.load(path, allow_pickle=True)\n", 1, "allow_pickle"),
        ("np.load(path, allow_pickle=flag)\n", 1, "allow_pickle"),
        ("Model.load(name, trust_remote_code=True)\n", 1, "trust_remote_code"),
        ("eval(text)\n", 1, "eval"),
    ],
    "benchmarks/speed.py": [("exec(text)\n", 1, "exec")],
}


@pytest.mark.parametrize(
    ("place", "source", "line", "words"),
    [(place, *each) for place, planted in PLANTED.items() for each in planted],
)
def test_a_planted_violation_is_found(house, place: str, source: str, line: int, words: str):
    faults = house(**{place: source})
    assert any(words in fault.sentence and fault.line == line for fault in faults), faults


def test_nothing_that_is_allowed_is_called_a_fault(house):
    allowed = {
        "data/long.py": "\n" * (architecture.MOST_LINES - 1) + "x = 1\n",
        "data/wide.py": _function(10),
        "models/wide.py": "class A:\n" + _function(11, "    "),
        "data/read.py": "import yaml\nyaml.safe_load(text)\nnp.load(p, allow_pickle=False)\n",
        "experiments/systems/second/page.py": "from jaxpfl.experiments.systems import base\n",
        "experiments/report/page.py": "'the first of all systems'\n",
    }
    assert house() == [] and house(**allowed) == []
