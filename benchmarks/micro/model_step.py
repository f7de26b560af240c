"""Time of one local SGD step of each model, by how clients are laid out.

    python benchmarks/micro/model_step.py [--models emnist_cnn ...] [--clients 8] [--steps 4]

Clients run a few SGD steps from common parameters and their deltas are added up: one after another
(`scan`, the steps inside it) or side by side with parameters of their own (`vmap`). The table
gives milliseconds for one step of one client (median over repeats, compilation excluded) and the
rate in GFLOP/s, counting the matrix products of the forward and backward pass. One JSON line a row
is appended to benchmarks/results/model_step.jsonl.
"""

import argparse
import datetime
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np

from jaxpfl.models import CNN, CIFGLanguageModel, classifier_cnn, emnist_cnn

RESULTS = Path(__file__).parents[1] / "results" / "model_step.jsonl"
LENGTH = 20
MODELS: dict[str, Any] = {
    "classifier_cnn": classifier_cnn(),
    "emnist_cnn": emnist_cnn(),
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


def measure(function: Callable[..., Any], *arguments: Any, repeats: int) -> float:
    """Median seconds of a call, after one that compiles."""
    jax.block_until_ready(function(*arguments))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(function(*arguments))
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=_Formatter)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--layouts", nargs="+", choices=["scan", "vmap"], default=["scan", "vmap"])
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--batch", type=int, default=16, help="examples in a batch")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dry", action="store_true", help="do not append to the results file")
    options = parser.parse_args()
    device = jax.devices()[0]
    print(f"{device.device_kind}, {platform.machine()}, jax {jax.__version__}")
    print(f"{'model':16}{'layout':8}{'ms/client step':>16}{'GFLOP/s':>10}")
    for name in options.models:
        model = MODELS[name]
        params = model.init(jax.random.key(0))
        batches = jax.device_put(data(model, options.clients, options.steps, options.batch))
        for layout in options.layouts:
            seconds = measure(rounds(model, layout), params, batches, repeats=options.repeats)
            step = seconds / (options.clients * options.steps)
            rate = gigaflops(model, options.batch) / step
            print(f"{name:16}{layout:8}{step * 1e3:16.2f}{rate:10.1f}", flush=True)
            if not options.dry:
                record = {
                    "benchmark": "model_step",
                    "model": name,
                    "layout": layout,
                    "clients": options.clients,
                    "steps": options.steps,
                    "batch": options.batch,
                    "ms_per_client_step": round(step * 1e3, 3),
                    "gflops_per_second": round(rate, 1),
                    "device": device.device_kind,
                    "devices": jax.device_count(),
                    "jax": jax.__version__,
                    "flax": flax.__version__,
                    "python": platform.python_version(),
                    "date": datetime.date.today().isoformat(),
                }
                RESULTS.parent.mkdir(exist_ok=True)
                with RESULTS.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(record) + "\n")


class _Formatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    pass


if __name__ == "__main__":
    main()
