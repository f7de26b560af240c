"""A keyed checksum of arrays' bits, taken on the device, that a key can be bound to.

One pass over the data. The checksum is 128 bits: four sums of 32-bit words, each word mixed with
its place and a secret before it is added. It is a family of hash functions chosen by the secret,
not a cryptographic hash: without the secret nobody can look for two sums that collide, and two that
were not chosen for it collide with probability about 2^-128. It never leaves the device by itself:
what it is folded into is a key of threefry, a pseudorandom function.
"""

from typing import Any

import jax
import jax.numpy as jnp

PyTree = Any

# Apart from the small numbers that address what a bound key draws.
_SECRETS = 2**32 - 1
_WORDS = 4


def bound_to_bits(key: jax.Array, tree: PyTree) -> jax.Array:
    """Returns a key that is a function of `key` and of every bit of `tree`.

    Args:
      key: typed, secret.
      tree: arrays of 32-bit numbers.
    """
    secrets = jax.random.bits(jax.random.fold_in(key, jnp.uint32(_SECRETS)), (_WORDS,), jnp.uint32)
    words = checksum(secrets, tree)
    # A loop: unrolled, these keys compile for a long time.
    return jax.lax.fori_loop(
        0, _WORDS, lambda index, bound: jax.random.fold_in(bound, words[index]), key
    )


def checksum(secrets_W: jax.Array, tree: PyTree) -> jax.Array:
    """Returns uint32 [W]: for each secret a sum over all words of all leaves."""
    words = [jnp.uint32(0)] * secrets_W.shape[0]
    for number, leaf in enumerate(jax.tree.leaves(tree)):
        bits = jax.lax.bitcast_convert_type(leaf, jnp.uint32).reshape(-1)
        place = jax.lax.iota(jnp.uint32, bits.shape[0]) * jnp.uint32(0x9E3779B1)
        for index in range(len(words)):
            # A leaf's sum is mixed before the next is added: leaves cannot change places.
            start = _mixed(words[index] ^ jnp.uint32(number + 1))
            added = _mixed(_mixed(bits ^ secrets_W[index]) + place)
            words[index] = start + jnp.sum(added, dtype=jnp.uint32)
    return jnp.stack(words)


def _mixed(word: jax.Array) -> jax.Array:
    """A permutation of 32-bit words, each output bit of which depends on all input bits.

    The multipliers are those of C. Wellons' search ("Prospecting for hash functions", 2018).
    """
    word = (word ^ (word >> 16)) * jnp.uint32(0x7FEB352D)
    word = (word ^ (word >> 15)) * jnp.uint32(0x846CA68B)
    return word ^ (word >> 16)
