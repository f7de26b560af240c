"""From events to epsilon by two accountants, and back to a noise multiplier.

PLD composes the privacy loss distribution, discretised pessimistically, so that its epsilon is an
upper bound within about 1e-3 of the truth (Koskela et al. 2020; Doroshenko et al. 2022, "Connect
the dots"). Releases on everyone have an exact formula (Balle and Wang 2018, Theorem 8), which is
what "pld" means for them. RDP composes Renyi divergences (Mironov 2017; Wang et al. 2018 for
cohorts of fixed size), is looser, and uses the orders of Opacus so that published figures can be
compared.

| releases                       | adjacency         | PLD   | RDP   |
|--------------------------------|-------------------|-------|-------|
| Gaussian on everyone           | either            | exact | bound |
| on Poisson cohorts             | add or remove one | bound | bound |
| on cohorts of fixed size       | replace one       | none  | bound |
| without noise                  | either            | inf   | inf   |

dp-accounting is called with multipliers relative to the shift under the adjacency in use (see
`events`). Its own REPLACE_ONE relation is not used for that: its PLD doubles the shift and its
RDP does not.
"""

import contextlib
import functools
import logging
import math
from collections.abc import Callable, Iterator
from typing import Literal

import dp_accounting
import numpy as np
from dp_accounting import pld, rdp
from scipy import optimize

from jaxpfl import checks
from jaxpfl.errors import InputError
from jaxpfl.privacy.events import Adjacency, Counts, counts

Accountant = Literal["pld", "rdp"]

RDP_ORDERS = tuple(1 + x / 10 for x in range(1, 100)) + tuple(float(x) for x in range(12, 64))

_INTERVAL = 1e-4
_FrozenCounts = tuple[tuple[dp_accounting.DpEvent, int], ...]


def epsilon(
    event: dp_accounting.DpEvent, delta: float, accountant: Accountant, adjacency: Adjacency
) -> float:
    """Returns the epsilon of an event at `delta`; infinite for a release without noise.

    Raises:
      InputError: the event, or a combination without an entry in the table above.
    """
    return epsilon_of_counts(counts(event), delta, accountant, adjacency)


def epsilon_of_counts(
    releases: Counts, delta: float, accountant: Accountant, adjacency: Adjacency
) -> float:
    """Returns the epsilon of a composition given as counts of elementary releases (cached)."""
    delta = checks.open_fraction("delta", delta)
    checks.one_of("accountant", accountant, ("pld", "rdp"))
    checks.one_of("adjacency", adjacency, ("add_or_remove_one", "replace_one"))
    # The order of releases must not change the last bits of the result.
    frozen = tuple(sorted(releases.items(), key=lambda item: repr(item[0])))
    return _epsilon(frozen, delta, accountant, adjacency, _INTERVAL)


def default_accountant(releases: Counts) -> Accountant:
    """Returns "pld" where it has support, else "rdp"."""
    fixed = dp_accounting.SampledWithoutReplacementDpEvent
    return "rdp" if any(isinstance(leaf, fixed) for leaf in releases) else "pld"


def smallest_noise_multiplier(
    event_of: Callable[[float], dp_accounting.DpEvent],
    target: float,
    delta: float,
    accountant: Accountant,
    adjacency: Adjacency,
) -> float:
    """Returns the smallest z with epsilon(event_of(z)) <= target, rounded up to 5 digits.

    The root is found on a coarse discretisation and then corrected on the fine one.

    Raises:
      InputError: no z between 1e-3 and 1e6 reaches the target.
    """
    target = checks.positive("epsilon", target)

    def excess(log_z: float, interval: float) -> float:
        releases = tuple(counts(event_of(math.exp(log_z))).items())
        found = _epsilon(releases, delta, accountant, adjacency, interval)
        return math.log(min(max(found, 1e-9), 1e9) / target)

    coarse = 10 * _INTERVAL
    low = high = 0.0
    while excess(high, coarse) > 0:
        low, high = high, high + 1.0
        if high > math.log(1e6):
            raise InputError(f"no noise multiplier below 1e6 reaches epsilon = {target:g}")
    while low == high or excess(low, coarse) <= 0:
        low, high = low - 0.5, low if low < high else high
        if low < math.log(1e-3):
            raise InputError(
                f"epsilon = {target:g} is reached with noise multiplier 1e-3 already: a target "
                "that large protects nobody"
            )
    root = float(optimize.brentq(excess, low, high, args=(coarse,), xtol=1e-6))
    slope = (excess(root + 1e-2, coarse) - excess(root, coarse)) / 1e-2
    if slope < 0:
        root -= excess(root, _INTERVAL) / slope
    z = _round_up(math.exp(root))
    while excess(math.log(z), _INTERVAL) > 0:
        z = _round_up(z * (1 + 1e-5))
    return z


def _round_up(z: float) -> float:
    """The smallest number of 5 significant digits that is at least z."""
    digits = 4 - math.floor(math.log10(z))
    rounded = round(math.ceil(round(z * 10**digits, 6)) / 10**digits, max(digits, 0))
    return rounded if rounded >= z else z


@functools.lru_cache(maxsize=16384)
def _epsilon(
    releases: _FrozenCounts,
    delta: float,
    accountant: Accountant,
    adjacency: Adjacency,
    interval: float,
) -> float:
    if any(isinstance(leaf, dp_accounting.NonPrivateDpEvent) for leaf, _ in releases):
        return math.inf
    if not releases:
        return 0.0
    for leaf, _ in releases:
        _require_support(leaf, accountant, adjacency)
    if accountant == "rdp":
        total = sum(count * _rdp(leaf) for leaf, count in releases)
        # A divergence that overflows is no bound, and dp-accounting warns of it by itself.
        return float(rdp.compute_epsilon(RDP_ORDERS, total, delta)[0])
    precision, sampled = 0.0, []
    for leaf, count in releases:
        if isinstance(leaf, dp_accounting.GaussianDpEvent):
            # Gaussians compose to one Gaussian, exactly.
            precision += count / leaf.noise_multiplier**2
        else:
            sampled.append((leaf, count))
    if not sampled:
        return float(dp_accounting.get_epsilon_gaussian(precision**-0.5, delta))
    interval *= _coarsening(releases, delta)
    composed = None
    if precision:
        composed = _pld(1.0, precision**-0.5, interval)
    for leaf, count in sampled:
        part = _pld(leaf.sampling_probability, leaf.event.noise_multiplier, interval)
        part = part.self_compose(count)
        composed = part if composed is None else composed.compose(part)
    assert composed is not None
    return float(composed.get_epsilon_for_delta(delta))


def _require_support(
    leaf: dp_accounting.DpEvent, accountant: Accountant, adjacency: Adjacency
) -> None:
    poisson = isinstance(leaf, dp_accounting.PoissonSampledDpEvent)
    fixed = isinstance(leaf, dp_accounting.SampledWithoutReplacementDpEvent)
    if poisson and adjacency != "add_or_remove_one":
        raise InputError("a Poisson cohort is accounted for under add_or_remove_one only")
    if fixed and adjacency != "replace_one":
        raise InputError(
            "a cohort of fixed size is accounted for under replace_one only: adding a client "
            "pushes another one out"
        )
    if fixed and accountant == "pld":
        raise InputError("PLD has no support for cohorts of fixed size: use accountant 'rdp'")


@functools.lru_cache(maxsize=4096)
def _rdp(leaf: dp_accounting.DpEvent) -> np.ndarray:
    """The Renyi divergence of one release at RDP_ORDERS."""
    if isinstance(leaf, dp_accounting.SampledWithoutReplacementDpEvent):
        relation = dp_accounting.NeighboringRelation.REPLACE_ONE
    else:
        relation = dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE
    account = rdp.RdpAccountant(list(RDP_ORDERS), relation)
    with _orders_left_out_in_silence():
        account.compose(leaf)
    return account.rdp


@functools.lru_cache(maxsize=32)
def _pld(
    q: float, noise_multiplier: float, interval: float
) -> pld.privacy_loss_distribution.PrivacyLossDistribution:
    """The privacy loss distribution of one release."""
    return pld.privacy_loss_distribution.from_gaussian_mechanism(
        noise_multiplier, sampling_prob=q, value_discretization_interval=interval
    )


def _coarsening(releases: _FrozenCounts, delta: float) -> float:
    """A power of ten that keeps a distribution of very large losses in memory.

    Without it a noise multiplier of 0.01 would need 10^8 points. It is 1 for every epsilon that
    protects anybody.
    """
    width = float(rdp.compute_epsilon(RDP_ORDERS, sum(c * _rdp(e) for e, c in releases), delta)[0])
    for leaf, _ in releases:
        inner = leaf.event if isinstance(leaf, dp_accounting.PoissonSampledDpEvent) else leaf
        z = inner.noise_multiplier  # pyright: ignore[reportAttributeAccessIssue]
        width = max(width, (1 / z + 20) / (2 * z))
    return 10.0 ** max(0, math.ceil(math.log10(min(width, 1e12) / 100)))


@contextlib.contextmanager
def _orders_left_out_in_silence() -> Iterator[None]:
    """Fractional RDP orders whose series does not converge are left out, which is sound."""
    logger, level = logging.getLogger("absl"), logging.getLogger("absl").level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
