"""Epsilons as papers print them, for comparison with valid ones.

Augenstein et al. 2020 ("Generative models for effective ML on private, decentralized datasets",
appendix A.1) draw exactly n of N users in each round. They take the Renyi divergence of one round
by Wang, Balle, Kasiviswanathan 2018 (Theorem 27) for a Gaussian whose shift is S, times the number
of rounds, and convert it by Mironov 2017 (Proposition 3).

This is NOT VALID for such rounds. The theorem is about REPLACING one client. In a cohort of fixed
size one update then leaves the sum and another one enters it, so that the sum moves by 2 S and not
by S: with half the noise multiplier, the same theorem gives several times the epsilon. Adding or
removing a client would move the sum by S, but in a cohort of fixed size it removes or adds another
one. Valid are a shift of 2 S, or cohorts of random size (Poisson).
"""

import dataclasses
import math
from typing import Any

import dp_accounting
import numpy as np
from dp_accounting import rdp

from jaxpfl import checks
from jaxpfl.errors import InputError
from jaxpfl.privacy.accounting import RDP_ORDERS
from jaxpfl.privacy.clipping import Clip
from jaxpfl.privacy.gaussian import Noise
from jaxpfl.privacy.participation import FixedSize, Poisson
from jaxpfl.privacy.plan import Plan

PAPERS = ("augenstein",)

# How far a published delta of 1 / N may be above it by rounding.
_ROUNDED = 1e-3


@dataclasses.dataclass(frozen=True)
class AsPublished:
    """The published epsilon of one setting, and two plans with valid epsilons.

    Attributes:
      paper: one of `PAPERS`.
      epsilon: by the paper's accounting, and so NOT a guarantee of any run of this library.
      order: the Renyi order that gives this epsilon.
      fixed: the same noise on cohorts of n, accounted for with a shift of 2 S.
      poisson: the same noise on Poisson cohorts of n on average.
    """

    paper: str
    epsilon: float
    order: float
    fixed: Plan
    poisson: Plan

    def statement(self) -> str:
        """Returns the published epsilon in one line that says what is wrong with it."""
        return (
            f"(epsilon = {self.epsilon:.2f}, delta = {self.fixed.delta:.4g}), as published: NOT "
            "VALID for fixed-size rounds: replacing one client moves the sum by 2 S, but S was "
            "accounted for"
        )

    def to_dict(self) -> dict[str, Any]:
        """Returns all three epsilons, and what they refer to, as plain values for JSON."""
        return {
            "as_published": {
                "paper": self.paper,
                "valid": False,
                "epsilon": self.epsilon,
                "order": self.order,
                "statement": self.statement(),
            },
            **{
                plan.sampling: {
                    "valid": True,
                    "caution": plan.allow_large_delta,
                    "epsilon": plan.epsilon(),
                    "confirmed_epsilon": plan.confirmed_epsilon(),
                    "accountant": plan.chosen_accountant,
                    "unit": plan.unit,
                    "adjacency": plan.adjacency,
                    "statement": plan.statement(),
                }
                for plan in (self.fixed, self.poisson)
            },
        }


def as_published(
    paper: str,
    *,
    population: int,
    clients_per_round: int,
    rounds: int,
    noise_multiplier: float,
    delta: float,
) -> AsPublished:
    """Returns the epsilon of a setting by a paper's accounting, and the valid ones.

    Args:
      paper: "augenstein".
      population, clients_per_round, rounds: N, n, T.
      noise_multiplier: z; the noise on the sum has standard deviation z S.
      delta: the paper's; 1 / N is accepted, because the paper's RNN uses it.

    Raises:
      InputError: a value is out of range, everyone takes part in each round, or the paper's
        accounting gives no finite epsilon.
    """
    checks.one_of("paper", paper, PAPERS)
    known = checks.positive_int("population", population)
    reason = None
    if 1 / known <= checks.open_fraction("delta", delta) <= (1 + _ROUNDED) / known:
        reason = "the published figure's delta is 1 / N"
    fixed, poisson = (
        Plan(
            rounds=rounds,
            clip=Clip(1.0),  # any norm will do, because the noise is relative to it
            noise=Noise(noise_multiplier),
            participation=kind(population, clients_per_round),
            delta=delta,
            allow_large_delta=reason,
        )
        for kind in (FixedSize, Poisson)
    )
    if fixed.clients_per_round == fixed.population:
        raise InputError(
            "the published accounting is for sampled cohorts: clients_per_round must be below the "
            f"population of {fixed.population}"
        )
    # dp-accounting takes the multiplier relative to the shift, here S as published.
    account = rdp.RdpAccountant(list(RDP_ORDERS), dp_accounting.NeighboringRelation.REPLACE_ONE)
    round_event = dp_accounting.SampledWithoutReplacementDpEvent(
        fixed.population,
        fixed.clients_per_round,
        dp_accounting.GaussianDpEvent(fixed.noise_multiplier),
    )
    account.compose(dp_accounting.SelfComposedDpEvent(round_event, fixed.rounds))
    orders = np.array(RDP_ORDERS)
    epsilons = np.asarray(account.rdp) - math.log(fixed.delta) / (orders - 1)
    best = int(np.argmin(epsilons))
    if not math.isfinite(epsilons[best]):
        raise InputError("the published accounting has no finite epsilon for this setting")
    return AsPublished(paper, float(epsilons[best]), float(orders[best]), fixed, poisson)
