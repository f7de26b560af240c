"""A step of DP-SGD by hand in plain JAX: a scan over the examples.

python -m benchmarks.peers.jax_examples FILE

`vmap` of `grad`, which is shorter, is several times slower on a CPU: XLA runs the products of a
batch of matrices without the threads and the kernels that it has for one product.
"""

import sys

import jax
import jax.numpy as jnp

from benchmarks.peers import work
from benchmarks.peers.network_jax import loss, norm, released


def main(file: str) -> None:
    params, held = work.load(file)
    batch = jax.device_put((held["image"][:, None], held["label"][:, None]))
    count = len(held["label"])

    @jax.jit
    def step(params, key, *batch):
        def add(total, example):
            gradient = jax.grad(loss)(params, *example, jnp.ones(1, bool))
            factor = jnp.minimum(1.0, work.EXAMPLE_CLIP_NORM / norm(gradient))
            return jax.tree.map(
                lambda t, g: t - work.LEARNING_RATE * factor * g, total, gradient
            ), None

        total, _ = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), batch)
        deviation = work.LEARNING_RATE * work.NOISE * work.EXAMPLE_CLIP_NORM
        new, found = released(params, total, count, key, deviation)
        return new, found / work.LEARNING_RATE

    params, key = jax.device_put(params), jax.random.key(0)
    work.serve(
        lambda: float(jax.block_until_ready(step(params, key, *batch))[1]), jax=jax.__version__
    )


if __name__ == "__main__":
    main(sys.argv[1])
