"""Algorithms that ask small populations, round by round and in memory."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxpfl.algorithms import Algorithm
from jaxpfl.data import Population
from jaxpfl.federated import Releaser, RunSecret
from jaxpfl.privacy import Budget, Ledger

SAME = RunSecret.reproducible(0)
OTHER = RunSecret.reproducible(1)


@contextmanager
def asking(
    algorithm: Algorithm,
    clients: Population,
    folder: Path,
    *,
    secret: RunSecret = SAME,
    run: str = "run",
    ledger: str = "ledger.jsonl",
    budget: Budget | None = None,
    observe: Callable[[dict[str, Any]], None] = lambda record: None,
) -> Iterator[Releaser]:
    """What asks an algorithm's queries, on a ledger in `folder` that several may share."""
    unit = algorithm.queries[0].plan.unit
    with Ledger(folder / ledger, clients, budget=budget, unit=unit) as opened:
        about = {"run": run, "name": algorithm.name, "queries": algorithm.queries}
        yield Releaser(clients, opened, secret, observe=observe, **about)


class Asked(NamedTuple):
    """What rounds came to.

    Attributes:
      state: the last one, on the host.
      metrics: of each round, on the host.
      ledger: closed; what stands there can be read.
    """

    state: Any
    metrics: list[dict[str, Any]]
    ledger: Ledger


def asked(
    algorithm: Algorithm,
    clients: Population,
    folder: Path,
    *,
    rounds: int | None = None,
    seed: int = 0,
    **settings: Any,
) -> Asked:
    """Runs the first `rounds` rounds (default: all); `settings` are of `asking`."""
    with asking(algorithm, clients, folder, **settings) as releaser:
        state, metrics = algorithm.init(jax.random.key(seed)), []
        for round in range(1, 1 + (algorithm.rounds if rounds is None else rounds)):
            state, public = releaser.step(algorithm.step, state, round)
            metrics.append(jax.device_get(public))
    return Asked(jax.device_get(state), metrics, releaser.ledger)
