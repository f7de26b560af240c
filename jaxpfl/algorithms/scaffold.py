"""SCAFFOLD: federated averaging in which each client corrects the drift of its own steps.

Source: Karimireddy, Kale, Mohri, Reddi, Stich, Suresh 2020, "SCAFFOLD: Stochastic Controlled
Averaging for Federated Learning", Algorithm 1, with option II for the control variates.

    for each round t:
        sample a cohort                                 each client with probability q
        for each client i in the cohort, with its variate c_i, zero at first:
            y = x
            for each of its K batches:  y = y - eta (g_i(y) - c_i + c)
            send clip_S(y - x)  and  clip_C(dc_i),  dc_i = (x - y) / (K eta) - c
            c_i = c_i + clip_C(dc_i)                    what was sent, so that the sums agree
        x = server optimiser(x, - release of y - x / n)
        c = c + release of dc_i / N

A client sends both parts in ONE contribution of norm S at most: the change times sqrt(1 - a), and
the variate's times sqrt(a) S / C, where a is `variate_share`. It costs what that of `fed_avg`
costs; of a plan with noise multiplier z, its parts have z / sqrt(1 - a) and z / sqrt(a).
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from jaxpfl import checks
from jaxpfl.algorithms.base import Algorithm, initial_params, require_parts, server_step
from jaxpfl.data.cohort import CohortSpec
from jaxpfl.errors import InputError
from jaxpfl.federated.clients.client import Batch
from jaxpfl.federated.clients.local_training import OfModel, gradient
from jaxpfl.federated.release.query import Execution, Query
from jaxpfl.models.base import Model
from jaxpfl.privacy.clipping import clip_factors
from jaxpfl.privacy.plan import Plan

PyTree = Any


class Parts(NamedTuple):
    """Of parameters and of variates: what clients get, and what they send."""

    params: PyTree
    variate: PyTree


class ScaffoldState(NamedTuple):
    """Everything a round starts from: x, c and the server optimiser's state; public."""

    params: PyTree
    variate: PyTree
    server: optax.OptState


@dataclasses.dataclass(frozen=True)
class CorrectedTraining(OfModel):
    """SCAFFOLD's client function by steps, which keeps c_i of each client.

    Attributes:
      learning_rate: eta.
      bounds: S and C, the L2 norms that the parts are clipped to.
      scales: what the clipped parts are multiplied by.
    """

    learning_rate: float
    bounds: Parts
    scales: Parts

    def client_state(self, broadcast: Parts) -> PyTree:
        """c_i of a client that was never asked."""
        return jax.tree.map(jnp.zeros_like, broadcast.variate)

    def init(self, broadcast: Parts, variate: PyTree, key: jax.Array) -> PyTree:
        """y, c_i and the number of steps."""
        del key
        return broadcast.params, variate, jnp.float32(0)

    def step(
        self, broadcast: Parts, state: PyTree, batch: Batch, mask: jax.Array, key: jax.Array
    ) -> PyTree:
        """One corrected step of SGD."""
        y, variate, steps = state
        slope = gradient(self.model, y, batch, mask, key)
        y = jax.tree.map(
            lambda y, g, own, all_: y - self.learning_rate * (g - own + all_),
            *(y, slope, variate, broadcast.variate),
        )
        return y, variate, steps + 1

    def finish(self, broadcast: Parts, state: PyTree) -> Parts:
        """Both changes, clipped and scaled; exactly 0 for a client without examples."""
        y, _, steps = state
        change = jax.tree.map(jnp.subtract, y, broadcast.params)
        length = jnp.maximum(steps, 1) * self.learning_rate
        moved = jax.tree.map(lambda d, c: -d / length - c, change, broadcast.variate)
        moved = jax.tree.map(lambda leaf: jnp.where(steps > 0, leaf, 0), moved)
        sent = []
        for part, bound, scale in zip((change, moved), self.bounds, self.scales, strict=True):
            factors, _, _ = clip_factors(part, jnp.float32(bound))
            sent.append(jax.tree.map(lambda d, f, s=scale: d * f * s, part, factors))
        return Parts(*sent)

    def keep(self, broadcast: Parts, state: PyTree, sent: Parts) -> PyTree:
        """c_i, moved by what was sent."""
        del broadcast
        return jax.tree.map(lambda own, d: own + d / self.scales.variate, state[1], sent.variate)


def scaffold(
    model: Model,
    *,
    learning_rate: float,
    server: optax.GradientTransformation,
    plan: Plan,
    variate_clip: float,
    variate_share: float = 0.5,
    cohort: CohortSpec | None = None,
    execution: Execution | None = None,
    start: Any = None,
) -> Algorithm:
    """Returns SCAFFOLD for `model` under `plan`, whose clip norm S bounds the clients' changes.

    Args:
      model, server, plan, cohort, execution, start: as for `fed_avg`; the clip is constant.
      learning_rate: eta, of the clients' SGD.
      variate_clip: C, the L2 bound on the change of a client's variate, which has the size of a
        gradient.
      variate_share: a, between 0 and 1.

    Raises:
      InputError: an argument is of another kind or out of range, or the clip is adaptive.

    Metrics of a step, public: `update_norm`, the L2 norm of the noisy mean change of parameters.
    """
    require_parts(model, plan, server=server)
    rate = checks.positive("learning_rate", learning_rate)
    share = checks.open_fraction("variate_share", variate_share)
    bounds = Parts(plan.clip_norm, checks.positive("variate_clip", variate_clip))
    if plan.adaptive_clip is not None:
        raise InputError("scaffold needs a plan with a constant clip norm, found an adaptive one")
    scales = Parts(math.sqrt(1 - share), math.sqrt(share) * bounds.params / bounds.variate)
    execution = Execution() if execution is None else execution
    cohort = CohortSpec(batch_size=16, max_examples=256) if cohort is None else cohort
    client = CorrectedTraining(model, rate, bounds, scales)
    columns = None if model.columns is None else tuple(model.columns)
    update = Query("update", client, plan, cohort, columns=columns, execution=execution)
    everywhere = NamedSharding(execution.devices.local_mesh, PartitionSpec())
    first_params = initial_params(model, start)

    def init(key):
        params = first_params(key)
        variate = jax.tree.map(jnp.zeros_like, params)
        return jax.device_put(ScaffoldState(params, variate, server.init(params)), everywhere)

    def step(state, release, round):
        del round
        sent = release(update, Parts(state.params, state.variate)).value
        divisor = -plan.denominator * scales.params
        stepped = server_step(server, state.params, state.server, sent.params, divisor)
        variate = _moved(state.variate, sent.variate, plan.population * scales.variate)
        params, server_state, update_norm = stepped
        return ScaffoldState(params, variate, server_state), {"update_norm": update_norm}

    return Algorithm("scaffold", init, step, (update,), lambda state: state.params)


@jax.jit
def _moved(variate: PyTree, release: PyTree, divisor: float) -> PyTree:
    return jax.tree.map(lambda c, d: c + d / divisor, variate, release)
