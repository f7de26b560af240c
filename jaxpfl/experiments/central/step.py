"""One dispatch of central training: some steps of AdamW on examples that are on the device."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpfl.errors import InputError
from jaxpfl.experiments.central.adamw import Training
from jaxpfl.models import adapter_trees
from jaxpfl.models.base import Metrics, Model, Params


class TrainState(NamedTuple):
    """What a step updates: parameters, AdamW's moments, and the sums "loss_sum" and "count"."""

    params: Params
    moments: Any
    seen: Metrics


def start(params: Params, settings: Training, steps: int, device: Any) -> TrainState:
    """The state before the first of `steps` steps, copied to a device or sharding."""
    place = partial(jax.device_put, device=device)
    return TrainState(
        params=jax.tree.map(jnp.copy, place(params)),
        moments=place(jax.jit(settings.optimizer(steps).init)(params)),
        seen=place({name: np.zeros((), np.float32) for name in ("loss_sum", "count")}),
    )


@partial(jax.jit, static_argnames=("model", "settings", "steps"), donate_argnames="state")
def run(
    model: Model,
    settings: Training,
    steps: int,
    state: TrainState,
    frozen: Params | None,
    columns: dict[str, Array],
    order: tuple[Array, Array],
    first: Array,
    last: Array,
) -> tuple[TrainState, Array]:
    """Carries out steps `first` .. `last - 1` of an epoch; returns state and last step's loss.

    Args:
      steps: of the whole training, for the schedule.
      state: donated.
      frozen: the base of LoRA, or None.
      columns: name -> [examples, ...].
      order: as returned by `batches`.
    """
    rows_SxB, real_SxB = order
    optimizer = settings.optimizer(steps)

    def loss_sum(params: Params, rows_B: Array, real_B: Array) -> tuple[Array, Array]:
        if frozen is not None:
            params = adapter_trees.join(params, frozen)
        batch = {name: column[rows_B] for name, column in columns.items()}
        mean, metrics = model.loss(params, batch, real_B)
        return mean * lax.stop_gradient(metrics["count"]), metrics["count"]

    differentiate = jax.value_and_grad(loss_sum, has_aux=True)

    def step(index: Array, carry: tuple[TrainState, Array]) -> tuple[TrainState, Array]:
        state, _ = carry
        batch = rows_SxB[index], real_SxB[index]
        (total, count), gradients = differentiate(state.params, *batch)
        # Mean and clipping in one factor: XLA fuses one product with the moments' update, while
        # clipping as a step of its own passes over all parameters twice more.
        mean = factor = 1.0 / jnp.maximum(count, 1.0)
        if settings.clip_norm is not None:
            norm = optax.tree.norm(gradients) * mean
            factor = mean * settings.clip_norm / jnp.maximum(norm, settings.clip_norm)
        gradients = jax.tree.map(lambda leaf: leaf * factor, gradients)
        # Optax mixes integer and float types in places; its results are float32 all the same.
        with jax.numpy_dtype_promotion("standard"):
            updates, moments = optimizer.update(gradients, state.moments, state.params)
        seen = {
            "loss_sum": state.seen["loss_sum"] + total,
            "count": state.seen["count"] + count,
        }
        params = optax.apply_updates(state.params, updates)
        return TrainState(params, moments, seen), total * mean

    return lax.fori_loop(first, last, step, (state, jnp.float32(0.0)))


def batches(rows: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Splits rows into batches: rows int32 and mask bool, [steps, size]; the last is padded."""
    steps = -(-len(rows) // size)
    padded = np.zeros(steps * size, np.int32)
    padded[: len(rows)] = rows
    real = np.arange(steps * size) < len(rows)
    return padded.reshape(steps, size), real.reshape(steps, size)


def shardings(mesh: Mesh | None, batch_size: int) -> tuple[Any, Any]:
    """The devices or shardings of parameters and of [steps, batch] arrays."""
    if mesh is None:
        device = jax.devices()[0]
        return device, device
    if "data" not in mesh.axis_names:
        raise InputError(f"mesh needs an axis 'data', found axes {mesh.axis_names}")
    devices = mesh.shape["data"]
    if batch_size % devices:
        raise InputError(
            f"batch_size must be a multiple of the mesh's {devices} devices along 'data', found "
            f"{batch_size}"
        )
    # With automatic axes, whatever the axis types of the caller's mesh.
    mesh = Mesh(mesh.devices, mesh.axis_names)
    return NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec(None, "data"))
