"""A run's secret, from which its cohorts, its shuffles and its noise follow."""

import hashlib
import hmac
import os
from typing import Any, Self

import jax
import numpy as np

from jaxpfl import checks
from jaxpfl.errors import InputError
from jaxpfl.privacy.keys import key_from_words


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
        """Names the run in ledgers: a digest, 12 digits, that reveals nothing of the secret."""
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
