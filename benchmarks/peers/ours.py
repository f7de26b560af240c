"""Rounds of this library, everything that a run does in one: charge, draw, pack, train, release.

    python -m benchmarks.peers.ours FILE [quiet]

With "quiet", rounds answer with the norm of the mean change; otherwise it is what the noise hides,
and they answer with null. All clients take part in every round. A release draws the order of their
examples, on which the norm depends by up to 13 %: the answer is that of the library's client
function in the order of the peers, once a release without noise has agreed with it in this bound.
"""

import importlib.metadata
import sys
from typing import Any

import numpy as np

from benchmarks import harness
from benchmarks.peers import work


def main(file: str, quiet: bool) -> None:
    harness.use_cpu_devices(None)
    import jax
    import optax

    import jaxpfl as jp
    from benchmarks.rounds import rounds
    from jaxpfl.federated import Execution, client_mesh

    arrays, held = work.load(file)
    clients = len(held["offsets"]) - 1
    data = jp.data.from_clients(
        {
            f"client {i}": {"image": image, "label": label.astype(np.int32)}
            for i, (image, label) in enumerate(work.each(held))
        }
    )
    start = work.by_layer(arrays)
    algorithm = jp.algorithms.fed_avg(
        jp.models.emnist_cnn(),
        client=optax.sgd(work.LEARNING_RATE),
        server=optax.sgd(1.0),
        plan=jp.Plan(
            rounds=100_000,
            clip=jp.Clip(work.CLIP_NORM),
            noise=None if quiet else jp.Noise(work.NOISE),
            participation=jp.Poisson(clients, clients),
            delta=0.0 if quiet else 1e-7,
        ),
        cohort=jp.CohortSpec(batch_size=work.BATCH, max_examples=work.EXAMPLES),
        execution=Execution(client_mesh()),
        start=start,
    )
    states = rounds(algorithm, data)

    def round_():
        state, metrics = next(states)
        jax.block_until_ready(state)
        if not quiet:
            return None
        norm = float(metrics["update_norm"])
        return _norm_in_order(algorithm.queries[0].client_fn, start, held, norm)

    versions = {name: importlib.metadata.version(name) for name in ("jaxpfl", "jax")}
    work.serve(round_, **versions)


def _norm_in_order(client_fn: Any, start: Any, held: work.Arrays, released: float) -> float:
    """The norm of the mean change, clipped, where examples come in the order in which they lie."""
    import jax
    import jax.numpy as jnp
    import optax

    from jaxpfl.federated import Examples, contribution

    @jax.jit
    def clipped(image, label, mask):
        steps = jnp.sum(jnp.any(mask, 1), dtype=jnp.int32)
        examples = Examples({"image": image, "label": label}, mask, steps)
        change = contribution(client_fn, start, examples, jax.random.key(0))
        factor = jnp.minimum(jnp.float32(1), work.CLIP_NORM / optax.tree.norm(change))
        return jax.tree.map(lambda leaf: leaf * factor, change)

    changes = [clipped(*batches) for batches in zip(*work.stacked(held), strict=True)]
    total = jax.tree.map(lambda *leaves: sum(leaves), *changes)
    norm = float(optax.tree.norm(total)) / len(changes)
    # A release takes each client's examples in an order of its own. The norms of five other orders
    # were up to 13 % away, of ten equal clients as of 200 ragged ones.
    if abs(released - norm) > 0.25 * norm:
        raise SystemExit(f"a release has a mean change of norm {released}, its clients {norm}")
    return norm


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:] == ["quiet"])
