"""What an algorithm is to everything that runs one."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
from dp_accounting import ComposedDpEvent, DpEvent

from jaxpfl.data.population import Population
from jaxpfl.errors import BudgetExhausted, InputError
from jaxpfl.federated.query import Query
from jaxpfl.federated.release import Release, Releaser
from jaxpfl.privacy.ledger import Ledger
from jaxpfl.privacy.secret import Secret

State = Any
Metrics = Mapping[str, Any]


class Algorithm(NamedTuple):
    """A server that asks clients, round by round: functions over a state, and its questions.

    Attributes:
      name: what the ledger's entries are called.
      init: `(key) -> state`, a pytree of arrays.
      step: `(state, release, round) -> (state, metrics)`, one round. `release` is its only access
        to clients (`federated.Release`), so all that it returns is public. The state's buffers may
        be donated. Metrics are scalars.
      queries: all that it will ever ask; what it costs follows from them before it starts. Their
        plans have equal numbers of rounds, and each is asked at most once a round, before the step
        donates anything of its state.
      params: `(state) -> model parameters`; None where there is no model.
    """

    name: str
    init: Callable[[jax.Array], State]
    step: Callable[[State, Release, int], tuple[State, Metrics]]
    queries: tuple[Query, ...]
    params: Callable[[State], Any] | None = None

    @property
    def rounds(self) -> int:
        """The number of rounds.

        Raises:
          InputError: there is no query, or their plans have different numbers of rounds.
        """
        found = {query.plan.rounds for query in self.queries}
        if len(found) != 1:
            raise InputError(
                f"the queries of {self.name!r} must have one number of rounds, found "
                f"{sorted(found) or 'no query'}"
            )
        return found.pop()

    def event(self, rounds: int | None = None) -> DpEvent:
        """Returns the event of the first `rounds` rounds (default: all): every query in each."""
        return ComposedDpEvent([query.plan.event(rounds) for query in self.queries])

    @property
    def private(self) -> bool:
        """Whether every query's plan is private."""
        return all(query.plan.private for query in self.queries)


def releaser_of(
    algorithm: Algorithm, clients: Population, ledger: Ledger, secret: Secret, *, run: str
) -> Releaser:
    """What an algorithm's queries are asked through; they are charged under its name."""
    return Releaser(
        clients, ledger, secret, run=run, name=algorithm.name, queries=algorithm.queries
    )


def run_rounds(algorithm: Algorithm, releaser: Releaser, key: jax.Array) -> State:
    """Runs all rounds in memory and returns the last state; every release is confirmed.

    For systems that ask clients a few times and keep what they learn themselves; `jaxpfl.run` adds
    checkpoints, metrics and a run directory.

    Args:
      key: of `init`.

    Raises:
      BudgetExhausted: all rounds together do not fit the ledger's budget; nothing was released.
    """
    require_affordable(algorithm, releaser.ledger, releaser.run)
    state = algorithm.init(key)
    with releaser:
        for round in range(1, algorithm.rounds + 1):
            state, _ = releaser.step(algorithm.step, state, round)
    return state


def require_affordable(algorithm: Algorithm, ledger: Ledger, run: str) -> None:
    """Refuses an algorithm that does not fit the ledger's budget, before clients work for it.

    A run that was charged before is let through: it may make the same releases again.

    Raises:
      BudgetExhausted: not even once does it fit.
    """
    begun = any(charge.run == run for charge in ledger.charges)
    if not begun and ledger.affordable(algorithm.event()) == 0:
        raise BudgetExhausted(
            f"{ledger.path}: all releases of {algorithm.name!r} together would exceed the budget; "
            "nothing was released"
        )
