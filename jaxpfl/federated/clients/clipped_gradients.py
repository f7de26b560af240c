"""The client of DP-SGD: it adds up its examples' clipped gradients.

Source: Abadi et al. 2016, "Deep Learning with Differential Privacy", Algorithm 1:

    - sum_i g_i min(1, S / ||g_i||),      g_i the gradient of example i's loss

with a minus, so that it is a change of the parameters, like that of `LocalTraining`.

A gradient with a NaN, an infinity or an overflow, and padding, add exactly 0, and change nothing of
the others. Most of these gradients are never formed.

A layer y = x W of a vector x [I] has the gradient x' dy of one example, a matrix that is larger
than x and dy together. Its norm follows from these (Goodfellow 2015, "Efficient per-example
gradient computations"), and so does the sum of all examples' gradients times their clip factors
c_b, which needs no second backward pass (Bu et al. 2023, "Differentially private optimization on
large model at small cost", book-keeping):

    ||x' dy|| = ||x|| ||dy||
    sum_b c_b x_b' dy_b                                       one product over all b

The norms are those of the very x and dy that are added up, not of a second computation, and no
square overflows or is lost before it is compared.

All others are formed, and measured: ghost norms (Li et al. 2022, "Large language models can be
strong differentially private learners", section 4) may cancel, and one product over all rows of all
examples rounds more than the noise is for. On a CPU those of an embedding or of a layer over a
sequence are formed for one example at a time, from small arrays of many (`clients.cut_gradients`).
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxpfl.federated.clients.client import Batch, PyTree
from jaxpfl.federated.clients.cut_gradients import cut_gradient
from jaxpfl.federated.clients.local_training import OfModel
from jaxpfl.models.base import Augmenting, traced_platform
from jaxpfl.privacy.clipping import Clip, clip_factors

Loss = Callable[[PyTree, Batch], jax.Array]

# Numbers of gradients of single examples that are in memory at a time: 512 MB of float32, and on a
# CPU 16 MB, which a core's cache holds in part.
_ENTRIES, _ENTRIES_OF_CPU = 2**27, 2**22


@dataclasses.dataclass(frozen=True)
class ClippedGradients(OfModel):
    """A client function by steps: minus the sum of the clipped gradients of its examples' losses.

    The loss of an example is the model's, of a batch of that example alone. A model that is
    `Augmenting` has its examples drawn anew. `clip_norm` is S, the L2 bound on one gradient.
    """

    clip_norm: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "clip_norm", Clip(self.clip_norm).norm)

    @property
    def example_bound(self) -> float:
        return self.clip_norm

    def init(self, params: PyTree, key: jax.Array) -> PyTree:
        return jax.tree.map(jnp.zeros_like, params)

    def step(
        self, params: PyTree, total: PyTree, batch: Batch, mask_B: jax.Array, key: jax.Array
    ) -> PyTree:
        def loss(params: PyTree, example: Batch) -> jax.Array:
            alone = {name: value[None] for name, value in example.items()}
            return self.model.loss(params, alone, jnp.ones((1,), bool))[0]

        if isinstance(self.model, Augmenting):
            batch = self.model.augment(batch, key)
        added = clipped_sum(loss, params, batch, mask_B, self.clip_norm)
        return jax.tree.map(jnp.subtract, total, added)

    def finish(self, params: PyTree, total: PyTree) -> PyTree:
        return total


def clipped_sum(
    loss: Loss, params: PyTree, batch: Batch, mask_B: jax.Array, clip_norm: float
) -> PyTree:
    """The sum of the clipped gradients of a batch's examples, a tree like `params`.

    Args:
      loss: `(params, example) -> scalar`, of one example of the batch, whose columns are [B, ...].
      mask_B: False for padding, which adds exactly 0.
      clip_norm: S, the L2 bound on one example's gradient. One that is not finite counts as 0.
    """
    leaves, structure = jax.tree.flatten(params)
    one = jax.tree.map(lambda column: jax.ShapeDtypeStruct(column.shape[1:], column.dtype), batch)
    on_cpu = traced_platform() == "cpu"
    gradient = cut_gradient(
        lambda leaves, example: loss(jax.tree.unflatten(structure, leaves), example),
        leaves,
        one,
        late=on_cpu,
    )

    def add(batch: Batch, mask_B: jax.Array, total: list[jax.Array]) -> list[jax.Array]:
        computed = jax.vmap(gradient.first, (None, 0))(leaves, batch)
        # Otherwise the gradients might be computed a second time, and be rounded in another way.
        formed, factors, arrays = jax.lax.optimization_barrier(computed)
        pairs = [(x.reshape(len(x), -1), dy.reshape(len(dy), -1)) for x, dy in factors]
        # A norm in place of a gradient: the norm of norms is that of all gradients together.
        norms = [_lengths(x_BxI) * _lengths(dy_BxO) for x_BxI, dy_BxO in pairs]

        def add_one(total: list[jax.Array], example: Any) -> tuple[list[jax.Array], Any]:
            formed, norms, arrays, is_example = example
            late = jax.lax.optimization_barrier(gradient.second(arrays))
            factors, _, finite = clip_factors((formed, norms, late), jnp.float32(clip_norm))
            factor, *_ = jax.tree.leaves(factors)
            counts = finite & is_example
            shares = [jnp.where(counts, factor * leaf, 0) for leaf in late]
            return jax.tree.map(jnp.add, total, shares), (factor, counts)

        examples = (formed, norms, arrays, mask_B)
        if gradient.late:
            sums = [total[i] for i in gradient.late]
            sums, (factor_B, counts_B) = jax.lax.scan(add_one, sums, examples)
            for i, added in zip(gradient.late, sums, strict=True):
                total[i] = added
        else:
            factor_B, counts_B = jax.vmap(lambda example: add_one([], example)[1])(examples)
        for i, gradient_B in zip(gradient.formed, formed, strict=True):
            counted_B = _counted(gradient_B, counts_B)
            total[i] = total[i] + jnp.tensordot(factor_B, counted_B, 1, precision="highest")
        for product, (x_BxI, dy_BxO) in zip(gradient.products, pairs, strict=True):
            x_BxI = _counted(x_BxI, counts_B) * factor_B[:, None]
            over_examples = (((0,), (0,)), ((), ()))
            added_IxO = jax.lax.dot_general(
                x_BxI, _counted(dy_BxO, counts_B), over_examples, precision="highest"
            )
            i = product.weight
            total[i] = total[i] + (added_IxO.T if product.transposed else added_IxO)
        return total

    # As many examples as fit, a divisor of the batch's size.
    size, room = mask_B.shape[0], _ENTRIES_OF_CPU if on_cpu else _ENTRIES
    fitting = (n for n in range(size, 0, -1) if size % n == 0 and n * gradient.entries <= room)
    at_once = next(fitting, 1)
    zeros = [jnp.zeros_like(leaf) for leaf in leaves]
    if at_once == size:
        return jax.tree.unflatten(structure, add(batch, mask_B, zeros))

    def add_part(index: jax.Array, total: list[jax.Array]) -> list[jax.Array]:
        part = partial(
            jax.lax.dynamic_slice_in_dim, start_index=index * at_once, slice_size=at_once
        )
        return add(jax.tree.map(part, batch), part(mask_B), total)

    total = jax.lax.fori_loop(0, size // at_once, add_part, zeros)
    return jax.tree.unflatten(structure, total)


def _lengths(rows_BxK: jax.Array) -> jax.Array:
    """Norms [B], NaN or infinite where a value is, without overflow of the squares."""
    largest_B = jnp.max(jnp.abs(rows_BxK), axis=1)
    divisor_B = jnp.where(largest_B > 0, largest_B, jnp.float32(1))
    return jnp.sqrt(jnp.sum(jnp.square(rows_BxK / divisor_B[:, None]), axis=1)) * largest_B


def _counted(array_B: jax.Array, counts_B: jax.Array) -> jax.Array:
    """Zero for examples that do not count. A select and no product: NaN * 0 is NaN."""
    return jnp.where(counts_B.reshape(-1, *(1,) * (array_B.ndim - 1)), array_B, 0)
