"""Where randomness comes from: two roots, and a table of every purpose that is drawn for.

Every draw of a run is a function of (root, purpose, address), so that any round can be computed
again alone. The SECRET root is a run's `federated.Secret`: 128 bits of the operating system's
entropy, kept only in the run's private folder. Whoever knows it can take the noise off a release.
What follows from it is an HMAC-SHA256 of a purpose and a text, and no purpose tells of another:

| purpose      | text                      | is                                                    |
|--------------|---------------------------|-------------------------------------------------------|
| run          | the label, or nothing     | the run's name in ledgers; public                     |
| charge       | identity, charge's number | what a charge is known by in the ledger; public       |
| record       | identity, round           | what a release is recorded as in the ledger; public   |
| again        | record, release's name    | what a second release is charged as; public           |
| cohort       | identity, round           | who takes part, and the order of their examples       |
| train        | identity, round           | the key of what clients draw, each folds in its place |
| noise        | identity, round           | the key of the noise, before it is bound to the sum   |
| checksum     | identity, round           | the secrets of the checksum that binds it             |
| shared noise | identity                  | the key of noise that several rounds share            |

The identity is that of all that a query's answers follow from (`federated.identity`), with the run
and the query's label. In cyclic participation a cohort follows from the identity alone.

The PUBLIC root is `training_root` of a config's seed; nobody's protection rests on it. What is
drawn from it has a number in this module, which is folded into the root:

| number            | is                                                             |
|-------------------|----------------------------------------------------------------|
| INITIAL_STATE     | the initial state of an algorithm                              |
| GENERATOR_IMAGES  | folded into the key of the initial state: the noise from which |
|                   | the GAN's generator makes its training images                  |
| SAMPLE_SENTENCES  | the sentences that are shown while a language model trains     |
| SAMPLE_IMAGES     | the images that are shown in GAN inversion                     |
| OOV_SENTENCES     | the sentences in which out-of-vocabulary words are looked for  |
| OOV_WORDS         | the words that are generated for them                          |

`jax.random.key(seed)` with x64 off keeps 32 bits of its seed; keys are therefore wrapped from four
words. Their implementation is pinned to threefry4x32, whose key has 128 bits.
"""

import hashlib
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxpfl import checks
from jaxpfl.errors import InputError

NOISE_IMPLEMENTATION = "threefry4x32"

# Counted from the top, so that no round's number is among them.
INITIAL_STATE = 2**32 - 1
SAMPLE_SENTENCES = 2**32 - 2
SAMPLE_IMAGES = 2**32 - 4
OOV_SENTENCES = 2**32 - 5
OOV_WORDS = 2**32 - 6
# Under INITIAL_STATE.
GENERATOR_IMAGES = 2**32 - 1


def training_root(seed: int) -> jax.Array:
    """Returns the public root key of a seed, a whole number of any size."""
    seed = checks.non_negative_int("seed", seed)
    words = hashlib.sha256(f"jaxpfl training {seed}".encode()).digest()[:16]
    return key_from_words(np.frombuffer(words, np.uint32).tolist())


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
            f"noise needs a typed JAX key, found {type(key).__name__} without a key type"
        )
    found = str(jax.random.key_impl(key))
    if found != NOISE_IMPLEMENTATION:
        raise InputError(f"noise needs a {NOISE_IMPLEMENTATION} key, found {found!r}")
