"""What algorithms that write texts share: what a round stores and shows, and their draws."""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np

Arrays = Mapping[str, np.ndarray]
Keep = Callable[[str, Callable[[], Arrays]], Arrays]
"""`keep(name, make)` returns what `make()` made, now or in an earlier attempt at the same run."""

T = TypeVar("T")


def nothing_kept(name: str, make: Callable[[], Arrays]) -> Arrays:
    """A `Keep` that stores nothing."""
    del name
    return make()


def _nothing_shown(found: Any) -> None:
    del found


@dataclass(frozen=True)
class Hooks(Generic[T]):
    """What surrounds the rounds; none of it changes what is learned.

    Attributes:
      keep: stores each phase of a round, so that a run that was stopped goes on from there.
      on_round: is called after each round, with what is public of it.
      progress: whether bars are shown on stderr.
    """

    keep: Keep = nothing_kept
    on_round: Callable[[T], None] = _nothing_shown
    progress: bool = False


def number_of(algorithm: str, purpose: str, seed: int, round: int) -> int:
    """A public number of 64 bits: what is drawn from it goes to the clients anyhow."""
    digest = hashlib.sha256(f"{algorithm} {purpose} {seed} {round}".encode()).digest()
    return int.from_bytes(digest[:8], "big")
