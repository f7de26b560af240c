"""Aggregation: clip + sum + noise over stacked updates [clients, coordinates], in GB/s.

    python -m benchmarks.micro.aggregate
    python -m benchmarks.micro.aggregate --clients 1000 --coordinates 1000000

Runs the door itself (`release.door`: no ledger, no packing) with a client function that returns
its stored update, and compares with what the memory allows, measured in the same run: a plain read
and a plain copy of the same array. Every rate counts one read of the updates. Clipping needs each
update twice (its norm, then its share of the sum), so that "of read" is at most a half unless the
second read finds the update still in cache. With a chunk between 1 and all, the client function's
results are written to memory first, as those of other client functions are. `naive` is the
three-line JAX program (norms, scale, sum, normal).
"""

import dataclasses

import tyro

from benchmarks import harness


@dataclasses.dataclass(frozen=True)
class Config:
    clients: int = 1000
    coordinates: int = 1_000_000
    repeats: int = 15
    devices: int | None = None  # virtual CPU devices; default one a core
    # Clients vmapped together; 0 = a device's whole share.
    chunks: tuple[int, ...] = (1, 2, 10, 50, 0)


def main(config: Config) -> list[dict]:
    harness.use_cpu_devices(config.devices)
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec

    import jaxpfl as jp
    from benchmarks.rounds import door_keys
    from jaxpfl.data.cohort import Bucket
    from jaxpfl.federated import Execution, Query, client_mesh
    from jaxpfl.federated.release.door import Door

    mesh = client_mesh()
    clients = config.clients // mesh.size * mesh.size
    dealt = NamedSharding(mesh, PartitionSpec("clients"))

    @jax.jit
    def fill(key):
        updates_CxD = jax.random.uniform(key, (clients, config.coordinates), minval=-1.0)
        return jax.lax.with_sharding_constraint(updates_CxD, dealt)

    updates_CxD = jax.block_until_ready(fill(jax.random.key(0)))
    nothing_C = jax.device_put(np.zeros(clients, np.int32), dealt)
    bucket = Bucket(
        batches={"update": updates_CxD},
        mask=jax.device_put(np.ones((clients, 1, 1), bool), dealt),
        steps=nothing_C,
        weight=jax.device_put(np.ones(clients, np.float32), dealt),
        key=jax.device_put(np.zeros((clients, 2), np.uint32), dealt),
    )
    plan = jp.Plan(
        rounds=100,
        clip=jp.Clip(1.0),
        noise=jp.Noise(1.0),
        participation=jp.Poisson(100 * clients, clients),
        delta=1e-6,
    )
    keys = door_keys()
    shape = jax.ShapeDtypeStruct((config.coordinates,), jnp.float32)

    def door(chunk, plan=plan):
        chunk = chunk or clients // mesh.size
        execution = Execution(mesh, chunk)
        query = Query("update", stored_update, plan, jp.CohortSpec(1, 1), execution=execution)
        opened, clip_norm = Door(query, shape), jnp.float32(plan.clip_norm)
        return lambda: opened(None, (bucket,), clip_norm, keys).value

    @jax.jit
    def naive(updates_CxD, key):
        norm_C = jnp.sqrt(jnp.sum(updates_CxD * updates_CxD, axis=1))
        total = jnp.sum(updates_CxD * jnp.minimum(1.0, 1.0 / norm_C)[:, None], axis=0)
        return total + jax.random.normal(key, total.shape)

    def per_device(function):
        return jax.jit(
            jax.shard_map(function, mesh=mesh, in_specs=dealt.spec, out_specs=dealt.spec)
        )

    read = per_device(lambda part: jnp.sum(part * part, axis=1))
    copy = per_device(lambda part: -part)
    functions = {
        "read": lambda: read(updates_CxD),
        "copy": lambda: copy(updates_CxD),
        "naive": lambda: naive(updates_CxD, keys.train),
    }
    for chunk in config.chunks:
        functions[f"door, chunk {chunk or 'all'}"] = door(chunk)
    exact = dataclasses.replace(plan, noise=jp.Noise(1.0, "exact"))
    functions["door, exact noise"] = door(1, exact)
    seconds = harness.interleaved(functions, config.repeats)

    gigabytes = updates_CxD.nbytes / 1e9
    read_rate = gigabytes / seconds["read"]
    rows = []
    for name, taken in seconds.items():
        rate = gigabytes / taken
        rows.append(
            {
                "what": name,
                "clients": clients,
                "coordinates": config.coordinates,
                "seconds": taken,
                "reads counted": 1,
                "GB/s": rate,
                "of read": rate / read_rate,
            }
        )
    harness.table(rows, ["what", "seconds", "GB/s", "of read"])
    print(f"recorded in {harness.record('aggregate', rows)}")
    return rows


def stored_update(broadcast, examples, key):
    """The contribution is the client's stored update."""
    return examples.batches["update"]


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
