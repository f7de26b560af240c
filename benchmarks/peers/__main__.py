"""Rounds of DP-FedAvg by this library and by others, on this machine, by turns.

    make peers                                           # environments, measurement, README's table
    python -m benchmarks.peers --equal 10 --ragged       # one cohort
    python -m benchmarks.peers --table-only              # README's table from the last stored run

Each program is a process in an environment of its own (`requirements/`), and all do the same work
(`work`): before they are timed, the norms of their noiseless mean updates must agree. Rounds are
asked of the programs by turns, in ever new order. The processor time of everything else is measured
during each round; a round that was disturbed by more than `--foreign` processors is asked for
again, at most `--attempts` times, and whatever disturbance is left is recorded.

The best and the median round count; `ratio` is a program's best time over ours. README's table
shows the last run that was not disturbed. Needs Linux.
"""

import dataclasses
import math
import os
import random
import statistics
import sys
import tempfile
from pathlib import Path

import tyro

from benchmarks import harness
from benchmarks.peers import table, work
from benchmarks.peers.process import Program, Turn

ROOT = Path(__file__).parents[2]
OURS = "jaxpfl"

# Program: its environment (None = ours), then its module and arguments.
PROGRAMS: dict[str, tuple[str | None, list[str]]] = {
    OURS: (None, ["ours"]),
    "PyTorch loop": ("torch", ["torch_loop"]),
    "PyTorch, a process a core": ("torch", ["torch_loop", str(os.cpu_count() or 1)]),
    "plain JAX, scan": ("drjax", ["jax_scan"]),
    "DrJAX": ("drjax", ["drjax_round"]),
    "pfl": ("pfl", ["pfl_round"]),
}


@dataclasses.dataclass(frozen=True)
class Config:
    equal: tuple[int, ...] = (10, 50, 200)  # cohorts of clients with 100 examples each
    ragged: tuple[int, ...] = (50, 200)  # cohorts of clients with 1 to 100 examples
    turns: int = 5
    foreign: float = 0.1  # processors
    attempts: int = 3
    programs: tuple[str, ...] = tuple(PROGRAMS)
    environments: Path = ROOT  # where .venv-peer-NAME are
    table_only: bool = False


def main(config: Config) -> None:
    if not config.table_only:
        rows = []
        with tempfile.TemporaryDirectory() as folder:
            for ragged, cohorts in ((False, config.equal), (True, config.ragged)):
                for cohort in cohorts:
                    rows += measured(config, cohort, ragged, Path(folder))
                    shown = ("what", "cohort", "clients/s", "median", "ratio", "cpu s/client")
                    harness.table(rows, [*shown, "peak MB", "first round s", "foreign"])
        print(f"recorded in {harness.record('peers', rows)}")
    print(f"table in {table.write(ROOT / 'README.md', harness.RESULTS / 'peers.jsonl')}")


def measured(config: Config, cohort: int, ragged: bool, folder: Path) -> list[dict]:
    """The rows of one cohort."""
    file = folder / f"{cohort} {ragged}.npz"
    work.save(str(file), cohort, ragged)
    quiet = _program(config, OURS, file, folder, "quiet")
    norm = quiet.turn().norm
    quiet.close()
    programs: dict[str, Program] = {}
    turns: dict[str, list[Turn]] = {name: [] for name in config.programs}
    first: dict[str, Turn] = {}
    try:
        for name in config.programs:
            programs[name] = _program(config, name, file, folder)
            first[name] = programs[name].turn()
            _check(name, first[name].norm, norm)
        for turn in range(config.turns):
            # Of its own seed each, so that no program always follows the same one.
            order = random.Random(turn).sample(config.programs, len(config.programs))
            for name in order:
                turns[name].append(_undisturbed(config, programs[name]))
        rows = []
        for name, program in programs.items():
            seconds = [turn.seconds for turn in turns[name]]
            rows.append(
                {
                    "what": name,
                    "cohort": cohort,
                    "ragged": ragged,
                    "clients/s": cohort / min(seconds),
                    "median": cohort / statistics.median(seconds),
                    "cpu s/client": min(turn.cpu_seconds for turn in turns[name]) / cohort,
                    "peak MB": program.peak_memory_mb(),
                    "start s": program.start_seconds,
                    "first round s": first[name].seconds,
                    "foreign": statistics.median(turn.foreign for turn in turns[name]),
                    "norm": norm if name == OURS else first[name].norm,
                    "versions": program.hello,
                }
            )
    finally:
        for program in programs.values():
            program.close()
    by_name = {row["what"]: row for row in rows}
    for row in rows:
        if OURS in by_name:
            row["ratio"] = by_name[OURS]["clients/s"] / row["clients/s"]
    return rows


def _program(config: Config, name: str, file: Path, folder: Path, *extra: str) -> Program:
    environment, (module, *arguments) = PROGRAMS[name]
    python = sys.executable
    if environment is not None:
        python = str(config.environments / f".venv-peer-{environment}" / "bin" / "python")
        if not Path(python).exists():
            raise SystemExit(f"{python} does not exist: make .venv-peer-{environment}/installed")
    command = [python, "-m", f"benchmarks.peers.{module}", str(file), *arguments, *extra]
    return Program(command, ROOT, folder / f"{module}.log")


def _undisturbed(config: Config, program: Program) -> Turn:
    """The least disturbed of some rounds; the first that is disturbed little is enough."""
    best = program.turn()
    for _ in range(config.attempts - 1):
        if best.foreign <= config.foreign:
            break
        best = min(best, program.turn(), key=lambda turn: turn.foreign)
    return best


def _check(name: str, found: float | None, expected: float | None) -> None:
    """PyTorch's convolutions differ in the fourth digit from one number of threads to another."""
    if found is None or expected is None:
        return
    if not math.isclose(found, expected, rel_tol=2e-3):
        raise SystemExit(f"{name} has a mean update of norm {found}, ours is {expected}")


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
