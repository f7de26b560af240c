"""What this machine's cores and memory allow: the ceilings that other benchmarks are held against.

    python -m benchmarks.micro.ceilings

`matrix product` is float32, 4,096 x 4,096 by 4,096 x 4,096, its rows dealt over one device a core.
`plain read` sums the squares of an array that no cache holds, each device its part.
"""

import dataclasses

import tyro

from benchmarks import harness


@dataclasses.dataclass(frozen=True)
class Config:
    size: int = 4096  # of the matrices
    megabytes: int = 1000  # of the array that is read
    repeats: int = 5
    devices: int | None = None  # virtual CPU devices; default one a core


def main(config: Config) -> list[dict]:
    harness.use_cpu_devices(config.devices)
    import jax
    import jax.numpy as jnp
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(jax.devices(), ("device",))
    dealt, whole = PartitionSpec("device"), PartitionSpec()
    size = config.size // mesh.size * mesh.size

    def filled(*shape: int) -> jax.Array:
        ones = jax.jit(lambda: jnp.ones(shape), out_shardings=NamedSharding(mesh, dealt))
        return jax.block_until_ready(ones())

    left_NxN = filled(size, size)
    right_NxN = jax.device_put(left_NxN, NamedSharding(mesh, whole))
    read_RxM = filled(config.megabytes // mesh.size * mesh.size, 250_000)

    product = jax.jit(
        jax.shard_map(jnp.matmul, mesh=mesh, in_specs=(dealt, whole), out_specs=dealt)
    )
    read = jax.jit(
        jax.shard_map(
            lambda part_RxM: jnp.sum(part_RxM * part_RxM, axis=1),
            mesh=mesh,
            in_specs=dealt,
            out_specs=dealt,
        )
    )
    seconds = harness.interleaved(
        {
            "matrix product": lambda: product(left_NxN, right_NxN),
            "plain read": lambda: read(read_RxM),
        },
        config.repeats,
    )
    work = {
        "matrix product": ("GFLOP/s", 2e-9 * size**3),
        "plain read": ("GB/s", read_RxM.nbytes / 1e9),
    }
    rows = []
    for name, (unit, amount) in work.items():
        rows.append({"what": name, unit: amount / seconds[name], "seconds": seconds[name]})
    harness.table(rows, ["what", "GFLOP/s", "GB/s", "seconds"])
    print(f"recorded in {harness.record('ceilings', rows)}")
    return rows


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
