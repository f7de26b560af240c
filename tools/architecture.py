"""Checks how the package is built: layers, circles, sizes, systems, and the one way to clients.

    python tools/architecture.py        prints each fault as `path:line: sentence`; exit status 1

A rule is a function of the package's modules that returns its faults; `RULES` lists them. They read
the syntax trees alone: nothing is imported, and imports inside functions and under TYPE_CHECKING
count like all others. tests/tools/test_architecture.py shows that each rule can fail.
"""

import ast
import graphlib
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

if __package__:
    from tools import count
else:
    import count

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "jaxpfl"

MOST_LINES = 450
# What people copy to another machine is one file.
LONGER = {"jaxpfl/privacy/verify.py": 500}
MOST_PARAMETERS = 10
# Physical lines and lines of code, as `count` counts them. They fall with each simplification; what
# adds to them replaces something first. The package is to come down to 46,000 lines.
MOST_IN_TREE = {
    "jaxpfl": (53_535, 34_905),
    "tests": (50_380, 38_570),
    "benchmarks": (13_530, 9_760),
    "tools": (3_905, 2_870),
}

LEAVES = {"errors", "checks", "checked", "compilation_cache", "cores", "files", "lazy"} | {
    "memory",
    "printable",
    "progress",
    "signals",
}
FOUNDATIONS = {"data", "privacy", "models"}
# What each part may import besides itself and the leaves.
LAYERS: dict[str, set[str]] = {
    **{leaf: set() for leaf in LEAVES},
    "data": set(),
    "privacy": set(),
    "models": set(),
    "federated": FOUNDATIONS,
    "text": FOUNDATIONS,
    # What uses a trained model loads nothing of what trained it.
    "trained": FOUNDATIONS | {"text"},
    "algorithms": FOUNDATIONS | {"federated", "text"},
    "experiments": FOUNDATIONS | {"federated", "text", "algorithms", "trained"},
    "cli": FOUNDATIONS | {"federated", "text", "algorithms", "experiments", "trained"},
    "__main__": {"cli"},
}
SHARED = {"config", "records", "central", "engine", "report"}
# The same inside experiments; "systems" is what systems share, a system of its own is SYSTEM.
SYSTEM = "systems/NAME"
EXPERIMENTS: dict[str, set[str]] = {
    "config": set(),
    "records": set(),
    "central": {"config", "records"},
    "engine": {"config", "records", "central"},
    "report": {"records", "engine"},
    "systems": SHARED,
    SYSTEM: SHARED | {"systems"},
    "registry": SHARED | {"systems"},
    # What a user calls from Python, without a config file.
    **dict.fromkeys(("run", "release", "choose_corpus", "compare"), SHARED),
    "deployment": set(),
    "carry_out": SHARED | {"systems", "registry"},
    "own_table": SHARED | {"systems", "registry", "carry_out", "choose_corpus"},
    "launch": set(),
    "sweep": SHARED | {"systems", "registry", "carry_out", "launch", "export"},
    "export": SHARED | {"systems", "registry", "carry_out", "run"},
    "own_models": SHARED | {"systems", "registry", "carry_out", "export"},
    "audit": SHARED | {"systems", "registry"},
    "dry_run": SHARED | {"systems", "registry", "sweep"},
}
REGISTRY = "experiments/registry.py"
# What each folder of federated may import besides itself and the two modules next to the folders.
BESIDE = {"mesh", "double_word"}
FEDERATED: dict[str, set[str]] = {
    **{module: set() for module in BESIDE},
    "clients": set(),
    "flow": set(),
    "release": {"clients", "flow"},
    "hosts": {"clients", "flow", "release"},
    "audits": {"clients", "flow", "release"},
}

RELEASE, DOOR = "federated/release/releaser.py", "federated/release/door.py"
PREPARED, SHARED_ROUNDS = "federated/release/prepared_query.py", "federated/hosts/shared_rounds.py"
FLOW, REHEARSAL = "federated/release/information_flow.py", "federated/audits/rehearsal.py"
# Another release, whose noise the clients add: on everyone, on the host, without a door.
SECURE = "federated/release/secure_release.py"
# What scores add to a release, for comparisons, is a function of the release.
SCORES = "federated/clients/scores.py"
# The one holder of a secret that outlives a process, which decides on resume.
RUN = "experiments/engine/run_directory.py"
# Another: how many points a private selection tries, and which; charged before the first.
SELECTION = "experiments/sweep/selection.py"
# Secrets of one release, which end with it; and of an audit, on made-up clients.
ONCE = {"experiments/release.py", "algorithms/base.py", "federated/audits/canaries.py", SECURE}
CORRELATED = "privacy/correlated_noise.py"
LOCAL = "federated/release/local_noise.py"
NOISE = {DOOR, SCORES, CORRELATED, LOCAL, "privacy/exact_noise.py"}
# What only the release does, and what it is made of: a pattern of what is called, and where.
CALLS: dict[str, tuple[str, set[str]]] = {
    "charges a ledger": (r"\.charge$", {RELEASE, SELECTION}),
    "charges a secure sum": (r"\.charge_secure_sum$", {SECURE}),
    "records a release": (r"\.record$", {RELEASE}),
    "asks clients": (r"(^|\.)Releaser$", {RUN, *ONCE}),
    "draws a secret": (r"(^|\.)RunSecret$", {RUN, RELEASE, SECURE}),
    "takes a secret from a seed": (r"(^|\.)RunSecret\.reproducible$", {RUN}),
    "keeps or deletes a secret": (r"(^|\.)(saved_secret|forget_secret)$", {RUN, SELECTION}),
    "samples a cohort": (r"plan\.sample$", {PREPARED}),
    "packs a cohort": (r"(^|\.)Cohort$", {PREPARED, SECURE}),
    "sums clients": (r"(prepared|_processes|shared)\.sum$", {RELEASE, SHARED_ROUNDS}),
    "shares rounds among processes": (r"(^|\.)SharedRounds$", {SHARED_ROUNDS}),
    "opens the door": (r"(^|\.)Door$", {PREPARED}),
    "makes noise that rounds share": (r"(^|\.)(NoiseStream|stream_of)$", {PREPARED, CORRELATED}),
    "draws noise": (r"(^|mechanisms\.)standard_normal$|(^|\.)exact_(normal|cells)$", NOISE),
    "opens the C library": (r"(^|\.)CDLL$", {"memory.py"}),
    "sets malloc": (
        r"(^|\.)give_back_after_compiling$",
        {"cli/common.py", "cli/begin.py", "experiments/sweep/points.py"},
    ),
}
IMPORTS: dict[str, set[str]] = {
    "federated.release.door": {PREPARED, FLOW},
    "federated.release.prepared_query": {RELEASE, SECURE, SHARED_ROUNDS, REHEARSAL},
    "federated.release.summing": {DOOR},
    "federated.release.sum_digest": {DOOR, FLOW},
}

FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "joblib"}
FORBIDDEN_CALLS = {"yaml.load", "yaml.unsafe_load", "yaml.full_load", "eval", "exec"}
FORBIDDEN_ARGUMENTS = {"allow_pickle", "trust_remote_code"}


class Module(NamedTuple):
    """A Python file: its path, the path inside its top folder, and what it says."""

    path: Path
    place: str
    source: str
    tree: ast.Module

    @property
    def name(self) -> str:
        """The dotted name, of a package without `__init__`."""
        pieces = self.place.removesuffix(".py").split("/")
        return ".".join([PACKAGE, *(piece for piece in pieces if piece != "__init__")])


class Fault(NamedTuple):
    """What breaks a rule, and where."""

    path: Path
    line: int
    sentence: str


def modules_in(folder: Path) -> list[Module]:
    """Every Python file below `folder`, parsed."""
    sources = {path: path.read_text("utf-8") for path in sorted(folder.rglob("*.py"))}
    return [
        Module(path, path.relative_to(folder).as_posix(), source, ast.parse(source))
        for path, source in sources.items()
    ]


def layers(modules: Sequence[Module]) -> list[Fault]:
    """Imports go one way, between the parts of the package and between those of experiments."""
    faults = []
    for module in modules:
        part = _part(module.name)
        places = (
            (part, LAYERS, "in the order of layers"),
            (_inner_part(module.name), EXPERIMENTS, "among the experiments"),
            (_folder(module.name), FEDERATED, "among the folders of federated"),
        )
        unknown = [(name, where) for name, order, where in places if name and name not in order]
        if unknown:
            faults.append(Fault(module.path, 1, "{} has no place {}".format(*unknown[0])))
            continue
        for line, name in _imports(module.tree):
            if name.startswith("."):
                faults.append(Fault(module.path, line, f"the import of {name} is relative"))
            elif part and name.split(".")[0] == PACKAGE:
                fault = _against_order(module.name, name)
                faults += [Fault(module.path, line, fault)] if fault else []
    return faults


def circles(modules: Sequence[Module]) -> list[Fault]:
    """No module or folder imports itself through others; at each depth, a folder is one node."""
    graph, faults = _graph(modules), []
    # With `__init__`, which may be in a circle with its own folder's modules.
    folders = {module.name: module.place.removesuffix(".py").split("/") for module in modules}
    paths = {module.name: module.path for module in modules}
    for depth in range(1, 1 + max(len(pieces) for pieces in folders.values())):
        # By parent: the imports between what lies directly in it.
        between: dict[str, dict[str, set[str]]] = {}
        lines: dict[tuple[str, str], tuple[Path, int]] = {}
        for name, targets in graph.items():
            for target, line in targets.items():
                ours, others = folders[name], folders[target]
                if min(len(ours), len(others)) < depth or ours[: depth - 1] != others[: depth - 1]:
                    continue
                here, there = ours[depth - 1], others[depth - 1]
                parent = ".".join([PACKAGE, *ours[: depth - 1]])
                # A module that imports itself is a circle where it lies.
                if here != there or (name == target and depth == len(ours)):
                    between.setdefault(parent, {}).setdefault(here, set()).add(there)
                    lines.setdefault((f"{parent}.{here}", there), (paths[name], line))
        for parent, nodes in between.items():
            for circle in _circles(nodes):
                path, line = lines[f"{parent}.{circle[0]}", circle[1 % len(circle)]]
                chain = " -> ".join([*circle, circle[0]])
                sentence = f"these parts of {parent} import each other in a circle: {chain}"
                faults.append(Fault(path, line, sentence))
    return faults


def long_files(modules: Sequence[Module]) -> list[Fault]:
    """No file is longer than `MOST_LINES`, or than `LONGER` allows."""
    faults = []
    for module in modules:
        lines, path = len(module.source.splitlines()), module.path.as_posix()
        most = next((n for end, n in LONGER.items() if path.endswith(end)), MOST_LINES)
        if lines > most:
            sentence = f"the file has {lines} lines, at most {most} are allowed"
            faults.append(Fault(module.path, lines, sentence))
    return faults


def long_signatures(modules: Sequence[Module]) -> list[Fault]:
    """No function takes more than `MOST_PARAMETERS`, not counting a method's first."""
    faults = []
    for module in modules:
        for function, method in _functions(module.tree):
            given = function.args
            number = len([*given.posonlyargs, *given.args, *given.kwonlyargs]) - method
            number += (given.vararg is not None) + (given.kwarg is not None)
            if number > MOST_PARAMETERS:
                sentence = f"{function.name} takes {number} parameters, more than {MOST_PARAMETERS}"
                faults.append(Fault(module.path, function.lineno, sentence))
    return faults


def known_systems(modules: Sequence[Module]) -> list[Fault]:
    """Only the registry names systems, and it names them without importing them."""
    prefix = f"{PACKAGE}.experiments.systems."
    places = [module.place.split("/") for module in modules]
    systems = {place[2] for place in places if place[1:2] == ["systems"] and len(place) > 3}
    faults = []
    for module in modules:
        own = module.name.removeprefix(prefix).split(".")[0] if prefix in module.name else ""
        for line, name in _imports(module.tree):
            system = name.removeprefix(prefix).split(".")[0] if name.startswith(prefix) else ""
            if system in systems - {own}:
                sentence = f"the system {system} is imported outside its folder"
                faults.append(Fault(module.path, line, sentence))
        for node in ast.walk(module.tree) if module.place != REGISTRY else ():
            if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
                continue
            named = {node.value, node.value.removeprefix(prefix).split(".")[0]} & (systems - {own})
            if named and re.fullmatch(r"[\w.]+", node.value):
                sentence = f"{node.value!r} names a system: only {REGISTRY} knows which there are"
                faults.append(Fault(module.path, node.lineno, sentence))
    return faults


def around_the_release(modules: Sequence[Module]) -> list[Fault]:
    """One place charges, records, samples and opens the door, and one draws noise for a sum."""
    faults = []
    allowed = {**{act: where for act, (_, where) in CALLS.items()}, **IMPORTS}
    done: dict[str, set[str]] = {act: set() for act in allowed}
    does = {act: act if act in CALLS else f"imports {act}" for act in allowed}
    for module in modules:
        for line, act in _acts(module.tree):
            done[act].add(module.place)
            if module.place not in allowed[act]:
                where = " and ".join(sorted(allowed[act]))
                faults.append(Fault(module.path, line, f"the module {does[act]}: only {where} may"))
    places = {module.place: module.path for module in modules}
    for act, where in allowed.items():
        for place in sorted(where - done[act]):
            # A pattern that matches nothing forbids nothing.
            sentence = f"{place} no longer {does[act]}: correct CALLS"
            faults.append(Fault(places.get(place, modules[0].path), 1, sentence))
    return faults


def unsafe_loading(modules: Sequence[Module]) -> list[Fault]:
    """Nothing runs code that it finds in a file: no pickle, safe YAML only, no remote code."""
    faults = []
    for module in modules:
        for line, name in _imports(module.tree):
            if name.split(".")[0] in FORBIDDEN_MODULES:
                faults.append(Fault(module.path, line, f"{name} can run code that a file holds"))
        for node in (node for node in ast.walk(module.tree) if isinstance(node, ast.Call)):
            if (called := ast.unparse(node.func)) in FORBIDDEN_CALLS:
                sentence = f"{called} can run code that a file holds"
                faults.append(Fault(module.path, node.lineno, sentence))
            for keyword in node.keywords:
                literal = keyword.value.value if isinstance(keyword.value, ast.Constant) else None
                if keyword.arg in FORBIDDEN_ARGUMENTS and literal is not False:
                    sentence = f"{keyword.arg} must be the literal False"
                    faults.append(Fault(module.path, node.lineno, sentence))
    return faults


def large_trees(root: Path) -> list[Fault]:
    """No tree has more lines than `MOST_IN_TREE`."""
    sentence = "{} has {} lines and lines of code, at most {} are allowed"
    return [
        Fault(root / tree, 1, sentence.format(tree, now, most))
        for tree, most in MOST_IN_TREE.items()
        if (now := count.sizes(tree, root))[0] > most[0] or now[1] > most[1]
    ]


RULES: tuple[Callable[[Sequence[Module]], list[Fault]], ...] = (
    layers,
    circles,
    long_files,
    long_signatures,
    known_systems,
    around_the_release,
    unsafe_loading,
)


def check(root: Path) -> list[Fault]:
    """The faults of the repository in `root`: of the package, and unsafe loading in benchmarks."""
    modules = modules_in(root / PACKAGE)
    faults = [fault for rule in RULES for fault in rule(modules)]
    faults += unsafe_loading(modules_in(root / "benchmarks"))
    faults += large_trees(root)
    # A statement that imports several names breaks a rule once.
    return sorted(set(faults))


def _part(name: str) -> str:
    """The layer of a dotted name; "" of the package's own table of contents."""
    return name.split(".")[1] if "." in name else ""


def _inner_part(name: str) -> str:
    """The part of experiments that a dotted name is in; "" outside, and of experiments itself."""
    pieces = name.split(".")
    if pieces[:2] != [PACKAGE, "experiments"] or len(pieces) < 3:
        return ""
    if pieces[2] == "systems" and len(pieces) > 3 and pieces[3] != "base":
        return SYSTEM
    return pieces[2]


def _folder(name: str) -> str:
    """The folder, or module, of federated that a dotted name is in; "" outside."""
    pieces = name.split(".")
    return pieces[2] if pieces[:2] == [PACKAGE, "federated"] and len(pieces) > 2 else ""


def _against_order(importer: str, name: str) -> str | None:
    """The sentence about an import that goes against the order, else None."""
    part, target = _part(importer), _part(name)
    if target not in LAYERS[part] | LEAVES | {part}:
        return f"{part} imports {target or 'the whole package'}, which goes against the layers"
    inner, target = _inner_part(importer), _inner_part(name)
    # A system and its own folder; a stranger's is the fault of `known_systems`.
    if inner and target and target not in EXPERIMENTS[inner] | {inner, SYSTEM}:
        return f"{inner} imports experiments.{target}, which goes against the layers"
    folder, target = _folder(importer), _folder(name)
    if folder and target and target not in FEDERATED[folder] | BESIDE | {folder}:
        return f"federated.{folder} imports federated.{target}, which goes against the layers"
    return None


def _imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and dotted name of every import, also in functions; "." in front: a relative one."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                name = ".".join(filter(None, [node.module, alias.name]))
                yield node.lineno, "." * node.level + name


def _graph(modules: Sequence[Module]) -> dict[str, dict[str, int]]:
    """By module: the package's modules that it imports, with the line."""
    names = {module.name for module in modules}
    graph: dict[str, dict[str, int]] = {name: {} for name in names}
    for module in modules:
        for line, name in _imports(module.tree):
            while name and name not in names:
                name = name.rpartition(".")[0]
            # What `import jaxpfl` in a part would be is a fault of its own.
            if name and name != PACKAGE:
                graph[module.name].setdefault(name, line)
    return graph


def _circles(graph: dict[str, set[str]]) -> Iterator[list[str]]:
    """Circles of modules that import each other, each from its first name, until none is left."""
    left = graph
    while True:
        nodes = {name: sorted(left[name] & left.keys()) for name in sorted(left)}
        try:
            graphlib.TopologicalSorter(nodes).prepare()
            return
        except graphlib.CycleError as error:
            # Of two neighbours in it, the second imports the first.
            circle = error.args[1][:0:-1]
        start = circle.index(min(circle))
        yield [*circle[start:], *circle[:start]]
        left = {name: targets for name, targets in left.items() if name not in circle}


def _functions(tree: ast.AST) -> Iterator[tuple[ast.FunctionDef | ast.AsyncFunctionDef, bool]]:
    """Every function, and whether its first parameter is the object or class it belongs to."""
    for node in ast.walk(tree):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                static = "staticmethod" in map(ast.unparse, child.decorator_list)
                yield child, isinstance(node, ast.ClassDef) and not static


def _acts(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and name of each of `CALLS` and `IMPORTS` that a module does."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            for act, (pattern, _) in CALLS.items():
                if re.search(pattern, called):
                    yield node.lineno, act
    for line, name in _imports(tree):
        for module in IMPORTS:
            if f"{name}.".startswith(f"{PACKAGE}.{module}."):
                yield line, module


def main() -> int:
    faults = check(ROOT)
    for path, line, sentence in faults:
        print(f"{path.relative_to(ROOT)}:{line}: {sentence}")
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
