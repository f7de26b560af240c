"""What the points of a sweep have spent on the ledger that all of them charge."""

from typing import Any

from jaxpfl.experiments.sweep.config import Sweep
from jaxpfl.privacy import accounting, events
from jaxpfl.privacy.guarantee import Guarantee
from jaxpfl.privacy.ledger import Charge, Ledger


def spent_on(sweep: Sweep) -> list[dict[str, Any]]:
    """A row for each run on the sweep's ledger, and last for all together; [] without one.

    A row has the algorithm of the run, the number of its "charges", its epsilon by each accountant
    that supports them, and the "statement" by the tightest.
    """
    if sweep.ledger is None or not sweep.ledger.exists():
        return []
    ledger, rows = Ledger.read(sweep.ledger), []
    delta = next((p.config.privacy.delta for p in sweep.points if p.config.privacy.private), 1e-6)
    runs: dict[str, list[Charge]] = {}
    for charge in ledger.charges:
        runs.setdefault(charge.run, []).append(charge)
    named = [(charges[0].label.split()[0], charges) for charges in runs.values()]
    for name, charges in [*named, ("together", ledger.charges)]:
        releases = [charge.event for charge in charges]
        whole = Guarantee.of_events(releases, delta, ledger.unit)
        row: dict[str, Any] = {"algorithm": name, "charges": len(charges)}
        for accountant in accounting.supporting(events.counts(whole.event)):
            found = Guarantee.of_events(releases, delta, ledger.unit, accountant)
            row[accountant] = found.epsilon()
        rows.append({**row, "statement": whole.statement()})
    return rows
