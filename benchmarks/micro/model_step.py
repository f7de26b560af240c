"""Time of one local SGD step of each model, by how clients are laid out.

    python -m benchmarks.micro.model_step
    python -m benchmarks.micro.model_step --models emnist_cnn_patches emnist_cnn_convolution

Clients run a few SGD steps from common parameters and their deltas are added up: one after another
(`scan`, the steps inside it) or side by side with parameters of their own (`vmap`). The table
gives milliseconds for one step of one client (best of the repeats, compilation excluded) and the
rate in GFLOP/s, counting the matrix products of the forward and backward pass.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro

from benchmarks import harness
from jaxpfl.models import CNN, CIFGLanguageModel, classifier_cnn, emnist_cnn

LENGTH = 20
MODELS: dict[str, Any] = {
    "classifier_cnn": classifier_cnn(),
    "emnist_cnn": emnist_cnn(),
    # The two forms of its convolutions: `models.layers.convolution` picks by backend from these.
    "emnist_cnn_patches": emnist_cnn(form="patches"),
    "emnist_cnn_convolution": emnist_cnn(form="convolution"),
    "cifg_4k": CIFGLanguageModel(vocab_size=4_000),
    "cifg_10k": CIFGLanguageModel(),
}


def data(model: Any, clients: int, steps: int, batch: int) -> dict[str, np.ndarray]:
    """Random batches, each column [clients, steps, batch, ...]."""
    rng = np.random.default_rng(0)
    lead = (clients, steps, batch)
    if isinstance(model, CNN):
        return {
            "image": rng.random((*lead, *model.image_shape), np.float32),
            "label": rng.integers(0, model.classes, lead, np.int32),
        }
    return {"tokens": rng.integers(3, model.vocab_size, (*lead, LENGTH + 1), np.int32)}


def gigaflops(model: Any, batch: int) -> float:
    """Matrix products of one step: 2 operations per multiplication, backward = 2 x forward."""
    if isinstance(model, CNN):
        height, width, channels = model.image_shape
        total, first = 0, True
        for outputs, pool in model.features:
            height, width = height - 2, width - 2
            products = height * width * 9 * channels * outputs
            total += products * (2 if first else 3)
            first, channels = False, outputs
            if pool:
                height, width = height // 2, width // 2
        total += 3 * (height * width * channels + model.classes) * model.hidden
        return 2e-9 * batch * total
    gates = (model.embedding + model.projection) * 3 * model.hidden
    output = model.projection * model.vocab_size
    return 2e-9 * batch * LENGTH * 3 * (gates + model.hidden * model.projection + output)


def rounds(model: Any, layout: str) -> Callable[..., Any]:
    """A jitted function (params, batches) -> sum over clients of the delta."""

    def local(params: Any, batches: Any) -> Any:
        def step(current: Any, batch: Any) -> tuple[Any, None]:
            mask = jnp.ones(next(iter(batch.values())).shape[0], bool)
            gradient = jax.grad(lambda p: model.loss(p, batch, mask)[0])(current)
            return jax.tree.map(lambda p, g: p - 0.1 * g, current, gradient), None

        final = jax.lax.scan(step, params, batches)[0]
        return jax.tree.map(jnp.subtract, final, params)

    def scan(params: Any, batches: Any) -> Any:
        def client(total: Any, one: Any) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, total, local(params, one)), None

        return jax.lax.scan(client, jax.tree.map(jnp.zeros_like, params), batches)[0]

    def vmap(params: Any, batches: Any) -> Any:
        deltas = jax.vmap(local, in_axes=(None, 0))(params, batches)
        return jax.tree.map(lambda delta: delta.sum(0), deltas)

    return jax.jit({"scan": scan, "vmap": vmap}[layout])


@dataclasses.dataclass(frozen=True)
class Config:
    models: tuple[str, ...] = ("classifier_cnn", "emnist_cnn", "cifg_4k", "cifg_10k")
    layouts: tuple[str, ...] = ("scan", "vmap")
    clients: int = 8
    steps: int = 4
    batch: int = 16  # examples in a batch
    repeats: int = 5


def main(config: Config) -> None:
    rows = []
    for name in config.models:
        model = MODELS[name]
        params = model.init(jax.random.key(0))
        batches = jax.device_put(data(model, config.clients, config.steps, config.batch))
        runs = {
            layout: functools.partial(rounds(model, layout), params, batches)
            for layout in config.layouts
        }
        for layout, seconds in harness.interleaved(runs, config.repeats).items():
            step = seconds / (config.clients * config.steps)
            rows.append(
                {
                    "model": name,
                    "layout": layout,
                    "clients": config.clients,
                    "steps": config.steps,
                    "batch": config.batch,
                    "ms/client step": 1e3 * step,
                    "GFLOP/s": gigaflops(model, config.batch) / step,
                }
            )
    harness.table(rows, ["model", "layout", "ms/client step", "GFLOP/s"])
    print(f"recorded in {harness.record('model_step', rows)}")


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
