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

`clients.tapped_products` finds such layers in the model's program. The norms are those of the
very x and dy that are added up, not of a second computation, and no square overflows or is lost
before it is compared.

The gradients of all other weights are formed, for as many examples at a time as fit. Among them are
the weights that multiply several vectors of an example, as in a sequence. The norm of the sum of
their matrices could be had from inner products, but its terms may cancel, or differ so much in size
that they are lost, and then an example would seem shorter than it is.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxpfl.federated.clients.client import Batch, PyTree
from jaxpfl.federated.clients.local_training import OfModel
from jaxpfl.federated.clients.tapped_products import opened
from jaxpfl.models.base import Augmenting
from jaxpfl.privacy.clipping import Clip, clip_factors

Loss = Callable[[PyTree, Batch], jax.Array]

# Gradients of single examples that are in memory at a time: 512 MB of float32.
_ENTRIES = 2**27


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
        """Returns a sum like `params`; exactly 0 for a client without examples."""
        return total


def clipped_sum(
    loss: Loss, params: PyTree, batch: Batch, mask_B: jax.Array, clip_norm: float
) -> PyTree:
    """The sum of the clipped gradients of a batch's examples, a tree like `params`.

    Args:
      loss: `(params, example) -> scalar`, of one example of the batch.
      batch: columns [B, ...].
      mask_B: False for padding, which adds exactly 0.
      clip_norm: S, the L2 bound on one example's gradient. One that is not finite counts as 0.
    """
    leaves, structure = jax.tree.flatten(params)
    one = jax.tree.map(lambda column: jax.ShapeDtypeStruct(column.shape[1:], column.dtype), batch)
    products, others, opened_loss = opened(
        lambda leaves, example: loss(jax.tree.unflatten(structure, leaves), example), leaves, one
    )
    taps = [jnp.zeros(product.tap.shape, product.tap.dtype) for product in products]
    slopes = jax.grad(opened_loss, argnums=(0, 1), has_aux=True)

    def add(batch: Batch, mask_B: jax.Array, total: list[jax.Array]) -> list[jax.Array]:
        computed = jax.vmap(slopes, (None, None, 0))([leaves[i] for i in others], taps, batch)
        # Otherwise the gradients might be computed a second time, and be rounded in another way.
        (gradients, tap_slopes), factors = jax.lax.optimization_barrier(computed)
        pairs = [
            (factor.reshape(len(factor), -1), slope.reshape(len(slope), -1))
            for factor, slope in zip(factors, tap_slopes, strict=True)
        ]
        # A norm in place of a gradient: the norm of norms is that of all gradients together.
        norms = [_lengths(x_BxI) * _lengths(dy_BxO) for x_BxI, dy_BxO in pairs]
        factors_B, _, finite_B = jax.vmap(clip_factors, (0, None))(
            (gradients, norms), jnp.float32(clip_norm)
        )
        factor_B, *_ = jax.tree.leaves(factors_B)
        counts_B = finite_B & mask_B
        for i, gradient_B in zip(others, gradients, strict=True):
            counted_B = _counted(gradient_B, counts_B)
            total[i] = total[i] + jnp.tensordot(factor_B, counted_B, 1, precision="highest")
        for product, (x_BxI, dy_BxO) in zip(products, pairs, strict=True):
            x_BxI = _counted(x_BxI, counts_B) * factor_B[:, None]
            over_examples = (((0,), (0,)), ((), ()))
            added_IxO = jax.lax.dot_general(
                x_BxI, _counted(dy_BxO, counts_B), over_examples, precision="highest"
            )
            i = product.weight
            total[i] = total[i] + product.as_weight(added_IxO)
        return total

    # As many examples as fit, a divisor of the batch's size.
    size, entries = mask_B.shape[0], sum(leaves[i].size for i in others)
    fitting = (n for n in range(size, 0, -1) if size % n == 0 and n * entries <= _ENTRIES)
    at_once = next(fitting, 1)
    zeros = [jnp.zeros_like(leaf) for leaf in leaves]
    if at_once == mask_B.shape[0]:
        return jax.tree.unflatten(structure, add(batch, mask_B, zeros))

    def add_part(index: jax.Array, total: list[jax.Array]) -> list[jax.Array]:
        def part(array: jax.Array) -> jax.Array:
            return jax.lax.dynamic_slice_in_dim(array, index * at_once, at_once)

        return add(jax.tree.map(part, batch), part(mask_B), total)

    total = jax.lax.fori_loop(0, mask_B.shape[0] // at_once, add_part, zeros)
    return jax.tree.unflatten(structure, total)


def _lengths(rows_BxK: jax.Array) -> jax.Array:
    """Norms [B], NaN or infinite where a value is, without overflow of the squares."""
    largest_B = jnp.max(jnp.abs(rows_BxK), axis=1)
    divisor_B = jnp.where(largest_B > 0, largest_B, jnp.float32(1))
    return jnp.sqrt(jnp.sum(jnp.square(rows_BxK / divisor_B[:, None]), axis=1)) * largest_B


def _counted(array_B: jax.Array, counts_B: jax.Array) -> jax.Array:
    """Zero for examples that do not count. A select and no product: NaN * 0 is NaN."""
    return jnp.where(counts_B.reshape(-1, *(1,) * (array_B.ndim - 1)), array_B, 0)
