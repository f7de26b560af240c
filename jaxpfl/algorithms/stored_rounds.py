"""Rounds that write texts on the server: storage for their steps, and their random draws.

A step may take minutes, so its result is stored under the round's number and the step's name, and a
resumed run reads it back. Every draw is a function of the algorithm, the purpose, the seed and the
round, so a step that is computed again gives the same result, unless a remote model writes in it.
"""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import jax
import numpy as np

Arrays = Mapping[str, np.ndarray]
LoadOrCompute = Callable[[str, Callable[[], Arrays]], Arrays]
"""`(name, compute) -> arrays`: what is stored under the name, or else computed and stored."""


def computed(name: str, compute: Callable[[], Arrays]) -> Arrays:
    """Stores nothing: the `LoadOrCompute` of rounds that are never resumed."""
    return compute()


@dataclass(frozen=True)
class PublicDraws:
    """An algorithm's random draws on the server, by its name. Clients may see all of them."""

    algorithm: str
    seed: int

    def number(self, purpose: str, round: int = 0) -> int:
        """Returns a number of 64 bits."""
        text = f"{self.algorithm} {purpose} {self.seed} {round}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")

    def seed_of(self, purpose: str, round: int = 0) -> int:
        """Returns a number of 31 bits, which every generator takes as its seed."""
        return self.number(purpose, round) >> 33

    def key(self, purpose: str, round: int = 0) -> jax.Array:
        return jax.random.key(self.seed_of(purpose, round))

    def generator(self, purpose: str, round: int = 0) -> np.random.Generator:
        return np.random.Generator(np.random.Philox(key=self.number(purpose, round)))
