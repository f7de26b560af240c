"""Clipping: what bounds a client's influence.

A contribution is a pytree of arrays. `flat` clips its L2 norm over all leaves to S. `per_layer`
clips each of L leaves to S / sqrt(L), so that the whole still has norm at most S (McMahan et al.
2018, section 3.2). All arithmetic is float32 at least, whatever the contribution's type.

Guarantees, for every input: the result is finite; its L2 norm is at most S (1 + 1e-6); a zero
contribution stays zero; a contribution with a NaN, an infinity or a norm that overflows float32
becomes zero as a whole.
"""

from typing import Any, Literal

import jax
import jax.numpy as jnp

PyTree = Any
Clipping = Literal["flat", "per_layer"]


def global_norm(tree: PyTree) -> jax.Array:
    """Returns the L2 norm over all leaves, a float32 scalar."""
    return jnp.sqrt(sum((_square_sum(leaf) for leaf in jax.tree.leaves(tree)), jnp.float32(0)))


def clip_contribution(
    contribution: PyTree, clipping: Clipping, clip_norm: jax.Array
) -> tuple[PyTree, jax.Array, jax.Array]:
    """Clips one client's contribution.

    Args:
      contribution: pytree of arrays of any real type.
      clipping: "flat" or "per_layer".
      clip_norm: S, float32 scalar.

    Returns:
      The clipped contribution (float32), its norm BEFORE clipping (float32 scalar, infinite
      where the contribution was refused; private) and whether it was finite (bool scalar).
    """
    leaves, structure = jax.tree.flatten(contribution)
    leaves = [leaf.astype(jnp.float32) for leaf in leaves]
    squares = [_square_sum(leaf) for leaf in leaves]
    norm = jnp.sqrt(sum(squares, jnp.float32(0)))
    # A NaN or an infinity anywhere makes the norm NaN or infinite.
    finite = jnp.isfinite(norm)
    if clipping == "flat":
        factors = [_factor(norm, clip_norm)] * len(leaves)
    elif clipping == "per_layer":
        share = clip_norm / jnp.sqrt(jnp.float32(len(leaves)))
        factors = [_factor(jnp.sqrt(square), share) for square in squares]
    else:
        raise ValueError(f"clipping must be 'flat' or 'per_layer', found {clipping!r}")
    clipped = [
        # Not a multiplication by zero: NaN * 0 is NaN.
        jnp.where(finite, leaf * factor, jnp.zeros_like(leaf))
        for leaf, factor in zip(leaves, factors, strict=True)
    ]
    return jax.tree.unflatten(structure, clipped), jnp.where(finite, norm, jnp.inf), finite


def _square_sum(leaf: jax.Array) -> jax.Array:
    return jnp.sum(jnp.square(leaf.astype(jnp.float32)))


def _factor(norm: jax.Array, bound: jax.Array) -> jax.Array:
    """min(1, bound / norm), with 1 at norm 0."""
    return jnp.where(norm > bound, bound / jnp.maximum(norm, bound), jnp.float32(1))
