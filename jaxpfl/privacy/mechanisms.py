"""The Gaussian mechanism's noise.

`jax.random.normal` in float32 inverts a uniform draw of 23 bits and therefore never exceeds 5.4
standard deviations, which the Gaussian mechanism's delta does not allow for. The rescaled sum of
two independent draws, (z1 + z2) / sqrt(2), is just as normal, reaches 7.6 standard deviations and
has a much finer grid.

All leaves of a tree share one vector of draws, in their order. Coordinate i of it is a function of
the key and of i alone (threefry's counter), whatever the vector's length and however it is split
among devices. One vector for each leaf would take a program each, and most of the time that a round
takes to compile.
"""

import math
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxpfl.privacy.clipping import PyTree
from jaxpfl.privacy.keys import require_noise_key


@partial(jax.jit, static_argnames=("shape",))
def standard_normal(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Returns float32 draws of N(0, 1); the typed threefry4x32 key is for this draw alone."""
    require_noise_key(key)

    def add_draw(index, total):
        drawn = jax.random.normal(jax.random.fold_in(key, index), shape, jnp.float32)
        return total + drawn

    # A loop, because XLA's CPU backend fuses a plain sum of two draws and fails to vectorise it
    # (84 ms instead of 6 ms for a million draws).
    total = jax.lax.fori_loop(0, 2, add_draw, jnp.zeros(shape, jnp.float32))
    return total * jnp.float32(0.5**0.5)


def on_grid(noisy: jax.Array, std: jax.Array) -> jax.Array:
    """Rounds noisy float32 values to multiples of 2^-6 to 2^-5 standard deviations of their noise.

    Without it, low bits tell what was added to the noise: if a supposed sum is right, the
    difference must be a float32 (Mironov 2012, "On significance of the least significant bits").
    Thousands of float32 draws lead to each value of the grid. It is post-processing, and adds
    0.03 % to the variance. Without noise, `std` = 0, the values stay.
    """
    exponent = jax.lax.bitcast_convert_type(std, jnp.uint32) & jnp.uint32(0x7F800000)
    step = jax.lax.bitcast_convert_type(exponent, jnp.float32) * jnp.float32(2.0**-5)
    # No noise has a deviation below 1e-18. In steps of 2^-70, a float32 from 2^-47 on is whole.
    step = jnp.maximum(step, jnp.float32(2.0**-70))
    return jnp.round(noisy / step) * step


def coordinates(tree: PyTree) -> int:
    """Returns the number of coordinates of a pytree of arrays or shapes."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))


def cut(vector_P: jax.Array | np.ndarray, tree: PyTree, reshape: Callable = jnp.reshape) -> PyTree:
    """Returns the first coordinates of a vector in the shapes of a pytree, leaf after leaf."""
    leaves, structure = jax.tree.flatten(tree)
    cut_leaves, start = [], 0
    for leaf in leaves:
        end = start + math.prod(leaf.shape)
        cut_leaves.append(reshape(vector_P[start:end], leaf.shape))
        start = end
    return jax.tree.unflatten(structure, cut_leaves)
