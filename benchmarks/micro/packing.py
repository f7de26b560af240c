"""Packing a round's clients: by one process, and by each of several that share the round.

    python -m benchmarks.micro.packing

The examples are stored and mapped, as large data is. Every process of a round knows who is in which
slot, and reads the examples of its own devices' slots alone. `ms` is the best of the repeats, on
one core; `examples` counts what is read.
"""

import dataclasses
import pathlib
import tempfile
from collections.abc import Callable
from functools import partial

import numpy as np
import tyro

from benchmarks import harness


@dataclasses.dataclass(frozen=True)
class Config:
    clients: int = 2_000
    examples: int = 40  # of a client, on average
    features: int = 784
    processes: tuple[int, ...] = (1, 2, 4)
    repeats: int = 9


def main(config: Config) -> list[dict]:
    harness.use_cpu_devices(1)
    from jaxpfl.data import Cohort, CohortSpec, Population

    rng = np.random.default_rng(0)
    offsets = np.append(0, np.cumsum(rng.integers(1, 2 * config.examples, config.clients)))
    values = rng.random((offsets[-1], config.features), np.float32)
    folder = pathlib.Path(tempfile.mkdtemp()) / "saved"
    names = [str(client) for client in range(config.clients)]
    Population({"x": values}, offsets, names).save(folder)
    stored = Population.load(folder)
    spec, everyone = CohortSpec(16, 64), np.arange(config.clients)

    def packed(blocks: tuple[int, ...] | None) -> int:
        buckets = Cohort(stored, everyone, spec, seed=0, round=0, shards=4, blocks=blocks)
        return sum(int(bucket.mask.sum()) for bucket in buckets)

    blocks_of = {count: tuple(range(4 // count)) for count in config.processes}
    functions: dict[str, Callable[[], object]] = {
        str(count): partial(packed, blocks) for count, blocks in blocks_of.items()
    }
    seconds = harness.interleaved(functions, config.repeats)
    alone = seconds[str(config.processes[0])]
    return [
        {
            "what": f"process 0 of {count}",
            "ms": 1e3 * seconds[str(count)],
            "examples": packed(blocks),
            "of one process": seconds[str(count)] / alone,
        }
        for count, blocks in blocks_of.items()
    ]


if __name__ == "__main__":
    rows = main(tyro.cli(Config))
    harness.record("packing", rows)
    harness.table(rows, ["what", "ms", "examples", "of one process"])
