"""Rounds of DP-FedAvg and DP-SGD in two checkouts of this library, by turns: what a change cost.

    python -m benchmarks.macro.versions ../other

The other checkout (`git worktree add ../other COMMIT`) runs in this Python, in processes of its
own, of which only one is awake at a time. All that a run does in a round is done: the charge on
the disk, the draw of everyone, packing, training, clipping, summing, noise, server step. Rows hold
the medians of the turns, and the median of the ratios of neighbouring turns, here to there.
"""

import contextlib
import dataclasses
import itertools
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import tyro

ROOT = Path(__file__).parents[2]


@dataclasses.dataclass(frozen=True)
class Config:
    other: tyro.conf.Positional[Path]  # the folder of the other checkout
    models: tuple[str, ...] = ("cnn", "words")
    cohorts: tuple[int, ...] = (10, 50)
    examples: tuple[int, ...] = (1_024, 59_392)  # of DP-SGD on the CNN, which all take part
    turns: int = 15


def serve(model: str, cohort: int, ragged: bool) -> None:
    """One program: a round for each line that it reads."""
    from benchmarks import harness
    from benchmarks.peers import work

    harness.use_cpu_devices(None)
    import jax
    import optax

    import jaxpfl as jp
    from jaxpfl.algorithms.base import releaser_of

    # Its name in the other checkout may be that of before.
    secrets: Any = getattr(jp.federated, "RunSecret", None) or jp.federated.Secret

    rng = np.random.default_rng(0)
    most = 64 if model == "words" else 100
    sizes = np.full(cohort, 1 if model == "examples" else most)
    if ragged:
        sizes = np.clip(rng.lognormal(3.0, 0.9, cohort), 1, most).astype(int)
    if model != "words":
        held = [
            {
                "image": rng.integers(0, 256, (n, 28, 28, 1)).astype(np.uint8),
                "label": rng.integers(0, 62, n).astype(np.int32),
            }
            for n in sizes
        ]
        network, spec = jp.models.emnist_cnn(), jp.CohortSpec(batch_size=20, max_examples=most)
    else:
        held = [{"tokens": rng.integers(5, 10_000, (n, 21)).astype(np.int32)} for n in sizes]
        network = jp.models.CIFGLanguageModel()
        spec = jp.CohortSpec(batch_size=16, max_examples=most)
    clients = jp.data.from_clients({str(i): each for i, each in enumerate(held)})
    participation, unit = jp.Poisson(cohort, cohort), "example" if model == "examples" else "client"
    plan = jp.Plan(100_000, jp.Clip(0.5), jp.Noise(1.0), participation, 1e-7, unit)
    if model == "examples":
        algorithm = jp.algorithms.fed_sgd(network, server=optax.sgd(1.0), plan=plan)
    else:
        algorithm = jp.algorithms.fed_avg(
            network, client=optax.sgd(0.1), server=optax.sgd(1.0), plan=plan, cohort=spec
        )
    with tempfile.TemporaryDirectory() as folder:
        ledger = jp.Ledger(Path(folder) / "ledger.jsonl", clients, unit=unit)
        releaser = releaser_of(algorithm, clients, ledger, secrets.reproducible(0), run="benchmark")
        state: Any = algorithm.init(jax.random.key(0))
        rounds = itertools.count(1)

        def round_() -> None:
            nonlocal state
            state, _ = releaser.step(algorithm.step, state, next(rounds))
            jax.block_until_ready(state)

        work.serve(round_)


def main(config: Config) -> None:
    from benchmarks import harness
    from benchmarks.peers.process import Program

    rows = []
    rounds = [*itertools.product(config.models, config.cohorts, (False, True))]
    rounds += [("examples", number, False) for number in config.examples]
    for model, cohort, ragged in rounds:
        command = [sys.executable, __file__, "serve", model, str(cohort), str(int(ragged))]
        programs = {}
        with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
            for name, root in (("here", ROOT), ("there", config.other.resolve())):
                os.environ["PYTHONPATH"] = str(root)
                programs[name] = Program(command, root, Path(folder) / f"{name}.log")
                stack.callback(programs[name].close)
            for program in programs.values():
                program.turn()  # compiles
                program.turn()
            found: dict[str, list[Any]] = {name: [] for name in programs}
            for turn in range(config.turns):
                for name in sorted(programs, reverse=bool(turn % 2)):
                    found[name].append(programs[name].turn())
        row: dict[str, Any] = {"model": model, "cohort": cohort, "ragged": ragged}
        for what in ("seconds", "cpu_seconds"):
            here, there = ([getattr(each, what) for each in found[n]] for n in ("here", "there"))
            ratios = [a / b for a, b in zip(here, there, strict=True)]
            row |= {
                f"{what} here": round(statistics.median(here), 4),
                f"{what} there": round(statistics.median(there), 4),
                f"{what} ratio": round(statistics.median(ratios), 4),
            }
        row["foreign"] = round(max(each.foreign for turns in found.values() for each in turns), 2)
        print(row, flush=True)
        rows.append(row)
    harness.record("versions", rows)


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        serve(sys.argv[2], int(sys.argv[3]), sys.argv[4] == "1")
    else:
        main(tyro.cli(Config))
