"""FedDyn: federated averaging in which each client moves its own regulariser, so that all agree.

Source: Acar, Zhao, Matas Navarro, Mattina, Whatmough, Saligrama 2021, "Federated Learning Based on
Dynamic Regularization", Algorithm 1.

    for each round t:
        sample a cohort                                 each client with probability q
        for each client k in the cohort, with its linear term g_k, zero at first:
            y = local steps from w on  L_k(y) - <g_k, y> + alpha / 2 ||y - w||^2
            send d_k = clip_S(y - w)
            g_k = g_k - alpha d_k                       what was sent, so that h is the mean of g_k
        h = h - alpha release / N
        w = server optimiser(w, -release / n + h / alpha)

A round releases one noisy sum of clipped changes, as in `fed_avg`, at the same cost. A client sends
nothing of its linear term. h adds up the releases, so that its noise grows with rounds.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxpfl import checks
from jaxpfl.algorithms.base import Algorithm, require_parts
from jaxpfl.algorithms.fed_avg import fed_avg
from jaxpfl.federated.clients.client import Batch, PyTree
from jaxpfl.federated.clients.local_training import LocalTraining
from jaxpfl.models.base import Model
from jaxpfl.privacy.plan import Plan


@dataclasses.dataclass(frozen=True)
class Regularised(LocalTraining):
    """FedDyn's client function by steps, which keeps g_k."""

    _: dataclasses.KW_ONLY
    alpha: float

    def client_state(self, params: PyTree) -> PyTree:
        """g_k of a client that was never asked."""
        return jax.tree.map(jnp.zeros_like, self._given(params)[0])

    def init(self, params: PyTree, own: PyTree, key: jax.Array) -> PyTree:  # pyright: ignore
        """The state of `LocalTraining`, and g_k."""
        return super().init(params, key), own

    def step(
        self, params: PyTree, state: PyTree, batch: Batch, mask: jax.Array, key: jax.Array
    ) -> PyTree:
        """One step on the regularised loss."""
        (trained, own), start = state, self._given(params)[0]
        more = jax.tree.map(lambda y, w, g: self.alpha * (y - w) - g, trained[0], start, own)
        return super().step(params, trained, batch, mask, key, more), own

    def finish(self, params: PyTree, state: PyTree) -> PyTree:
        """The change of the parameters."""
        return super().finish(params, state[0])

    def keep(self, params: PyTree, state: PyTree, sent: PyTree) -> PyTree:
        """g_k, moved by the sent change."""
        return jax.tree.map(lambda g, d: g - self.alpha * d, state[1], sent)


def fed_dyn(
    model: Model,
    *,
    client: optax.GradientTransformation,
    server: optax.GradientTransformation,
    plan: Plan,
    alpha: float,
    **settings: Any,
) -> Algorithm:
    """Returns FedDyn for `model` under `plan`.

    Args:
      model, server, plan, settings: as for `fed_avg`; the paper's server is `optax.sgd(1.0)`.
      alpha: positive.

    State and metrics are those of `fed_avg`; its server's state begins with h / alpha. `InputError`
    if an argument is of another kind or out of range.
    """
    require_parts(model, plan, client=client, server=server)
    alpha, adapters = checks.positive("alpha", alpha), settings.get("frozen") is not None
    training = Regularised(model, client, adapters, alpha=alpha)
    server = _corrected(server, plan.denominator / plan.population)
    made = fed_avg(model, client=training, server=server, plan=plan, **settings)
    return made._replace(name="fed_dyn")


@functools.cache  # because a round is compiled once for the same optimiser
def _corrected(server: optax.GradientTransformation, share: float) -> optax.GradientTransformation:
    """The server on -release / n + h / alpha, of which it gets the first; the share is n / N."""

    def init(params: PyTree) -> PyTree:
        return optax.tree.zeros_like(params)

    def update(updates: PyTree, state: PyTree, params: PyTree = None) -> tuple[PyTree, PyTree]:
        drift = jax.tree.map(lambda h, g: h + share * g, state, updates)
        return jax.tree.map(jnp.add, updates, drift), drift

    return optax.chain(optax.GradientTransformation(init, update), server)
