"""The privacy cost of a run, read from its ledger, which is charged before every release."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dp_accounting import DpEvent

from jaxpfl.algorithms.base import Algorithm
from jaxpfl.privacy import local_trust, simulated
from jaxpfl.privacy.accounting import Accountant
from jaxpfl.privacy.guarantee import Guarantee
from jaxpfl.privacy.ledger import Ledger
from jaxpfl.privacy.plan import Plan

OWN, SHARED = "this run", "everything on its ledger"
"""Whose an epsilon is."""

ALONE = "if nothing else is released from these clients"


@dataclass(frozen=True)
class Cost:
    """The cost of one run, with the `prior` ones that it depends on; its ledger may hold others.

    The first query's plan gives the delta of all statements.
    """

    ledger: Ledger
    algorithm: Algorithm
    run: str
    prior: tuple[str, ...]

    def epsilon(self, round: int | None = None) -> float:
        """Epsilon of the prior releases and the run's own, up to `round` or, with None, of all."""
        if not self.algorithm.private:
            return float("inf")
        return self._of(self._events(round)).epsilon()

    def epsilons(self) -> dict[str, float]:
        """Epsilon of the run with its prior releases, and of all releases on its ledger."""
        own = shared = self.epsilon()
        everything = [charge.event for charge in self.ledger.charges]
        if self.algorithm.private and len(self._events()) < len(everything):
            shared = self._of(everything).epsilon()
        return {OWN: own, SHARED: shared}

    def planned(self) -> str:
        """The guarantee of the whole run as planned, before its first round."""
        planned = self._of([*self._events(0), self.algorithm.event()]).statement()
        return with_larger([query.plan for query in self.algorithm.queries], planned)

    def statement(self) -> str:
        """The guarantee of the run and of everything on its ledger, in one line."""
        plans, runs = [query.plan for query in self.algorithm.queries], (self.run, *self.prior)
        both = both_statements(self.ledger, runs, plans[0].delta, plans[0].accountant)
        return with_larger(plans, both)

    def _events(self, round: int | None = None) -> list[DpEvent]:
        last, runs = math.inf if round is None else round, (*self.prior, self.run)
        own = [charge for charge in self.ledger.charges if charge.run in runs]
        return [x.event for x in own if x.round <= last or x.run in self.prior]

    def _of(self, events: Sequence[DpEvent]) -> Guarantee:
        plan = self.algorithm.queries[0].plan
        return Guarantee.of_events(events, plan.delta, plan.unit, plan.accountant)


def with_larger(plans: Sequence[Plan], statement: str) -> str:
    """The statement on a run of these plans, after that of the larger population they simulate.

    It says so where clients add all of the noise.
    """
    if plans and all(plan.local for plan in plans):
        statement = local_trust.LABEL + statement
    larger = [plan.scaled_to(plan.simulates) for plan in plans if plan.simulates is not None]
    if not larger:
        return statement
    events = [plan.event() for plan in larger]
    guarantee = Guarantee.of_events(events, larger[0].delta, accountant=larger[0].accountant)
    stated = f"{guarantee.statement()}, after {larger[0].rounds} rounds"
    return simulated.both_statements(stated, statement)


def both_statements(
    ledger: Ledger, runs: Sequence[str], delta: float, accountant: Accountant | None = None
) -> str:
    """The guarantee of these runs, and of all releases on the ledger, in one line.

    If the ledger holds no other releases, the statement is conditional on there being none.
    """
    own = [charge for charge in ledger.charges if charge.run in runs]
    if not own and not delta:
        # A budget stopped a run without privacy before its first release.
        return "(epsilon = 0): nothing was released"
    terms = delta, ledger.unit, accountant
    guarantee = Guarantee.of_events((charge.event for charge in own), *terms)
    statement = guarantee.statement()
    if not guarantee.private:
        return statement
    if again := sum(charge.label.endswith(" released again") for charge in own):
        statement += f"; {again} of its releases were made again and came out otherwise"
    if len(own) == len(ledger.charges):
        return f"{statement}, {ALONE}"
    everything = Guarantee.of_events((charge.event for charge in ledger.charges), *terms)
    return f"{statement}; with everything else on its ledger: {everything.statement()}"


def stamped(statement: str, stamp: str, note: str = "") -> str:
    """The statement with a stamp before it and a note after it, where they are not ""."""
    if stamp and not statement.startswith("NOT PRIVATE"):
        joined = "" if simulated.SIMULATED in stamp else "it would be "
        statement = f"{stamp}; {joined}{statement}"
    return f"{statement}; {note}" if note else statement
