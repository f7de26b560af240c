"""A stored population of Stack Overflow's size: open, identify, pack, check.

    python -m benchmarks.macro.large_population --folder DISK
    python -m benchmarks.macro.large_population --folder DISK --clients 3000 --sentences 200000

As many clients and sentences as Stack Overflow has are generated as token ids (Zipf words; numbers
of sentences log-normal, lengths geometric) and written as `jaxpfl convert` writes them. Then, each
in processes of its own:

- `open`: `data.open(FOLDER)` alone, without imports; "cold" after the files left the page cache;
- `identity`: what a release needs of the data before its first round: the fingerprint, and the hash
  of all columns, of everybody and of a part of 90 % of the clients;
- `pack`: cohorts are packed from the map, and the same clients from an array in memory, taking
  turns. The first cohorts also verify the blocks that they read;
- `check`: `jaxpfl data check`, which reads everything.

The peak is of resident memory, pages of mapped files included, which the system may drop at any
time; "anonymous" is the part that it may not. The folder is removed at the end.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator

import numpy as np
import tyro

from benchmarks import harness
from benchmarks.macro.stackoverflow import Watched, watched
from jaxpfl.data.sequences import Sequences
from jaxpfl.data.storage import write
from jaxpfl.data.stream import Batch, Stream

WORDS, MEAN_WORDS, BATCH = 10_004, 13, 2**17
OPEN = """
import sys, time
from jaxpfl.data import open
began = time.perf_counter()
clients = open(sys.argv[1])
print(time.perf_counter() - began)
"""
IDENTITY = """
import json, sys, time
from jaxpfl.data import open
from jaxpfl.data.content import origin_hash
from jaxpfl.data.sequences import Padded
def rows(clients):
    held = {"tokens": Padded(clients.columns["tokens"], 21)}
    return clients.with_columns(held)
clients = open(sys.argv[1])
whole = rows(clients)
began = time.perf_counter()
clients.fingerprint, origin_hash(whole.numeric(), whole.offsets)
done = time.perf_counter()
part = rows(clients.split({"train": 0.9}, seed=0)["train"])
split = time.perf_counter()
origin_hash(part.numeric(), part.offsets)
end = time.perf_counter()
print(json.dumps({"whole": done - began, "split": split - done, "part": end - split}))
"""
PACK = """
import json, os, pathlib, sys, time
import numpy as np
from jaxpfl.data import CohortSpec, Population, open, Cohort
from jaxpfl.data.sequences import Padded
folder, size, rounds, cold = sys.argv[1], *map(int, sys.argv[2:])
clients = open(folder)
held = clients.columns["tokens"]
mapped = clients.with_columns({"tokens": Padded(held, 21)})
spec = CohortSpec(batch_size=16, max_examples=256)

def seconds(population, chosen, round):
    began = time.perf_counter()
    examples = sum(int(bucket.mask.sum()) for bucket in Cohort(population, chosen, spec, seed=1,
                                                             round=round))
    return time.perf_counter() - began, examples

found = {"mapped": [], "memory": [], "verified": [], "MB": []}
for round in range(rounds):
    chosen = np.sort(np.random.default_rng(round).choice(len(clients), size, replace=False))
    first, examples = seconds(mapped, chosen, round)
    found["mapped"].append(first)
    blocks = [held.edges.blocks, held.values.blocks]
    total = sum(len(each._missing) for each in blocks)
    found["verified"].append(1 - sum(each._left for each in blocks) / total)
    sizes = clients.sizes()[chosen]
    ids = len(held.values) / len(held) * held.dtype.itemsize
    found["MB"].append(float(sizes.sum()) * ids / 2**20)
    if cold:
        continue
    part = clients.select(chosen)
    ids = part.columns["tokens"].compact()
    inside = Population({"tokens": Padded(ids, 21)}, part.offsets, part.client_ids)
    again, number = seconds(inside, np.arange(size), round)
    assert number == examples
    found["memory"].append(again)
if not cold:
    # Everything that the cohort reads was verified: the map alone.
    found["mapped again"] = [seconds(mapped, chosen, rounds)[0] for _ in range(5)]
    found["memory again"] = [seconds(inside, np.arange(size), rounds)[0] for _ in range(5)]
print(json.dumps(found))
"""
CHECK = "import sys; from jaxpfl.cli import main; sys.exit(main(['data', 'check', sys.argv[1]]))"


@dataclasses.dataclass(frozen=True)
class Config:
    folder: pathlib.Path  # on a disk with room; made, and removed at the end
    clients: int = 342_477
    sentences: int = 135_818_730
    cohort: int = 5_000
    rounds: int = 6
    repeats: int = 5
    seed: int = 0


def generate(config: Config) -> Stream:
    """The population as a stream of batches."""
    rng = np.random.default_rng(config.seed)
    sizes = rng.lognormal(0, 1.6, config.clients)
    sizes = np.maximum(1, np.round(sizes * (config.sentences / sizes.sum()))).astype(np.int64)
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])
    edges = np.cumsum(1 / np.arange(1, WORDS + 1) ** 1.05)
    # Drawn once, and used again: what they are makes no difference here.
    words = np.searchsorted(edges / edges[-1], rng.random(2**24)).astype(np.uint16)
    ids = [f"user {number:08d}" for number in rng.permutation(10**8)[: config.clients]]

    def batches() -> Iterator[Batch]:
        seen = 0
        for start in range(0, int(offsets[-1]), BATCH):
            stop = min(start + BATCH, int(offsets[-1]))
            lengths = np.clip(rng.geometric(1 / MEAN_WORDS, stop - start), 1, 200) + 2
            places = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
            first = int(rng.integers(len(words)))
            held = np.take(words, np.arange(first, first + int(places[-1])), mode="wrap")
            done = int(np.searchsorted(offsets[1:], stop, "right"))
            columns = {"tokens": Sequences(held, places, {"vocabulary_size": WORDS})}
            yield Batch(columns, ids[seen:done], sizes[seen:done].tolist())
            seen = done

    return Stream(batches(), int(offsets[-1]), "generated", "user")


def forget(folder: pathlib.Path) -> None:
    """Drops the folder's files from the page cache, as far as the system does so."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def main(config: Config) -> list[dict]:
    config.folder.mkdir(parents=True, exist_ok=True)
    folder = pathlib.Path(tempfile.mkdtemp(prefix="large-", dir=config.folder))
    try:
        rows = measure(config, folder / "clients")
    finally:
        shutil.rmtree(folder)
    for row in rows:
        row["load average"] = os.getloadavg()[2]
    print(f"recorded in {harness.record('large_population', rows)}")
    return rows


def written(folder: pathlib.Path, population: Callable[[], Stream]) -> int:
    """Writes a population in a process of its own, whose memory is not measured; its bytes."""
    if os.fork() == 0:
        write(folder, lambda _: contextlib.nullcontext(population()))
        os._exit(0)
    _, status = os.wait()
    if status:
        raise SystemExit("the population could not be written")
    return sum(entry.stat().st_size for entry in folder.iterdir())


def measure(config: Config, folder: pathlib.Path) -> list[dict]:
    size = written(folder, lambda: generate(config))
    shared = {"clients": config.clients, "sentences": config.sentences, "folder MB": size / 2**20}
    rows: list[dict] = []

    def run(code: str, *arguments: object) -> Watched:
        return watched(sys.executable, "-c", code, str(folder), *map(str, arguments))

    def add(what: str, done: Watched, **more: object) -> None:
        memory = {"peak MB": done.peak, "anonymous MB": done.anonymous}
        rows.append({"what": what, **shared, **memory, **more})
        print(json.dumps(rows[-1]), flush=True)

    for cold in (False, True):
        taken = []
        for _ in range(config.repeats + 1):
            if cold:
                forget(folder)
            done = run(OPEN)
            taken.append(float(done.output))
        kind = "cold" if cold else "warm"
        add(f"open, {kind}", done, seconds=statistics.median(taken[1:]), worst=max(taken[1:]))

    done = run(IDENTITY)
    found = json.loads(done.output)
    add("identity", done, **{f"{name} seconds": value for name, value in found.items()})

    forget(folder)
    done = run(PACK, config.cohort, 1, 1)
    found = json.loads(done.output)
    add("pack, first cohort, cold", done, cohort=config.cohort, seconds=found["mapped"][0])

    done = run(PACK, config.cohort, config.rounds, 0)
    found = json.loads(done.output)
    again = {name: min(found[f"{name} again"]) for name in ("mapped", "memory")}
    add(
        "pack",
        done,
        cohort=config.cohort,
        **{"seconds of each cohort": found["mapped"], "the same in memory": found["memory"]},
        **{"verified share": found["verified"], "MB of the clients": found["MB"]},
        **{f"{name} clients/s": config.cohort / value for name, value in again.items()},
        **{"mapped / memory": again["memory"] / again["mapped"]},
    )
    done = run(CHECK)
    add("check", done, seconds=done.seconds)
    return rows


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
