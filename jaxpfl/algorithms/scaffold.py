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

A client sends both parts in ONE contribution of norm S at most (`TwoParts`), which costs what that
of `fed_avg` costs.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxpfl import checks
from jaxpfl.algorithms import base
from jaxpfl.federated.clients.client import Batch, PyTree
from jaxpfl.federated.clients.local_training import LocalTraining, TwoParts
from jaxpfl.models.base import Model
from jaxpfl.privacy.plan import Plan


class Parts(NamedTuple):
    """Parameters and variates, as clients get them, and their changes, as clients send them."""

    params: PyTree
    variate: PyTree


class ScaffoldState(NamedTuple):
    """Everything a round starts from: x, c and the server optimiser's state; public."""

    params: PyTree
    variate: PyTree
    server: optax.OptState


@dataclasses.dataclass(frozen=True)
class CorrectedTraining(LocalTraining):
    """SCAFFOLD's client function, plain SGD of rate eta, which keeps c_i of each client."""

    _: dataclasses.KW_ONLY
    learning_rate: float
    parts: TwoParts

    def client_state(self, broadcast: Parts) -> PyTree:
        """c_i of a client that was never asked."""
        return jax.tree.map(jnp.zeros_like, broadcast.variate)

    def init(self, broadcast: Parts, variate: PyTree, key: jax.Array) -> PyTree:  # pyright: ignore
        """The state of `LocalTraining`, c_i, and the number of steps."""
        return super().init(broadcast.params, key), variate, jnp.float32(0)

    def step(
        self, broadcast: Parts, state: PyTree, batch: Batch, mask: jax.Array, key: jax.Array
    ) -> PyTree:
        """One corrected step of SGD."""
        trained, variate, steps = state
        more = jax.tree.map(jnp.subtract, broadcast.variate, variate)
        trained = super().step(broadcast.params, trained, batch, mask, key, more)
        return trained, variate, steps + 1

    def finish(self, broadcast: Parts, state: PyTree) -> Parts:
        """Both changes, clipped and scaled; exactly 0 for a client without examples."""
        trained, _, steps = state
        change = super().finish(broadcast.params, trained)
        length = jnp.maximum(steps, 1) * self.learning_rate
        moved = jax.tree.map(lambda d, c: -d / length - c, change, broadcast.variate)
        moved = jax.tree.map(lambda leaf: jnp.where(steps > 0, leaf, 0), moved)
        return Parts(*self.parts.sent(change, moved))

    def keep(self, broadcast: Parts, state: PyTree, sent: Parts) -> PyTree:
        """c_i, moved by what was sent."""
        scale = self.parts.scales[1]
        return jax.tree.map(lambda own, d: own + d / scale, state[1], sent.variate)


def scaffold(
    model: Model,
    *,
    learning_rate: float,
    server: optax.GradientTransformation,
    plan: Plan,
    variate_clip: float,
    variate_share: float = 0.5,
    start: Any = None,
    **settings: Any,
) -> base.Algorithm:
    """Returns SCAFFOLD for `model` under `plan`, whose clip norm S bounds the clients' changes.

    Args:
      model, server, plan, start: as for `fed_avg`; the clip is constant.
      learning_rate: eta, of the clients' SGD.
      variate_clip: C, the L2 bound on the change of a client's variate, which has the size of a
        gradient.
      variate_share: a, between 0 and 1.
      settings: `cohort` and `execution`, as for `fed_avg`.

    Metrics of a step, public: `update_norm`, the L2 norm of the noisy mean change of parameters.
    `InputError` if an argument is of another kind or out of range, or the clip is adaptive.
    """
    base.require_parts(model, plan, server=server)
    rate = checks.positive("learning_rate", learning_rate)
    parts = TwoParts.of(plan, "variate", variate_clip, variate_share)
    client = CorrectedTraining(model, optax.sgd(rate), learning_rate=rate, parts=parts)
    update = base.update_query(model, client, plan, **settings)
    first_params = base.initial_params(model, start)

    def init(key):
        params = first_params(key)
        variate = jax.tree.map(jnp.zeros_like, params)
        return base.placed(update, ScaffoldState(params, variate, server.init(params)))

    def step(state, release, round):
        sent = release(update, Parts(state.params, state.variate)).value
        divisor = -plan.denominator * parts.scales[0]
        stepped = base.server_step(server, state.params, state.server, sent.params, divisor)
        variate = _moved(state.variate, sent.variate, plan.population * parts.scales[1])
        params, server_state, update_norm = stepped
        return ScaffoldState(params, variate, server_state), {"update_norm": update_norm}

    return base.Algorithm("scaffold", init, step, (update,), lambda s: s.params, model=model)


@jax.jit
def _moved(variate: PyTree, release: PyTree, divisor: float) -> PyTree:
    return jax.tree.map(lambda c, d: c + d / divisor, variate, release)
