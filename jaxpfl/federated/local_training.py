"""What a client does in federated averaging: some steps of SGD on its own examples."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from jaxpfl.federated.client import Examples
from jaxpfl.federated.mesh import shardings
from jaxpfl.models.base import Augmenting, Checking, Model, traced_platform
from jaxpfl.models.decoder import lora

PyTree = Any

# A batch is not computed on fewer rows than this: each width is compiled.
_FEWEST_ROWS = 8


@dataclasses.dataclass(frozen=True)
class LocalTraining:
    """A client function: trains from the broadcast parameters and returns the change.

    The steps of the packed cohort include all epochs and their shuffles (`data.CohortSpec.epochs`).
    The optimiser's state starts anew in every round, as in McMahan et al. 2017, Algorithm 1
    (ClientUpdate).

    Attributes:
      model: its `loss(params, batch, mask)` is the mean over a batch's real examples. One that is
        `Augmenting` has its examples drawn anew in every step.
      optimizer: any optax optimiser.
      adapters: whether the broadcast is a pair, LoRA adapters and the base that they belong to
        (`lora.split`); only the adapters are trained.
    """

    model: Model
    optimizer: optax.GradientTransformation
    adapters: bool = False

    def check(self, columns: Mapping[str, Any]) -> None:
        """Refuses a model of one's own that does not fit the columns (`models.OwnModel.check`)."""
        if isinstance(self.model, Checking):
            self.model.check(columns)

    def shardings(self, mesh: Mesh, params: PyTree) -> PyTree:
        """Where the broadcast, or a change of it, is on a mesh: as the model's own rule says."""
        return shardings(self.model, mesh, params)

    def __call__(self, params: PyTree, examples: Examples, key: jax.Array) -> PyTree:
        """Returns params_after - params_before; exactly 0 for a client without examples."""
        params, base = params if self.adapters else (params, None)

        def loss(params, batch, mask):
            whole = lora.join(params, base) if self.adapters else params
            return self.model.loss(whole, batch, mask)[0]

        def step(index, carry):
            local, optimizer_state = carry
            batch = {name: column[index] for name, column in examples.batches.items()}
            mask = examples.mask[index]
            if isinstance(self.model, Augmenting):
                batch = self.model.augment(batch, jax.random.fold_in(key, index))
            gradients = _of_leading_rows(jax.grad(loss), local, batch, mask)
            # Optax mixes integer and float types in some places; the results are still float32.
            with jax.numpy_dtype_promotion("standard"):
                updates, new_state = self.optimizer.update(gradients, optimizer_state, local)
            # In a step of padding alone, momentum and weight decay would move the parameters.
            real = jnp.any(mask)
            updates = jax.tree.map(lambda u: jnp.where(real, u, jnp.zeros_like(u)), updates)
            new_state = jax.tree.map(
                lambda new, old: jnp.where(real, new, old), new_state, optimizer_state
            )
            return optax.apply_updates(local, updates), new_state

        # A traced bound: padding steps are not run.
        trained, _ = jax.lax.fori_loop(
            0, examples.steps, step, (params, self.optimizer.init(params))
        )
        return jax.tree.map(jnp.subtract, trained, params)


def _of_leading_rows(
    gradient: Callable[..., PyTree], local: PyTree, batch: dict[str, jax.Array], mask: jax.Array
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
        def of(local: PyTree, batch: dict[str, jax.Array], mask: jax.Array) -> PyTree:
            rows = {name: column[:width] for name, column in batch.items()}
            return gradient(local, rows, mask[:width])

        return of

    used = _of_one_client(jnp.max(jnp.where(mask, jnp.arange(1, size + 1), 0)))
    width = jnp.sum(used > jnp.array(widths), dtype=jnp.int32)
    return jax.lax.switch(width, [leading(rows) for rows in (*widths, size)], local, batch, mask)


@jax.custom_batching.custom_vmap
def _of_one_client(number: jax.Array) -> jax.Array:
    """The number; of clients that run side by side, one that is larger than any batch.

    If they shared the widest one's width, a client would change how the others' updates are
    rounded, and so move the sum by more than its own clipped contribution.
    """
    return number


@_of_one_client.def_vmap
def _of_several_clients(
    axis_size: int, in_batched: list[bool], numbers: jax.Array
) -> tuple[jax.Array, bool]:
    del axis_size, in_batched
    return jnp.full((), jnp.iinfo(numbers.dtype).max, numbers.dtype), False
