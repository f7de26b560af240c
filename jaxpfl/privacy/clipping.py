"""Clipping: what bounds a client's influence.

A contribution is a pytree of arrays. `flat` clips its L2 norm over all leaves to S. `per_layer`
clips each of L leaves to S / sqrt(L), so that the whole still has norm at most S (McMahan et al.
2018, section 3.2). All arithmetic is float32 at least, whatever the contribution's type.

Guarantees for every input, with S from SMALLEST_CLIP_NORM on:

| contribution               | becomes                                                           |
|----------------------------|-------------------------------------------------------------------|
| of norm at most S          | itself, to the bit                                                |
| of norm above S            | itself times S / norm: of norm S, in the same direction           |
| of norm above 1.8e19       | zero as a whole: its square overflows                             |
| with a NaN or an infinity  | zero as a whole                                                   |
| any, with a smaller S      | zero as a whole: squares underflow, and the norm would be wrong   |

So the result is always finite and of L2 norm at most S (1 + 1e-6), and zero stays zero. "To the
bit" leaves out subnormal numbers, which devices may flush to zero. With "per_layer" the second line
holds for each leaf and its share.

Why no scaling. Squares below 1.2e-38 are flushed to zero, so values below 1.1e-19 are missing from
the norm. With S >= 1e-12 even 1e8 of them, in a contribution of norm S, are less than 6e-7 of it.
Restricting S costs nothing; a second pass over scaled values, or products with a scale inside the
sum of squares, take 13 to 25 % more time for the whole clip on a CPU (1.2 M parameters).
"""

from typing import Any, Literal

import jax
import jax.numpy as jnp

PyTree = Any
Clipping = Literal["flat", "per_layer"]

# Between them the clip is exact; a plan's clip norm, and what it adapts to, stays there. Above the
# largest it would be exact too, as far as norms reach; no contribution needs that.
SMALLEST_CLIP_NORM = 1e-12
LARGEST_CLIP_NORM = 1e12


def clip_factors(
    contribution: PyTree, clipping: Clipping, clip_norm: jax.Array
) -> tuple[PyTree, jax.Array, jax.Array]:
    """Returns what one client's contribution must be multiplied by to be clipped.

    Args:
      contribution: pytree of arrays of any real type.
      clipping: "flat" or "per_layer".
      clip_norm: S, float32 scalar; infinity does not clip, but finds out what is not finite.

    Returns:
      A float32 scalar in (0, 1] for each leaf; the norm before clipping (float32 scalar, infinite
      where the contribution must be refused; private); and whether it counts (bool scalar): not
      where the table above says zero. Such a contribution must be left out, not multiplied:
      NaN * 0 is NaN.
    """
    leaves, structure = jax.tree.flatten(contribution)
    squares = [_square_sum(leaf) for leaf in leaves]
    norm = jnp.sqrt(_pairwise_sum(squares))
    # A NaN or an infinity anywhere makes the norm NaN or infinite. The bound is the constant as
    # float32, so the smallest clip norm itself is in.
    finite = jnp.isfinite(norm) & (clip_norm >= jnp.float32(SMALLEST_CLIP_NORM))
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
      where the contribution was refused; private) and whether it counts (bool scalar).
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


def _pairwise_sum(values: list[jax.Array]) -> jax.Array:
    """The sum of scalars, float32: one after the other, 150 alike would be wrong by 2e-6."""
    if len(values) < 2:
        return sum(values, jnp.float32(0))
    half = len(values) // 2
    return _pairwise_sum(values[:half]) + _pairwise_sum(values[half:])


def _factor(norm: jax.Array, bound: jax.Array) -> jax.Array:
    """min(1, bound / norm), with 1 at norm 0."""
    return jnp.where(norm > bound, bound / jnp.maximum(norm, bound), jnp.float32(1))
