"""The account of a ledger: the cost of its releases together, and whether another one fits."""

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence

import dp_accounting

from jaxpfl import checks
from jaxpfl.errors import InputError
from jaxpfl.privacy import accounting, events
from jaxpfl.privacy.accounting import Accountant
from jaxpfl.privacy.events import Adjacency, Counts
from jaxpfl.privacy.guarantee import stated


@dataclasses.dataclass(frozen=True)
class Budget:
    """A hard limit on what all charges of a ledger cost together: `epsilon` at `delta`."""

    epsilon: float
    delta: float

    def __post_init__(self):
        checks.positive("budget epsilon", self.epsilon)
        checks.open_fraction("budget delta", self.delta)


class Account:
    """The composition of releases under one adjacency, and the budgets that it must stay within."""

    def __init__(self, budgets: Sequence[Budget] = ()) -> None:
        self.budgets = tuple(dict.fromkeys(budgets))
        self._counts: Counter[dp_accounting.DpEvent] = Counter()
        self._adjacency: Adjacency | None = None
        self._fitting: Counts = {}

    @property
    def adjacency(self) -> Adjacency:
        """The adjacency of all releases; add-or-remove-one while there is none."""
        return self._adjacency or "add_or_remove_one"

    @property
    def accountant(self) -> Accountant:
        return accounting.default_accountant(self._counts)

    def add(self, event: dp_accounting.DpEvent) -> None:
        """Adds a release, whether it fits the budgets or not."""
        self.check_adjacency(event)
        releases = events.counts(event)
        self._counts += releases
        if _is_noisy(releases):
            added = events.adjacency(event)
            self._adjacency = events.common(self._adjacency or added, added)

    def check_adjacency(self, event: dp_accounting.DpEvent) -> None:
        """Raises `InputError` if the event has no common adjacency with the account."""
        if not _is_noisy(events.counts(event)):
            return
        adjacency = events.adjacency(event)
        if self._adjacency is not None and not events.common(self._adjacency, adjacency):
            raise InputError(
                f"its releases are accounted for under {self._adjacency}, this one under "
                f"{adjacency}, so that they have no common epsilon: sample all of them in the same "
                "way, or use two ledgers and state the guarantees of both"
            )

    def spent(self, delta: float, accountant: Accountant | None = None) -> float:
        """Returns the epsilon of all releases, confirmed by a second accountant."""
        return stated(self._counts, delta, accountant or self.accountant, self.adjacency)

    def fits(self, event: dp_accounting.DpEvent) -> bool:
        """Returns whether one more `event` stays within every budget.

        It also finds how many more fit, so that many equal events take only a few compositions.
        """
        if not self.budgets:
            return True
        after = self._counts + events.counts(event)
        if all(count <= self._fitting.get(leaf, 0) for leaf, count in after.items()):
            return True
        if not self._fit(after, event):
            return False
        # Epsilon grows with every count: smaller counts than those that fit also fit.
        for share in (1, 1 / 2, 1 / 4, 1 / 16):
            ahead = {leaf: count + math.ceil(share * count) for leaf, count in after.items()}
            if self._fit(ahead, event):
                break
        else:
            ahead = after
        self._fitting = ahead
        return True

    def _fit(self, total: Counts, event: dp_accounting.DpEvent) -> bool:
        """Whether the releases `total` are within every budget, under the adjacency of `event`.

        By one accountant alone, because it is asked before every charge.
        """
        chosen = accounting.default_accountant(total)
        added = events.adjacency(event)
        adjacency = events.common(self._adjacency or added, added)
        assert adjacency is not None, "it was checked"
        return all(
            accounting.epsilon_of_counts(total, budget.delta, chosen, adjacency) <= budget.epsilon
            for budget in self.budgets
        )


def _is_noisy(releases: Counts) -> bool:
    return any(not isinstance(leaf, dp_accounting.NonPrivateDpEvent) for leaf in releases)
