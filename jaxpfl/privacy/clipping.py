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


def clip_factors(
    contribution: PyTree, clipping: Clipping, clip_norm: jax.Array
) -> tuple[PyTree, jax.Array, jax.Array]:
    """Returns what one client's contribution must be multiplied by to be clipped.

    Args:
      contribution: pytree of arrays of any real type.
      clipping: "flat" or "per_layer".
      clip_norm: S, float32 scalar.

    Returns:
      A float32 scalar in (0, 1] for each leaf; the norm before clipping (float32 scalar, infinite
      where the contribution must be refused; private); and whether it is finite (bool scalar).
      A contribution that is not finite must be left out, not multiplied: NaN * 0 is NaN.
    """
    leaves, structure = jax.tree.flatten(contribution)
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
    return jax.tree.unflatten(structure, factors), jnp.where(finite, norm, jnp.inf), finite


def clip_contribution(
    contribution: PyTree, clipping: Clipping, clip_norm: jax.Array
) -> tuple[PyTree, jax.Array, jax.Array]:
    """Clips one client's contribution; arguments as for `clip_factors`.

    Returns:
      The clipped contribution (float32), its norm BEFORE clipping (float32 scalar, infinite
      where the contribution was refused; private) and whether it was finite (bool scalar).
    """
    factors, norm, finite = clip_factors(contribution, clipping, clip_norm)
    clipped = jax.tree.map(
        lambda leaf, factor: jnp.where(finite, leaf.astype(jnp.float32) * factor, 0.0),
        contribution,
        factors,
    )
    return clipped, norm, finite


def _square_sum(leaf: jax.Array) -> jax.Array:
    return jnp.sum(jnp.square(leaf.astype(jnp.float32)))


def _factor(norm: jax.Array, bound: jax.Array) -> jax.Array:
    """min(1, bound / norm), with 1 at norm 0."""
    return jnp.where(norm > bound, bound / jnp.maximum(norm, bound), jnp.float32(1))
