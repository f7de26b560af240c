"""Rounds in FedJAX: `for_each_client` with its jit backend, and a model in Haiku, as its own are.

python -m benchmarks.peers.fedjax_round FILE

Clients are trained one after the other; XLA's threads share each step. Each step is a program of
its own, outside of any loop, where XLA's ordinary convolutions are fast.
"""

import importlib.metadata
import sys

import fedjax  # pyright: ignore[reportMissingImports]
import haiku as hk  # pyright: ignore[reportMissingImports]
import jax

from benchmarks.peers import work
from benchmarks.peers.network_jax import released

# Haiku's names of the layers of `work.parameters`.
LAYERS = {
    "convolution_0": "conv2_d",
    "convolution_1": "conv2_d_1",
    "hidden": "linear",
    "output": "linear_1",
}
LEAVES = {"kernel": "w", "bias": "b"}


def logits(batch):
    x = jax.nn.relu(hk.Conv2D(32, 3, padding="VALID")(batch["x"]))
    x = jax.nn.relu(hk.Conv2D(64, 3, padding="VALID")(x))
    x = hk.MaxPool((1, 2, 2, 1), (1, 2, 2, 1), "VALID")(x)
    x = jax.nn.relu(hk.Linear(128)(hk.Flatten()(x)))
    return hk.Linear(work.CLASSES)(x)


def main(file: str) -> None:
    arrays, held = work.load(file)
    start: dict[str, dict[str, jax.Array]] = {}
    for name, array in arrays.items():
        layer, leaf = name.split(".")
        start.setdefault(LAYERS[layer], {})[LEAVES[leaf]] = jax.device_put(array)
    clients = [fedjax.ClientDataset({"x": image, "y": label}) for image, label in work.each(held)]
    # Last batches of 20, 10 or 5 examples: a step is compiled for each of these sizes.
    sizes = fedjax.PaddedBatchHParams(batch_size=work.BATCH, num_batch_size_buckets=3)

    model = fedjax.create_model_from_haiku(
        hk.transform(logits),
        clients[0].raw_examples,
        lambda batch, found: fedjax.metrics.unreduced_cross_entropy_loss(batch["y"], found),
    )
    gradients = fedjax.model_grad(model)
    optimizer = fedjax.optimizers.sgd(work.LEARNING_RATE)

    def init(params, key):
        return {"params": params, "optimizer": optimizer.init(params), "key": key}

    def step(state, batch):
        given = gradients(state["params"], batch, state["key"])
        optimizer_state, params = optimizer.apply(given, state["optimizer"], state["params"])
        return {"params": params, "optimizer": optimizer_state, "key": state["key"]}

    def final(params, state):
        change = jax.tree.map(lambda new, old: new - old, state["params"], params)
        return fedjax.tree_util.tree_clip_by_global_norm(change, work.CLIP_NORM)

    train = fedjax.for_each_client(init, step, final)
    finish, key = jax.jit(released, static_argnums=2), jax.random.key(0)

    def round_() -> float:
        cohort = [(index, data.padded_batch(sizes), key) for index, data in enumerate(clients)]
        total = fedjax.tree_util.tree_sum(change for _, change in train(start, cohort))
        return float(jax.block_until_ready(finish(start, total, len(clients), key))[1])

    versions = {name: importlib.metadata.version(name) for name in ("fedjax", "jax")}
    work.serve(round_, **versions)


if __name__ == "__main__":
    main(sys.argv[1])
