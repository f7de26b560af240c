"""The gradients of single examples, clipped and added up."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxpfl.privacy.clipping import clip_factors

PyTree = Any
Batch = dict[str, jax.Array]
Loss = Callable[[PyTree, Batch], jax.Array]

# Gradients that are in memory at a time: 512 MB of float32.
_ENTRIES = 2**27


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
    size = mask_B.shape[0]
    entries = sum(leaf.size for leaf in jax.tree.leaves(params))
    at_once = next(
        n for n in range(size, 0, -1) if (size % n == 0 and n * entries <= _ENTRIES) or n == 1
    )

    def add(index, total):
        def part(array):
            return jax.lax.dynamic_slice_in_dim(array, index * at_once, at_once)

        gradients_B = jax.vmap(jax.grad(loss), (None, 0))(params, jax.tree.map(part, batch))
        factors_B, _, finite_B = jax.vmap(clip_factors, (0, None, None))(
            gradients_B, "flat", jnp.float32(clip_norm)
        )
        counts_B = finite_B & part(mask_B)

        def added(leaf_B, factor_B):
            shape = (at_once,) + (1,) * (leaf_B.ndim - 1)
            # A select and no product: NaN * 0 is NaN.
            kept_B = jnp.where(counts_B.reshape(shape), leaf_B, 0)
            return jnp.tensordot(factor_B, kept_B, 1)

        return jax.tree.map(lambda t, g, f: t + added(g, f), total, gradients_B, factors_B)

    zeros = jax.tree.map(jnp.zeros_like, params)
    return jax.lax.fori_loop(0, size // at_once, add, zeros)
