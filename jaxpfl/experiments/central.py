"""Ordinary training on public data: for the models that a modeller already has."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxpfl.models.base import Model


def fit(
    model: Model,
    columns: dict[str, np.ndarray],
    *,
    optimizer: optax.GradientTransformation,
    epochs: int,
    batch_size: int,
    seed: int,
) -> Any:
    """Trains `model` on PUBLIC examples; returns its parameters, on the host.

    A function of its arguments: the same seed gives the same parameters on the same hardware.

    Args:
      columns: name -> [examples, ...], what the model reads.
      optimizer: any optax optimiser.
      epochs: passes over the examples, each in a new order; a last part batch is masked.
      seed: of the start and the orders.
    """
    device = jax.devices()[0]
    place = partial(jax.device_put, device=device)
    root = jax.random.key(seed)
    params = place(model.init(jax.random.fold_in(root, 0)))
    state = place(optimizer.init(params))
    held = place({name: columns[name] for name in model.columns})
    examples = len(next(iter(held.values())))
    steps = -(-examples // batch_size)
    for epoch in range(epochs):
        generator = np.random.Generator(np.random.Philox(key=[seed, epoch]))
        rows = np.zeros(steps * batch_size, np.int32)
        rows[:examples] = generator.permutation(examples)
        mask = np.arange(len(rows)) < examples
        order = place((rows.reshape(steps, -1), mask.reshape(steps, -1)))
        params, state = _epoch(model, optimizer, params, state, held, order)
    return jax.device_get(params)


@partial(jax.jit, static_argnames=("model", "optimizer"), donate_argnames=("params", "state"))
def _epoch(
    model: Model,
    optimizer: optax.GradientTransformation,
    params: Any,
    state: Any,
    columns: dict[str, jax.Array],
    order: tuple[jax.Array, jax.Array],
) -> tuple[Any, Any]:
    def step(index, carry):
        params, state = carry
        rows_B, mask_B = order[0][index], order[1][index]
        batch = {name: column[rows_B] for name, column in columns.items()}
        gradients = jax.grad(lambda params: model.loss(params, batch, mask_B)[0])(params)
        # Optax mixes integer and float types in places; its results are float32 all the same.
        with jax.numpy_dtype_promotion("standard"):
            updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    return jax.lax.fori_loop(jnp.int32(0), jnp.int32(order[0].shape[0]), step, (params, state))
