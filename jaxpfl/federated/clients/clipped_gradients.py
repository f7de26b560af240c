"""What a client does in DP-SGD: it adds up its examples' clipped gradients.

Source: Abadi et al. 2016, "Deep Learning with Differential Privacy", Algorithm 1:

    - sum_i g_i min(1, S / ||g_i||),      g_i the gradient of example i's loss

with a minus, so that it is a change of the parameters, like that of `LocalTraining`.

One with a NaN, an infinity or an overflow, and padding, add exactly 0, and the others what they
would. The gradients are computed by `federated.clients.example_gradients`.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxpfl.federated.clients.client import Batch
from jaxpfl.federated.clients.example_gradients import clipped_sum
from jaxpfl.federated.clients.local_training import OfModel
from jaxpfl.models.base import Augmenting
from jaxpfl.privacy.clipping import Clip

PyTree = Any


@dataclasses.dataclass(frozen=True)
class ClippedGradients(OfModel):
    """A client function by steps: minus the sum of the clipped gradients of its examples' losses.

    Attributes:
      model: the loss of an example is its `loss(params, batch, mask)` of a batch of that example
        alone. One that is `Augmenting` has its examples drawn anew.
      clip_norm: S, the L2 bound on one example's gradient.
    """

    clip_norm: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "clip_norm", Clip(self.clip_norm).norm)

    @property
    def example_bound(self) -> float:
        """S, see `BoundedByExample`; `clients.example_gradients` says how sums are rounded."""
        return self.clip_norm

    def init(self, params: PyTree, key: jax.Array) -> PyTree:
        """A sum of nothing, like `params`."""
        del key  # nothing is drawn
        return jax.tree.map(jnp.zeros_like, params)

    def step(
        self, params: PyTree, total: PyTree, batch: Batch, mask_B: jax.Array, key: jax.Array
    ) -> PyTree:
        """Adds one batch's clipped gradients."""

        def loss(params: PyTree, example: Batch) -> jax.Array:
            alone = {name: value[None] for name, value in example.items()}
            return self.model.loss(params, alone, jnp.ones((1,), bool))[0]

        if isinstance(self.model, Augmenting):
            batch = self.model.augment(batch, key)
        added = clipped_sum(loss, params, batch, mask_B, self.clip_norm)
        return jax.tree.map(jnp.subtract, total, added)

    def finish(self, params: PyTree, total: PyTree) -> PyTree:
        """Returns a sum like `params`; exactly 0 for a client without examples."""
        del params
        return total
