"""What a client does in federated averaging: some steps of SGD on its own examples."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from jaxpfl.federated.clients.client import Batch, of_one_client
from jaxpfl.federated.mesh import shardings
from jaxpfl.models import adapter_trees
from jaxpfl.models.base import Augmenting, Checking, Model, traced_platform

PyTree = Any

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
        """Where the broadcast, and a contribution, is on a mesh: as the model's own rule says."""
        return shardings(self.model, mesh, params)


@dataclasses.dataclass(frozen=True)
class LocalTraining(OfModel):
    """A client function by steps: trains from the broadcast parameters and returns the change.

    The steps of the packed cohort include all epochs and their shuffles (`data.CohortSpec.epochs`).
    The optimiser's state starts anew in every round, as in McMahan et al. 2017, Algorithm 1
    (ClientUpdate).

    Attributes:
      model: its `loss(params, batch, mask)` is the mean over a batch's real examples. One that is
        `Augmenting` has its examples drawn anew in every step.
      optimizer: any optax optimiser.
      adapters: whether the broadcast is a pair, LoRA adapters and the base that they belong to
        (`adapter_trees.split`); only the adapters are trained.
    """

    optimizer: optax.GradientTransformation
    adapters: bool = False

    def init(self, params: PyTree, key: jax.Array) -> PyTree:
        """The broadcast parameters, and the optimiser's state."""
        del key  # nothing is drawn
        local = params[0] if self.adapters else params
        return local, self.optimizer.init(local)

    def step(
        self, params: PyTree, state: PyTree, batch: Batch, mask: jax.Array, key: jax.Array
    ) -> PyTree:
        """One step of the optimiser on one batch."""
        local, optimizer_state = state

        def loss(local, batch, mask):
            whole = adapter_trees.join(local, params[1]) if self.adapters else local
            return self.model.loss(whole, batch, mask)[0]

        if isinstance(self.model, Augmenting):
            batch = self.model.augment(batch, key)
        gradients = _of_leading_rows(jax.grad(loss), local, batch, mask)
        # Optax mixes integer and float types in some places; the results are still float32.
        with jax.numpy_dtype_promotion("standard"):
            updates, optimizer_state = self.optimizer.update(gradients, optimizer_state, local)
        return optax.apply_updates(local, updates), optimizer_state

    def finish(self, params: PyTree, state: PyTree) -> PyTree:
        """Returns params_after - params_before; exactly 0 for a client without examples."""
        return jax.tree.map(jnp.subtract, state[0], params[0] if self.adapters else params)


def _of_leading_rows(
    gradient: Callable[..., PyTree], local: PyTree, batch: Batch, mask: jax.Array
) -> PyTree:
    """`gradient(local, batch, mask)`, computed on as many leading rows as hold an example.

    That is rounded up to a half or a quarter of the batch. A client's last batch, often its only
    one, has fewer examples than slots, and on a CPU the time of a step grows with its rows. Clients
    that are computed side by side, as on accelerators, have whole batches.
    """
    size = mask.shape[0]
    widths = [-(-size // share) for share in (4, 2) if size // share >= _FEWEST_ROWS]
    if not widths or traced_platform() != "cpu":
        return gradient(local, batch, mask)

    def leading(width: int) -> Callable[..., PyTree]:
        def of(local: PyTree, batch: Batch, mask: jax.Array) -> PyTree:
            rows = {name: column[:width] for name, column in batch.items()}
            return gradient(local, rows, mask[:width])

        return of

    used = of_one_client(jnp.max(jnp.where(mask, jnp.arange(1, size + 1), 0)))
    width = jnp.sum(used > jnp.array(widths), dtype=jnp.int32)
    return jax.lax.switch(width, [leading(rows) for rows in (*widths, size)], local, batch, mask)
