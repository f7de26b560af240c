"""A round with jax_privacy: `clipped_fun` over clients, one at a time, then its Gaussian noise.

python -m benchmarks.peers.jax_privacy_round FILE

The library clips and sums whatever a function returns for each row of its arguments; here a row is
a client, and the function is the client's training (`network_jax`, on one device).
"""

import importlib.metadata
import sys

import jax
import jax_privacy  # pyright: ignore[reportMissingImports]
from jax_privacy import clipping  # pyright: ignore[reportMissingImports]

from benchmarks.peers import work
from benchmarks.peers.network_jax import changed, norm


def main(file: str) -> None:
    params, held = work.load(file)
    batches = jax.device_put(work.stacked(held))
    count = len(batches[0])
    # All at once, as without a microbatch, is slower and takes the memory of all clients.
    summed = clipping.clipped_fun(
        lambda image, label, mask, params: changed(params, image, label, mask),
        batch_argnums=(0, 1, 2),
        keep_batch_dim=False,
        l2_clip_norm=work.CLIP_NORM,
        microbatch_size=1,
    )
    privatizer = jax_privacy.noise_addition.gaussian_privatizer(
        stddev=work.NOISE * work.CLIP_NORM, prng_key=jax.random.key(0)
    )

    @jax.jit
    def compiled(params, state, *given):
        total = summed(*given, params)
        noisy, state = privatizer.update(total, state)
        new = jax.tree.map(lambda p, leaf: p + leaf / count, params, noisy)
        return new, state, norm(total) / count

    params = jax.device_put(params)
    state = privatizer.init(params)

    def round_() -> float:
        nonlocal state
        _, state, found = jax.block_until_ready(compiled(params, state, *batches))
        return float(found)

    versions = {name: importlib.metadata.version(name) for name in ("jax-privacy", "jax")}
    work.serve(round_, **versions)


if __name__ == "__main__":
    main(sys.argv[1])
