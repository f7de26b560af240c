"""One token from a row of logits: temperature, the most probable k, the nucleus, and the draw.

Both cuts keep the tokens at or above a threshold. That of the nucleus is found by bisection over
the bits of the probabilities: exact, and without a sort of the vocabulary. Tokens that tie with the
last one kept are kept.

The draw is by Gumbel's maximum in two stages, first a block of the vocabulary by its share of the
probability, then a token of the block: the same distribution as over all tokens at once, from a
hundredth of the random numbers.
"""

import math

import jax
import jax.numpy as jnp
from jax import Array, lax


def greedy(logits_SxV: Array) -> Array:
    """The most probable tokens int32 [S]; a tie goes to the lowest id."""
    return jnp.argmax(logits_SxV, axis=-1).astype(jnp.int32)


def probabilities(logits_SxV: Array, temperature: Array) -> Array:
    """Unnormalised float32 [S, V], the largest 1, of softmax(logits / temperature)."""
    scaled_SxV = logits_SxV / temperature
    return jnp.exp(scaled_SxV - jnp.max(scaled_SxV, axis=-1, keepdims=True))


def keep_top_k(weights_SxV: Array, k: int) -> Array:
    """The k largest weights of each row, the others 0."""
    largest_SxK, _ = lax.top_k(weights_SxV, min(k, weights_SxV.shape[1]))
    return jnp.where(weights_SxV >= largest_SxK[:, -1:], weights_SxV, 0.0)


def keep_top_p(weights_SxV: Array, p: Array) -> Array:
    """The nucleus (Holtzman et al. 2020): the fewest largest weights that sum to p of the total.

    Args:
      weights_SxV: none above 1.
    """
    # Non-negative floats are in the order of their bits.
    bits_SxV = lax.bitcast_convert_type(weights_SxV, jnp.int32)
    wanted_S = p * jnp.sum(weights_SxV, axis=-1)

    def halve(_: int, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low_S, high_S = bounds
        middle_S = low_S + (high_S - low_S) // 2
        kept_S = jnp.sum(jnp.where(bits_SxV >= middle_S[:, None], weights_SxV, 0.0), axis=-1)
        enough_S = kept_S >= wanted_S
        return jnp.where(enough_S, middle_S, low_S), jnp.where(enough_S, high_S, middle_S)

    low_S = jnp.zeros(weights_SxV.shape[0], jnp.int32)
    # One above the largest bits there are, those of 1; less than 2^30.
    high_S = low_S + lax.bitcast_convert_type(jnp.float32(1), jnp.int32) + 1
    threshold_S, _ = lax.fori_loop(0, 30, halve, (low_S, high_S))
    return jnp.where(bits_SxV >= threshold_S[:, None], weights_SxV, 0.0)


def draw(keys_S: Array, weights_SxV: Array) -> Array:
    """A token of each row, int32 [S], with probability in proportion to its weight."""
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
