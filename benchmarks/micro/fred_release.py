"""FreD's covariance as clients send it: the door against one product of all examples.

    python -m benchmarks.micro.fred_release
    python -m benchmarks.micro.fred_release --clients 5000 --chunks 8 32 64

Every client's clipped second moment of its embeddings, clipped again, summed and noised, by
`release.door` (no ledger, no packing). `one product` is X^T X of all rows at once, which no
private sum may use: nothing is bounded for a client, and nothing is noised. TFLOP/s count the
products of the full matrix alone, 2 d^2 an example.
"""

import dataclasses

import tyro

from benchmarks import harness


@dataclasses.dataclass(frozen=True)
class Config:
    clients: int = 256
    examples: int = 32  # of a client
    dimension: int = 768
    chunks: tuple[int, ...] = (0,)  # clients side by side on a device; 0 = the default
    repeats: int = 5
    devices: int | None = None  # virtual CPU devices; default one a core


def main(config: Config) -> list[dict]:
    harness.use_cpu_devices(config.devices)
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec

    import jaxpfl as jp
    from benchmarks.rounds import door_keys, whole_bucket
    from jaxpfl.algorithms.fred import FredPlan
    from jaxpfl.federated import Execution, Query, client_mesh
    from jaxpfl.federated.release import identity
    from jaxpfl.federated.release.door import Door, default_chunk

    mesh = client_mesh()
    step = mesh.size * max([default_chunk(mesh), *config.chunks])
    clients = -(-config.clients // step) * step
    dealt = NamedSharding(mesh, PartitionSpec("clients"))
    shape = (clients, 1, config.examples)

    @jax.jit
    def fill(key):
        rows = jax.random.normal(key, (*shape, config.dimension))
        rows = rows / jnp.linalg.norm(rows, axis=-1, keepdims=True)
        return jax.lax.with_sharding_constraint(rows, dealt)

    rows_CxSxBxD = jax.block_until_ready(fill(jax.random.key(0)))
    bucket = whole_bucket({"embedding": rows_CxSxBxD}, dealt)
    plan = jp.Plan(
        rounds=1,
        clip=jp.Clip(1.0),
        noise=jp.Noise(1.0),
        participation=jp.Poisson(clients, clients),
        delta=1e-7,
    )
    centre_D = jnp.zeros(config.dimension)
    client_fn = FredPlan((1.0, 1.0, 1.0), delta=1e-6).client_fn("second")
    spec = jp.CohortSpec(config.examples, config.examples, clients_per_bucket=clients)
    keys = door_keys()
    empty = {"embedding": np.empty((0, config.dimension), np.float32)}

    def door(chunk):
        query = Query("second", client_fn, plan, spec, execution=Execution(mesh, chunk or None))
        opened = Door(query, identity.traced(query, centre_D, empty).contribution)
        return lambda: opened(centre_D, (bucket,), jnp.float32(1.0), keys).value

    @jax.jit
    def one_product(rows_CxSxBxD):
        rows_NxD = rows_CxSxBxD.reshape(-1, config.dimension)
        return rows_NxD.T @ rows_NxD

    functions = {f"door, chunk {chunk or 'default'}": door(chunk) for chunk in config.chunks}
    functions["one product"] = lambda: one_product(rows_CxSxBxD)
    seconds = harness.interleaved(functions, config.repeats)
    flops = 2.0 * clients * config.examples * config.dimension**2
    rows = [
        {
            "what": name,
            "clients": clients,
            "examples": config.examples,
            "d": config.dimension,
            "seconds": taken,
            "clients/s": clients / taken,
            "TFLOP/s": flops / taken / 1e12,
        }
        for name, taken in seconds.items()
    ]
    harness.table(rows, ["what", "seconds", "clients/s", "TFLOP/s"])
    print(f"recorded in {harness.record('fred_release', rows)}")
    return rows


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
