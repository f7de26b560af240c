"""The phases of `jaxpfl.run` in a new process; prints them as JSON.

    python -m benchmarks.macro.run_phases FILE

The clients of FILE (`benchmarks.peers.work`) train the EMNIST CNN for three rounds, with a round's
evaluation on as many public examples and a checkpoint at the end.
"""

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import harness
from benchmarks.peers import work

ROUNDS = 3


def main(file: str) -> None:
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
            rounds=ROUNDS,
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
    main(sys.argv[1])
