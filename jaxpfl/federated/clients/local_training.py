"""The client of federated averaging: some steps of SGD on its own examples.

Algorithms that only differ in a client's loss, or in how it transforms its change before the clip,
are settings of `LocalTraining`: docs/algorithms.md has one for each.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpfl import checks
from jaxpfl.checked import Checked, NonNegative
from jaxpfl.errors import InputError
from jaxpfl.federated.clients.client import Batch, PyTree, of_one_client
from jaxpfl.federated.mesh import shardings
from jaxpfl.models import adapter_trees
from jaxpfl.models.base import Augmenting, Checking, Model, traced_platform, updated
from jaxpfl.privacy.clipping import clip_factors
from jaxpfl.privacy.plan import Plan

# A batch is not computed on fewer rows than this: each width is compiled.
_FEWEST_ROWS = 8


@dataclasses.dataclass(frozen=True)
class OfModel:
    """A client function by steps of a model, whose check and whose place on a mesh it has."""

    model: Model

    def check(self, columns: Mapping[str, Any]) -> None:
        """Refuses a model of one's own that does not fit the columns (`models.OwnModel.check`)."""
        if isinstance(self.model, Checking):
            self.model.check(columns)

    def shardings(self, mesh: Mesh, params: PyTree) -> PyTree:
        """The places of broadcast and contribution on a mesh, by the model's own rule."""
        return shardings(self.model, mesh, params)


@dataclasses.dataclass(frozen=True)
class Proximal(Checked):
    """FedProx's penalty, `mu / 2 ||params - broadcast||^2` (Li et al. 2020, Algorithm 2)."""

    mu: NonNegative

    def __call__(self, params: PyTree, broadcast: PyTree) -> jax.Array:
        apart = jax.tree.map(jnp.subtract, params, broadcast)
        return self.mu / 2 * optax.tree.norm(apart, squared=True)


def per_step(change: PyTree, steps: jax.Array, key: jax.Array) -> PyTree:
    """FedNova's normalisation: the change divided by the client's own number of steps.

    That is d_i of Wang et al. 2020, section 4, for plain SGD; tau_eff, which must be public, is a
    part of the server's learning rate. A client without steps sends zeros.
    """
    return jax.tree.map(lambda leaf: leaf / jnp.maximum(steps, 1), change)


class Scheduled(NamedTuple):
    """A broadcast whose optimiser's steps are multiplied by a factor, a float32 scalar."""

    params: PyTree
    factor: Any


@dataclasses.dataclass(frozen=True)
class LocalTraining(OfModel):
    """A client function by steps: trains from the broadcast parameters and returns the change.

    The steps of the packed cohort include all epochs and their shuffles (`data.CohortSpec.epochs`).
    The optimiser's state starts anew in every round, as in McMahan et al. 2017, Algorithm 1
    (ClientUpdate).

    Attributes:
      model: its `loss(params, batch, mask)` is the mean over a batch's real examples. One that is
        `Augmenting` has its examples drawn anew in every step.
      adapters: whether the broadcast is a pair, LoRA adapters and the base that they belong to
        (`adapter_trees.split`); only the adapters are trained.
      penalty: `(params, broadcast) -> scalar` of trained parameters, which is added to the loss of
        each step, such as `Proximal(0.1)`; None adds nothing.
      transform: `(change, steps, key) -> contribution`, of one client and before its clip, such as
        `per_step`. `steps` is a float32 scalar, the client's own number of steps; `key` is its own
        in this round. None sends the change.
      schedule: `(rounds done) -> factor` of every step of the optimiser, any schedule of optax. The
        factor is broadcast, so that one program serves all rounds. None is a factor of 1.
    """

    optimizer: optax.GradientTransformation
    adapters: bool = False
    penalty: Callable[[PyTree, PyTree], jax.Array] | None = None
    transform: Callable[[PyTree, jax.Array, jax.Array], PyTree] | None = None
    schedule: optax.Schedule | None = None

    def scheduled(self, params: PyTree, round: int) -> PyTree:
        """The broadcast of a round, from 1: the parameters, and the factor if there is one."""
        if self.schedule is None:
            return params
        return Scheduled(params, jnp.asarray(self.schedule(round - 1), jnp.float32))

    def shardings(self, mesh: Mesh, params: PyTree) -> PyTree:
        """As `OfModel`; the factor of a broadcast is on all devices."""
        if not isinstance(params, Scheduled):
            return super().shardings(mesh, params)
        places = super().shardings(mesh, params.params)
        return Scheduled(places, NamedSharding(mesh, PartitionSpec()))

    def _given(self, broadcast: PyTree) -> tuple[PyTree, PyTree]:
        """The trained parameters of a broadcast, and the base of adapters, or None."""
        whole = broadcast.params if isinstance(broadcast, Scheduled) else broadcast
        return whole if self.adapters else (whole, None)

    def init(self, params: PyTree, key: jax.Array) -> PyTree:
        local, _ = self._given(params)
        # Words, because a step hands the state on, and a key may be used but once.
        drawn = self.transform and (jnp.int32(0), jax.random.bits(key, (2,), jnp.uint32))
        return local, self.optimizer.init(local), drawn

    def step(
        self,
        params: PyTree,
        state: PyTree,
        batch: Batch,
        mask: jax.Array,
        key: jax.Array,
        more: PyTree = None,
    ) -> PyTree:
        """One step of the optimiser on one batch, to whose gradient `more` is added."""
        local, optimizer_state, drawn = state
        start, base = self._given(params)
        gradients = gradient(self.model, local, batch, mask, key, base)
        if self.penalty is not None:
            pull = jax.grad(self.penalty)(local, start)
            gradients = jax.tree.map(jnp.add, gradients, pull)
        if more is not None:
            gradients = jax.tree.map(jnp.add, gradients, more)
        drawn = drawn and (drawn[0] + 1, drawn[1])
        return *self._stepped(params, local, gradients, optimizer_state), drawn

    def _stepped(
        self, broadcast: PyTree, local: PyTree, gradients: PyTree, optimizer_state: PyTree
    ) -> tuple[PyTree, PyTree]:
        """The parameters and the optimiser's state after one of its steps."""
        updates, optimizer_state = updated(self.optimizer, gradients, optimizer_state, local)
        if isinstance(broadcast, Scheduled):
            updates = jax.tree.map(lambda leaf: broadcast.factor * leaf, updates)
        return optax.apply_updates(local, updates), optimizer_state

    def finish(self, params: PyTree, state: PyTree) -> PyTree:
        """Returns params_after - params_before; exactly 0 for a client without examples."""
        local, _, drawn = state
        change = jax.tree.map(jnp.subtract, local, self._given(params)[0])
        if self.transform is None:
            return change
        key = jax.random.wrap_key_data(drawn[1], impl="threefry2x32")
        sent = self.transform(change, drawn[0].astype(jnp.float32), key)
        expected, shapes = (jax.tree.map(jnp.shape, tree) for tree in (change, sent))
        if shapes != expected:
            raise InputError(f"transform must return shapes like {expected}, found {shapes}")
        return sent


@dataclasses.dataclass(frozen=True)
class TwoParts:
    """How two parts, each clipped to a norm of its own, share a contribution of norm S at most.

    The first is clipped to S and multiplied by sqrt(1 - a), the second to C and by sqrt(a) S / C.
    Their sum costs what that of the plan costs; in their own clip norms, the noise of the parts is
    z / sqrt(1 - a) and z / sqrt(a) for a plan with noise multiplier z.
    """

    bounds: tuple[float, float]  # S and C
    share: float  # a

    @property
    def scales(self) -> tuple[float, float]:
        """The factors of the clipped parts."""
        first, second = self.bounds
        return math.sqrt(1 - self.share), math.sqrt(self.share) * first / second

    @classmethod
    def of(cls, plan: Plan, name: str, second: float, share: float) -> "TwoParts":
        """The parts of a plan whose clip norm is S."""
        if plan.clip.adaptive is not None:
            raise InputError(
                f"a {name} beside the change needs a plan with a constant clip norm, found an "
                "adaptive one"
            )
        bound = checks.positive(f"{name}_clip", second)
        return cls((plan.clip_norm, bound), checks.open_fraction(f"{name}_share", share))

    def sent(self, first: PyTree, second: PyTree) -> tuple[PyTree, PyTree]:
        """The parts of one client, clipped and scaled."""
        return self._scaled(first, 0), self._scaled(second, 1)

    def _scaled(self, part: PyTree, place: int) -> PyTree:
        factors, _, _ = clip_factors(part, jnp.float32(self.bounds[place]))
        return jax.tree.map(lambda d, f: d * f * self.scales[place], part, factors)


def gradient(
    model: Model, local: PyTree, batch: Batch, mask: jax.Array, key: jax.Array, base: PyTree = None
) -> PyTree:
    """The gradient of a batch's mean loss, of examples that an `Augmenting` model draws anew.

    `local` are parameters of the model, or adapters, whose `base` is then given.
    """

    def loss(local, batch, mask):
        whole = local if base is None else adapter_trees.join(local, base)
        return model.loss(whole, batch, mask)[0]

    def of_leading(width: int, local: PyTree, batch: Batch, mask: jax.Array) -> PyTree:
        rows = {name: column[:width] for name, column in batch.items()}
        return jax.grad(loss)(local, rows, mask[:width])

    if isinstance(model, Augmenting):
        batch = model.augment(batch, key)
    # On as many leading rows as hold an example, rounded up to a half or a quarter of the batch. A
    # client's last batch, often its only one, has fewer examples than slots, and on a CPU the time
    # of a step grows with its rows. Clients that are computed side by side, as on accelerators,
    # have whole batches.
    size = mask.shape[0]
    widths = [-(-size // share) for share in (4, 2) if size // share >= _FEWEST_ROWS]
    if not widths or traced_platform() != "cpu":
        return jax.grad(loss)(local, batch, mask)
    used = of_one_client(jnp.max(jnp.where(mask, jnp.arange(1, size + 1), 0)))
    width = jnp.sum(used > jnp.array(widths), dtype=jnp.int32)
    branches = [partial(of_leading, rows) for rows in (*widths, size)]
    return jax.lax.switch(width, branches, local, batch, mask)
