"""Models that clients keep for themselves, trained beside the one that they share."""

import dataclasses
from typing import Any

import jax

from jaxpfl import checks
from jaxpfl.federated.clients.client import Batch
from jaxpfl.federated.clients.local_training import LocalTraining, gradient

PyTree = Any


@dataclasses.dataclass(frozen=True)
class Ditto(LocalTraining):
    """FedAvg's client function, which also trains a model v of the client's own.

    Source: Li, Hu, Beirami, Smith 2021, "Ditto: Fair and Robust Federated Learning Through
    Personalization", Algorithm 1. v begins as the first parameters w that the client gets. For each
    batch it takes a step on the batch's loss + `pull` / 2 ||v - w||^2. It is never sent.

    Attributes:
      pull: lambda.
    """

    pull: float = 0.1

    def __post_init__(self) -> None:
        object.__setattr__(self, "pull", checks.non_negative("pull", self.pull))

    def client_state(self, params: PyTree) -> PyTree:
        """v of a client that was never asked."""
        return self._given(params)[0]

    def init(self, params: PyTree, own: PyTree, key: jax.Array) -> PyTree:  # pyright: ignore
        """The state of `LocalTraining`, v, and the state of its optimiser."""
        return super().init(params, key), own, self.optimizer.init(own)

    def step(
        self, params: PyTree, state: PyTree, batch: Batch, mask: jax.Array, key: jax.Array
    ) -> PyTree:
        """One step of both models on one batch."""
        shared, own, optimizer_state = state
        (start, base), keys = self._given(params), jax.random.split(key)
        slope = gradient(self.model, own, batch, mask, keys[0], base)
        slope = jax.tree.map(lambda g, v, w: g + self.pull * (v - w), slope, own, start)
        own, optimizer_state = self._stepped(params, own, slope, optimizer_state)
        return super().step(params, shared, batch, mask, keys[1]), own, optimizer_state

    def finish(self, params: PyTree, state: PyTree) -> PyTree:
        """The change of the shared parameters."""
        return super().finish(params, state[0])

    def keep(self, params: PyTree, state: PyTree, sent: PyTree) -> PyTree:
        """v."""
        del params, sent
        return state[1]
