"""The privacy profile of a composition: its delta at every epsilon, and not at one of them alone.

An epsilon that is stated at one delta implies, through the same events, an epsilon at every other
one. A mechanism whose outputs contradict any of these pairs is not the stated one. That shows with
far fewer observations at a large delta than at a small one.

| releases                  | delta at an epsilon                                               |
|---------------------------|-------------------------------------------------------------------|
| Gaussians on everyone     | exact (Balle and Wang 2018, Theorem 8)                            |
| with Poisson cohorts      | an upper bound, by privacy loss distributions on a coarse grid    |
| cohorts of fixed size     | an upper bound, by Renyi divergences (Canonne et al. 2020)        |
| with a secure sum         | the same                                                          |
| any release without noise | 1                                                                 |

The coarse grid makes the bounds weaker by some thousandths and never invalid. It is for audits;
`privacy.accounting` computes a run's stated epsilon.
"""

import math
from typing import Any

import dp_accounting
import numpy as np

from jaxpfl.privacy import accounting, confirmation, events

# The most points of one release's privacy loss on a grid: more would only cost time.
_POINTS = 20_000


def scaled(event: dp_accounting.DpEvent, factor: float) -> dp_accounting.DpEvent:
    """Returns the same releases with `factor` times their noise.

    A secure sum's divergences are divided by the factor's square, as those of Gaussians are.
    """
    return events.from_json(_scaled(events.to_json(event), factor))


def deltas(event: dp_accounting.DpEvent, epsilons_E: np.ndarray) -> np.ndarray:
    """Returns a delta, float64 [E], for each epsilon >= 0, with which the event is private."""
    releases = events.counts(event)
    if any(isinstance(leaf, dp_accounting.NonPrivateDpEvent) for leaf in releases):
        return np.ones(len(epsilons_E))
    concentrated = any(isinstance(leaf, dp_accounting.ZCDpEvent) for leaf in releases)
    if concentrated or events.adjacency(event) == "replace_one":
        order_O = np.array(accounting.RDP_ORDERS)
        divergence_O = np.array(accounting.renyi_divergences(releases.items()))
        constant_O = (order_O - 1) * np.log1p(-1 / order_O) - np.log(order_O)
        # Proposition 12.
        log_OxE = constant_O[:, None] + np.outer(order_O - 1, -epsilons_E)
        log_E = np.min(log_OxE + ((order_O - 1) * divergence_O)[:, None], axis=0)
        return np.exp(np.minimum(log_E, 0.0))
    precision, sampled = accounting.gaussians_apart(releases.items())
    if not sampled:
        mu = math.sqrt(precision)
        delta_E = confirmation.gaussian_delta(mu, epsilons_E) if mu else 0.0 * epsilons_E
        return np.clip(delta_E, 0.0, 1.0)
    step = min(_step(leaf, count) for leaf, count in sampled)
    if step > accounting.LARGEST_STEP:
        # Losses so large protect nobody, and a step of theirs has no exponential. Delta 1 holds.
        return np.ones(len(epsilons_E))
    composed = accounting.composed(sampled, precision, step)
    return np.clip(composed.get_delta_for_epsilon(epsilons_E.tolist()), 0.0, 1.0)


def _scaled(record: Any, factor: float) -> Any:
    """The same for an event's form in a file, or a part of it."""
    if isinstance(record, list):
        return [_scaled(part, factor) for part in record]
    if not isinstance(record, dict):
        return record
    grows = {"noise_multiplier": factor, "rho": factor**-2, "xi": factor**-2}
    return {
        name: value * grows[name] if name in grows else _scaled(value, factor)
        for name, value in record.items()
    }


def _step(leaf: dp_accounting.DpEvent, count: int) -> float:
    """The step of the grid for `count` releases of this kind.

    Rounding overestimates a loss by about step^2 / 8 in each release, and its deviation by as much
    relative to the deviation itself, so that both bound the step.
    """
    q, z = accounting.rate_and_multiplier(leaf)
    deviation = q * math.sqrt(math.expm1(min(z**-2, 50.0)))
    largest = (1 / z + 20) / (2 * z)
    return max(min(math.sqrt(8e-3 / count), deviation / 4), largest / _POINTS)
