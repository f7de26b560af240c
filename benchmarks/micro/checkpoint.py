"""Saving a checkpoint: how long a run waits for it, and when it is on the disk.

    python -m benchmarks.micro.checkpoint
    python -m benchmarks.micro.checkpoint --megabytes 200

Each program saves float32 leaves of equal size, verified by SHA-256 where it says so, synced and
renamed:

    jaxpfl                  `Checkpoints`: arrays by Orbax in the background, manifest
    in the foreground       the same, waited for
    Orbax alone             StandardCheckpointer, waited for: no hashes, no sync of ours
    plain file              one .npz file, hashed, synced and renamed: nothing can be faster that
                            is as safe

`blocked` is what the loop over rounds waits, `on the disk` what it takes until a crash loses
nothing; both are the best of the repeats.
"""

import dataclasses
import pathlib
import shutil
import tempfile
import time
from collections.abc import Callable

import tyro

from benchmarks import harness


@dataclasses.dataclass(frozen=True)
class Config:
    megabytes: int = 20
    leaves: int = 40
    repeats: int = 7


def main(config: Config) -> list[dict]:
    harness.use_cpu_devices(1)
    import jax
    import jax.numpy as jnp
    import orbax.checkpoint as ocp

    from jaxpfl import files
    from jaxpfl.experiments.records.checkpoint import Checkpoints

    size = config.megabytes * 1_000_000 // 4 // config.leaves
    keys = jax.random.split(jax.random.key(0), config.leaves)
    state = {
        f"leaf {i}": jax.random.normal(key, (size,), jnp.float32) for i, key in enumerate(keys)
    }
    jax.block_until_ready(state)
    folder = pathlib.Path(tempfile.mkdtemp())
    checkpoints = Checkpoints(folder / "checkpoints", run="benchmark")
    orbax = ocp.StandardCheckpointer()

    def jaxpfl(number: int) -> Callable[[], object]:
        checkpoints.save(number, state)
        return checkpoints.wait

    def foreground(number: int) -> Callable[[], object]:
        checkpoints.save(number, state)
        checkpoints.wait()
        return _nothing

    def alone(number: int) -> Callable[[], object]:
        orbax.save(folder / f"orbax {number}", state)
        orbax.wait_until_finished()
        return _nothing

    def plain(number: int) -> Callable[[], object]:
        path = folder / f"plain {number}.npz"
        files.write_atomically(path, files.npz(jax.device_get(state)))
        files.sha256_file(path)
        return _nothing

    programs = {
        "jaxpfl": jaxpfl,
        "in the foreground": foreground,
        "Orbax alone": alone,
        "plain file": plain,
    }
    blocked = dict.fromkeys(programs, float("inf"))
    durable = dict.fromkeys(programs, float("inf"))
    number = 0
    for _ in range(config.repeats):
        for name, program in programs.items():
            number += 1
            start = time.perf_counter()
            wait = program(number)
            blocked[name] = min(blocked[name], time.perf_counter() - start)
            wait()
            durable[name] = min(durable[name], time.perf_counter() - start)
    checkpoints.wait()
    orbax.close()
    shutil.rmtree(folder)
    rows = [
        {
            "what": name,
            "megabytes": config.megabytes,
            "leaves": config.leaves,
            "blocked": blocked[name],
            "on the disk": durable[name],
        }
        for name in programs
    ]
    harness.table(rows, ["what", "blocked", "on the disk"])
    print(f"recorded in {harness.record('checkpoint', rows)}")
    return rows


def _nothing() -> None:
    """Everything was waited for."""


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
