"""Rounds on the server whose phases are stored one by one, because each may take long.

A phase that was interrupted is repeated. A release that it repeats is either identical, and free,
or is charged again.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from jaxpfl.algorithms.stored_rounds import Arrays
from jaxpfl.errors import CorruptFile
from jaxpfl.experiments.records.artifacts import Artifact, Artifacts
from jaxpfl.federated.hosts.processes import decide
from jaxpfl.federated.release.releaser import Released, Releaser


class LateReleaser(Releaser):
    """The releaser that `make` returns when a step first asks clients, who may need embedding."""

    def __init__(self, make: Callable[[], Releaser | None]) -> None:
        self._made = cache(make)

    def release(self, *question: Any, **options: Any) -> Released:
        """As `Releaser.release`; an error where `make` returns None, for a finished run."""
        return (self._made() or missing()).release(*question, **options)


@dataclass(frozen=True)
class Phases:
    """The stored phases of a run, and what makes the missing ones.

    `releaser` asks the clients; None if no client is asked, or all releases are made.
    """

    artifacts: Artifacts
    releaser: Releaser | None = None

    def stored(self, name: str, compute: Callable[[], Artifact]) -> Artifact:
        """The artifact stored under `name`, of process 0; else computed, by all, and stored.

        All, because it may ask clients, or need the devices of every process.
        """
        stored = decide(f"the artifact {name!r}", lambda: self.artifacts.find(name))
        if stored is None:
            made = compute()
            keep = partial(self.artifacts.load_or_compute, name, lambda: made)
            stored = decide(f"the new artifact {name!r}", keep)
        return Artifact(*stored)

    def load_or_compute(self, name: str, compute: Callable[[], Arrays]) -> Arrays:
        """The arrays of `stored`."""
        return self.stored(name, lambda: Artifact(arrays=compute())).arrays

    def step(self, step: Callable, state: Any, round: int) -> tuple[Any, Any]:
        """Runs a step of an algorithm."""
        if self.releaser is None:
            return step(state, missing, round)
        return self.releaser.step(step, state, round)


def missing(*_: Any, **__: Any) -> Any:
    """Takes the clients' place when all releases are made: a missing artifact is an error."""
    lost = "the run lacks the artifact of a phase in artifacts/: `jaxpfl resume` makes it again"
    raise CorruptFile(f"{lost}; of a finished run, restore the folder")
