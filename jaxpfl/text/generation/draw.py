"""Drawing a token from a row of logits: temperature, top-p and the draw.

Top-p keeps the tokens at or above a threshold; tokens that tie with the last one kept are kept. The
threshold is found by bisection over the bits of the probabilities, which is exact and does not sort
the vocabulary.

The draw uses the Gumbel-max trick twice, first for a block of the vocabulary by its share of the
probability, then for a token of the block. The distribution is the same as over all tokens at once,
from a hundredth of the random numbers.
"""

import math

import jax
import jax.numpy as jnp
from jax import Array, lax

# Weights that are added up side by side.
_ADDED = 128


def probabilities(logits_SxV: Array, temperature: Array) -> Array:
    """softmax(logits / temperature), float32 [S, V], scaled to a largest value of 1."""
    scaled_SxV = logits_SxV / temperature
    return jnp.exp(scaled_SxV - jnp.max(scaled_SxV, axis=-1, keepdims=True))


def keep_top_p(weights_SxV: Array, p: Array) -> Array:
    """The nucleus (Holtzman et al. 2020): the fewest largest weights that sum to p of the total.

    No weight may be above 1.
    """
    rows, vocabulary = weights_SxV.shape
    padded = jnp.pad(weights_SxV, ((0, 0), (0, -vocabulary % _ADDED)))
    weights_SxNxW = padded.reshape(rows, -1, _ADDED)

    def total(least_S: Array) -> Array:
        nucleus_SxNxW = jnp.where(weights_SxNxW >= least_S[:, None, None], weights_SxNxW, 0.0)
        # A sum over the middle axis reads the weights once, and has no copy with zeros in it.
        return jnp.sum(jnp.sum(nucleus_SxNxW, axis=1), axis=-1)

    wanted_S = p * total(jnp.zeros(rows))

    def halve(_: int, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low_S, high_S = bounds
        middle_S = low_S + (high_S - low_S) // 2
        enough_S = total(lax.bitcast_convert_type(middle_S, jnp.float32)) >= wanted_S
        return jnp.where(enough_S, middle_S, low_S), jnp.where(enough_S, high_S, middle_S)

    # Non-negative floats are ordered like their bits.
    low_S = jnp.zeros(rows, jnp.int32)
    # One above the bits of 1, the largest weight; less than 2^30.
    high_S = low_S + lax.bitcast_convert_type(jnp.float32(1), jnp.int32) + 1
    threshold_S, _ = lax.fori_loop(0, 30, halve, (low_S, high_S))
    least_S = lax.bitcast_convert_type(threshold_S, jnp.float32)
    return jnp.where(weights_SxV >= least_S[:, None], weights_SxV, 0.0)


def draw(keys_S: Array, weights_SxV: Array) -> Array:
    """A token of each row, int32 [S], drawn with probability proportional to its weight."""
    rows, vocabulary = weights_SxV.shape
    width = 1 << round(math.log2(vocabulary) / 2)
    blocks = -(-vocabulary // width)
    padded = jnp.pad(weights_SxV, ((0, 0), (0, blocks * width - vocabulary)))
    weights_SxNxW = padded.reshape(rows, blocks, width)
    gumbel_SxG = jax.vmap(lambda key: jax.random.gumbel(key, (blocks + width,)))(keys_S)
    shares_SxN = jnp.sum(weights_SxNxW, axis=-1)
    block_S = jnp.argmax(jnp.log(shares_SxN) + gumbel_SxG[:, :blocks], axis=-1)
    within_SxW = jnp.take_along_axis(weights_SxNxW, block_S[:, None, None], axis=1)[:, 0]
    place_S = jnp.argmax(jnp.log(within_SxW) + gumbel_SxG[:, blocks:], axis=-1)
    return (block_S * width + place_S).astype(jnp.int32)
