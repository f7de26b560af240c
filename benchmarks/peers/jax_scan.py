"""A round by hand in plain JAX: a scan over clients on each device, one device a core.

python -m benchmarks.peers.jax_scan FILE
"""

import os
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.peers import work
from benchmarks.peers.network_jax import clipped_change, released


def main(file: str) -> None:
    jax.config.update("jax_num_cpu_devices", os.cpu_count() or 1)
    mesh = Mesh(np.array(jax.devices()), ("clients",))
    params, held = work.load(file)
    batches = work.stacked(held)
    count = len(batches[0])
    # Clients without examples, so that every device gets as many; they train in no steps.
    short = -count % mesh.size
    batches = [
        np.concatenate([leaf, np.zeros((short, *leaf.shape[1:]), leaf.dtype)]) for leaf in batches
    ]

    def device_sum(params, *batches_CxSxB):
        def add(total, batches_SxB):
            return jax.tree.map(jnp.add, total, clipped_change(params, *batches_SxB)), None

        total, _ = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), batches_CxSxB)
        return jax.lax.psum(total, "clients")

    dealt, everywhere = PartitionSpec("clients"), PartitionSpec()
    summed = jax.shard_map(
        device_sum,
        mesh=mesh,
        in_specs=(everywhere, dealt, dealt, dealt),
        out_specs=everywhere,
        check_vma=False,
    )
    compiled = jax.jit(
        lambda params, key, *given: released(params, summed(params, *given), count, key)
    )
    params = jax.device_put(params, NamedSharding(mesh, everywhere))
    batches = jax.device_put(batches, NamedSharding(mesh, dealt))
    key = jax.random.key(0)
    work.serve(
        lambda: float(jax.block_until_ready(compiled(params, key, *batches))[1]),
        jax=jax.__version__,
    )


if __name__ == "__main__":
    main(sys.argv[1])
