"""Rounds of DP-FedAvg and steps of DP-SGD by this library and by others, on this machine, by turns.

    make peers                                      # environments, measurements, the page's tables
    python -m benchmarks.peers --equal 10 --ragged  # one cohort
    python -m benchmarks.peers --unit example       # steps of DP-SGD, whose unit is the example
    python -m benchmarks.peers --table-only         # the page's tables from the last stored runs

Each program is a process in an environment of its own (`requirements/`), and all do the same work
(`work`): before they are timed, the norms of their noiseless mean updates must agree. Rounds are
asked of the programs by turns, in ever new order. The processor time of everything else is measured
during each round; a round that was disturbed by more than `--foreign` processors is asked for
again, at most `--attempts` times, and whatever disturbance is left is recorded.

The best and the median round count; `ratio` is a program's best time over ours. A program whose
round of a cohort would, going by the cohort before it, take longer than `--longest` or more memory
than there is, is left out, as is one that fails, and the table says why. The page is
docs/performance.md: it shows the last runs that were not disturbed. Needs Linux.
"""

import dataclasses
import math
import os
import random
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Literal

import tyro

from benchmarks import harness
from benchmarks.peers import table, work
from benchmarks.peers.process import Ended, Program, Turn

ROOT = Path(__file__).parents[2]
Programs = dict[str, tuple[str | None, list[str]]]
# Program: its environment (None = ours), then its module and arguments. The first is what the
# others are compared with.
CLIENT: Programs = {
    "jaxpfl": (None, ["ours"]),
    "PyTorch loop": (".venv-peer-torch", ["torch_loop"]),
    "PyTorch, a process a core": (".venv-peer-torch", ["torch_loop", str(os.cpu_count() or 1)]),
    "plain JAX, scan": (".venv-peer-drjax", ["jax_scan"]),
    "DrJAX": (".venv-peer-drjax", ["drjax_round"]),
    "jax_privacy": (".venv-peer-jax_privacy", ["jax_privacy_round"]),
    "FedJAX": (".venv-peer-fedjax", ["fedjax_round"]),
    "TensorFlow Federated": (".venv-tff", ["tff_round"]),
    "pfl": (".venv-peer-pfl", ["pfl_round"]),
    "fluke": (".venv-peer-fluke", ["fluke_round"]),
    "Flower": (".venv-peer-flower", ["flower_round"]),
}
EXAMPLE: Programs = {
    "jaxpfl": (None, ["ours_examples"]),
    "plain JAX, scan": (".venv-peer-drjax", ["jax_examples"]),
    "jax_privacy": (".venv-peer-jax_privacy", ["jax_privacy_examples"]),
    "Opacus": (".venv-peer-opacus", ["opacus_examples", "hooks"]),
    "Opacus, ghost clipping": (".venv-peer-opacus", ["opacus_examples", "ghost"]),
}
PROGRAMS = {"client": CLIENT, "example": EXAMPLE}


@dataclasses.dataclass(frozen=True)
class Config:
    unit: Literal["client", "example"] = "client"
    equal: tuple[int, ...] = (10, 50, 200, 1_000)  # cohorts of clients with 100 examples each
    ragged: tuple[int, ...] = (10, 50, 200, 1_000)  # cohorts of clients with 1 to 100 examples
    examples: tuple[int, ...] = (100,)  # of a step of DP-SGD, multiples of 100
    turns: int = 5
    clients: int = 600  # in all turns of a program, beyond which it has fewer turns
    longest: float = 60.0  # seconds of a round, beyond which a program is left out
    foreign: float = 0.1  # processors
    attempts: int = 3
    programs: tuple[str, ...] = ()  # default: all of the unit
    environments: Path = ROOT  # where the environments' folders are
    table_only: bool = False


def main(config: Config) -> None:
    if not config.table_only:
        with tempfile.TemporaryDirectory() as folder:
            kinds = ((False, config.equal), (True, config.ragged))
            if config.unit == "example":
                kinds = ((False, config.examples),)
            for ragged, cohorts in kinds:
                before: dict[str, dict] = {}
                for cohort in sorted(cohorts):
                    rows = measured(config, cohort, ragged, Path(folder), before)
                    before = {row["what"]: row for row in rows}
                    shown = ("what", "cohort", "a second", "median", "ratio", "cpu s each")
                    harness.table(rows, [*shown, "peak MB", "first round s", "foreign"])
                    # Each by itself, so that what was measured stays if a later one fails.
                    print(f"recorded in {harness.record('peers', rows)}")
    print(f"tables in {table.write(table.PAGE, harness.RESULTS / 'peers.jsonl')}")


def measured(
    config: Config, cohort: int, ragged: bool, folder: Path, before: dict[str, dict]
) -> list[dict]:
    """The rows of one cohort; `before` has a program's row of the cohort before this one."""
    file, example = folder / f"{cohort} {ragged}.npz", config.unit == "example"
    clients = cohort // work.EXAMPLES if example else cohort
    work.save(str(file), clients, ragged)
    reference = next(iter(PROGRAMS[config.unit]))
    asked = config.programs or tuple(PROGRAMS[config.unit])
    norm = _norm(config, reference, file, folder)
    reasons = {
        name: _too_much(config, cohort, before[name])
        for name in asked
        if name in before and name != reference
    }
    names = [name for name in asked if not reasons.get(name)]
    programs: dict[str, Program] = {}
    turns: dict[str, list[Turn]] = {name: [] for name in names}
    first: dict[str, Turn] = {}
    norms = {reference: norm}
    try:
        for name in tuple(names):
            try:
                programs[name] = _program(config, name, file, folder)
                first[name] = programs[name].turn()
            except Ended as ended:
                if name == reference:
                    raise
                print(ended, file=sys.stderr)
                reasons[name] = ended.reason
                names.remove(name)
                if name in programs:
                    programs.pop(name).close()
                continue
            if name != reference:
                norms[name] = first[name].norm or _norm(config, name, file, folder)
                _check(name, norms[name], norm)
        for turn in range(max(1, min(config.turns, config.clients // clients))):
            # Of its own seed each, so that no program always follows the same one.
            for name in random.Random(turn).sample(names, len(names)):
                turns[name].append(_undisturbed(config, programs[name]))
        rows = []
        for name, program in programs.items():
            seconds = [turn.seconds for turn in turns[name]]
            rows.append(
                {
                    "what": name,
                    "unit": config.unit,
                    "cohort": cohort,
                    "ragged": ragged,
                    "a second": cohort / min(seconds),
                    "median": cohort / statistics.median(seconds),
                    "cpu s each": min(turn.cpu_seconds for turn in turns[name]) / cohort,
                    "peak MB": program.peak_memory_mb(),
                    "start s": program.start_seconds,
                    "first round s": first[name].seconds,
                    "foreign": statistics.median(turn.foreign for turn in turns[name]),
                    "norm": norms[name],
                    "versions": program.hello,
                }
            )
    finally:
        for program in programs.values():
            program.close()
    by_name = {row["what"]: row for row in rows}
    for row in rows:
        if reference in by_name:
            row["ratio"] = by_name[reference]["a second"] / row["a second"]
    left_out = {"unit": config.unit, "cohort": cohort, "ragged": ragged}
    return rows + [
        {"what": name, **left_out, "left out": reason} for name, reason in reasons.items() if reason
    ]


def _too_much(config: Config, cohort: int, before: dict) -> str:
    """Why a program is left out of a cohort, after its row of a smaller one; empty if it is not."""
    if "left out" in before:
        return before["left out"]
    seconds = cohort / before["median"]
    # At most: what a process needs without any client is multiplied, too.
    gigabytes = before["peak MB"] / 1024 * cohort / before["cohort"]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    if seconds > config.longest:
        return f"a round would take {seconds:.0f} s"
    if gigabytes > 0.8 * memory:
        return f"a round would take up to {gigabytes:.0f} GB"
    return ""


def _norm(config: Config, name: str, file: Path, folder: Path) -> float:
    """The norm of the mean change of a program that tells it without noise alone."""
    quiet = _program(config, name, file, folder, "quiet")
    norm = quiet.turn().norm
    quiet.close()
    if norm is None:
        raise SystemExit(f"{name} does not tell the norm of its mean update")
    return norm


def _program(config: Config, name: str, file: Path, folder: Path, *extra: str) -> Program:
    environment, (module, *arguments) = PROGRAMS[config.unit][name]
    python = sys.executable
    if environment is not None:
        python = str(config.environments / environment / "bin" / "python")
        if not Path(python).exists():
            raise SystemExit(f"{python} does not exist: make {environment}/installed")
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


def _check(name: str, found: float, expected: float) -> None:
    """PyTorch's convolutions differ in the fourth digit from one number of threads to another."""
    if not math.isclose(found, expected, rel_tol=2e-3):
        raise SystemExit(f"{name} has a mean update of norm {found}, not {expected}")


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
