"""The gradients of single examples, clipped and added up, mostly without forming any of them.

A layer y = x W, x [N, I], has the gradient x' dy of one example, a matrix that is larger than x and
dy together. Its norm follows from these (Goodfellow 2015, "Efficient per-example gradient
computations"; for N > 1, Li et al. 2022, "Large language models can be strong differentially
private learners", section 4), and so does the sum of all examples' gradients times their clip
factors c_b, which needs no second backward pass (Bu et al. 2023, "Differentially private
optimization on large model at small cost", book-keeping):

    ||x' dy||^2 = sum_nm (x_n . x_m) (dy_n . dy_m)          = ||x||^2 ||dy||^2 for N = 1
    sum_b c_b x_b' dy_b                                       one product over all b and n

`federated.tapped_products` finds such layers in the model's program. The gradients of all other
weights are formed, for as many examples at a time as fit.

The norms are those of the very x and dy that are added up, not of a second computation, and no
square overflows or is lost before it is compared. For N > 1 the terms of the sum may cancel, where
rounding is relative to P = sum_n ||x_n|| ||dy_n||, and an example could be made so that it seems
short and is not. There the norm counts as sqrt(||.||^2 + 1e-5 P^2), which clips an ordinary example
at most some hundredths of a percent shorter, so that what rounding adds to the sum stays below a
thousandth of the clip norm; and by this thousandth, examples are clipped to less than it.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxpfl.federated.tapped_products import Product, opened
from jaxpfl.privacy.clipping import clip_factors

PyTree = Any
Batch = dict[str, jax.Array]
Loss = Callable[[PyTree, Batch], jax.Array]

# Gradients of single examples that are in memory at a time: 512 MB of float32.
_ENTRIES = 2**27
_CANCELLED = 1e-5
_ADDED_BY_ROUNDING = 1e-3


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
        lambda leaves, example: loss(jax.tree.unflatten(structure, leaves), example),
        leaves,
        one,
        _is_cheaper,
    )
    if any(product.sizes[0] > 1 for product in products):
        clip_norm *= 1 - _ADDED_BY_ROUNDING
    taps = [jnp.zeros(product.tap.shape, product.tap.dtype) for product in products]
    slopes = jax.grad(opened_loss, argnums=(0, 1), has_aux=True)

    def add(batch: Batch, mask_B: jax.Array, total: list[jax.Array]) -> list[jax.Array]:
        (gradients, tap_slopes), factors = jax.vmap(slopes, (None, None, 0))(
            [leaves[i] for i in others], taps, batch
        )
        pairs = [
            (jax.vmap(product.rows)(factor), jax.vmap(product.slopes)(slope))
            for product, factor, slope in zip(products, factors, tap_slopes, strict=True)
        ]
        # A norm in place of a gradient: the norm of norms is that of all gradients together.
        norms = [_norms(x_BxNxI, dy_BxNxO) for x_BxNxI, dy_BxNxO in pairs]
        (factor_B, *_), _, finite_B = jax.vmap(lambda held: _flat_factors(held, clip_norm))(
            (gradients, norms)
        )
        counts_B = finite_B & mask_B
        for i, gradient_B in zip(others, gradients, strict=True):
            total[i] = total[i] + _weighted(_kept(gradient_B, counts_B), factor_B)
        for product, (x_BxNxI, dy_BxNxO) in zip(products, pairs, strict=True):
            x_BxNxI = _kept(x_BxNxI, counts_B) * factor_B[:, None, None]
            both = ((0, 1), (0, 1))
            added_IxO = jax.lax.dot_general(
                x_BxNxI, _kept(dy_BxNxO, counts_B), (both, ((), ())), precision="highest"
            )
            i = product.weight
            total[i] = total[i] + product.as_weight(added_IxO)
        return total

    at_once = _at_once(mask_B.shape[0], sum(leaves[i].size for i in others))
    zeros = [jnp.zeros_like(leaf) for leaf in leaves]
    if at_once == mask_B.shape[0]:
        return jax.tree.unflatten(structure, add(batch, mask_B, zeros))

    def add_part(index: jax.Array, total: list[jax.Array]) -> list[jax.Array]:
        def part(array: jax.Array) -> jax.Array:
            return jax.lax.dynamic_slice_in_dim(array, index * at_once, at_once)

        return add(jax.tree.map(part, batch), part(mask_B), total)

    total = jax.lax.fori_loop(0, mask_B.shape[0] // at_once, add_part, zeros)
    return jax.tree.unflatten(structure, total)


def _at_once(size: int, entries: int) -> int:
    """The most examples whose gradients of so many entries fit, a divisor of the batch's size."""
    fitting = (n for n in range(size, 0, -1) if size % n == 0 and n * entries <= _ENTRIES)
    return next(fitting, 1)


def _is_cheaper(product: Product) -> bool:
    """Whether the norm from x and dy takes less work than the gradient."""
    rows, inputs, outputs = product.sizes
    return rows * (inputs + outputs) <= inputs * outputs


def _flat_factors(held: PyTree, clip_norm: float) -> tuple[list[jax.Array], jax.Array, jax.Array]:
    factors, norm, finite = clip_factors(held, "flat", jnp.float32(clip_norm))
    return jax.tree.leaves(factors), norm, finite


def _norms(x_BxNxI: jax.Array, dy_BxNxO: jax.Array) -> jax.Array:
    """At least the norms [B] of x' dy, NaN or infinite where a value is."""
    x_BxNxI, x_scale_B = _scaled(x_BxNxI)
    dy_BxNxO, dy_scale_B = _scaled(dy_BxNxO)
    lengths_BxN = _lengths(x_BxNxI) * _lengths(dy_BxNxO)
    bound_B = jnp.sum(lengths_BxN, axis=1)
    if x_BxNxI.shape[1] > 1:
        squares_B = jnp.sum(_products(x_BxNxI) * _products(dy_BxNxO), axis=(1, 2))
        doubt_B = jnp.float32(_CANCELLED) * jnp.square(bound_B)
        bound_B = jnp.sqrt(jnp.maximum(squares_B, 0) + doubt_B)
    return bound_B * x_scale_B * dy_scale_B


def _scaled(rows_BxNxK: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Rows whose largest value is 1, so that squares are in range, and what it was [B]."""
    largest_B = jnp.max(jnp.abs(rows_BxNxK), axis=(1, 2))
    divisor_B = jnp.where(largest_B > 0, largest_B, jnp.float32(1))
    return rows_BxNxK / divisor_B[:, None, None], largest_B


def _lengths(rows_BxNxK: jax.Array) -> jax.Array:
    return jnp.sqrt(jnp.sum(jnp.square(rows_BxNxK), axis=2))


def _products(rows_BxNxK: jax.Array) -> jax.Array:
    """The inner products of an example's rows: [B, N, N]."""
    over, of = ((2,), (2,)), ((0,), (0,))
    return jax.lax.dot_general(rows_BxNxK, rows_BxNxK, (over, of), precision="highest")


def _kept(array_B: jax.Array, counts_B: jax.Array) -> jax.Array:
    """Zero for examples that do not count. A select and no product: NaN * 0 is NaN."""
    return jnp.where(counts_B.reshape(-1, *(1,) * (array_B.ndim - 1)), array_B, 0)


def _weighted(array_B: jax.Array, factor_B: jax.Array) -> jax.Array:
    return jnp.tensordot(factor_B, array_B, 1, precision="highest")
