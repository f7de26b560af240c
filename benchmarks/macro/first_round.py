"""The first round of DP-FedAvg on the EMNIST CNN in a new process, cold and warm, and its memory.

    python -m benchmarks.macro.first_round
    python -m benchmarks.macro.first_round --cohorts 10 --turns 5

Two programs, each in a process of its own, by turns: `peers.ours`, which asks a releaser for
rounds, and `run_phases`, which calls `jaxpfl.run` for three rounds of the same clients, with a
round's evaluation on as many public examples and a checkpoint at the end. A cold process finds no
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
import time
from pathlib import Path
from typing import Any

import numpy as np
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
    command = _command("macro.first_round", file, cache)
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{command!r} ended with status {done.returncode}:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout)


def run_phases(file: str) -> None:
    """The phases of `jaxpfl.run` in this process, as JSON."""
    began = time.perf_counter()
    harness.use_cpu_devices(None)
    import jax
    import optax

    import jaxpfl as jp

    _, held = work.load(file)
    ids = [f"client {i}" for i in range(len(held["offsets"]) - 1)]
    data = jp.data.from_clients(
        {
            name: {"image": image, "label": label.astype(np.int32)}
            for name, (image, label) in zip(ids, work.each(held), strict=True)
        }
    )
    rng = np.random.default_rng(2)
    public = jp.data.from_clients(
        {
            "public": {
                "image": rng.random((1_000, *work.SHAPE), np.float32),
                "label": rng.integers(0, work.CLASSES, 1_000).astype(np.int32),
            }
        }
    )
    model = jp.models.emnist_cnn()
    algorithm = jp.algorithms.fed_avg(
        model,
        client=optax.sgd(work.LEARNING_RATE),
        server=optax.sgd(1.0, momentum=0.9),
        plan=jp.Plan(
            rounds=3,
            clip=jp.Clip(work.CLIP_NORM),
            noise=jp.Noise(work.NOISE),
            participation=jp.Poisson(len(ids), len(ids)),
            delta=1e-4,
        ),
        cohort=jp.CohortSpec(batch_size=work.BATCH, max_examples=work.EXAMPLES),
    )
    # When each round begins, and when its state is computed.
    times: list[tuple[float, float, float]] = []

    def step(state: Any, release: Any, round: int) -> Any:
        start, cpu = time.perf_counter(), time.process_time()
        found = jax.block_until_ready(algorithm.step(state, release, round))
        times.append((start, time.perf_counter(), time.process_time() - cpu))
        return found

    with tempfile.TemporaryDirectory() as folder:
        called = time.perf_counter()
        jp.run(
            algorithm._replace(step=step),
            data,
            ledger=Path(folder) / "ledger.jsonl",
            out=Path(folder) / "run",
            evaluation=jp.Evaluator(model, jp.DeclaredPublic(public, "random images")),
        )
        ended = time.perf_counter()
    print(
        json.dumps(
            {
                "start s": called - began,
                "begins s": times[0][0] - called,
                "first round s": times[0][1] - times[0][0],
                "first round cpu s": times[0][2],
                "round s": min(end - start for start, end, _ in times[1:]),
                "ends s": ended - times[-1][1],
                "peak MB": harness.peak_memory_mb(),
            }
        )
    )


if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1].endswith(".npz"):
        run_phases(sys.argv[1])
    else:
        main(tyro.cli(Config, description=__doc__))
