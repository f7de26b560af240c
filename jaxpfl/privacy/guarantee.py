"""The cost of releases together: one epsilon, confirmed by a second accountant, and a statement.

A `Guarantee` is for any composition of releases on the same clients: the rounds of one plan, or all
charges of a ledger. An `Account` says whether another one fits the budgets of a ledger.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Literal, Self

import dp_accounting

from jaxpfl import checks
from jaxpfl.checked import Checked
from jaxpfl.errors import InputError
from jaxpfl.privacy import accounting, events
from jaxpfl.privacy.accounting import Accountant
from jaxpfl.privacy.events import Adjacency, Counts

Unit = Literal["client", "example"]

EXAMPLE_ROUNDING = 2.0**-7
"""The share of S by which rounding may add to what one example moves a sum by. A query whose blocks
could exceed it is refused, see `federated.release.example_rounding`."""


def sensitivity(unit: Unit) -> float:
    """How far one unit moves a sum, in clip norms; rounding is included."""
    return 1 + EXAMPLE_ROUNDING if unit == "example" else 1.0


@dataclasses.dataclass(frozen=True)
class Guarantee(Checked):
    """(epsilon, delta) of one event, with unit, adjacency and accountant.

    Attributes:
      event: everything that was released; multipliers in it are relative to the adjacency.
      delta: in (0, 1); ignored if a release has no noise.
      unit: what is protected, "client" or "example".
      adjacency: how neighbouring data sets differ, see `privacy.events`.
      accountant: one of `accounting.ACCOUNTANTS`.
    """

    event: dp_accounting.DpEvent
    delta: float
    unit: Unit = "client"
    adjacency: Adjacency = "add_or_remove_one"
    accountant: Accountant = "pld"

    def check_fields(self) -> None:
        if self.private:
            checks.open_fraction("delta", self.delta)
            if events.adjacency(self.event) == "zero_out_one" != self.adjacency:
                raise InputError(
                    f"the cost of a client who is zeroed is no cost under {self.adjacency}: state "
                    "it under zero_out_one"
                )

    @classmethod
    def of_events(
        cls,
        releases: Iterable[dp_accounting.DpEvent],
        delta: float,
        unit: Unit = "client",
        accountant: Accountant | None = None,
    ) -> Self:
        """Returns the guarantee under the adjacency of all; accountant None = the tightest one."""
        # Counted for speed: this is called after every round, and rounds repeat one event.
        parts, repeated = [], Counter()
        for release in releases:
            try:
                repeated[release] += 1
            except TypeError:  # a composition holds a list, which has no hash
                parts.append(release)
        parts += [dp_accounting.SelfComposedDpEvent(*pair) for pair in repeated.items()]
        event = dp_accounting.ComposedDpEvent(parts)
        chosen = accountant or accounting.default_accountant(events.counts(event))
        return cls(event, delta, unit, events.adjacency(event), chosen)

    @property
    def private(self) -> bool:
        """Whether everything that was released has noise."""
        return not any(
            isinstance(leaf, dp_accounting.NonPrivateDpEvent) for leaf in events.counts(self.event)
        )

    def epsilon(self) -> float:
        """Returns epsilon at `delta` as `stated`; infinite if a release has no noise."""
        if not self.private:
            return math.inf
        return stated(events.counts(self.event), self.delta, self.accountant, self.adjacency)

    def confirmed_epsilon(self) -> float | None:
        """Returns the second accountant's epsilon; None if there is none for these releases."""
        if not self.private:
            return math.inf
        exact = accounting.ACCOUNTANTS[self.accountant].exact
        return _second(events.counts(self.event), self.delta, exact)[0]

    def statement(self) -> str:
        """Returns the guarantee in a line; it says "one accountant" where no second confirms it."""
        if not self.private:
            return f"NOT PRIVATE: no noise, epsilon = infinity, unit = {self.unit}"
        kinds = {type(leaf) for leaf in events.counts(self.event)}
        gaussian = kinds == {dp_accounting.GaussianDpEvent}
        exact = gaussian and accounting.ACCOUNTANTS[self.accountant].exact
        accountant = "exact Gaussian" if exact else self.accountant.upper()
        if self.confirmed_epsilon() is None:
            accountant += " (one accountant)"
        return (
            f"(epsilon = {accounting.rounded_up(self.epsilon())}, delta = {self.delta:g}), "
            f"unit = {self.unit}, adjacency = {self.adjacency.replace('_', ' ')} {self.unit}, "
            f"accountant = {accountant}"
        )


def stated(releases: Counts, delta: float, accountant: Accountant, adjacency: Adjacency) -> float:
    """Returns the accountant's epsilon, or that of a second one where it is larger.

    The two differ by at most 0.1 percent (below 0.1, by 1e-4) and by what the accountant's grid may
    add. Where the second computes epsilon itself and the first a looser bound, this must only not
    be below it; nor must a looser accountant's bound be below a tighter one's.

    Raises:
      InputError: the accountants disagree, or `accountant` does not support the releases.
    """
    bound = accounting.epsilon_of_counts(releases, delta, accountant, adjacency)
    if not math.isfinite(bound):
        return bound
    spec = accounting.ACCOUNTANTS[accountant]
    tolerance = 1e-3 * max(bound, 0.1)
    # PLD leaves out a term with exp(-epsilon) where that underflows, so that its bound is looser.
    looser = spec.exact and bound > 600
    least = bound - tolerance - spec.excess(accounting.frozen(releases), delta)
    names = accounting.supporting(releases)
    for name in names[names.index(accountant) + 1 :]:
        other = accounting.epsilon_of_counts(releases, delta, name, adjacency)
        if other < least:
            raise _disagreement(accountant, bound, name.upper(), other)
    second, same = _second(releases, delta, spec.exact)
    if second is None:
        return bound
    if second > bound + tolerance or (same and not looser and second < least):
        raise _disagreement(accountant, bound, "a second accountant", second)
    # Not for the last bits, by which a cost that fits a budget exactly would exceed it.
    return second if second > bound * (1 + 1e-9) else bound


def _disagreement(accountant: Accountant, bound: float, second: str, other: float) -> InputError:
    return InputError(
        f"the accountants disagree: epsilon = {bound:.6g} by {accountant.upper()} and {other:.6g} "
        f"by {second}, so that neither can be stated"
    )


def _second(releases: Counts, delta: float, exact: bool) -> tuple[float | None, bool]:
    """The epsilon of a second accountant, if there is one, and whether it is of the same quantity.

    That is epsilon itself if `exact`, else the bound by Renyi divergences.
    """
    # A release that no budget limits needs no epsilon until its cost is stated.
    from jaxpfl.privacy import confirmation

    # The squares of shift / noise add up (Dong, Roth, Su 2022, Corollary 3.3).
    precision, others = accounting.gaussians_apart(accounting.frozen(releases))
    mu, rounds, fixed, rho, xi = math.sqrt(precision), [], [], 0.0, 0.0
    for leaf, count in others:
        match leaf:
            case dp_accounting.PoissonSampledDpEvent():
                rounds.append((*accounting.rate_and_multiplier(leaf), count))
            case dp_accounting.TruncatedSubsampledGaussianDpEvent():
                cut = accounting.truncation(leaf)
                rounds.append((*accounting.rate_and_multiplier(leaf), *cut, count))
            case dp_accounting.SampledWithoutReplacementDpEvent():
                z = accounting.rate_and_multiplier(leaf)[1]
                fixed.append((z, leaf.sample_size, leaf.source_dataset_size, count))
            case dp_accounting.ZCDpEvent():
                rho, xi = rho + count * leaf.rho, xi + count * leaf.xi
            case dp_accounting.dp_event.RepeatAndSelectDpEvent() if len(releases) == count == 1:
                runs = events.counts(leaf.event).items()
                one = accounting.gaussians_apart(runs)
                if {type(run) for run, _ in one[1]} - {dp_accounting.PoissonSampledDpEvent}:
                    return None, False
                rounds = tuple((*accounting.rate_and_multiplier(run), n) for run, n in one[1])
                law = leaf.mean, leaf.shape
                return confirmation.selected_epsilon(rounds, delta, math.sqrt(one[0]), *law), True
            case _:
                return None, False
    if exact or (rounds and not fixed and not rho):
        return confirmation.poisson_epsilon(tuple(rounds), delta, mu), exact
    if rounds:
        return None, False
    bound = confirmation.renyi_epsilon(
        delta, gaussian_mu=mu, rho=rho, xi=xi, fixed_size=tuple(fixed)
    )
    return bound, True


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
            both = f"{self._adjacency}, this one under {adjacency}".replace("_", " ")
            raise InputError(
                f"its releases are accounted for under {both}, so that they have no common epsilon:"
                " sample all in the same way, or use two ledgers and state the guarantees of both"
            )

    def spent(self, delta: float, accountant: Accountant | None = None) -> float:
        """Returns the epsilon of all releases, confirmed by a second accountant."""
        return stated(self._counts, delta, accountant or self.accountant, self.adjacency)

    def fits(self, event: dp_accounting.DpEvent, *, ahead: bool = False) -> bool:
        """Returns whether one more `event` stays within every budget.

        What fits is kept, so that no part of it is composed again. With `ahead`, it also finds how
        many more fit, so that many equal events take only a few compositions.

        Raises:
          InputError: as `check_adjacency`.
        """
        self.check_adjacency(event)
        if not self.budgets:
            return True
        after = self._counts + events.counts(event)
        if all(count <= self._fitting.get(leaf, 0) for leaf, count in after.items()):
            return True
        if not self._fit(after, event):
            return False
        self._fitting = after
        # Epsilon grows with every count: smaller counts than those that fit also fit.
        for share in (1, 1 / 2, 1 / 4, 1 / 16) if ahead else ():
            more = {leaf: count + math.ceil(share * count) for leaf, count in after.items()}
            if self._fit(more, event):
                self._fitting = more
                break
        return True

    def _fit(self, total: Counts, event: dp_accounting.DpEvent) -> bool:
        """Whether the releases `total` are within every budget, under the adjacency of `event`."""
        # By one accountant alone, because it is asked before every charge.
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
