"""A step of DP-SGD with jax_privacy: `clipped_grad`, then its Gaussian noise.

python -m benchmarks.peers.jax_privacy_examples FILE
"""

import importlib.metadata
import sys

import jax
import jax_privacy  # pyright: ignore[reportMissingImports]

from benchmarks.peers import work
from benchmarks.peers.network_jax import loss, norm


def main(file: str) -> None:
    params, held = work.load(file)
    batch = jax.device_put((held["image"], held["label"], held["label"] >= 0))
    count = len(held["label"])
    summed = jax_privacy.clipped_grad(
        loss,
        batch_argnums=(1, 2, 3),
        l2_clip_norm=work.EXAMPLE_CLIP_NORM,
        microbatch_size=1,  # one after the other: vmapped products are far slower on a CPU
    )
    privatizer = jax_privacy.noise_addition.gaussian_privatizer(
        stddev=work.NOISE * work.EXAMPLE_CLIP_NORM, prng_key=jax.random.key(0)
    )

    @jax.jit
    def step(params, state, *batch):
        total = summed(params, *batch)
        noisy, state = privatizer.update(total, state)
        rate = work.LEARNING_RATE / count
        new = jax.tree.map(lambda p, leaf: p - rate * leaf, params, noisy)
        return new, state, norm(total) / count

    params = jax.device_put(params)
    state = privatizer.init(params)

    def round_() -> float:
        nonlocal state
        _, state, found = jax.block_until_ready(step(params, state, *batch))
        return float(found)

    versions = {name: importlib.metadata.version(name) for name in ("jax-privacy", "jax")}
    work.serve(round_, **versions)


if __name__ == "__main__":
    main(sys.argv[1])
