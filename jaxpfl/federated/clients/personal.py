"""Models, or parts of them, that clients keep for themselves and that are never sent.

Each is a client function of `fed_avg`: it releases clipped changes of the shared parameters, and
costs as much.
"""

import dataclasses
import re
from typing import Any, Literal, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from jaxpfl.checked import Checked, Fraction, NonNegative, NonNegativeInt
from jaxpfl.errors import InputError
from jaxpfl.federated.clients.client import Batch, Examples, PyTree, Stateful, contribution
from jaxpfl.federated.clients.local_training import LocalTraining, OfModel, gradient


@runtime_checkable
class Personalising(Stateful, Protocol):
    """A `Stateful` client function whose clients have models of their own."""

    def own_model(self, params: PyTree, own: PyTree, /) -> PyTree:
        """The model that a client uses, from the shared parameters and its own state."""


@dataclasses.dataclass(frozen=True)
class _WithOwnModel(LocalTraining):
    """FedAvg's client function, which also trains parameters v of the client's own.

    v begins as the first parameters that the client gets. Each batch is a step for both.
    """

    def _slope(self, start: PyTree, local: PyTree, own: PyTree, gradient_at: Any) -> PyTree:
        """The gradient of v, by `gradient_at(params)`, of a batch's loss.

        `start` and `local` are the shared parameters as broadcast, and before this step.
        """
        raise NotImplementedError

    def client_state(self, params: PyTree) -> PyTree:
        return self._given(params)[0]

    def init(self, params: PyTree, own: PyTree, key: jax.Array) -> PyTree:  # pyright: ignore
        return super().init(params, key), own, self.optimizer.init(own)

    def step(
        self, params: PyTree, state: PyTree, batch: Batch, mask: jax.Array, key: jax.Array
    ) -> PyTree:
        shared, own, optimizer_state = state
        (start, base), keys = self._given(params), jax.random.split(key)
        slope = self._slope(
            *(start, shared[0], own),
            lambda at: gradient(self.model, at, batch, mask, keys[0], base),
        )
        own, optimizer_state = self._stepped(params, own, slope, optimizer_state)
        return super().step(params, shared, batch, mask, keys[1]), own, optimizer_state

    def finish(self, params: PyTree, state: PyTree) -> PyTree:
        return super().finish(params, state[0])

    def keep(self, params: PyTree, state: PyTree, sent: PyTree) -> PyTree:
        return state[1]


@dataclasses.dataclass(frozen=True)
class Ditto(Checked, _WithOwnModel):
    """A model v of the client's own, which is pulled to the shared one.

    Source: Li, Hu, Beirami, Smith 2021, "Ditto: Fair and Robust Federated Learning Through
    Personalization", Algorithm 1. A step of v is on the batch's loss + `pull` / 2 ||v - w||^2,
    where w is the broadcast.
    """

    pull: NonNegative = 0.1

    def own_model(self, params: PyTree, own: PyTree) -> PyTree:
        return own

    def _slope(self, start: PyTree, local: PyTree, own: PyTree, gradient_at: Any) -> PyTree:
        return jax.tree.map(lambda g, v, w: g + self.pull * (v - w), gradient_at(own), own, start)


@dataclasses.dataclass(frozen=True)
class APFL(Checked, _WithOwnModel):
    """A mixture of a model v of the client's own and the shared one w: mix v + (1 - mix) w.

    Source: Deng, Kamani, Mahdavi 2020, "Adaptive Personalized Federated Learning", Algorithm 1,
    with a constant `mix`. A step of v is on the loss of the mixture with w as it is trained here.
    """

    mix: Fraction = 0.5

    def own_model(self, params: PyTree, own: PyTree) -> PyTree:
        return jax.tree.map(lambda v, w: self.mix * v + (1 - self.mix) * w, own, params)

    def _slope(self, start: PyTree, local: PyTree, own: PyTree, gradient_at: Any) -> PyTree:
        return jax.tree.map(lambda g: self.mix * g, gradient_at(self.own_model(local, own)))


@dataclasses.dataclass(frozen=True)
class Passing(OfModel):
    """A whole client function that passes over its batches several times.

    Each device must hold the whole model, because clients take different times.
    """

    def shardings(self, mesh: Mesh, params: PyTree) -> PyTree:
        # Only devices that share a copy of the model are asked for places.
        raise InputError(
            f"{type(self).__name__} needs devices that hold the whole model each, found "
            f"{mesh.shape['model']} that share a copy"
        )


@dataclasses.dataclass(frozen=True)
class BestFitting(Passing):
    """IFCA's client function: chooses one of the broadcast models by its loss, and trains it."""

    training: LocalTraining

    def __call__(self, models: PyTree, examples: Examples, key: jax.Array) -> PyTree:
        """Changes [k, ...], zeros but for those of the chosen model."""
        chosen = self.chosen(models, examples)
        start = jax.tree.map(lambda leaf: leaf[chosen], models)
        change = contribution(self.training, start, examples, key)
        return jax.tree.map(lambda all_, d: jnp.zeros_like(all_).at[chosen].set(d), models, change)

    def chosen(self, models: PyTree, examples: Examples) -> jax.Array:
        """The index of the model whose loss on the client's examples is the smallest."""

        def add(index: jax.Array, loss_K: jax.Array) -> jax.Array:
            batch = {name: column[index] for name, column in examples.batches.items()}
            sums = jax.vmap(lambda params: self.model.evaluate(params, batch, examples.mask[index]))
            return loss_K + sums(models)["loss_sum"]

        clusters = len(jax.tree.leaves(models)[0])
        return jnp.argmin(jax.lax.fori_loop(0, examples.steps, add, jnp.zeros(clusters)))


@dataclasses.dataclass(frozen=True)
class PersonalParts(Checked, Passing):
    """A part of the parameters that stays with the client, such as a head; the rest is shared.

    Source: Arivazhagan, Aggarwal, Singh, Choudhary 2019, "Federated Learning with Personalization
    Layers" (FedPer), Algorithms 1 and 2, where both parts are trained at once; Collins, Hassani,
    Mokhtari, Shakkottai 2021, "Exploiting Shared Representations for Personalized Federated
    Learning" (FedRep), Algorithm 1, where the own part is trained first.

    The own part begins as that of the first parameters. No change of it is sent, and no noise is
    added to it: on the server it stays as it began.

    Attributes:
      optimizer: any optax optimiser; its state starts anew in every pass.
      own: a regular expression that is found in the paths of the client's own parameters, such as
        "head" in "head/kernel".
      first: passes over all batches that train the own part alone, before one that trains the
        shared part alone (FedRep); 0 = one pass that trains both (FedPer).
    """

    optimizer: optax.GradientTransformation
    own: str
    first: NonNegativeInt = 0

    def client_state(self, params: PyTree) -> PyTree:
        return self._part(params, "own")

    def __call__(
        self, params: PyTree, own: PyTree, examples: Examples, key: jax.Array
    ) -> tuple[PyTree, PyTree]:
        """The change of the shared part, and the own part."""
        local = start = self.own_model(params, own)
        phases = ((self.first, "own"), (1, "shared")) if self.first else ((1, "both"),)
        for (passes, part), phase in zip(phases, jax.random.split(key, len(phases)), strict=True):
            optimizer = self.optimizer
            if part != "both":
                # The other part stays as it is.
                parts = {"own": optax.set_to_zero(), "shared": optax.set_to_zero()}
                optimizer = optax.multi_transform({**parts, part: optimizer}, self._labels)
            training = LocalTraining(self.model, optimizer)

            def one_pass(index: jax.Array, local: PyTree, phase=phase, training=training) -> PyTree:
                change = contribution(training, local, examples, jax.random.fold_in(phase, index))
                return jax.tree.map(jnp.add, local, change)

            local = jax.lax.fori_loop(0, passes, one_pass, local)
        change = jax.tree.map(jnp.subtract, local, start)
        return self._part(change, "shared"), self._part(local, "own")

    def own_model(self, params: PyTree, own: PyTree) -> PyTree:
        return jax.tree.map(lambda leaf, mine: leaf if mine is None else mine, params, own)

    def _labels(self, params: PyTree) -> PyTree:
        """The owner of each parameter: "own" or "shared"."""

        def label(path: Any, leaf: Any) -> str:
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            return "own" if re.search(self.own, name) else "shared"

        labels = jax.tree_util.tree_map_with_path(label, params)
        if len(owners := {*jax.tree.leaves(labels)}) != 2:
            matched = "all" if "own" in owners else "none"
            wanted = f"own must match some parameters and not all, {self.own!r} matches"
            raise InputError(f"{wanted} {matched}")
        return labels

    def _part(self, params: PyTree, part: Literal["own", "shared"]) -> PyTree:
        """The parameters of a part, and None in place of the others."""
        return jax.tree.map(
            lambda leaf, label: leaf if label == part else None, params, self._labels(params)
        )
