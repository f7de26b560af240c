"""Steps of DP-SGD of this library, everything that a run does in one: charge, draw, pack, release.

    python -m benchmarks.peers.ours_examples FILE [quiet]

All examples take part in every step. With "quiet" there is no noise, and steps answer with the norm
of the mean gradient; otherwise it is what the noise hides, and they answer with null.
"""

import importlib.metadata
import sys

import numpy as np

from benchmarks import harness
from benchmarks.peers import work


def main(file: str, quiet: bool) -> None:
    harness.use_cpu_devices(None)
    import jax
    import optax

    import jaxpfl as jp
    from benchmarks.rounds import rounds

    arrays, held = work.load(file)
    examples = len(held["label"])
    columns = {"image": held["image"], "label": held["label"].astype(np.int32)}
    data = jp.data.from_clients({"all": columns})
    algorithm = jp.algorithms.fed_sgd(
        jp.models.emnist_cnn(),
        server=optax.sgd(work.LEARNING_RATE),
        plan=jp.Plan(
            rounds=100_000,
            clip=jp.Clip(work.EXAMPLE_CLIP_NORM),
            noise=None if quiet else jp.Noise(work.NOISE),
            participation=jp.Poisson(examples, examples),
            delta=0.0 if quiet else 1e-7,
            unit="example",
        ),
        start=work.by_layer(arrays),
    )
    states = rounds(algorithm, data)

    def step() -> float | None:
        state, metrics = next(states)
        jax.block_until_ready(state)
        return float(metrics["update_norm"]) if quiet else None

    versions = {name: importlib.metadata.version(name) for name in ("jaxpfl", "jax")}
    work.serve(step, **versions)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:] == ["quiet"])
