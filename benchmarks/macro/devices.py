"""One round of DP-FedAvg on 1, 2, 4 and 8 virtual devices: the same bits, and at what cost.

    python -m benchmarks.macro.devices

Each number of devices has a process of its own. Through the door (`release.door`: no ledger, no
packing) with the same keys go

- 64 stored updates of 100,000 coordinates: releases with exact noise must be the same to the bit;
  compensated sums are within 1e-6;
- 32 clients that train (the EMNIST CNN, two batches of 20 random images): XLA compiles their
  training for each number of devices, and may round it in another way, so that their sums agree
  as well as training does.

The cost is that of the training clients, at equal work, against one device: CPU seconds, because
virtual devices share the cores, and the best wall time.
"""

import dataclasses
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import tyro

from benchmarks import harness

STORED, CLIENTS = 64, 32


@dataclasses.dataclass(frozen=True)
class Config:
    devices: tuple[int, ...] = (1, 2, 4, 8)
    repeats: int = 5


def child(devices: int, repeats: int, file: str) -> None:
    """Writes the releases; prints the best times of a round."""
    harness.use_cpu_devices(devices)
    import jax
    import jax.numpy as jnp
    import optax

    import jaxpfl as jp
    from jaxpfl.data.cohort import Bucket, CohortSpec
    from jaxpfl.federated import Execution, Query, RunSecret, client_mesh
    from jaxpfl.federated.clients.local_training import LocalTraining
    from jaxpfl.federated.release.door import Door, Keys

    def bucket_of(clients, steps, batch, columns):
        shape = (clients, steps, batch)
        return Bucket(
            batches={name: column.reshape(*shape, *column.shape[1:]) for name, column in columns},
            mask=np.ones(shape, bool),
            steps=np.full(clients, steps, np.int32),
            weight=np.ones(clients, np.float32),
            key=np.zeros((clients, 2), np.uint32),
        )

    draw = np.random.default_rng(0)
    updates = draw.normal(size=(STORED, 100_000)).astype(np.float32)
    stored = bucket_of(STORED, 1, 1, [("update", updates)])
    images = draw.normal(size=(CLIENTS * 40, 28, 28, 1)).astype(np.float32)
    labels = draw.integers(0, 62, CLIENTS * 40).astype(np.int32)
    training = bucket_of(CLIENTS, 2, 20, [("image", images), ("label", labels)])
    model = jp.models.emnist_cnn()
    params = model.init(jax.random.key(0))
    secret = RunSecret.reproducible(0)
    keys = Keys(secret.key("train", ""), np.tile(secret.words_of("noise", ""), 2))
    participation, clip = jp.Poisson(10_000, CLIENTS), jp.Clip(0.5)
    private = jp.Plan(
        rounds=10, clip=clip, noise=jp.Noise(1.0), participation=participation, delta=1e-6
    )
    plain = jp.Plan.without_privacy(rounds=10, clip=clip, participation=participation)
    mesh, found = client_mesh(), {}

    exact = dataclasses.replace(private, noise=jp.Noise(1.0, "exact"))

    def opened(plan, client_fn, contribution, broadcast, bucket):
        clients, steps, batch = bucket.mask.shape
        spec = CohortSpec(batch, steps * batch, clients_per_bucket=clients)
        execution = Execution(mesh)
        door = Door(Query("update", client_fn, plan, spec, execution=execution), contribution)
        clip_norm = jnp.float32(plan.clip_norm)
        return lambda: door(broadcast, (bucket,), clip_norm, keys).value

    shape = jax.ShapeDtypeStruct(updates.shape[1:], jnp.float32)
    for name, plan in (("exact noise", exact), ("compensated", plain)):
        found[name] = np.asarray(opened(plan, _own, shape, (), stored)())
    client_fn = LocalTraining(model, optax.sgd(0.1))
    value = opened(plain, client_fn, params, params, training)()
    found["trained"] = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(value)])
    np.savez(file, **found)
    run = opened(private, client_fn, params, params, training)
    jax.block_until_ready(run())
    wall, processor = [], []
    for _ in range(repeats):
        start = time.perf_counter(), time.process_time()
        jax.block_until_ready(run())
        wall.append(time.perf_counter() - start[0])
        processor.append(time.process_time() - start[1])
    print(json.dumps({"devices": devices, "wall_s": min(wall), "cpu_s": min(processor)}))


def _own(broadcast, examples, key):
    """A client's stored update."""
    del broadcast, key
    return examples.batches["update"][0, 0]


def main(config: Config) -> None:
    rows, releases = [], []
    with tempfile.TemporaryDirectory() as folder:
        for devices in config.devices:
            file = str(Path(folder) / f"{devices}.npz")
            call = f"from benchmarks.macro.devices import child; child({devices}, {config.repeats}"
            command = [sys.executable, "-c", f"{call}, {file!r})"]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            rows.append(json.loads(done.stdout.splitlines()[-1]))
            with np.load(file) as held:
                releases.append(dict(held))
    first, base = releases[0], rows[0]
    for row, release in zip(rows, releases, strict=True):
        row["exact noise: same bits"] = (
            release["exact noise"].tobytes() == first["exact noise"].tobytes()
        )
        for name in ("compensated", "trained"):
            change = np.linalg.norm(release[name].astype(np.float64) - first[name])
            row[f"{name}: relative change"] = float(change / np.linalg.norm(first[name]))
        row["cpu_ratio"] = row["cpu_s"] / base["cpu_s"]
        row["wall_ratio"] = row["wall_s"] / base["wall_s"]
    harness.record("devices", rows)
    harness.table(rows, list(rows[0]))


if __name__ == "__main__":
    main(tyro.cli(Config))
