"""DP-SGD: time of a step over 100 examples of the EMNIST CNN, by how their gradients are clipped.

    python -m benchmarks.micro.example_unit
    python -m benchmarks.micro.example_unit --examples 1000

`release` is a whole round of `fed_sgd` (charge, draw, pack, clip, sum, noise, step), its examples
dealt to one device a core. The others are compiled functions on one device: `clipped` the client
function's sum, `formed` the same by `vmap(grad)`, and `batch` the gradient of the batch's loss,
without any clipping, which is what a step costs without privacy. The table gives milliseconds, the
best of the repeats.
"""

import dataclasses
import functools
from typing import Any

import tyro

from benchmarks import harness


@dataclasses.dataclass(frozen=True)
class Config:
    examples: int = 100
    repeats: int = 15
    devices: int | None = None  # virtual CPU devices; default one a core


def main(config: Config) -> list[dict]:
    harness.use_cpu_devices(config.devices)
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

    import jaxpfl as jp
    from benchmarks.rounds import rounds
    from jaxpfl.federated.clients.clipped_gradients import clipped_sum

    model, number = jp.models.emnist_cnn(), config.examples
    params = model.init(jax.random.key(0))
    rng = np.random.default_rng(0)
    batch = {
        "image": rng.random((number, 28, 28, 1), np.float32),
        "label": rng.integers(0, 62, number, np.int32),
    }
    mask_B = np.ones(number, bool)

    def loss(params: Any, example: Any) -> jax.Array:
        alone = {name: value[None] for name, value in example.items()}
        return model.loss(params, alone, jnp.ones((1,), bool))[0]

    def formed(params: Any, batch: Any, mask_B: jax.Array) -> Any:
        gradients = jax.vmap(jax.grad(loss), (None, 0))(params, batch)
        factor_B = jnp.minimum(1, 1 / jax.vmap(optax.tree.norm)(gradients)) * mask_B
        return jax.tree.map(lambda leaf: jnp.tensordot(factor_B, leaf, 1), gradients)

    functions = {
        "clipped": jax.jit(
            lambda params, batch, mask_B: clipped_sum(loss, params, batch, mask_B, 1.0)
        ),
        "formed": jax.jit(formed),
        "batch": jax.jit(jax.grad(lambda *given: model.loss(*given)[0])),
    }
    given = jax.device_put((params, batch, mask_B))
    runs = {name: (lambda f=function: f(*given)) for name, function in functions.items()}

    clients = jp.data.from_clients({"all": batch})
    algorithm = jp.algorithms.fed_sgd(
        model,
        server=optax.sgd(0.1),
        plan=jp.Plan(
            rounds=100_000,
            clip=jp.Clip(1.0),
            noise=jp.Noise(1.0),
            participation=jp.Poisson(number, number),
            delta=1e-7,
            unit="example",
        ),
    )
    release = functools.partial(next, rounds(algorithm, clients))
    best = harness.interleaved({"release": release, **runs}, config.repeats)
    rows = [
        {"what": name, "examples": number, "ms": 1e3 * seconds} for name, seconds in best.items()
    ]
    harness.table(rows, ["what", "examples", "ms"])
    print(f"recorded in {harness.record('example_unit', rows)}")
    return rows


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
