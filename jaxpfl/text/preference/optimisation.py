"""Preference optimisation of a decoder's LoRA adapters by DPO, IPO or GRPO (`losses`).

The settings are those of POPri (Hou et al. 2025, appendix). The reference is the model without its
adapters, which shares the base arrays; the model that wrote the responses is the one that is given.
Their log-probabilities are computed once.
"""

import dataclasses
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpfl.checked import Checked, NonNegative, Positive, PositiveFraction, PositiveInt
from jaxpfl.errors import InputError
from jaxpfl.models import adapter_trees
from jaxpfl.models.base import PAD, Params, descended
from jaxpfl.models.decoder import lora
from jaxpfl.models.decoder.layers import packed_on_cpu
from jaxpfl.models.decoder.network import Decoder
from jaxpfl.progress import track
from jaxpfl.text.microbatches import dealt, filled, placed
from jaxpfl.text.preference import losses
from jaxpfl.text.preference.groups import Groups, Rows, lengths, rows, widths
from jaxpfl.text.preference.losses import Constants, Objective


@dataclass(frozen=True)
class PreferenceSettings(Checked):
    """How adapters are tuned; the defaults are POPri's.

    Attributes:
      loss: "dpo" or "ipo", of pairs, or "grpo", of all responses to a prompt.
      tau: the weight of staying close to the reference model; beta in the papers of DPO and GRPO.
      clip_ratio: epsilon in GRPO's paper: a token's ratio counts between 1 - clip_ratio and
        1 + clip_ratio.
      epochs: passes over the groups, each in a new order.
      batch_size: groups (pairs, with DPO and IPO) in a step.
      learning_rate, final_learning_rate: AdamW's, in the first and the last step of a cosine
        schedule.
      weight_decay: the adapters' decay, multiplied by the learning rate.
      clip_norm: the gradient's global L2 norm is clipped to this, unless it is None. (The paper
        gives no value; the trainer of the released code uses 1.)
      microbatch_size: groups on the accelerator at a time, each a row of the prompt and all of its
        responses; a batch's gradient is accumulated over its microbatches. None means the whole
        batch.
      multiple: rows are padded to a multiple of this many tokens.
      remat: stores one array per layer for the backward pass and recomputes the rest, see
        `Decoder.remat`: less memory, a third more time.
      dtype: "float32" or "bfloat16", of the tuning's computations, the reference's among them; None
        keeps the model's. Adapters are float32.
    """

    loss: Literal["dpo", "ipo", "grpo"] = "dpo"
    tau: Positive = 0.01
    clip_ratio: PositiveFraction = 0.2
    epochs: PositiveInt = 2
    batch_size: PositiveInt = 24
    learning_rate: Positive = 8e-7
    final_learning_rate: NonNegative = 3e-7
    weight_decay: NonNegative = 0.0
    clip_norm: Positive | None = 1.0
    microbatch_size: PositiveInt | None = None
    multiple: PositiveInt = 64
    remat: bool = False
    dtype: Literal["float32", "bfloat16"] | None = None

    def computing(self, model: Decoder) -> Decoder:
        compute = model.compute if self.dtype is None else self.dtype
        return dataclasses.replace(model, compute=compute, remat=model.remat or self.remat)

    @property
    def objective(self) -> Objective:
        return Objective(self.loss, self.tau, self.clip_ratio)

    def steps(self, groups: int) -> int:
        """The number of optimiser steps of a tuning on this many groups."""
        return self.epochs * -(-groups // self.batch_size)

    def optimizer(self, steps: int) -> optax.GradientTransformation:
        """AdamW for `steps` steps, without the clipping, which `descended` does."""
        schedule = optax.cosine_decay_schedule(
            self.learning_rate, max(steps - 1, 1), self.final_learning_rate / self.learning_rate
        )
        return optax.adamw(schedule, weight_decay=self.weight_decay)


class Carried(NamedTuple):
    """An optimiser that several tunings share: its state, and the steps of all of them."""

    state: Any
    steps: int


@dataclass(frozen=True)
class Tuned:
    """Tuned parameters and a record of the tuning.

    Attributes:
      record: for every step its "loss", and of pairs "margin" (mean of tau h over the batch, the
        difference of DPO's implicit rewards) and "accuracy" (share of pairs with h > 0), of GRPO
        "kl" and "clipped" (`losses.grpo`), all before the step; "padding", the share of places
        without a token; "shapes", the number of compiled programs; and "steps".
      optimizer: the optimiser's state after the last step.
    """

    params: Params
    record: dict[str, Any]
    optimizer: Any = field(repr=False)


def tune(
    model: Decoder,
    params: Params,
    groups: Groups,
    settings: PreferenceSettings = PreferenceSettings(),
    *,
    seed: int,
    carried: Carried | None = None,
    mesh: Mesh | None = None,
    progress: bool = False,
) -> Tuned:
    """Tunes the adapters of `model` on responses to prompts; the base does not change.

    The optimiser's state covers the adapters only, and is new in each call unless it is `carried`.
    A batch is drawn from all groups; its microbatches are formed by length, so that little of them
    is padding.

    Args:
      params: with adapters (`lora.attach`); they are not changed.
      groups: with advantages for GRPO, or else pairs.
      seed: decides their order; the same one gives the same parameters on the same hardware.
      carried: the optimiser of an earlier tuning, which is continued; it is not changed.
      mesh: the devices along its axis "data" share each microbatch. Parameters on the mesh keep
        their sharding; others are copied to all of its devices.

    Raises:
      InputError: the model has no adapters, the groups are not the loss's, or as
        `log_probabilities` raises it.
    """
    if model.lora is None:
        raise InputError("the model has no adapters to tune: attach them first (lora.attach)")
    responses = groups.responses_NxGxT.shape[1]
    if settings.loss == "grpo" and groups.advantage_NxG is None:
        raise InputError("loss 'grpo' needs groups with the responses' advantages, found none")
    if settings.loss != "grpo" and responses != 2:
        raise InputError(f"loss {settings.loss!r} needs pairs, 2 responses each, found {responses}")
    losses.check_fits(model, groups)
    model = settings.computing(model)
    params = placed(params, mesh)
    size = min(settings.microbatch_size or settings.batch_size, settings.batch_size)
    batching: Any = {"microbatch_size": size, "multiple": settings.multiple, "mesh": mesh}
    by = partial(losses.log_probabilities, groups=groups, progress=progress, **batching)
    written = by(model, params) if settings.loss == "grpo" else None
    constants = Constants(by(*lora.detach(model, params)), written, groups.advantage_NxG)

    adapters, base = adapter_trees.split(params)
    fixed = packed_on_cpu(base)
    # A copy, because the arguments of a step are donated.
    adapters = jax.tree.map(jnp.copy, adapters)
    steps = settings.steps(len(groups))
    scheduled = steps if carried is None else carried.steps
    if carried is None:
        state = jax.jit(settings.optimizer(steps).init)(adapters)
    else:
        state = jax.tree.map(jnp.copy, carried.state)
    state = jax.device_put(state, None if mesh is None else NamedSharding(mesh, PartitionSpec()))
    width_N, tokens_N = widths(groups, settings.multiple), np.sum(lengths(groups), axis=1)

    batches = []
    for epoch in range(settings.epochs):
        order = np.random.Generator(np.random.Philox(key=[seed, epoch])).permutation(len(groups))
        batches += np.split(order, range(settings.batch_size, len(groups), settings.batch_size))
    history, shapes, places, tokens = [], set(), 0, 0
    for batch in track(batches, "tuning", progress=progress):
        batch = batch[np.argsort(-width_N[batch], kind="stable")]
        total = None
        for start in range(0, len(batch), size):
            chosen = batch[start : start + size]
            indices, real_B = filled(chosen, size, mesh)
            width = int(np.max(width_N[chosen]))
            shapes.add((len(indices), width))
            places, tokens = places + len(indices) * width, tokens + int(np.sum(tokens_N[chosen]))
            weight_B = (real_B / len(batch)).astype(np.float32)
            here = jax.tree.map(lambda leaf, indices=indices: leaf[indices], constants)
            given = dealt((rows(groups[indices], width), here, weight_B), mesh)
            part = _gradients(model, settings.objective, adapters, fixed, *given)
            total = part if total is None else _sum(total, part)
        assert total is not None
        (_, metrics), gradients = total
        adapters, state = _descended(settings, scheduled, adapters, state, gradients)
        history.append(metrics)

    record: dict[str, Any] = {
        name: [float(entry[name]) for entry in jax.device_get(history)] for name in history[0]
    }
    record |= {"padding": 1 - tokens / places, "shapes": len(shapes), "steps": steps}
    return Tuned(adapter_trees.join(adapters, base), record, state)


@partial(jax.jit, static_argnames=("model", "objective"))
def _gradients(
    model: Decoder,
    objective: Objective,
    adapters: Params,
    base: Params,
    read: Rows,
    constants: Constants,
    weight_B: Array,
) -> tuple[tuple[Array, dict[str, Array]], Params]:
    def share(adapters: Params) -> tuple[Array, dict[str, Array]]:
        policy_BxGxT = losses.of_tokens(model, adapter_trees.join(adapters, base), read)
        measures = losses.measured(objective, policy_BxGxT, constants, read.target_BxGxT != PAD)
        metrics = {name: jnp.sum(weight_B * values_B) for name, values_B in measures.items()}
        return metrics["loss"], metrics

    return jax.value_and_grad(share, has_aux=True)(adapters)


_sum = jax.jit(partial(jax.tree.map, jnp.add), donate_argnums=0)


_descended = jax.jit(descended, static_argnums=(0, 1), donate_argnums=(2, 3))
