"""The first round of DP-FedAvg on the EMNIST CNN in a new process, cold and warm, and its memory.

    python -m benchmarks.macro.first_round
    python -m benchmarks.macro.first_round --cohorts 10 --turns 5

Two programs, each in a process of its own, by turns: `peers.ours`, which asks a releaser for
rounds, and `macro.run_phases`, which calls `jaxpfl.run` for three rounds. A cold process finds no
compiled program on the disk, a warm one finds what another process compiled before it. "first
round" is from the question to the answer, "start" before it: imports, data, ledger, first state.
"begins" is the time from the call of `jaxpfl.run` to its first round, "ends" that from the end of
its last round to the result, with the checkpoint and the page on the disk.

Rows hold the best of the turns in wall time, and the processor time of the same turn; memory is the
largest of all turns. Needs Linux.
"""

import dataclasses
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import tyro

from benchmarks import harness
from benchmarks.peers import work
from benchmarks.peers.process import Program

ROOT = Path(__file__).parents[2]
CACHE = "JAX_COMPILATION_CACHE_DIR"


@dataclasses.dataclass(frozen=True)
class Config:
    cohorts: tuple[int, ...] = (10, 50)  # clients with 100 examples each
    turns: int = 3


def main(config: Config) -> None:
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for cohort in config.cohorts:
            file = folder / f"{cohort}.npz"
            work.save(str(file), cohort, ragged=False)
            found: dict[str, list[dict[str, float]]] = {}
            for turn in range(config.turns):
                for kind in ("cold", "warm"):
                    # The cold process of the first turn fills the cache of all warm ones.
                    used = folder / (f"{cohort} {turn}" if kind == "cold" and turn else f"{cohort}")
                    found.setdefault(f"releaser, {kind}", []).append(_asked(file, used))
                for kind in ("cold", "warm"):
                    name = f"run {cohort} {turn}" if kind == "cold" and turn else f"run {cohort}"
                    found.setdefault(f"jaxpfl.run, {kind}", []).append(_run(file, folder / name))
            for what, turns in found.items():
                best = min(turns, key=lambda each: each["first round s"])
                peak = max(each["peak MB"] for each in turns)
                rows.append({"what": what, "cohort": cohort, **best, "peak MB": peak})
    shown = ["start s", "begins s", "first round s", "first round cpu s", "round s", "ends s"]
    harness.table(rows, ["what", "cohort", *shown, "peak MB"])
    print(f"recorded in {harness.record('first_round', rows)}")


def _command(module: str, file: Path, cache: Path) -> list[str]:
    # Every program, however quickly it was compiled.
    least = "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0"
    python = [sys.executable, "-m", f"benchmarks.{module}", str(file)]
    return ["env", f"{CACHE}={cache}", least, *python]


def _asked(file: Path, cache: Path) -> dict[str, float]:
    """The first rounds of a releaser in a new process."""
    program = Program(_command("peers.ours", file, cache), ROOT, file.with_suffix(".log"))
    try:
        first, *later = [program.turn() for _ in range(3)]
        peak = program.peak_memory_mb()
    finally:
        program.close()
    return {
        "start s": program.start_seconds,
        "first round s": first.seconds,
        "first round cpu s": first.cpu_seconds,
        "round s": min(turn.seconds for turn in later),
        "peak MB": peak,
    }


def _run(file: Path, cache: Path) -> dict[str, Any]:
    """The phases of `jaxpfl.run` in a new process."""
    command = _command("macro.run_phases", file, cache)
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{command!r} ended with status {done.returncode}:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout)


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
