"""A round in DrJAX: `map_fn` over the clients that are placed on it, then `reduce_sum`.

python -m benchmarks.peers.drjax_round FILE
"""

import importlib.metadata
import sys

import drjax  # pyright: ignore[reportMissingImports]
import jax

from benchmarks.peers import work
from benchmarks.peers.network_jax import clipped_change, released


def main(file: str) -> None:
    params, held = work.load(file)
    batches = jax.device_put(work.stacked(held))
    count = len(batches[0])

    @drjax.program(clients=count)
    def summed(params, batches):
        placed = drjax.broadcast(params)
        changes = drjax.map_fn(lambda p, given: clipped_change(p, *given), (placed, batches))
        return drjax.reduce_sum(changes)

    compiled = jax.jit(
        lambda params, key, given: released(params, summed(params, given), count, key)
    )
    params, key = jax.device_put(params), jax.random.key(0)
    versions = {"drjax": importlib.metadata.version("drjax"), "jax": jax.__version__}
    work.serve(lambda: float(jax.block_until_ready(compiled(params, key, batches))[1]), **versions)


if __name__ == "__main__":
    main(sys.argv[1])
