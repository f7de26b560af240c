"""What a run has cost, read from its ledger, which is charged before every release."""

from collections.abc import Iterable, Sequence

from dp_accounting import DpEvent

from jaxpfl.algorithms.base import Algorithm
from jaxpfl.privacy.accounting import Accountant
from jaxpfl.privacy.guarantee import Guarantee
from jaxpfl.privacy.ledger import Charge, Ledger

ALONE = "if nothing else is released from these clients"


class Cost:
    """The cost of one run; its ledger may hold releases of other runs, too.

    Args:
      ledger: of the run, open.
      algorithm: makes the releases; the plan of its first query has the delta of all statements.
      run: its name in the ledger.
      prior: names of runs whose releases this one depends on; they are part of its cost.
    """

    def __init__(
        self, ledger: Ledger, algorithm: Algorithm, run: str, prior: Sequence[str] = ()
    ) -> None:
        self._ledger, self._algorithm = ledger, algorithm
        self._run, self._prior = run, tuple(prior)
        self._plan = algorithm.queries[0].plan

    def epsilon(self, round: int | None = None) -> float:
        """Epsilon of all releases up to those of `round` (None: of all), prior ones included."""
        if not self._algorithm.private:
            return float("inf")
        return self._of([charge.event for charge in self._charges(round)]).epsilon()

    def planned(self) -> str:
        """The statement of the whole run as it is planned, before its first round."""
        events = [charge.event for charge in self._charges(0)]
        return self._of([*events, self._algorithm.event()]).statement()

    def statement(self) -> str:
        """The guarantee of the run and of everything on its ledger, in one line."""
        plan, runs = self._plan, (self._run, *self._prior)
        return both_statements(self._ledger, runs, plan.delta, plan.accountant)

    def _charges(self, round: int | None) -> list[Charge]:
        return [
            charge
            for charge in self._ledger.charges
            if charge.run in self._prior
            or (charge.run == self._run and (round is None or charge.round <= round))
        ]

    def _of(self, events: Iterable[DpEvent]) -> Guarantee:
        plan = self._plan
        return Guarantee.of_events(events, plan.delta, plan.unit, plan.accountant)


def both_statements(
    ledger: Ledger, runs: Sequence[str], delta: float, accountant: Accountant | None = None
) -> str:
    """What these runs cost, and what everything on the ledger costs, in one line.

    Where the ledger holds nothing else, the statement says on which condition it holds.

    Args:
      accountant: None = PLD where it has support, else RDP.
    """
    own = [charge for charge in ledger.charges if charge.run in runs]

    def of(charges: Sequence[Charge]) -> Guarantee:
        events = (charge.event for charge in charges)
        return Guarantee.of_events(events, delta, ledger.unit, accountant)

    guarantee = of(own)
    if not guarantee.private:
        return guarantee.statement()
    statement = guarantee.statement()
    again = sum(charge.label.endswith(" released again") for charge in own)
    if again:
        statement += f"; {again} of its releases were made again and came out otherwise"
    if len(own) == len(ledger.charges):
        return f"{statement}, {ALONE}"
    return f"{statement}; with everything else on its ledger: {of(ledger.charges).statement()}"


def stamped(statement: str, stamp: str, note: str = "") -> str:
    """The statement as it is written down: a stamp stands before it, a note after it."""
    if stamp and not statement.startswith("NOT PRIVATE"):
        statement = f"{stamp}; it would be {statement}"
    return f"{statement}; {note}" if note else statement
