"""The Gaussian mechanism's noise.

`jax.random.normal` in float32 inverts a uniform draw of 23 bits and so ends at 5.4 standard
deviations: events beyond that have probability zero, which the Gaussian mechanism's delta does
not allow for. The mean of two independent draws, rescaled, (z1 + z2) / sqrt(2), is exactly as
normal, has support to 7.6 standard deviations and a much finer grid.

All leaves of a tree share one vector of draws, in their order. Coordinate i of it is a function of
the key and of i alone (threefry counts with i), whatever the vector's length and however it is
dealt to devices. One vector for each leaf would be another program for each: most of what a round
takes to compile.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxpfl.privacy.keys import require_noise_key

PyTree = Any


def gaussian_noise_like(key: jax.Array, tree: PyTree, std: jax.Array | float) -> PyTree:
    """Returns float32 noise N(0, std^2), one independent draw for each coordinate of `tree`.

    Args:
      key: typed threefry4x32 key, used for this draw alone.
      tree: pytree of arrays or shapes; only shapes are read.
      std: standard deviation, a float32 scalar.

    Raises:
      InputError: the key is not a typed threefry4x32 key.
    """
    return cut(standard_normal(key, (coordinates(tree),)) * std, tree)


def standard_normal(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Returns float32 draws of N(0, 1) with support to 7.6 standard deviations.

    Raises:
      InputError: the key is not a typed threefry4x32 key.
    """
    require_noise_key(key)

    def add_draw(index, total):
        drawn = jax.random.normal(jax.random.fold_in(key, index), shape, jnp.float32)
        return total + drawn

    # A loop, not a sum of two draws: fused into one, XLA's CPU backend vectorises neither (84 ms
    # against 6 ms for a million draws).
    total = jax.lax.fori_loop(0, 2, add_draw, jnp.zeros(shape, jnp.float32))
    return total * jnp.float32(0.5**0.5)


def coordinates(tree: PyTree) -> int:
    """Returns the number of coordinates of a pytree of arrays or shapes."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))


def cut(vector_P: jax.Array, tree: PyTree) -> PyTree:
    """Returns the vector's first coordinates in the shape of `tree`, leaf after leaf.

    Args:
      vector_P: at least as many coordinates as `tree` has.
      tree: pytree of arrays or shapes; only shapes are read.
    """
    leaves, structure = jax.tree.flatten(tree)
    cut_leaves, start = [], 0
    for leaf in leaves:
        end = start + math.prod(leaf.shape)
        cut_leaves.append(vector_P[start:end].reshape(leaf.shape))
        start = end
    return jax.tree.unflatten(structure, cut_leaves)
