"""Which mechanism gives a deployment the least noise, at one epsilon and with one size of cohort.

Every sampling and every kind of noise that a `Plan` accepts is calibrated to the same epsilon. An
epsilon is of its own adjacency, which is part of a row: under "replace one", it promises more.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any, get_args

import numpy as np
import scipy

from jaxpfl import checks
from jaxpfl.errors import InputError
from jaxpfl.privacy import correlated_noise, participation, strategies
from jaxpfl.privacy.clipping import Clip
from jaxpfl.privacy.gaussian import NoiseKind
from jaxpfl.privacy.participation import Sampling
from jaxpfl.privacy.plan import Plan

POPULATIONS = (10_000, 100_000, 1_000_000, 10_000_000)


@dataclasses.dataclass(frozen=True)
class Alternative:
    """One mechanism for one population; its noise is in clip norms.

    Attributes:
      mechanism: sampling and noise, as a config names them.
      ratio: the noise-to-batch ratio: z / n, that of one round's mean.
      noise_of_sums: that of the sum of the first t rounds' means, which a server optimiser uses:
        the root of the mean square over t = 1 ... T (Choquette-Choo et al. 2023); None for a kind
        of noise whose sums have no formula here.
    """

    mechanism: str
    plan: Plan
    ratio: float
    noise_of_sums: float | None

    def row(self) -> dict[str, Any]:
        plan, who = self.plan, self.plan.participation
        return {
            "population": plan.population,
            "mechanism": self.mechanism,
            "adjacency": plan.adjacency,
            "clients_per_round": plan.clients_per_round,
            "separation": who.rounds_per_epoch if who.in_epochs else None,
            "noise_multiplier": plan.noise_multiplier,
            "noise_to_batch_ratio": self.ratio,
            "noise_of_sums": self.noise_of_sums,
            "epsilon": plan.epsilon(),
        }


def alternatives(
    *,
    epsilon: float,
    delta: float,
    rounds: int,
    check_in_rate: float,
    populations: Sequence[int] = POPULATIONS,
    most_clients: int | None = None,
    separation: int | None = None,
) -> Iterator[Alternative]:
    """Yields the calibrated mechanisms of each population, as far as a plan accepts them.

    Exact noise is not listed: it costs the same as the same kind in float32.

    Args:
      check_in_rate: the share of clients that can take part in a round.
      most_clients: in a round; None takes all that check in.
      separation: a client takes part at most once in so many rounds, where the sampling has a
        choice; None takes as many as there can be.
    """
    rate = checks.positive_fraction("check-in rate", check_in_rate)
    checks.positive_int("rounds", rounds)
    for population in populations:
        number = int(rate * checks.positive_int("population", population))
        number = min(number, most_clients or number)
        if not number:
            raise InputError(f"no client of {population:,} checks in at a rate of {rate:g}")
        for sampling in get_args(Sampling):
            if sampling == "truncated_poisson" and number == population:
                continue  # Nothing is drawn that could be cut.
            made = participation.KINDS[sampling]
            own = {
                "separation": separation or population // number,
                # Six deviations above the mean.
                "at_most": number + math.ceil(6 * math.sqrt(number)),
            }
            names = own.keys() & {field.name for field in dataclasses.fields(made)}
            who = made(population, number, **{name: own[name] for name in names})
            for kind in get_args(NoiseKind):
                if "exact" in kind:
                    continue
                terms: Any = {"epsilon": epsilon, "delta": delta, "rounds": rounds, "noise": kind}
                try:
                    plan = Plan.calibrated(**terms, clip=Clip(1.0), participation=who)
                except InputError:
                    if kind == "independent":
                        raise
                    # This sampling has no such noise.
                    continue
                ratio, variances_T = plan.noise_multiplier / plan.denominator, sum_variances(plan)
                of_sums = None
                if variances_T is not None:
                    of_sums = ratio * math.sqrt(float(np.mean(variances_T)))
                yield Alternative(f"{sampling}, {kind}", plan, ratio, of_sums)


def sum_variances(plan: Plan) -> np.ndarray | None:
    """The variance of the noise in the sum of the first t releases, for z = 1; float64 [T]."""
    assert plan.noise is not None
    if not plan.correlated:
        return np.arange(1.0, plan.rounds + 1)
    if plan.noise.kind in ("blt", "tree"):
        blt, separation = plan.noise.blt, plan.participation.rounds_per_epoch
        errors_T = strategies.tree_errors(plan.rounds) if blt is None else blt.errors(plan.rounds)
        return strategies.unit(blt, plan.rounds, separation) ** 2 * errors_T
    if plan.noise.kind != "banded":
        return None
    # C^-1 as a filter: the noise of sums is that of its response to ones.
    column = correlated_noise.square_root(plan.bands)
    column = column / np.linalg.norm(column)
    response_T = scipy.signal.lfilter([1.0], column, np.ones(plan.rounds))
    return np.cumsum(np.square(response_T))
