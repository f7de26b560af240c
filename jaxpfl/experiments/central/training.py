"""Central training on public or synthetic data; nothing here reads a client's data.

The examples are on the device, the order of an epoch is fixed beforehand, and one dispatch carries
out several steps. Parameters and moments are donated.
"""

import hashlib
import json
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpfl.data.cohort import batches
from jaxpfl.errors import InputError
from jaxpfl.experiments.central.adamw import Training
from jaxpfl.experiments.central.scoring import in_batches, score
from jaxpfl.experiments.records.checkpoint import Checkpoints
from jaxpfl.federated.clients.client import Static
from jaxpfl.models import adapter_trees
from jaxpfl.models.base import Metrics, Model, Params, columns_read, descended, initialised
from jaxpfl.progress import Progress
from jaxpfl.text.microbatches import dealt

Columns = Mapping[str, np.ndarray]

_DISPATCHED = 64
"""Steps at a time: few enough to show how far it has come."""
_SAMPLED = 65_536


@dataclass(frozen=True)
class Fitted:
    """The selected parameters, on the host, and a record of their training."""

    params: Params
    record: dict[str, Any]


class TrainState(NamedTuple):
    """What a step updates: parameters, AdamW's moments, and the sums "loss_sum" and "count"."""

    params: Params
    moments: Any
    seen: Metrics


class _State(NamedTuple):
    """The state of the training between two steps; checkpoints contain all of it.

    `best` is that of the least validation loss so far, empty without validation data. Losses are of
    each epoch, NaN until it has ended.
    """

    train: TrainState
    best: Params
    train_losses: Array
    valid_losses: Array


def fit(
    model: Model,
    params: Params,
    columns: Columns,
    settings: Training,
    *,
    seed: int,
    valid: Columns | None = None,
    frozen: Params | None = None,
    mesh: Mesh | None = None,
    folder: str | Path | None = None,
    progress: bool = False,
) -> Fitted:
    """Trains `params` on PUBLIC or synthetic examples.

    The same arguments give the same parameters on the same hardware, even after an interruption.

    Args:
      params: initial parameters, not changed; with `frozen`, the adapters (`adapter_trees.split`).
      valid: validation examples, like `columns`, after each epoch; the parameters of least loss are
        returned. They must be PUBLIC: a choice by private data would be a release without a charge.
      frozen: the base of LoRA, not changed; the model sees `adapter_trees.join(params, frozen)`.
      mesh: has an axis "data" over which batches, of a multiple of its size, are sharded;
        parameters are replicated. Default: the first device.
      folder: for checkpoints, from which interrupted training continues. The folder of another
        training (other data, settings, seed or initial parameters) is refused.

    Returns:
      Parameters, and a record with "steps", "train_loss" (nats per target, the mean of each epoch)
      and, with validation data, "valid_loss" (after each epoch) and "best_step".
    """
    columns, examples = _checked(model, columns, "columns")
    everywhere, by_rows = shardings(mesh)
    place = partial(jax.device_put, device=everywhere)
    steps_per_epoch = -(-examples // settings.batch_size)
    steps = steps_per_epoch * settings.epochs
    placed, scored, held_out = place(columns), Static(model), ()
    if valid is not None:
        valid, _ = _checked(model, valid, "valid")
        # A batch size that fits into memory in training fits here, too.
        held_out = dealt(in_batches(valid, settings.batch_size), mesh)
    if frozen is not None and not isinstance(jax.tree.leaves(frozen)[0], jax.Array):
        frozen = place(frozen)
    state = _State(
        train=start(params, settings, steps, everywhere),
        best={} if valid is None else jax.tree.map(jnp.copy, place(params)),
        train_losses=place(np.full(settings.epochs, np.nan, np.float32)),
        valid_losses=place(np.full(settings.epochs if valid else 0, np.nan, np.float32)),
    )

    def validated(state: _State) -> _State:
        params = state.train.params
        whole = params if frozen is None else adapter_trees.join(params, frozen)
        loss = score(scored, whole, held_out).result()["loss"]
        # The loss of a diverged run is NaN, for which this is false.
        if loss < np.nanmin(np.asarray(state.valid_losses), initial=np.inf):
            state = state._replace(best=jax.tree.map(jnp.copy, params))
        return state._replace(valid_losses=state.valid_losses.at[epoch].set(loss))

    order, epoch, done, checkpoints = None, -1, 0, None
    with ExitStack() as stack:
        if folder is not None:
            described = [repr(model), asdict(settings), seed]
            identity = _digest(described, [params, columns, valid or {}], frozen or {})
            checkpoints = stack.enter_context(Checkpoints(folder, run=identity, private=False))
            restored = checkpoints.restore(state, warn=warnings.warn)
            if restored is not None:
                done, state = restored.round, place(restored.state)
        bar = stack.enter_context(Progress("training", total=steps, progress=progress))
        bar.begin(done)
        while done < steps:
            if done // steps_per_epoch != epoch:
                epoch = done // steps_per_epoch
                generator = np.random.Generator(np.random.Philox(key=[seed, epoch]))
                shuffled = batches(generator.permutation(examples), settings.batch_size)
                order = jax.device_put(shuffled, by_rows)
            last = min(done + _DISPATCHED, (epoch + 1) * steps_per_epoch)
            ends = (place(np.int32(at - epoch * steps_per_epoch)) for at in (done, last))
            train, loss = run(model, settings, steps, state.train, frozen, placed, order, *ends)
            state = state._replace(train=train)
            loss, done = float(loss), last
            if done % steps_per_epoch == 0:
                train, mean = epoch_ended(train)
                losses = state.train_losses.at[epoch].set(mean)
                state = state._replace(train=train, train_losses=losses)
                state = state if valid is None else validated(state)
                if checkpoints:
                    checkpoints.save(done, state)
            bar.update(done, {"loss": f"{loss:.3f}"})
    state = jax.device_get(state)
    record: dict[str, Any] = {"steps": steps, "train_loss": state.train_losses.tolist()}
    if valid is None:
        return Fitted(state.train.params, record)
    losses = np.nan_to_num(state.valid_losses, nan=np.inf)
    best = (int(np.argmin(losses)) + 1) * steps_per_epoch if np.isfinite(losses).any() else 0
    record |= {"valid_loss": state.valid_losses.tolist(), "best_step": best}
    return Fitted(state.best, record)


def fit_adam(
    model: Model, columns: Columns, *, epochs: int, batch_size: int, learning_rate: float, seed: int
) -> Params:
    """Trains a new model by Adam at one learning rate, see `fit`; parameters on the host."""
    settings = Training(epochs, batch_size, learning_rate, "constant", 0.0, clip_norm=None)
    start = initialised(model, jax.random.fold_in(jax.random.key(seed), 0))
    return fit(model, start, columns, settings, seed=seed).params


def start(params: Params, settings: Training, steps: int, device: Any) -> TrainState:
    """The state before the first of `steps` steps, copied to a device or sharding."""
    place = partial(jax.device_put, device=device)
    return TrainState(
        params=jax.tree.map(jnp.copy, place(params)),
        moments=place(_moments(settings, steps, params)),
        seen=place({name: np.zeros((), np.float32) for name in ("loss_sum", "count")}),
    )


@partial(jax.jit, static_argnums=(0, 1))
def _moments(settings: Training, steps: int, params: Params) -> Any:
    return settings.optimizer(steps).init(params)


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

    `steps` are those of the whole training, for the schedule; `order` is made by `batches`.
    """
    rows_SxB, real_SxB = order

    def loss_sum(params: Params, rows_B: Array, real_B: Array) -> tuple[Array, Array]:
        if frozen is not None:
            params = adapter_trees.join(params, frozen)
        batch = {name: column[rows_B] for name, column in columns.items()}
        mean, metrics = model.loss(params, batch, real_B)
        return mean * lax.stop_gradient(metrics["count"]), metrics["count"]

    differentiate = jax.value_and_grad(loss_sum, has_aux=True)

    def step(index: Array, carry: tuple[TrainState, Array]) -> tuple[TrainState, Array]:
        state, _ = carry
        (total, count), gradients = differentiate(state.params, rows_SxB[index], real_SxB[index])
        mean = 1.0 / jnp.maximum(count, 1.0)
        params, moments = descended(settings, steps, state.params, state.moments, gradients, mean)
        seen = jax.tree.map(jnp.add, state.seen, {"loss_sum": total, "count": count})
        return TrainState(params, moments, seen), total * mean

    return lax.fori_loop(first, last, step, (state, jnp.float32(0.0)))


def epoch_ended(state: TrainState) -> tuple[TrainState, Array]:
    """The state before the next epoch, and the mean loss of the one that `run` has carried out."""
    mean = state.seen["loss_sum"] / jnp.maximum(state.seen["count"], 1.0)
    return state._replace(seen=jax.tree.map(jnp.zeros_like, state.seen)), mean


def _checked(model: Model, columns: Columns, what: str) -> tuple[dict[str, np.ndarray], int]:
    arrays = {name: np.asarray(columns[name]) for name in columns_read(model, columns)}
    examples = len(next(iter(arrays.values())))
    if not examples:
        raise InputError(f"{what}: has no examples, expected at least one")
    return arrays, examples


def shardings(mesh: Mesh | None) -> tuple[Any, Any]:
    """The devices or shardings of parameters and of [steps, batch] arrays."""
    if mesh is None:
        return jax.local_devices()[0], jax.local_devices()[0]
    return NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec(None, "data"))


def _digest(described: Any, trees: Sequence[Any], frozen: Any) -> str:
    """A digest of everything that the result depends on; of a frozen base, only of a sample."""
    digest = hashlib.sha256(json.dumps(described).encode())
    for tree, most in [*((tree, None) for tree in trees), (frozen, _SAMPLED)]:
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            digest.update(f"{jax.tree_util.keystr(path)} {leaf.shape} {leaf.dtype}".encode())
            digest.update(np.ascontiguousarray(np.asarray(leaf.reshape(-1)[:most])).tobytes())
    return digest.hexdigest()[:16]
