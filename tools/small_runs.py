"""Runs a small form of every config and writes down every number that comes out.

    python tools/small_runs.py --out before.json        (on the code before a change)
    python tools/small_runs.py --out after.json         (on the code after it)
    python tools/small_runs.py --compare before.json after.json
    python tools/small_runs.py --out runs.json --verify PYTHON

A change that must not change results is checked by this: final parameters, the metrics of every
round, epsilons and the numbers of all statements are equal to the bit, or the comparison says what
differs. A small form is the shipped config with few rounds and clients, tiny models, and data that
this file generates.

Cohorts and noise follow from a run's secret and from all that identifies its queries, versions and
the lowered program among them, so that no two versions of the code draw the same. For this
comparison the secrets of a process are counted, and a query is identified by its label alone. With
`--noise off` every standard normal draw for privacy is zero. Such runs are NOT private.

With `--verify`, all certificates that were written, of each point of a sweep, are checked against
their ledgers by `jaxpfl/privacy/verify.py`, in an interpreter that needs dp-accounting alone.
"""

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import yaml

ROOT = Path(__file__).resolve().parents[1]

# By the end of a field's path in a config: the longest that fits is taken, wherever the field is.
SMALL: dict[str, Any] = {
    "rounds": 2,
    "clients_per_round": 12,
    "batch_size": 4,
    "max_examples": 8,
    "epochs": 1,
    "every": 2,
    "checkpoint_every": 2,
    # Language models.
    "vocab_size": 300,
    # The public clients of the generated text have few words.
    "model.vocab_size": 24,
    "sequence_length": 32,
    "model.sequence_length": 8,
    "embedding": 8,
    "hidden": 8,
    "projection": 8,
    "layers": 2,
    "hidden_size": 16,
    "heads": 2,
    "inner_size": 32,
    # Stages before the rounds.
    "embedder": "hashed:16",
    "examples": 80,
    "trials": 2,
    "other_candidates": True,
    "max_candidate_examples": 200,
    "prefinetune_epochs": 1,
    # Generative adversarial networks.
    "image_shape": [8, 8, 1],
    "width": 0.03125,
    "gan.noise": 8,
    "gan.model.noise": 8,
    "generator.steps": 1,
    "generator.batch": 8,
    "generator_steps": 1,
    "generator_batch": 8,
    "images": 64,
    "classes": 10,
    "classifier.examples": 400,
    "classifier.epochs": 12,
    # Digits have no other column.
    "selection.column": "label",
    # The histogram of a few clients is all noise at a sensible epsilon, and refused.
    "selection.epsilon": 100.0,
    "bug.probabilities": [0.0, 1.0],
    "drawn.sentences": 64,
    "drawn.words": 64,
    "drawn.top": 3,
    # Synthetic text.
    "corpus_texts": 100,
    "texts": 24,
    "tokens": 8,
    "prompts": 4,
    "prompt_tokens": 32,
    "new_tokens": 8,
    "response_tokens": 8,
    "preference.epochs": 2,
    "preference.batch_size": 25,
    "run.seed": 0,
}
# Fields that a config leaves at a default which is too large or too slow.
ADDED: dict[str, dict[str, Any]] = {"evaluation": {"sentences": 1}, "run": {"devices": 2}}
ADDED_TO_SYNTHETIC_TEXT: dict[str, dict[str, Any]] = {
    "evolution": {"population": 8, "variations": 1, "lookahead": 1, "max_texts": 2},
    # The other configs are accounted for by privacy loss distributions.
    "privacy": {"accountant": "rdp"},
}
# Of FreD's candidates, and of a sweep's cases: those that other configs do not have, the ends of
# its gap, and what a mixture is made of.
CANDIDATES = ("docs", "commits", "science", "web", "0%", "100%", "40%")
CASES = {
    "popri_ablation": ("rejected rank 7", "IPO", "cosine", "nearest-neighbour votes"),
    "popri_table": (
        "public, epsilon 0",
        "generator, epsilon 0",
        "central, infinity",
        "DP-FTRL, 1",
    ),
}
# The data is TensorFlow Federated's, of which only its own files are the test; or the programs are
# those of `popri_table` and `quickstart`; or the weights are published.
WITHOUT_SMALL_FORM = (
    "cifar100_resnet18",
    "emnist_cnn",
    "one_look",
    "popri_fed_avg",
    "popri_proxy",
    "shakespeare_characters",
    "three_papers",
)
# Nearly all of the time is the compiler's, but for convolutions of images; both sides are compiled
# alike.
QUICKLY_COMPILED = {
    "XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true",
}
SOURCES = (("data", "source"), ("data", "public"))
DIGITS = "digits?clients=60&alpha=5&seed=0"


def configs_of(tree: Path) -> list[Path]:
    """The configs that have a small form."""
    found = sorted((tree / "configs").glob("*.yaml"))
    return [path for path in found if path.stem not in WITHOUT_SMALL_FORM]


def small_form(path: Path, folder: Path) -> Path:
    """Writes the small form of a shipped config, with its data, into `folder`; its path."""
    mapping = yaml.safe_load(path.read_text("utf-8"))
    if "metric" in mapping:
        mapping["base"] = str(small_form(path.parent / mapping["base"], folder))
        cases, grid = mapping.get("cases", {}), mapping["grid"].items()
        mapping["cases"] = {name: cases[name] for name in CASES.get(path.stem) or cases}
        mapping["grid"] = {name: _small_values(name, values) for name, values in grid}
    else:
        mapping = _shrunk(mapping, (), folder)
        synthetic = "corpora" in mapping
        for section, fields in {**ADDED, **(ADDED_TO_SYNTHETIC_TEXT if synthetic else {})}.items():
            if section in mapping or section in ("run", "evolution"):
                mapping[section] = mapping.get(section, {}) | fields
        if synthetic:
            mapping["cache"] = str(folder / "cache")
    written = folder / path.name
    written.write_text(yaml.safe_dump(mapping, sort_keys=False), "utf-8")
    return written


def _shrunk(value: Any, path: tuple[str, ...], folder: Path) -> Any:
    if isinstance(value, dict):
        changed = {
            key: _shrunk(each, (*path, str(key)), folder)
            for key, each in value.items()
            if path[-1:] != ("candidates",) or key in CANDIDATES
        }
        if "clients_per_round" in changed:
            changed["clients_per_bucket"] = 8
        return changed
    source = "candidates" in path or path[0] == "corpora" or path in SOURCES
    if source and isinstance(value, str) and value != "split:public":
        images = any(name in value for name in ("digits", "emnist", "mnist"))
        return DIGITS if images else str(_sentences(folder, path[-1]))
    return _small(path, value)


def _small(path: tuple[str, ...], value: Any) -> Any:
    for start in range(len(path)):
        if (end := ".".join(path[start:])) in SMALL:
            return SMALL[end]
    return value


def _small_values(name: str, values: list[Any]) -> list[Any]:
    """One value of a sweep's field, but two of the clients in a round."""
    small = _small(tuple(name.split(".")), values[0])
    return [small // 2, small] if name.endswith("clients_per_round") else [small]


def _sentences(folder: Path, name: str) -> Path:
    """A file of 80 clients with 3 to 8 sentences each, which no other file has."""
    path = folder / f"{re.sub(r'[^a-z]', '', name.lower()) or 'mixed'}.jsonl"
    draw = np.random.default_rng(list(name.encode()))
    known = ["".join(draw.choice(list("abdegiklmnorstu"), 3)) for _ in range(30)]
    with path.open("w", encoding="utf-8") as file:
        for client in range(80):
            for row in range(3 + client % 6):
                words = [*draw.choice(known, 5), f"{name[:2]}{client}x{row}", "the", "of"]
                text = " ".join(str(word) for word in draw.permutation(words))
                file.write(json.dumps({"client": f"c{client}", "text": text}) + "\n")
    return path


class _WithoutNoise:
    """The module `jax`, but every normal draw is zero."""

    def __getattr__(self, name: str) -> Any:
        import jax

        return self if name == "random" else getattr(jax, name, None) or getattr(jax.random, name)

    def normal(self, key: Any, shape: Any, dtype: Any) -> Any:
        import jax.numpy as jnp

        return jnp.zeros(shape, dtype)


def _pin(noise: bool) -> None:
    """Makes cohorts and noise comparable between versions of the code; see the head."""
    from matplotlib.figure import Figure

    from jaxpfl.federated.release import identity
    from jaxpfl.privacy import keys, mechanisms

    made = iter(range(10**6))
    start = keys.RunSecret.__init__

    def counted(self: Any, words: bytes | None = None) -> None:
        if words is None:
            words = hashlib.sha256(f"secret {next(made)}".encode()).digest()[:16]
        start(self, words)

    keys.RunSecret.__init__ = counted
    identity.described = lambda query, *others: query.label
    if not noise:
        mechanisms.jax = _WithoutNoise()  # pyright: ignore[reportAttributeAccessIssue]

    def blank(self: Any, file: Any, **options: Any) -> None:
        """Pictures are a quarter of the time, and no numbers."""
        with open(file, "wb") if isinstance(file, str | Path) else nullcontext(file) as target:
            target.write(b"")

    Figure.savefig = blank  # pyright: ignore[reportAttributeAccessIssue]


def _child(arguments: argparse.Namespace) -> int:
    """Runs one small form in this process."""
    sys.path.insert(0, str(arguments.tree))
    _pin(arguments.noise == "on")
    from jaxpfl.cli import main

    return main([arguments.command, str(arguments.config), "--out", str(arguments.out)])


def run_all(tree: Path, names: list[str], noise: str, out: Path, python: str | None) -> bool:
    """Writes what each config's small form came to, one after the other; whether all went well.

    Args:
      python: of the interpreter that verifies certificates; None does not.
    """
    found = json.loads(out.read_text("utf-8")) if out.exists() else {}
    for path in configs_of(tree):
        if path.stem in found or (names and path.stem not in names):
            continue
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as scratch:
            found[path.stem] = _run(tree, path, Path(scratch), noise)
            if python is not None and "failed" not in found[path.stem]:
                found[path.stem] |= _verified(tree, Path(scratch) / "out", python)
        failed = found[path.stem].get("failed", "")
        print(f"{path.stem}: {time.monotonic() - began:.0f} s {failed}", file=sys.stderr)
        out.write_text(json.dumps(found, indent=1) + "\n", "utf-8")
    return not any("failed" in each for each in found.values())


def _run(tree: Path, path: Path, folder: Path, noise: str) -> dict[str, Any]:
    config = small_form(path, folder)
    command = "sweep" if "metric" in yaml.safe_load(config.read_text("utf-8")) else "run"
    arguments = {"--tree": tree, "--noise": noise, "--child": command, "--config": config}
    arguments |= {"--out": folder / "out"}
    quick = {} if "gan" in path.stem else QUICKLY_COMPILED
    finished = subprocess.run(
        [sys.executable, __file__, *(str(word) for pair in arguments.items() for word in pair)],
        cwd=folder,
        env={**os.environ, **quick, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(tree)},
        capture_output=True,
        text=True,
    )
    if finished.returncode:
        return {"failed": finished.stderr[-2000:]}
    rounds = _read(folder, ("metrics.jsonl",), str.splitlines)
    records = ("result.json", "study.json", "sweep.json", "scores.json", "record.json")
    return {
        "arrays": dict(_arrays(folder)),
        "rounds": {name: [*map(json.loads, lines)] for name, lines in rounds.items()},
        "records": _read(folder, records, lambda text: _numbers(json.loads(text))),
    }


def _read(folder: Path, names: Iterable[str], read: Callable[[str], Any]) -> dict[str, Any]:
    """What `read` makes of all files of these names."""
    files = [file for name in names for file in sorted(folder.rglob(name))]
    return {file.relative_to(folder).as_posix(): read(file.read_text("utf-8")) for file in files}


def _verified(tree: Path, out: Path, python: str) -> dict[str, Any]:
    """How many certificates of a run fit, and the first that does not."""
    paths = sorted(out.rglob("certificate.json"))
    for path in paths:
        named = [path.parent / ledger["name"] for ledger in json.loads(path.read_text())["ledgers"]]
        command = [python, "-I", str(tree / "jaxpfl" / "privacy" / "verify.py"), str(path)]
        for ledger in named:
            command += ["--ledger", str(ledger)]
        finished = subprocess.run(command, capture_output=True, text=True)
        if finished.returncode:
            return {"failed": finished.stderr[-2000:]}
    return {"certificates": len(paths)} if paths else {"failed": "wrote no certificate"}


def _arrays(folder: Path) -> Iterator[tuple[str, str]]:
    """SHA-256 of every array that was written: final states, public models, pictures' numbers."""
    for file in sorted(path for path in folder.rglob("*.npz") if path.is_file()):
        with np.load(file, allow_pickle=False) as arrays:
            for name in arrays.files:
                yield f"{file.relative_to(folder).as_posix()}:{name}", _digest(arrays[name])
    for checkpoints in sorted(folder.rglob("checkpoints")):
        last = max(checkpoints.iterdir())
        for name, array in _checkpoint(last).items():
            yield f"{last.relative_to(folder).as_posix()}:{name}", _digest(array)


def _checkpoint(folder: Path) -> dict[str, np.ndarray]:
    import jax
    import orbax.checkpoint as ocp

    handler: Any = ocp.PyTreeCheckpointHandler()
    leaves = jax.tree_util.tree_leaves_with_path(handler.restore(folder / "state"))
    name = partial(jax.tree_util.keystr, simple=True, separator=".")
    return {name(path): np.asarray(leaf) for path, leaf in leaves}


def _digest(array: np.ndarray) -> str:
    head = f"{array.dtype}{list(array.shape)}".encode()
    return hashlib.sha256(head + np.ascontiguousarray(array).tobytes()).hexdigest()[:20]


def _numbers(value: Any, name: str = "") -> dict[str, Any]:
    """Every number below `value` by its path, those within statements too."""
    if isinstance(value, dict):
        parts = value.items()
    elif isinstance(value, list):
        parts = enumerate(value)
    elif isinstance(value, str):
        texts = re.findall(r"(?<![\w.])\d+(?:\.\d+)?(?:e-?\d+)?(?!\w)", value)
        parts = enumerate(float(text) for text in texts)
    else:
        return {} if value is None or isinstance(value, bool) else {name: value}
    found: dict[str, Any] = {}
    for key, each in parts:
        # How long it took and where are no results.
        if not re.search(r"seconds|bytes|sha256|\brun\b|^config$|head", str(key)):
            found |= _numbers(each, f"{name}.{key}" if name else str(key))
    return found


def compare(before: dict[str, Any], after: dict[str, Any]) -> dict[str, list[str]]:
    """By config: what `before` has and `after` has not; names may have changed, numbers not."""
    faults = {}
    for config, old in before.items():
        new = after.get(config, {"failed": "was not run"})
        sides = (("before", old), ("after", new))
        failed = [f"failed {s}: {of['failed'][-600:]}" for s, of in sides if "failed" in of]
        faults[config] = failed or [*_differences(old, new)]
    return faults


def _differences(old: dict[str, Any], new: dict[str, Any]) -> Iterator[str]:
    for name in _missing(old["arrays"].items(), new["arrays"].values()):
        yield f"array {name}"
    rounds = [(name, _as_text(rows)) for name, rows in old["rounds"].items()]
    for name in _missing(rounds, map(_as_text, new["rounds"].values())):
        first = _first_difference(old["rounds"][name], new["rounds"].get(name))
        yield f"metrics of {name}: {first}"
    yield from _missing(_named(old["records"]), (value for _, value in _named(new["records"])))


def _missing(old: Iterable[tuple[str, Any]], new: Iterable[Any]) -> Iterator[str]:
    """The names of the old values that the new ones do not have as often."""
    left = Counter(new)
    for name, value in old:
        left[value] -= 1
        if left[value] < 0:
            yield name


def _named(records: dict[str, dict[str, Any]]) -> Iterator[tuple[str, float]]:
    """Every number of some records, with what to call it."""
    for file, numbers in records.items():
        for name, value in numbers.items():
            yield f"{file}: {name} = {value}", float(value)


def _first_difference(old: list[Any], new: list[Any] | None) -> str:
    if new is None:
        return "no such file"
    for one, other in zip(old, new, strict=False):
        if _as_text([one]) != _as_text([other]):
            return f"{one} is {other}"
    return f"{len(old)} rows are {len(new)}"


def _as_text(rows: list[Any]) -> str:
    """The numbers of some rows, whatever their names are."""
    return json.dumps([sorted(float(value) for value in _numbers(row).values()) for row in rows])


def main() -> int:
    parser = argparse.ArgumentParser(description="Runs a small form of every config.")
    parser.add_argument("names", nargs="*", help="configs, without .yaml; default: all")
    parser.add_argument("--out", type=Path, help="JSON file; what it holds is not run again")
    parser.add_argument("--noise", choices=("on", "off"), default="on")
    parser.add_argument("--verify", metavar="PYTHON", help="checks all certificates with it")
    parser.add_argument("--tree", type=Path, default=ROOT, help="where jaxpfl/ and configs/ are")
    parser.add_argument("--compare", nargs=2, type=Path, metavar=("BEFORE", "AFTER"))
    parser.add_argument("--child", dest="command", help=argparse.SUPPRESS)
    parser.add_argument("--config", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.command:
        return _child(arguments)
    if arguments.compare:
        faults = compare(*(json.loads(path.read_text("utf-8")) for path in arguments.compare))
        for config, found in faults.items():
            print(f"{config}: {'equal' if not found else f'{len(found)} differ'}")
            print("".join(f"    {fault}\n" for fault in found), end="")
        return int(any(faults.values()))
    tree, out = arguments.tree.resolve(), arguments.out
    return int(not run_all(tree, arguments.names, arguments.noise, out, arguments.verify))


if __name__ == "__main__":
    sys.exit(main())
