"""The Gaussian mechanism's noise.

`jax.random.normal` in float32 inverts a uniform draw of 23 bits and therefore never exceeds 5.4
standard deviations, which the Gaussian mechanism's delta does not allow for. Here a number is made
of one block of threefry, four words that give u, v, w and x, each uniform in (0, 1], by Box and
Muller 1958 ("A note on the generation of random normal deviates"):

    z = sqrt(-ln u) cos(2 pi v) + sqrt(-ln w) cos(2 pi x).

Both terms are N(0, 1/2), so that z is N(0, 1). It reaches 9.5 standard deviations, on a far finer
grid, and takes half as long as two inverted draws.

All leaves of a tree share one vector of draws, in their order: one for each leaf would take most of
the time that a round takes to compile. Coordinate i of it is a function of the key and of i alone
(threefry's counter), whatever the vector's length and however it is split among devices.
"""

import math
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxpfl.privacy.clipping import PyTree
from jaxpfl.privacy.keys import require_noise_key

# sin(pi t) / t as a polynomial of t^2 for t in [-1/2, 1/2], within 2e-9, and in float32 6e-8.
_SINE = (3.14159265, -5.16771276, 2.55016332, -0.5992522, 0.0820504, -0.00702839)


@partial(jax.jit, static_argnames=("shape",))
def standard_normal(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Returns float32 draws of N(0, 1); the typed threefry4x32 key is for this draw alone."""
    require_noise_key(key)
    # The words of a block are those of a new key.
    return normal_of_words(jax.random.key_data(jax.random.split(key, shape)))


def normal_of_words(words_4: jax.Array) -> jax.Array:
    """Numbers of N(0, 1), float32 [...], of independent uniform words, uint32 [..., 4]."""

    def radius(word: jax.Array) -> jax.Array:
        uniform = (word.astype(jnp.float32) + jnp.float32(0.5)) * jnp.float32(2.0**-32)
        return jnp.sqrt(jnp.abs(jnp.log(uniform)))

    def cosine(word: jax.Array) -> jax.Array:
        # Of 2 pi t, with t in [-1/2, 1/2]: 1 - 2 sin(pi t)^2.
        t = jax.lax.bitcast_convert_type(word, jnp.int32).astype(jnp.float32)
        t = t * jnp.float32(2.0**-32)
        sine = t * jnp.polyval(jnp.asarray(_SINE[::-1], jnp.float32), t * t)
        return 1 - 2 * sine * sine

    first, second, third, fourth = (words_4[..., place] for place in range(4))
    return radius(first) * cosine(second) + radius(third) * cosine(fourth)


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
