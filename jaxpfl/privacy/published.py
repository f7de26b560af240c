"""Epsilons as papers print them, for comparison only: their form, and the valid ones beside it.

Augenstein et al. 2020 ("Generative models for effective ML on private, decentralized datasets",
appendix A.1) draw exactly n of N users a round and account for it as follows: the Renyi divergence
of one round by Wang, Balle, Kasiviswanathan 2018 (Theorem 27) for a Gaussian whose shift is S,
times the rounds, converted by Mironov 2017 (Proposition 3).

NOT VALID for such rounds. The theorem is about REPLACING one client. In a cohort of fixed size the
replaced one's update leaves the sum and another one's enters, so the sum moves by 2 S and not by S:
the same theorem with half the noise multiplier gives several times the epsilon. Adding or removing
a client, where the sum would move by S, cannot be meant: it pushes another client out or in. What
is valid is either that, or cohorts of random size (Poisson), where a client comes and goes alone.
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

# Published deltas are rounded, 1 / N too.
_ROUNDED = 1e-3


@dataclasses.dataclass(frozen=True)
class AsPublished:
    """One setting in a paper's form and in the two valid forms.

    Attributes:
      paper: whose form.
      epsilon: in the paper's form. It is NOT an epsilon of any run of this library.
      order: the Renyi order it is reached at.
      fixed: the same noise on cohorts of n, accounted for a shift of 2 S.
      poisson: the same noise on cohorts of n on average.
    """

    paper: str
    epsilon: float
    order: float
    fixed: Plan
    poisson: Plan

    def statement(self) -> str:
        """Returns the paper's figure in one line that says what is wrong with it."""
        return (
            f"(epsilon = {self.epsilon:.2f}, delta = {self.fixed.delta:.4g}), as published: NOT "
            "VALID for fixed-size rounds: replacing one client moves the sum by 2 S, accounted "
            "for was S"
        )

    def to_dict(self) -> dict[str, Any]:
        """Returns all three as plain values for JSON."""
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
    """Returns what a paper's accounting says of a setting, and what is true of it.

    Args:
      paper: "augenstein".
      population, clients_per_round, rounds: N, n, T.
      noise_multiplier: z; the noise on the sum has standard deviation z S.
      delta: the paper's; 1 / N, which its RNN uses, is let through.

    Raises:
      InputError: a value out of range; everyone takes part, which needs no sampling; the form has
        no finite epsilon.
    """
    checks.one_of("paper", paper, PAPERS)
    known = checks.positive_int("population", population)
    reason = None
    if 1 / known <= checks.open_fraction("delta", delta) <= (1 + _ROUNDED) / known:
        reason = "the published figure's delta is 1 / N"
    fixed, poisson = (
        Plan(
            rounds=rounds,
            clip=Clip(1.0),  # nothing here depends on it: noise is relative to it
            noise=Noise(noise_multiplier),
            participation=kind(population, clients_per_round),
            delta=delta,
            allow_large_delta=reason,
        )
        for kind in (FixedSize, Poisson)
    )
    if fixed.clients_per_round == fixed.population:
        raise InputError(
            "the published form is for cohorts that are sampled: clients_per_round must be below "
            f"the population of {fixed.population}"
        )
    # Their relation's shift is the one that the multiplier is relative to: here S, as published.
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
        raise InputError("the published form has no finite epsilon for this setting")
    return AsPublished(paper, float(epsilons[best]), float(orders[best]), fixed, poisson)
