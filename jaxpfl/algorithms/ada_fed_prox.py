"""AdaFedProx: FedProx whose mu follows the loss.

Source: Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith 2020, "Federated Optimization in Heterogeneous
Networks", Algorithm 2, with mu as in appendix C.3.3.

    for each round t:
        sample a cohort                                 each client with probability q
        for each client k in the cohort:
            y = local steps from w on  L_k(y) + mu / 2 ||y - w||^2
            send clip_S(y - w)  and  clip_C(L_k(w) - L_k(w of the round before))
        w = server optimiser(w, - release of y - w / n)
        mu = mu + 0.1 if the loss rose, mu - 0.1, but not below 0, if it fell 5 times in a row

The rise of the loss is a private number, and a charged part of the release (`TwoParts`). A client
compares both models on the same examples: cohorts differ by more than rounds do, and a rise can be
clipped to a smaller norm than a loss. The mean rise has noise of deviation z C / (n sqrt(a)), in
nats. Where that exceeds what a round changes, every other round seems to rise, and mu grows.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxpfl.algorithms import base
from jaxpfl.federated.clients.client import Batch, PyTree
from jaxpfl.federated.clients.local_training import LocalTraining, TwoParts
from jaxpfl.models.base import Model
from jaxpfl.privacy.plan import Plan


class AdaFedProxState(NamedTuple):
    """Everything a round starts from; public.

    Attributes:
      params, before: w, and that of the round before.
      mu: float32 scalar.
      falls: int32 scalar, the number of falls of the loss in a row.
    """

    params: PyTree
    before: PyTree
    server: optax.OptState
    mu: jax.Array
    falls: jax.Array


@dataclasses.dataclass(frozen=True)
class ComparedTraining(LocalTraining):
    """AdaFedProx's client function by steps, on (w, that of the round before, mu)."""

    _: dataclasses.KW_ONLY
    parts: TwoParts

    def init(self, broadcast: PyTree, key: jax.Array) -> PyTree:
        """The state of `LocalTraining`, and sums of losses and of targets."""
        return super().init(broadcast[0], key), jnp.zeros(2)

    def step(
        self, broadcast: PyTree, state: PyTree, batch: Batch, mask: jax.Array, key: jax.Array
    ) -> PyTree:
        """One step, and how the losses of both models on the batch differ."""
        (params, before, mu), (trained, sums) = broadcast, state
        new, old = (self.model.evaluate(model, batch, mask) for model in (params, before))
        more = jax.tree.map(lambda y, w: mu * (y - w), trained[0], params)
        trained = super().step(params, trained, batch, mask, key, more)
        return trained, sums + jnp.stack([new["loss_sum"] - old["loss_sum"], new["count"]])

    def finish(self, broadcast: PyTree, state: PyTree) -> PyTree:
        """The change of the parameters and the rise of the mean loss, clipped and scaled."""
        trained, (rise, count) = state
        return self.parts.sent(super().finish(broadcast[0], trained), rise / jnp.maximum(count, 1))


def ada_fed_prox(
    model: Model,
    *,
    client: optax.GradientTransformation,
    server: optax.GradientTransformation,
    plan: Plan,
    rise_clip: float,
    rise_share: float = 0.1,
    start: Any = None,
    **settings: Any,
) -> base.Algorithm:
    """Returns AdaFedProx for `model` under `plan`, whose clip norm S bounds the clients' changes.

    Args:
      model, server, plan, start: as for `fed_avg`; the clip is constant.
      rise_clip: C, the bound on the rise of a client's mean loss in a round, in nats.
      rise_share: a, between 0 and 1.
      settings: `cohort` and `execution`, as for `fed_avg`.

    Metrics of a step, public: `update_norm` as in `fed_avg`, `rise`, and `mu` as it was used, which
    begins at 0. `InputError` if an argument is of another kind or out of range, or the clip is
    adaptive.
    """
    base.require_parts(model, plan, client=client, server=server)
    parts = TwoParts.of(plan, "rise", rise_clip, rise_share)
    training = ComparedTraining(model, client, parts=parts)
    update = base.update_query(model, training, plan, **settings)
    first_params = base.initial_params(model, start)

    def init(key):
        params = first_params(key)
        before = jax.tree.map(jnp.array, params)
        start = server.init(params), jnp.float32(0), jnp.int32(0)
        return base.placed(update, AdaFedProxState(params, before, *start))

    def step(state, release, round):
        sent = release(update, (state.params, state.before, state.mu)).value
        before = jax.tree.map(jnp.array, state.params)
        divisor = -plan.denominator * parts.scales[0]
        params, server_state, norm = base.server_step(
            server, state.params, state.server, sent[0], divisor
        )
        rise = sent[1] / (plan.denominator * parts.scales[1])
        metrics = {"update_norm": norm, "rise": rise, "mu": state.mu}
        return AdaFedProxState(params, before, server_state, *_next(state, rise)), metrics

    return base.Algorithm("ada_fed_prox", init, step, (update,), lambda s: s.params, model=model)


@jax.jit
def _next(state: AdaFedProxState, rise: jax.Array) -> tuple[jax.Array, jax.Array]:
    """mu and the falls in a row after a round."""
    falls = jnp.where(rise < 0, state.falls + 1, 0)
    lower = jnp.where(falls == 5, jnp.float32(0.1), jnp.float32(0))
    mu = jnp.maximum(state.mu + jnp.where(rise > 0, jnp.float32(0.1), -lower), 0)
    return mu, falls % 5
