"""The keys of all random draws: two roots, and a table of every purpose that is drawn for.

Every draw of a run is a function of (root, purpose, address), so that any round can be computed
again alone. The SECRET root is a `RunSecret`: 128 bits of the operating system's entropy, kept only
in the run's private folder. Each value below is the HMAC-SHA256 of a purpose and a text, and
reveals nothing of the others:

| purpose      | text                      | value                                                 |
|--------------|---------------------------|-------------------------------------------------------|
| run          | the label, or nothing     | the run's name in ledgers; public                     |
| question     | broadcast, clip norm      | a round's question, a part of its identity; public    |
| charge       | identity                  | identifies a charge in the ledger; public             |
| record       | identity                  | identifies a recorded release in the ledger; public   |
| asked        | identity                  | identifies an epoch's recorded question; public       |
| names        | nothing                   | key of clients' names where their states are kept     |
| again        | record, release's name    | identifies the charge of a second release; public     |
| cohort       | identity                  | seed of the cohort and of the order of its examples   |
| train        | identity                  | key of clients' draws, with their indices folded in   |
| noise        | identity                  | half of a secret: with the sum, it gives the noise    |
| checksum     | identity                  | the other half of it, see `release.sum_digest`        |
| shared noise | identity, or its run part | key of noise that clients add, or rounds share        |
| secure sum   | identity, event           | identifies the charge of a secure sum; public         |
| noise share  | the client's index        | seed of a client's integer noise in a secure sum      |
| dropped      | nothing                   | seed of who drops out of a secure sum                 |
| selection    | number, or point N        | seed of how many points are tried, and which          |

The identity covers everything that a release depends on (`release.identity`): the question, the
round, the run and the query's label, too. In cyclic participation a charge follows from the part of
it that the rounds of an epoch share, and the cohorts from the run's part.

The PUBLIC root is `training_root` of a config's seed; no privacy guarantee depends on it. Each
purpose has a number in this module, which is folded into the root.

With x64 off, `jax.random.key(seed)` only keeps 32 bits of its seed, so that keys are made from four
words instead. Their implementation is pinned to threefry4x32, whose key has 128 bits.
"""

import hashlib
import hmac
import os
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from jaxpfl import checks
from jaxpfl.errors import InputError

NOISE_IMPLEMENTATION = "threefry4x32"

# Counted down from 2^32 - 1, so that none equals the number of a round.
INITIAL_STATE = 2**32 - 1  # of an algorithm
SAMPLE_SENTENCES = 2**32 - 2  # that are shown while a language model trains
SAMPLE_IMAGES = 2**32 - 4  # that are shown in GAN inversion
OOV_SENTENCES = 2**32 - 5  # that are searched for out-of-vocabulary words
OOV_WORDS = 2**32 - 6  # that are generated for them
BIAS_SENTENCES = 2**32 - 7  # that show what public training data lacks
# Folded into the key of INITIAL_STATE: the noise of the images that the GAN's generator trains on.
GENERATOR_IMAGES = 2**32 - 1


def training_root(seed: int) -> jax.Array:
    """Returns the public root key of a seed, a whole number of any size."""
    seed = checks.non_negative_int("seed", seed)
    words = hashlib.sha256(f"jaxpfl training {seed}".encode()).digest()[:16]
    return key_from_words(np.frombuffer(words, np.uint32))


def key_from_words(words: Any) -> jax.Array:
    """Returns the typed key of four numbers below 2^32, an array or a list."""
    return jax.random.wrap_key_data(jnp.asarray(words, jnp.uint32), impl=NOISE_IMPLEMENTATION)


def require_noise_key(key: jax.Array) -> None:
    """Refuses keys that are raw integers, or of another implementation than threefry4x32."""
    if not hasattr(key, "dtype") or not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        kind = type(key).__name__
        raise InputError(f"noise needs a typed JAX key, found {kind} without a key type")
    implementation = str(jax.random.key_impl(key))
    if implementation != NOISE_IMPLEMENTATION:
        raise InputError(f"noise needs a {NOISE_IMPLEMENTATION} key, found {implementation!r}")


class ReproducibleSeed(int):
    """A seed from which the noise is drawn, too: for tests only, the run is NOT private."""


class RunSecret:
    """The 128 bits from which a run's cohorts, shuffles and noise follow.

    Whoever knows them can remove the noise from every release. Without `words`, 16 bytes, they are
    drawn from the operating system.
    """

    def __init__(self, words: bytes | None = None) -> None:
        self._words = os.urandom(16) if words is None else words
        if len(self._words) != 16:
            raise InputError(f"a secret has 16 bytes, found {len(self._words)}")

    def __repr__(self) -> str:
        return "RunSecret(...)"

    @property
    def words(self) -> bytes:
        """The 16 bytes, for a private file."""
        return self._words

    @property
    def public_name(self) -> str:
        """The run's name in ledgers: a digest, 12 digits, that reveals nothing of the secret."""
        return self.digest("run", "")[:12]

    @classmethod
    def reproducible(cls, seed: int, purpose: str = "") -> Self:
        """A secret that follows from a seed, for tests: a run with it is NOT private."""
        seed = checks.non_negative_int("seed", seed)
        text = f"jaxpfl reproducible secret {seed} {purpose}"
        return cls(hashlib.sha256(text.encode()).digest()[:16])

    def digest(self, purpose: str, text: str) -> str:
        """A keyed hash, 64 hexadecimal digits; reveals nothing of `text` without the secret."""
        return hmac.new(self._words, f"{purpose}\0{text}".encode(), hashlib.sha256).hexdigest()

    def key(self, purpose: str, text: str) -> jax.Array:
        """A typed threefry4x32 key, a function of the secret, the purpose and the text."""
        return key_from_words(self.words_of(purpose, text).tolist())

    def words_of(self, purpose: str, text: str) -> Any:
        """Four 32-bit words, uint32 [4], a function of the secret, the purpose and the text."""
        return np.frombuffer(bytes.fromhex(self.digest(purpose, text))[:16], np.uint32)

    def seed(self, purpose: str, text: str) -> int:
        """A whole number of 128 bits, a function of the secret, the purpose and the text."""
        return int(self.digest(purpose, text)[:32], 16)
