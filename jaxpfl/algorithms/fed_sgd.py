"""DP-SGD over federated examples: each single example is protected, whoever holds it.

Source: Abadi, Chu, Goodfellow, McMahan, Mironov, Talwar, Zhang 2016, "Deep Learning with
Differential Privacy", Algorithm 1.

    for each round t:
        sample examples                               each with probability q, from all clients
        for each sampled example i:
            g_i = gradient of its loss at params      ClippedGradients
            g_i = g_i min(1, S / ||g_i||)
        release = sum_i g_i + N(0, z^2 S^2)
        params  = server optimiser(params, release / n)

n is the planned number of examples in a round, q N, a public constant: how many were drawn is
private.

The promise is weaker than that of `fed_avg`: it protects an example, and not a person who holds
many of them. Use it where one example is really all that needs protection.
"""

import math
from typing import Any, NamedTuple

import jax
import optax
from jax.sharding import NamedSharding, PartitionSpec

from jaxpfl.algorithms.base import UNTRAINED, Algorithm, initial_params, require_parts, server_step
from jaxpfl.data.cohort import CohortSpec
from jaxpfl.errors import InputError
from jaxpfl.federated.clients.clipped_gradients import ClippedGradients
from jaxpfl.federated.release.query import Execution, Query
from jaxpfl.models.base import Model
from jaxpfl.privacy.plan import Plan


class FedSGDState(NamedTuple):
    """Everything a round starts from; public.

    Attributes:
      params: of the model.
      server: the optimiser's state.
    """

    params: Any
    server: optax.OptState


def fed_sgd(
    model: Model,
    *,
    server: optax.GradientTransformation,
    plan: Plan,
    cohort: CohortSpec | None = None,
    execution: Execution | None = None,
    start: Any = None,
) -> Algorithm:
    """Returns DP-SGD for `model` under `plan`, whose unit is the example.

    Args:
      model: what is trained: one of `jaxpfl.models`, or your own, `models.from_functions`.
      server: the optimiser, e.g. `optax.sgd(0.5)` or `optax.adam(1e-3)`.
      plan: privacy of the whole run, with `unit="example"`: its population counts examples, and
        its clip norm bounds one example's gradient.
      cohort: how many examples are computed side by side (`batch_size`) and how many make a block
        that one device computes (`max_examples`); default equal numbers, at most 32, so that the
        plan's examples fill as many blocks on each device. Neither changes what is computed, beyond
        rounding.
      execution: devices and chunk; sums are compensated.
      start: PUBLIC parameters to start from, such as prefinetuned ones; None draws them by
        `model.init`.

    Raises:
      InputError: an argument is of another kind, the plan's unit is the client, or `start` is not a
        tree of the model's parameters.

    Metrics of a step, all public: `update_norm` (float32, L2 norm of the noisy mean gradient).
    """
    require_parts(model, plan, server=server)
    if plan.unit != "example":
        raise InputError(
            "fed_sgd protects single examples: it needs a plan with unit = 'example', found "
            f"{plan.unit!r} (fed_avg protects clients)"
        )
    execution = Execution() if execution is None else execution
    gradient = Query(
        "gradient",
        ClippedGradients(model, plan.clip_norm),
        plan,
        _blocks(plan, execution.replicas) if cohort is None else cohort,
        columns=None if model.columns is None else tuple(model.columns),
        execution=execution,
    )
    everywhere = NamedSharding(execution.devices.local_mesh, PartitionSpec())
    first_params = initial_params(model, start)

    def init(key):
        params = first_params(key)
        return jax.device_put(FedSGDState(params, server.init(params)), everywhere)

    def step(state, release, round):
        del round
        found = release(gradient, state.params)
        params, server_state, update_norm = server_step(
            server, state.params, state.server, found.value, plan.denominator
        )
        return FedSGDState(params, server_state), {"update_norm": update_norm}

    begins_as = UNTRAINED if start is None else "before the rounds"
    return Algorithm("fed_sgd", init, step, (gradient,), lambda state: state.params, begins_as)


def _blocks(plan: Plan, replicas: int) -> CohortSpec:
    """Blocks of at most 32 examples that those of a round fill.

    These are seldom more than two standard deviations above the planned number. With more in a
    block, an example takes longer: what lies between two layers leaves a core's cache.
    """
    planned = plan.denominator
    most = planned + 2 * math.sqrt(planned * (1 - planned / plan.population))
    blocks = replicas * math.ceil(most / (32 * replicas))
    size = math.ceil(most / blocks)
    return CohortSpec(batch_size=size, max_examples=size)
