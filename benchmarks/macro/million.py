"""A million clients on one machine: written, opened, sampled, trained; and the cost of a cohort.

    python -m benchmarks.macro.million --folder DISK --clients 50000      # a smaller one
    python -m benchmarks.macro.million --folder DISK
    python -m benchmarks.macro.million --figure docs/cohorts.png           # of the stored rows

Clients hold vectors of 784 bytes and a class, 25 on average (log-normal), 20 GB in all, as
`jaxpfl convert` would store them. Then, each in a process of its own:

- `open`: `data.open(FOLDER)`, after the files left the page cache;
- a run of a softmax regression (7,850 parameters) by `jp.run`, each client by one batch of at most
  16 examples: what comes before its rounds, the first round (which compiles, and verifies the
  blocks that it reads), later rounds, and checkpoints. So with cohorts of 10 to 100,000.

The noise is that of a plan of 1,000 rounds at epsilon 2 and delta 1e-7: `noise` is its multiplier,
and `noise of the mean` its standard deviation in a coordinate of the mean update, over the clip.
The peak is of resident memory, mapped files included; "anonymous" is what the system cannot drop.
"""

import dataclasses
import json
import os
import pathlib
import shutil
import sys
import tempfile
from collections.abc import Iterator

import numpy as np
import tyro

from benchmarks import comparison, harness
from benchmarks.macro.large_population import OPEN, forget, written
from benchmarks.macro.stackoverflow import watched
from jaxpfl.data.stream import Batch, Stream

WIDTH, MEAN, BATCH = 784, 25, 2**17
TRAIN = """
import json, pathlib, sys, tempfile, time
import jax
jax.config.update("jax_num_cpu_devices", 2)
import optax
import jaxpfl as jp
from jaxpfl.experiments.records.checkpoint import Checkpoints

folder, cohort, rounds = sys.argv[1], *map(int, sys.argv[2:])
saved, save = [], Checkpoints.save
def timed(self, *given, **named):
    began = time.perf_counter()
    save(self, *given, **named)
    self.wait()
    saved.append(time.perf_counter() - began)
Checkpoints.save = timed
began = time.perf_counter()
clients = jp.data.open(folder)
def loss(params, batch):
    scores = batch["x"].astype("float32") / 255 @ params["w"] + params["b"]
    return optax.softmax_cross_entropy_with_integer_labels(scores, batch["label"])
model = jp.models.from_functions(
    lambda key: {"w": jax.numpy.zeros((784, 10)), "b": jax.numpy.zeros(10)}, loss)
plan = jp.Plan.calibrated(
    epsilon=2.0, delta=1e-7, rounds=1000, clip=jp.Clip(0.5),
    participation=jp.Poisson(len(clients), cohort))
algorithm = jp.algorithms.fed_avg(
    model, client=optax.sgd(0.1), server=optax.sgd(1.0), plan=plan,
    cohort=jp.CohortSpec(16, 16, clients_per_bucket=2048 if cohort > 1000 else 64))
times = []
def watch(round):
    times.append(time.perf_counter() - began)
    return "stop" if round.number == rounds else None
with tempfile.TemporaryDirectory() as out:
    jp.run(algorithm, clients, ledger=out + "/ledger.jsonl", out=out + "/run", every=1,
           on_round=watch)
    lines = pathlib.Path(out, "run/private/rounds.jsonl").read_text().splitlines()
print(json.dumps({
    "before the rounds": times[0], "first round": times[1] - times[0],
    "a later round": min(b - a for a, b in zip(times[1:], times[2:])),
    "checkpoint": sorted(saved)[len(saved) // 2],
    "noise": plan.noise_multiplier, "noise of the mean": plan.noise_multiplier / cohort,
}))
"""


@dataclasses.dataclass(frozen=True)
class Config:
    folder: pathlib.Path = pathlib.Path()  # on a disk with room; what is made is removed at the end
    clients: int = 1_000_000
    cohorts: tuple[int, ...] = (10, 100, 1_000, 10_000, 100_000)
    rounds: int = 3
    seed: int = 0
    figure: pathlib.Path | None = None


def generate(config: Config) -> Stream:
    """The population as a stream of batches."""
    rng = np.random.default_rng(config.seed)
    sizes = rng.lognormal(0, 1.0, config.clients)
    sizes = np.maximum(1, np.round(sizes * MEAN / sizes.mean())).astype(np.int64)
    ends = np.cumsum(sizes)
    # Drawn once, and used again from another place: what it is makes no difference here.
    noise = rng.integers(0, 256, BATCH * WIDTH * 2, np.uint8)

    def batches() -> Iterator[Batch]:
        seen = 0
        for start in range(0, int(ends[-1]), BATCH):
            stop = min(start + BATCH, int(ends[-1]))
            first = int(rng.integers(BATCH * WIDTH))
            rows = noise[first : first + (stop - start) * WIDTH].reshape(-1, WIDTH)
            done = int(np.searchsorted(ends, stop, "right"))
            ids = [f"user {number:07d}" for number in range(seen, done)]
            columns = {"x": rows, "label": (rows[:, 0] % 10).astype(np.int32)}
            yield Batch(columns, ids, sizes[seen:done].tolist())
            seen = done

    return Stream(batches(), int(ends[-1]), "generated", "user")


def main(config: Config) -> None:
    if config.figure is not None:
        draw(comparison.read(harness.RESULTS / "million.jsonl"), config.figure)
        return
    config.folder.mkdir(parents=True, exist_ok=True)
    folder = pathlib.Path(tempfile.mkdtemp(prefix="million-", dir=config.folder))
    try:
        for row in measured(config, folder / "clients"):
            row |= {"clients": config.clients, "load average": os.getloadavg()[1]}
            print(json.dumps(row), flush=True)
            # At once, because a run of it is long.
            harness.record("million", [row])
    finally:
        shutil.rmtree(folder)


def measured(config: Config, folder: pathlib.Path) -> Iterator[dict]:
    size = written(folder, lambda: generate(config))
    forget(folder)
    done = watched(sys.executable, "-c", OPEN, str(folder))
    peaks = {"peak MB": done.peak, "anonymous MB": done.anonymous}
    yield {"what": "open", "seconds": float(done.output), "folder MB": size / 2**20, **peaks}
    for cohort in config.cohorts:
        rounds = min(config.rounds, 2) if cohort > 10_000 else config.rounds
        done = watched(sys.executable, "-c", TRAIN, str(folder), str(cohort), str(rounds))
        peaks = {"peak MB": done.peak, "anonymous MB": done.anonymous}
        yield {"what": "run", "cohort": cohort, **json.loads(done.output), **peaks}


def draw(rows: list[dict], path: pathlib.Path) -> None:
    """Memory and noise, of the latest row of each cohort: seconds are of several machines."""
    from matplotlib.figure import Figure

    found = {row["cohort"]: row for row in rows if row["what"] == "run"}
    cohorts = sorted(found)
    figure = Figure(figsize=(7.2, 3.2), dpi=144, layout="constrained")
    memory, noise = figure.subplots(1, 2)
    for name, label, style in (("peak MB", "peak", "o-"), ("anonymous MB", "not mapped", "s--")):
        memory.plot(cohorts, [found[each][name] for each in cohorts], style, label=label)
    memory.legend(fontsize="small")
    noise.plot(cohorts, [found[each]["noise of the mean"] for each in cohorts], "o-")
    for axes, title in ((memory, "memory, MB"), (noise, "noise of the mean, in clip norms")):
        axes.set(xscale="log", yscale="log", xlabel="clients in a round")
        axes.set_title(title, fontsize="medium")
    figure.savefig(path)


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
