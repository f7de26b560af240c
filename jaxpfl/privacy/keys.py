"""Where randomness comes from: addressed typed keys, and noise keys nobody can guess.

Every draw of a run is a function of (root key, round, purpose), so that any round can be
computed again alone. There are two roots. The TRAINING root follows a seed: the config's
initialises models, a secret one drives what clients do. The NOISE root is 128 bits of the operating
system's entropy: whoever knows it can take the noise off a release, so it must not follow a
seed that is written in a config, and it is kept only in a run's private folder.

`jax.random.key(seed)` with x64 off keeps 32 bits of its seed; noise keys are therefore wrapped
from four words. Their implementation is pinned to threefry4x32, whose key has 128 bits.
"""

import hashlib
import os
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpfl import checks
from jaxpfl.errors import InputError

NOISE_IMPLEMENTATION = "threefry4x32"


class RoundKeys(NamedTuple):
    """The typed keys of one round.

    Attributes:
      train: for clients' training.
      noise: for the mechanism's noise, where rounds are independent.
      terms: typed keys [H] of the draws that make up correlated noise, and their float32 weights
        [H] (see `privacy.correlated_noise`); None where rounds are independent.
      made_for: the plan's `noise_name`.
    """

    train: jax.Array
    noise: jax.Array
    terms: tuple[jax.Array, jax.Array] | None = None
    made_for: str = "independent"


def noise_root(reproducible_seed: int | None = None) -> jax.Array:
    """Returns a noise root key, by default from the operating system's entropy.

    Args:
      reproducible_seed: draws the key from this seed instead, for tests. Noise that can be drawn
        again protects nobody: such a run must be labelled NOT PRIVATE.
    """
    if reproducible_seed is None:
        words = os.urandom(16)
    else:
        seed = checks.non_negative_int("reproducible_seed", reproducible_seed)
        words = hashlib.sha256(f"jaxpfl reproducible noise {seed}".encode()).digest()[:16]
    return key_from_words(np.frombuffer(words, np.uint32).tolist())


def training_root(seed: int) -> jax.Array:
    """Returns the training root key of a seed."""
    seed = checks.non_negative_int("seed", seed)
    words = hashlib.sha256(f"jaxpfl training {seed}".encode()).digest()[:16]
    return key_from_words(np.frombuffer(words, np.uint32).tolist())


def round_keys(training_root: jax.Array, noise_root: jax.Array, round: int) -> RoundKeys:
    """Returns the keys of round `round` (0 <= round < 2^32 - 1), independent between rounds."""
    require_noise_key(noise_root)
    if not checks.non_negative_int("round", round) < 2**32 - 1:
        raise InputError(f"round must be below 2^32 - 1, found {round}")
    number = jnp.uint32(round)
    return RoundKeys(
        jax.random.fold_in(training_root, number), jax.random.fold_in(noise_root, number)
    )


def term_keys(noise_root: jax.Array, addresses_Hx3: np.ndarray) -> jax.Array:
    """Returns the typed keys [H] of draws that several rounds share, by their addresses."""
    require_noise_key(noise_root)
    # Apart from the rounds' own keys, whatever the addresses are.
    root = jax.random.fold_in(noise_root, jnp.uint32(2**32 - 1))

    def one(address_3):
        key = root
        for part in address_3:
            key = jax.random.fold_in(key, part)
        return key

    return jax.vmap(one)(jnp.asarray(addresses_Hx3, jnp.uint32))


def bound_to(noise_root: jax.Array, identity: bytes) -> jax.Array:
    """Returns the key of one query alone, a function of root and identity.

    Were one key used for two queries of equal shape, the difference of the releases would be free
    of noise.

    Args:
      identity: a hash of all that the query's answer follows from besides the noise; at least 16
        bytes, of which the first 16 are used. PRIVATE where it is of private data.
    """
    require_noise_key(noise_root)
    if len(identity) < 16:
        raise InputError(f"identity must have at least 16 bytes, found {len(identity)}")
    key = noise_root
    for word in np.frombuffer(identity[:16], np.uint32):
        key = jax.random.fold_in(key, jnp.uint32(word))
    return key


def key_to_words(key: jax.Array) -> list[int]:
    """Returns a typed threefry4x32 key as four ints, for a private file."""
    require_noise_key(key)
    return [int(word) for word in np.asarray(jax.random.key_data(key))]


def key_from_words(words: Sequence[int]) -> jax.Array:
    """Returns the typed key of four 32-bit words."""
    if len(words) != 4 or any(
        isinstance(word, bool) or not isinstance(word, int) or not 0 <= word < 2**32
        for word in words
    ):
        raise InputError("a noise key must be four whole numbers below 2^32")
    return jax.random.wrap_key_data(jnp.asarray(words, jnp.uint32), impl=NOISE_IMPLEMENTATION)


def require_noise_key(key: jax.Array) -> None:
    """Refuses what noise must not be drawn from: raw integers, rbg, or any other implementation."""
    if not hasattr(key, "dtype") or not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        raise InputError(
            "noise needs a typed JAX key (privacy.noise_root()), found "
            f"{type(key).__name__} without a key type"
        )
    found = str(jax.random.key_impl(key))
    if found != NOISE_IMPLEMENTATION:
        raise InputError(f"noise needs a {NOISE_IMPLEMENTATION} key, found {found!r}")
