"""Aggregation: clip and sum clients' updates, through the release's door and by a plain loop.

    python -m benchmarks.micro.aggregate                          # 1,000 clients of 1,000,000
    python -m benchmarks.micro.aggregate --clients 10000 --coordinates 10000 --chunks 1 10 0
    python -m benchmarks.micro.aggregate --function computed

Beside `door, chunk K` is `plain, chunk K`: the same client function, K clients vmapped at a time,
clipped and added to the same integers on as many devices, by `jax.lax.scan` (`all`: in one shot),
and nothing else: no padding, no refusal of what is not finite, no noise. `usual` is the median of
the processor time (of an accelerator, of the time), which other programs disturb less than the
least time, `seconds`. `of plain` is the median, over turns, of the plain loop's by the door's.
`three lines` is what one writes first (norms, scale, float sum, normal).

`door, one client` is the door's own part, whatever the number of clients: noise, the hash of the
sum, dispatch. `clients of plain` is `of plain` without it, from medians. The function `stored`
returns an update that lies in memory, `computed` scales and shifts it. Every rate counts one read
of the updates; the ceiling is a plain read of the same array in the same run.
"""

import dataclasses
import statistics
from typing import Any, Literal

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
    function: Literal["stored", "computed"] = "stored"


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
    from jaxpfl.federated.clients.client import Examples
    from jaxpfl.federated.release.door import Door

    mesh = client_mesh()
    clients = config.clients // mesh.size * mesh.size
    share = clients // mesh.size
    dealt = NamedSharding(mesh, PartitionSpec("clients"))
    client_fn = {"stored": stored, "computed": computed}[config.function]

    @jax.jit
    def fill(key):
        updates_CxD = jax.random.uniform(key, (clients, config.coordinates), minval=-1.0)
        return jax.lax.with_sharding_constraint(updates_CxD, dealt)

    updates_CxD = jax.block_until_ready(fill(jax.random.key(0)))
    plan = jp.Plan(
        rounds=100,
        clip=jp.Clip(1.0),
        noise=jp.Noise(1.0),
        participation=jp.Poisson(100 * clients, clients),
        delta=1e-9,
    )
    keys = door_keys()
    shape = jax.ShapeDtypeStruct((config.coordinates,), jnp.float32)

    def bucket_of(number):
        return Bucket(
            batches={"update": updates_CxD},
            mask=jax.device_put(np.ones((clients, 1, 1), bool), dealt),
            steps=jax.device_put(np.zeros(clients, np.int32), dealt),
            weight=jax.device_put(np.arange(clients) < number, dealt).astype(np.float32),
            key=jax.device_put(np.zeros((clients, 2), np.uint32), dealt),
        )

    def door(chunk, number=clients):
        execution = Execution(mesh, chunk)
        query = Query("update", client_fn, plan, jp.CohortSpec(1, 1), execution=execution)
        opened, clip_norm = Door(query, shape), jnp.float32(plan.clip_norm)
        bucket = bucket_of(number)
        return lambda: opened(None, (bucket,), clip_norm, keys).value

    def per_device(function):
        return jax.jit(
            jax.shard_map(
                function, mesh=mesh, in_specs=dealt.spec, out_specs=dealt.spec, check_vma=False
            )
        )

    def plain(chunk):
        valid, steps = jnp.ones((1, 1), bool), jnp.int32(1)

        def add_chunk(total, updates_KxD):
            def one(update):
                return client_fn(None, Examples({"update": update}, valid, steps), None)

            # One client needs no vmap, with which XLA takes three times as long.
            sent_KxD = jax.vmap(one)(updates_KxD) if chunk > 1 else one(updates_KxD[0])[None]
            norm_K = jnp.sqrt(jnp.sum(sent_KxD * sent_KxD, axis=1))
            factor_K = jnp.minimum(jnp.float32(1), 1 / norm_K)
            steps_KxD = sent_KxD * factor_K[:, None] * jnp.float32(2**24)
            return total + jnp.sum(steps_KxD.astype(jnp.int32), axis=0), None

        def on_device(part_CxD):
            start = jnp.zeros(config.coordinates, jnp.int32)
            if chunk == share:
                return add_chunk(start, part_CxD)[0][None]
            chunks = part_CxD.reshape(-1, chunk, config.coordinates)
            return jax.lax.scan(add_chunk, start, chunks)[0][None]

        summed = per_device(on_device)
        return lambda: summed(updates_CxD)

    @jax.jit
    def three_lines(updates_CxD, key):
        norm_C = jnp.sqrt(jnp.sum(updates_CxD * updates_CxD, axis=1))
        total = jnp.sum(updates_CxD * jnp.minimum(1.0, 1.0 / norm_C)[:, None], axis=0)
        return total + jax.random.normal(key, total.shape)

    read = per_device(lambda part: jnp.sum(part * part, axis=1))
    functions = {"read": lambda: read(updates_CxD)}
    functions["door, one client"] = door(1, number=1)
    if config.function == "stored":
        functions["three lines"] = lambda: three_lines(updates_CxD, keys.train)
    for chunk in config.chunks:
        functions[f"plain, chunk {chunk or 'all'}"] = plain(chunk or share)
        functions[f"door, chunk {chunk or 'all'}"] = door(chunk or share)
    turns = harness.turns(functions, config.repeats)

    gigabytes, rows = updates_CxD.nbytes / 1e9, []
    best = {name: min(turn.seconds for turn in taken) for name, taken in turns.items()}
    # An accelerator's work takes no processor time.
    on_cpu = jax.default_backend() == "cpu"
    spent = {
        name: [turn.cpu_seconds if on_cpu else turn.seconds for turn in taken]
        for name, taken in turns.items()
    }
    usual = {name: statistics.median(taken) for name, taken in spent.items()}
    for name in turns:
        row = {
            "what": name,
            "function": config.function,
            "clients": clients,
            "coordinates": config.coordinates,
            "seconds": best[name],
            "usual": usual[name],
            "GB/s": gigabytes / best[name],
            "of read": best["read"] / best[name],
        }
        other = name.replace("door", "plain")
        if name != other in turns:
            ratios = [a / b for a, b in zip(spent[other], spent[name], strict=True)]
            row["of plain"] = statistics.median(ratios)
            own = usual[name] - usual["door, one client"]
            row["clients of plain"] = usual[other] / own if own > 0 else None
        rows.append(row)
    columns = ["what", "seconds", "usual", "GB/s", "of read", "of plain"]
    columns.append("clients of plain")
    harness.table(rows, columns)
    print(f"recorded in {harness.record('aggregate', rows)}")
    return rows


def stored(broadcast: Any, examples: Any, key: Any) -> Any:
    """The contribution is the client's stored update."""
    return examples.batches["update"]


def computed(broadcast: Any, examples: Any, key: Any) -> Any:
    """The contribution is the client's stored update, scaled and shifted."""
    return examples.batches["update"] * 0.5 + 0.25


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
