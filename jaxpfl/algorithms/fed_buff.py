"""FedBuff: clients of different speed send changes of older models, summed as they arrive.

Source: Nguyen, Malik, Zhan, Yousefpour, Rabbat, Malek, Huba 2022, "Federated Learning with Buffered
Asynchronous Aggregation", Algorithms 1 and 2, s(d) = 1 / sqrt(1 + d) as in section 5.

    for each round t:                                   a full buffer
        sample a cohort                                 the clients that arrive, each with prob. q
        for each client k in the cohort:
            d = its delay in rounds                     drawn by a public law
            send clip_S(s(d) (LocalTraining(w of round t - d) - that w))
        w = server optimiser(w, -release / n)

Time is simulated: which clients arrive follows from the plan, and how old their model is from
`delay`; neither depends on their examples. A client is in a sum at most once, and the older models
are releases themselves, so that a run costs what that of `fed_avg` costs.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxpfl import checks
from jaxpfl.algorithms import base
from jaxpfl.algorithms.fed_avg import used_clip_norm
from jaxpfl.federated.clients.client import Examples, PyTree, contribution
from jaxpfl.federated.clients.local_training import LocalTraining
from jaxpfl.federated.clients.personal import Passing
from jaxpfl.models.base import Model
from jaxpfl.privacy.plan import Plan


class FedBuffState(NamedTuple):
    """Everything a round starts from; public.

    Attributes:
      history: parameters with an axis [longest + 1] before their own: of this round first, then of
        those before it.
      clip_norm: S of this round, a float32 scalar.
    """

    history: PyTree
    server: optax.OptState
    clip_norm: jax.Array


@dataclasses.dataclass(frozen=True)
class DelayedTraining(Passing):
    """FedBuff's client function, on the parameters of several rounds."""

    training: LocalTraining
    delay: Callable[[jax.Array], jax.Array]

    def __call__(self, history: PyTree, examples: Examples, key: jax.Array) -> PyTree:
        """The change of older parameters, divided by sqrt(1 + delay)."""
        drawn, key = (jax.random.fold_in(key, number) for number in range(2))
        delay = jnp.clip(self.delay(drawn), 0, len(jax.tree.leaves(history)[0]) - 1)
        start = jax.tree.map(lambda leaf: leaf[delay], history)
        change = contribution(self.training, start, examples, key)
        weight = jax.lax.rsqrt(1 + delay.astype(jnp.float32))
        return jax.tree.map(lambda leaf: weight * leaf, change)


def fed_buff(
    model: Model,
    *,
    client: optax.GradientTransformation,
    server: optax.GradientTransformation,
    plan: Plan,
    longest: int,
    delay: Callable[[jax.Array], jax.Array] | None = None,
    start: Any = None,
    **settings: Any,
) -> base.Algorithm:
    """Returns FedBuff for `model` under `plan`.

    Args:
      model, server, plan, start: as for `fed_avg`.
      longest: the longest delay in rounds; as many older models are kept.
      delay: `(key) -> rounds`, an int32 scalar that is clipped to 0 .. `longest`. None draws all of
        these alike.
      settings: `cohort` and `execution`, as for `fed_avg`.

    Metrics of a step are those of `fed_avg`. `InputError` if an argument is of another kind or out
    of range.
    """
    base.require_parts(model, plan, client=client, server=server)
    models = checks.non_negative_int("longest", longest) + 1

    def uniform(key: jax.Array) -> jax.Array:
        return jnp.int32(models * jax.random.uniform(key))

    training = DelayedTraining(model, LocalTraining(model, client), delay or uniform)
    update = base.update_query(model, training, plan, **settings)
    first_params = base.initial_params(model, start)

    def init(key):
        params = first_params(key)
        history = jax.tree.map(lambda leaf: jnp.stack([leaf] * models), params)
        state = FedBuffState(history, server.init(params), jnp.float32(plan.clip_norm))
        return base.placed(update, state)

    def step(state, release, round):
        released = release(update, state.history, clip_norm=used_clip_norm(plan, state.clip_norm))
        params, server_state, norm = base.server_step(
            server, _newest(state), state.server, released.value, -plan.denominator
        )
        history = jax.tree.map(
            lambda older, new: jnp.concatenate([new[None], older[:-1]]), state.history, params
        )
        metrics = {"clip_norm": state.clip_norm, "update_norm": norm}
        return FedBuffState(history, server_state, released.clip_norm), metrics

    return base.Algorithm("fed_buff", init, step, (update,), _newest, model=model)


def _newest(state: FedBuffState) -> PyTree:
    return jax.tree.map(lambda leaf: leaf[0], state.history)
