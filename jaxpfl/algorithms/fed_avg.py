"""DP-FedAvg: federated averaging with user-level differential privacy.

Source: McMahan, Ramage, Talwar, Zhang 2018, "Learning Differentially Private Recurrent Language
Models", Algorithm 1; the server optimiser as in Reddi et al. 2021, "Adaptive Federated
Optimization", Algorithm 1; restated by Augenstein et al. 2020, Algorithm 2.

    for each round t:
        sample a cohort                               each client with probability q
        for each client k in the cohort:
            delta_k = LocalTraining(params)           E epochs of SGD on its own examples
            delta_k = delta_k min(1, S / ||delta_k||)
        release = sum_k delta_k + N(0, z^2 S^2)
        params  = server optimiser(params, -release / n)

The sum is unweighted and n is the planned cohort size, a public constant.
"""

import contextlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxpfl.algorithms import base
from jaxpfl.data.cohort import CohortSpec
from jaxpfl.errors import InputError
from jaxpfl.federated.clients.client import ClientFn, Stepping
from jaxpfl.federated.clients.local_training import LocalTraining
from jaxpfl.federated.clients.optimizers import require_optimizer
from jaxpfl.federated.mesh import shardings
from jaxpfl.federated.release.query import Execution
from jaxpfl.models import adapter_trees
from jaxpfl.models.base import Model
from jaxpfl.privacy.plan import Plan


class FedAvgState(NamedTuple):
    """Everything a round starts from; public.

    Attributes:
      params: of the model, or of its adapters alone where these are trained.
      clip_norm: float32 scalar, S of the next round.
    """

    params: Any
    server: optax.OptState
    clip_norm: jax.Array


def fed_avg(
    model: Model,
    *,
    client: optax.GradientTransformation | ClientFn,
    server: optax.GradientTransformation,
    plan: Plan,
    cohort: CohortSpec | None = None,
    execution: Execution | None = None,
    start: Any = None,
    frozen: Any = None,
) -> base.Algorithm:
    """Returns DP-FedAvg for `model` under `plan`.

    Args:
      model: one of `jaxpfl.models`, or your own, `models.from_functions`.
      client: the clients' optimiser, e.g. `optax.sgd(0.5)`; or a client function, which is
        `federated.LocalTraining` with settings, as in FedProx and FedNova, or one of your own that
        gets the parameters (with `frozen`, both) and returns their change, or None in place of the
        change of a parameter that is to stay as it is.
      server: the server's optimiser, e.g. `optax.sgd(1.0, momentum=0.9, nesterov=True)`; plain
        averaging is `optax.sgd(1.0)`.
      plan: privacy of the whole run.
      cohort: how clients' examples are capped and batched; default batches of 16, at most 256
        examples, one epoch.
      execution: devices, chunk and accumulator.
      start: PUBLIC parameters to start from, such as prefinetuned ones; None draws them by
        `model.init`.
      frozen: PUBLIC base of a model with LoRA adapters, which is not trained. `start` then holds
        the adapters (`adapter_trees.split`), and clients send changes of these alone.

    Raises:
      InputError: an argument is of another kind, `start` is not a tree of the model's parameters,
        or is missing beside `frozen`.

    Metrics of a step, all public: `clip_norm` (float32, as used in this round) and `update_norm`
    (float32, L2 norm of the noisy mean update).
    """
    if isinstance(client, optax.GradientTransformation):
        client = LocalTraining(model, client, adapters=frozen is not None)
    elif not isinstance(client, LocalTraining) and _is_no_client(client):
        require_optimizer("client", client)
    base.require_parts(model, plan, server=server)
    if isinstance(client, LocalTraining) and client.adapters != (frozen is not None):
        raise InputError("a LocalTraining must have adapters = True with `frozen`, and only then")
    update = base.update_query(model, client, plan, cohort, execution)
    if frozen is None:
        first_params = base.initial_params(model, start)
    elif start is None:
        raise InputError("start must hold the adapters of the frozen model, found none")
    else:
        first_params = base.copied(start)
        mesh = update.execution.devices.local_mesh
        frozen = jax.device_put(frozen, shardings(model, mesh, frozen))

    def params_of(state):
        return state.params if frozen is None else adapter_trees.join(state.params, frozen)

    def init(key):
        params = first_params(key)
        state = FedAvgState(params, base.server_state(server, params), jnp.float32(plan.clip_norm))
        return base.placed(update, state)

    def step(state, release, round):
        broadcast = state.params if frozen is None else (state.params, frozen)
        if isinstance(client, LocalTraining):
            broadcast = client.scheduled(broadcast, round)
        released = release(update, broadcast, clip_norm=used_clip_norm(plan, state.clip_norm))
        change = _whole(state.params, released.value)
        params, server_state, update_norm = base.server_step(
            server, state.params, state.server, change, -plan.denominator
        )
        metrics = {"clip_norm": state.clip_norm, "update_norm": update_norm}
        return FedAvgState(params, server_state, released.clip_norm), metrics

    begins_as = base.UNTRAINED if start is None else "before the rounds"
    return base.Algorithm("fed_avg", init, step, (update,), params_of, begins_as, model)


def _is_no_client(value: Any) -> bool:
    """Whether it is no client function: neither steps nor callable, a class, or one of optax."""
    callables = isinstance(value, Stepping) or callable(value)
    return not callables or isinstance(value, type) or str(value.__module__).startswith("optax")


def _whole(params: Any, change: Any) -> Any:
    """The change, with zeros where it has None."""
    shapes, sent = (jax.tree.map(jnp.shape, tree) for tree in (params, change))
    whole = None
    with contextlib.suppress(ValueError):  # another structure
        whole = jax.tree.map(lambda p, d: jnp.zeros_like(p) if d is None else d, params, change)
    if jax.tree.map(jnp.shape, whole) != shapes:
        raise InputError(f"client must return a change shaped like {shapes}, found {sent}")
    return whole


def used_clip_norm(plan: Plan, clip_norm: jax.Array) -> jax.Array | None:
    """Returns the clip norm that a round names: None where the plan's is constant."""
    return None if plan.clip.adaptive is None else clip_norm
