"""Kills runs of every system at random instants, resumes them, and compares them with whole runs.

    python -m tools.kills                                # 200 kills, spread over all systems
    python -m tools.kills --kills 20 --systems popri     # some of one
    python -m tools.kills --seed 7 --workers 1
    python -m tools.kills --processes 2 --kills 40 --systems exact scaffold
    python -m tools.kills --kills 20 --damaged 5 --devices 2 --systems scaffold ditto

With two processes, one of them is killed after both have joined; the other must end within a minute
by itself. Two or one go on, with as many devices, and the whole run is that of one process.

A run is a process of its own. It is killed (SIGKILL) after a random time or before a random durable
operation: a charge, a line of metrics, any step of saving or deleting a checkpoint. What a user
does next is done: `resume`, or `run` again where nothing was begun; and every second time the
resumed run is killed, too. In the end, everything outside private/ that is not a page, a log or a
checkpoint must be what an uninterrupted run writes, and its ledgers must have exactly its charges
and releases; clients' states and the last checkpoint must be the same bytes, too. At least
`--damaged` resumes find the newest of two checkpoints damaged: a bit is flipped, or a file is cut
or removed. The noise of these runs follows from the seed of their configs, without which two runs
could not be compared.

Prints a table, and appends it to benchmarks/results/kills.jsonl; ends with 1 at any difference.
"""

import dataclasses
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import tyro
from rich.progress import track

from benchmarks import harness
from tests.experiments import conftest as studies
from tests.experiments.crashes import damages
from tests.experiments.ledgers import same_but_heads
from tests.experiments.systems.gan_inversion.test_study import STUDY as GAN_INVERSION
from tests.experiments.systems.oov_concatenation.test_study import STUDY as OOV_CONCATENATION
from tests.experiments.systems.training_bias import test_study as training_bias
from tests.federated.two_processes import free_address

REPRODUCIBLE = ("--run.reproducible_noise", "True")
_COMPARED = (".json", ".jsonl", ".npz", ".safetensors", ".yaml")
_RESUME_LIMIT_S = 600

# Runs or resumes, and kills itself before a durable operation if it is told to; prints how many
# there were.
_CHILD = """
import os, pathlib, signal, sys
config, out, fatal, how, *overrides = sys.argv[1:]
calls = 0
def counted(real):
    def call(*arguments, **options):
        global calls
        calls += 1
        if calls == int(fatal):
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments, **options)
    return call
for name in ("fsync", "rename", "replace", "mkdir", "rmdir"):
    setattr(os, name, counted(getattr(os, name)))
from jaxpfl import compilation_cache
compilation_cache.enable()  # before JAX is imported
from jaxpfl.experiments import carry_out, registry
if how:
    from jaxpfl.federated.hosts import processes
    processes.join(how)
    print("joined", flush=True)
out = pathlib.Path(out)
if (out / "config.yaml").exists():
    carry_out.resume(out, progress=False)
else:
    carry_out.run(registry.load(config, overrides), out, progress=False)
print(calls)
"""


@dataclasses.dataclass(frozen=True)
class Config:
    kills: int = 200
    seed: int = 0
    systems: tuple[str, ...] = ()  # default: all
    workers: int = 2  # runs side by side
    processes: int = 1  # that share each run; 2 need systems with exact noise
    devices: int = 1  # of a run of one process
    damaged: int = 0  # resumes with the newest checkpoint damaged, of runs of one process
    seconds: float = float("inf")  # after which no other run begins


@dataclasses.dataclass(frozen=True)
class System:
    """A config, and what an uninterrupted run of it was."""

    name: str
    config: Path
    overrides: tuple[str, ...]
    straight: Path
    seconds: float
    operations: int
    devices: int


# A config, and the files of sentences beside it: words, clients, rows and a word of each client.
_CLIENTS = (studies.NEAR, 60, 3, "canarytext{}")
_CORPORA = {"near": (studies.NEAR, 30, 4), "far": (studies.FAR, 30, 4)}
_TINY = (studies.TINY, {"public": (studies.NEAR, 40, 5), "clients": _CLIENTS})
_PIPELINE = (
    studies.PIPELINE,
    {
        **_CORPORA,
        "clients": (studies.NEAR, 300, 3, "canarytext{}"),
        "vocabulary": (studies.NEAR + studies.FAR, 40, 5),
    },
)
_OOV = (
    OOV_CONCATENATION,
    {
        "clients": (studies.NEAR + studies.FAR, 60, 3, "canary{}"),
        "public": (studies.NEAR, 30, 4, "publicword{}"),
    },
)
_GAN = (GAN_INVERSION.replace("{", "{{").replace("}", "}}"), {})
_SYNTHETIC = (studies.SYNTHETIC, {**_CORPORA, "clients": _CLIENTS})
_EXACT = ("--privacy.noise", "exact")
_DP_FTRL = ("--privacy.sampling", "cyclic", "--privacy.noise", "banded")
_SEPARATED = ("--privacy.sampling", "min_separation", "--privacy.separation", "2")
_BLT = (*_SEPARATED, "--privacy.noise", "blt")
_ALGORITHM = "--training.algorithm"
_SCAFFOLD = (*_EXACT, f"{_ALGORITHM}.name", "scaffold", f"{_ALGORITHM}.variate_clip", "1.0")
_DITTO = (f"{_ALGORITHM}.name", "ditto", f"{_ALGORITHM}.mu", "0.5")
SYSTEMS: dict[str, tuple[tuple[str, dict[str, Any]], tuple[str, ...]]] = {
    "fed_avg": (_TINY, ()),
    "dp_ftrl": (_TINY, _DP_FTRL),
    "blt": (_TINY, _BLT),
    "exact": (_TINY, _EXACT),
    "scaffold": (_TINY, _SCAFFOLD),
    "ditto": (_TINY, _DITTO),
    "fred, prefinetuning, fed_avg": (_PIPELINE, REPRODUCIBLE),
    "gan_inversion": (_GAN, ()),
    "oov_concatenation": (_OOV, ()),
    "training_bias": ((training_bias.STUDY, training_bias.FILES), ()),
    **dict.fromkeys(
        ("popri", "private_evolution", "pe_sft", "steered", "fed_avg, then synthetic text"),
        (_SYNTHETIC, REPRODUCIBLE),
    ),
}


def _written(name: str, folder: Path) -> tuple[Path, tuple[str, ...]]:
    """The config of a system in its folder, with its data, and what is overridden."""
    (text, files), overrides = SYSTEMS[name]
    for file, given in files.items():
        studies.write_lines(folder / f"{file}.jsonl", *given)
    path = folder / "config.yaml"
    path.write_text(text.format(folder=folder, method=name.split(",")[0]))
    return path, overrides


def main(config: Config) -> None:
    names = config.systems or tuple(SYSTEMS)
    with tempfile.TemporaryDirectory() as folder:
        systems = [
            _whole(name, Path(folder), max(config.processes, config.devices))
            for name in track(names, "whole runs")
        ]
        found, begun, started = [], 0, time.monotonic()
        with ThreadPoolExecutor(config.workers) as pool:
            # A run may end before its second kill, and then there are fewer than were planned.
            while (
                missing := max(
                    config.kills - sum(row["kills"] for row in found),
                    config.damaged - sum(row.get("damaged", 0) for row in found),
                )
            ) > 0:
                if any(row["differences"] for row in found):
                    break
                most = missing if config.seconds == float("inf") else config.workers
                trials = _trials(config.seed, systems, Path(folder), min(missing, most), begun)
                if time.monotonic() - started > config.seconds:
                    break
                damage = config.damaged > sum(row.get("damaged", 0) for row in found)
                trial = partial(_trial, damage) if config.processes == 1 else _shared_trial
                done = pool.map(lambda each: trial(*each), trials)  # noqa: B023
                found += track(done, "killed runs", total=len(trials))
                begun += len(trials)
    rows = []
    for system in systems:
        own = [row for row in found if row["what"] == system.name]
        rows.append(
            {
                "what": system.name,
                "runs": len(own),
                "kills": sum(row["kills"] for row in own),
                "of resumed runs": sum(row["kills"] - 1 for row in own),
                "differences": sum(bool(row["differences"]) for row in own),
                "seed": config.seed,
                "seconds of a run": system.seconds,
                "operations": system.operations,
                "processes": config.processes,
                "devices": system.devices,
                "newest checkpoint damaged": sum(row.get("damaged", 0) for row in own),
                "longest survival, s": max((row.get("survived", 0.0) for row in own), default=0),
                "of process 0": sum(row.get("of 0", 0) for row in own),
                "resumed by one": sum(row.get("by one", 0) for row in own),
            }
        )
    for row in found:
        for difference in row["differences"]:
            print(f"{row['what']}, seed {row['seed']}: {difference}", file=sys.stderr)
    harness.table(rows, [name for name in rows[0] if name != "seed"])
    print(f"{sum(row['kills'] for row in rows)} kills, recorded in {harness.record('kills', rows)}")
    if any(row["differences"] for row in rows):
        raise SystemExit(1)


def _whole(name: str, folder: Path, devices: int) -> System:
    """Runs a system without interruption, twice: the second time, all programs are compiled."""
    own = folder / name.replace(" ", "_").replace(",", "")
    own.mkdir()
    path, overrides = _written(name, own)
    seconds, operations = 0.0, 0
    for number in range(2):
        began = time.perf_counter()
        child = _start(path, overrides, own / f"whole_{number}", 0, devices=devices)
        printed, errors = child.communicate()
        if child.returncode:
            raise SystemExit(f"{name} does not run:\n{errors[-2_000:]}")
        seconds, operations = time.perf_counter() - began, int(printed.splitlines()[-1])
    system = System(name, path, overrides, own / "whole_0", seconds, operations, devices)
    if differences := list(_differences(own / "whole_1", system.straight)):
        raise SystemExit(f"{name}: two whole runs differ: {differences}")
    return system


def _trials(
    seed: int, systems: list[System], folder: Path, kills: int, number: int
) -> list[tuple[System, Path, int, int]]:
    """As many runs as have `kills` kills if none ends early, dealt to the systems in turn."""
    trials = []
    while kills > 0:
        own = seed * 1_000_000 + number
        times = random.Random(own).choice((1, 2))
        trials.append((systems[number % len(systems)], folder / f"trial_{number}", own, times))
        kills, number = kills - times, number + 1
    return trials


def _trial(damage: bool, system: System, out: Path, seed: int, times: int) -> dict:
    generator = random.Random(seed)
    generator.random()  # the first draw said how often
    kills, damaged = 0, 0
    while kills < times:
        # A resumed run has fewer operations and less time left, which may be over before its kill.
        by_operation = generator.random() < 0.5
        operation = 1 + generator.randrange(system.operations)
        delay = generator.uniform(0.1, system.seconds)
        if damage:  # There must be two checkpoints.
            by_operation, operation = True, (system.operations + operation) // 2
        fatal = operation if by_operation else 0
        child = _start(system.config, system.overrides, out, fatal, devices=system.devices)
        try:
            _, errors = child.communicate(timeout=None if by_operation else delay)
        except subprocess.TimeoutExpired:
            child.kill()
            _, errors = child.communicate()
        if child.returncode not in (0, -signal.SIGKILL):
            return _row(system, seed, kills, [f"status {child.returncode}: {errors[-500:]}"])
        if child.returncode == 0:
            if kills:
                break
            shutil.rmtree(out)
            continue
        kills += 1
        damaged += damage and _damage(out, generator)
    last = [_start(system.config, system.overrides, out, 0, devices=system.devices)]
    differences = list(_faults_of_resuming(last))
    if differences:
        return _row(system, seed, kills, differences)
    differences += [*_differences(out, system.straight), *_kept_differences(out, system.straight)]
    shutil.rmtree(out)
    return {**_row(system, seed, kills, differences), "damaged": damaged}


def _faults_of_resuming(children: list[subprocess.Popen]) -> Iterator[str]:
    """What hinders processes that resume a run."""
    for child in children:
        try:
            _, errors = child.communicate(timeout=_RESUME_LIMIT_S)
        except subprocess.TimeoutExpired:
            child.kill()
            yield f"not resumed within {_RESUME_LIMIT_S} s"
        else:
            if child.returncode:
                yield f"not resumed: {errors[-500:]}"


def _damage(out: Path, generator: random.Random) -> bool:
    """Damages the newest checkpoint of an unfinished run that has an older one, too."""
    checkpoints = sorted((out / "checkpoints").glob("round_*"))
    if len(checkpoints) < 2 or not (out / "private" / "secret.json").exists():
        return False
    _, path, change = generator.choice(list(damages(checkpoints[-1])))
    change(path)
    return True


def _shared_trial(system: System, out: Path, seed: int, times: int) -> dict:
    """As `_trial`, of two processes, either of which is killed; two or one resume."""
    generator = random.Random(seed)
    kills, zeros, survived, differences = 0, 0, 0.0, []
    while kills < times and not differences:
        pair = _pair(system, out)
        for each in pair:
            assert each.stdout is not None
            each.stdout.readline()  # Both have joined.
        victim = generator.randrange(2)
        time.sleep(generator.uniform(0, 1.3 * system.seconds))
        if (out / "result.json").exists():
            break
        pair[victim].kill()
        killed = time.monotonic()
        try:
            _, errors = pair[1 - victim].communicate(timeout=60)
        except subprocess.TimeoutExpired:
            differences.append(f"process {1 - victim} lives 60 s after the other")
            pair[1 - victim].kill()
            continue
        survived = max(survived, time.monotonic() - killed)
        # JAX ends the others of process 0, with its own text.
        if victim and not errors.strip():
            differences.append("process 0 ended without a sentence")
        kills, zeros = kills + 1, zeros + (victim == 0)
        pair[victim].communicate()
    one = generator.random() < 0.5
    last = [_start(system.config, system.overrides, out, 0, devices=2)] if one else []
    differences += _faults_of_resuming(last or _pair(system, out))
    differences += _differences(out, system.straight)
    shutil.rmtree(out)
    more = {"survived": survived, "of 0": zeros, "by one": int(one)}
    return {**_row(system, seed, kills, differences), **more}


def _pair(system: System, out: Path) -> list[subprocess.Popen]:
    address = free_address()
    return [
        _start(system.config, system.overrides, out, 0, f"{address},{index}/2")
        for index in range(2)
    ]


def _row(system: System, seed: int, kills: int, differences: list[str]) -> dict:
    return {"what": system.name, "seed": seed, "kills": kills, "differences": differences}


def _start(
    config: Path,
    overrides: tuple[str, ...],
    out: Path,
    fatal: int,
    how: str = "",
    devices: int = 1,
) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", _CHILD, str(config), str(out), str(fatal), how, *overrides],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(sys.path),
            "JAX_NUM_CPU_DEVICES": str(devices),
            # Small programs, too, so that a run is short.
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        },
    )


def _differences(out: Path, straight: Path) -> Iterator[str]:
    """Files that are missing, too many or other than those of a whole run."""
    found, expected = _compared(out), _compared(straight)
    for name in sorted(found ^ expected):
        yield f"{name} is {'missing' if name in expected else 'too many'}"
    for name in sorted(found & expected):
        if not same_but_heads(out / name, straight / name):
            yield f"{name} differs"


def _kept_differences(out: Path, straight: Path) -> Iterator[str]:
    """Of the states that clients keep, and then of the last checkpoint, other files."""
    rows = Path("private", "client_states", "rows")
    if not (straight / rows).exists():
        return
    last = max((straight / "checkpoints").iterdir())
    files = [path for path in last.rglob("*") if path.is_file()]
    for name in [rows, *(path.relative_to(straight) for path in files)]:
        if not (out / name).exists() or not same_but_heads(out / name, straight / name):
            yield f"{name} is missing or differs"


def _compared(out: Path) -> set[str]:
    return {
        str(path.relative_to(out))
        for path in out.rglob("*")
        if path.suffix in _COMPARED
        and path.name != "attempts.jsonl"  # it has dates
        and not {"private", "checkpoints"} & set(path.relative_to(out).parts)
        # Of a state that Orbax wrote, not its manifest.
        and not (path.name == "manifest.json" and (path.parent / "state").is_dir())
    }


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
