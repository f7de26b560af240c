"""What releases cost together: one epsilon, confirmed by a second accountant, and one statement.

All releases on the same clients compose, such as rounds of training, a Frechet distance and
histograms of metrics. A `Guarantee` is that of any such composition: the rounds of one plan, or all
charges of a ledger.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable
from itertools import pairwise
from typing import Literal, Self

import dp_accounting

from jaxpfl import checks
from jaxpfl.checked import Checked
from jaxpfl.errors import InputError
from jaxpfl.privacy import accounting, confirmation, events
from jaxpfl.privacy.accounting import Accountant
from jaxpfl.privacy.events import Adjacency

Unit = Literal["client", "example"]

EXAMPLE_ROUNDING = 2.0**-7
"""The share of S by which rounding may add to what one example moves a sum by. A query whose blocks
could exceed it is refused, see `federated.release.rounding`."""


def sensitivity(unit: Unit) -> float:
    """How far one unit moves a sum, in clip norms; rounding is included."""
    return 1 + EXAMPLE_ROUNDING if unit == "example" else 1.0


_IN_WORDS = {"add_or_remove_one": "add or remove one", "replace_one": "replace one"}


@dataclasses.dataclass(frozen=True)
class Guarantee(Checked):
    """(epsilon, delta) of one event, with what the two numbers refer to.

    Attributes:
      event: everything that was released; multipliers in it are relative to the adjacency.
      delta: in (0, 1); ignored if a release has no noise.
      unit: what is protected, "client" or "example".
      adjacency: how neighbouring data sets differ, "add_or_remove_one" or "replace_one".
      accountant: one of `accounting.ACCOUNTANTS`.
    """

    event: dp_accounting.DpEvent
    delta: float
    unit: Unit = "client"
    adjacency: Adjacency = "add_or_remove_one"
    accountant: Accountant = "pld"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.private:
            checks.open_fraction("delta", self.delta)

    @classmethod
    def of_events(
        cls,
        releases: Iterable[dp_accounting.DpEvent],
        delta: float,
        unit: Unit = "client",
        accountant: Accountant | None = None,
    ) -> Self:
        """Returns the guarantee of several releases, under the adjacency that they share.

        Without an accountant, it is by the tightest that supports the releases.
        """
        # Counted for speed: this is called after every round, and rounds repeat one event.
        parts, repeated = [], Counter()
        for release in releases:
            try:
                repeated[release] += 1
            except TypeError:  # a composition holds a list, which has no hash
                parts.append(release)
        parts += [dp_accounting.SelfComposedDpEvent(*each) for each in repeated.items()]
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
        """Returns epsilon at `delta`; infinite if a release has no noise."""
        return self._epsilon(self.accountant)

    def _epsilon(self, accountant: Accountant) -> float:
        if not self.private:
            return math.inf
        return accounting.epsilon(self.event, self.delta, accountant, self.adjacency)

    def confirmed_epsilon(self) -> float:
        """Returns the second accountant's epsilon.

        On Poisson cohorts that may be the accountant's `confirmed_by`. Otherwise it is one of
        `privacy.confirmation`, which share no code with dp-accounting.
        """
        if not self.private:
            return math.inf
        # The squares of shift / noise add up (Dong, Roth, Su 2022, Corollary 3.3).
        precision, others = accounting.gaussians_apart(events.counts(self.event).items())
        mu = math.sqrt(precision)
        if not others:
            return confirmation.gaussian_epsilon(mu, self.delta) if mu else 0.0
        if all(isinstance(leaf, dp_accounting.ZCDpEvent) for leaf, _ in others):
            # A Gaussian is zero-concentrated, too (Bun and Steinke 2016, Proposition 1.6).
            rho, xi = (sum(n * getattr(leaf, each) for leaf, n in others) for each in ("rho", "xi"))
            return confirmation.concentrated_epsilon(rho + precision / 2, xi, self.delta)
        match others:
            case [(dp_accounting.PoissonSampledDpEvent(sampling_probability=q) as poisson, count)]:
                second = accounting.ACCOUNTANTS[self.accountant].confirmed_by
                if second is not None:
                    return self._epsilon(second)
                z = accounting.rate_and_multiplier(poisson)[1]
                reach = self._epsilon(accounting.supporting({poisson: 1})[-1])
                return confirmation.poisson_epsilon(
                    z, q, count, self.delta, reach=reach, gaussian_mu=mu
                )
            case [(dp_accounting.SampledWithoutReplacementDpEvent() as fixed, count)] if not mu:
                assert isinstance(fixed.event, dp_accounting.GaussianDpEvent)
                return confirmation.fixed_size_epsilon(
                    fixed.event.noise_multiplier,
                    fixed.sample_size,
                    fixed.source_dataset_size,
                    count,
                    self.delta,
                )
        raise InputError(
            "the second accountant supports the rounds of one plan and Gaussians on everyone, or "
            f"secure sums and these, found {len(others)} kinds of sampled rounds"
        )

    def confirms(self, target: float) -> bool:
        """Returns whether both accountants are at most `target`, and tighter ones below looser."""
        if self.epsilon() > target or self.confirmed_epsilon() > target:
            return False
        names = accounting.supporting(events.counts(self.event))
        found = [self._epsilon(name) for name in names]
        return all(tight <= loose * (1 + 1e-3) for tight, loose in pairwise(found))

    def statement(self) -> str:
        """Returns the guarantee in one line, with unit, adjacency and accountant."""
        if not self.private:
            return f"NOT PRIVATE: no noise, epsilon = infinity, unit = {self.unit}"
        releases = events.counts(self.event)
        gaussian = all(isinstance(leaf, dp_accounting.GaussianDpEvent) for leaf in releases)
        exact = accounting.ACCOUNTANTS[self.accountant].exact and releases and gaussian
        accountant = "exact Gaussian" if exact else self.accountant.upper()
        adjacency = _IN_WORDS[self.adjacency]
        if any(isinstance(leaf, dp_accounting.ZCDpEvent) for leaf in releases):
            # In a secure sum, a client's noise share stays when its update goes.
            adjacency = "zero out one"
        return (
            f"(epsilon = {accounting.rounded_up(self.epsilon())}, delta = {self.delta:g}), "
            f"unit = {self.unit}, adjacency = {adjacency} {self.unit}, "
            f"accountant = {accountant}"
        )
