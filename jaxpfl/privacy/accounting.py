"""From an event to epsilon, by two accountants.

An event is a `dp_accounting.DpEvent`: what was released, how often, under which sampling. PLD
composes the exact privacy loss distribution (pessimistically discretised); RDP composes Renyi
divergences and is looser. RDP's orders are those of Opacus, so that published figures can be
compared. `second_epsilon` is an implementation of our own that shares no code with the first and
confirms every calibration.
"""

import functools
import math
from collections.abc import Callable
from typing import Literal

import dp_accounting
import numpy as np
from dp_accounting import pld, rdp
from scipy import special, stats

from jaxpfl import checks
from jaxpfl.errors import InputError

Accountant = Literal["pld", "rdp"]
Adjacency = Literal["add_or_remove_one", "replace_one"]

RDP_ORDERS = tuple(1 + x / 10 for x in range(1, 100)) + tuple(float(x) for x in range(12, 64))

_RELATIONS = {
    "add_or_remove_one": dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE,
    "replace_one": dp_accounting.NeighboringRelation.REPLACE_ONE,
}


@functools.lru_cache(maxsize=4096)
def epsilon(
    event: dp_accounting.DpEvent, delta: float, accountant: Accountant, adjacency: Adjacency
) -> float:
    """Returns the epsilon of an event at `delta`; infinite for a release without noise.

    Raises:
      InputError: the accountant has no support for the event under this adjacency.
    """
    delta = checks.open_fraction("delta", delta)
    checks.one_of("accountant", accountant, ("pld", "rdp"))
    checks.one_of("adjacency", adjacency, tuple(_RELATIONS))
    if accountant == "pld":
        if adjacency == "add_or_remove_one" and (rounds := _poisson_rounds(event)) is not None:
            return _composed_pld(*rounds).get_epsilon_for_delta(delta)
        account = pld.PLDAccountant(_RELATIONS[adjacency])
    else:
        account = rdp.RdpAccountant(list(RDP_ORDERS), _RELATIONS[adjacency])
    if not account.supports(event):
        raise InputError(
            f"the {accountant.upper()} accountant cannot account for {type(event).__name__} under "
            f"adjacency {adjacency}"
        )
    account.compose(event)
    return float(account.get_epsilon(delta))


def _poisson_rounds(event: dp_accounting.DpEvent) -> tuple[float, float, int] | None:
    """(z, q, rounds) if the event is that many equal Poisson-sampled Gaussian rounds."""
    count = 1
    if isinstance(event, dp_accounting.SelfComposedDpEvent):
        count, event = event.count, event.event
    if isinstance(event, dp_accounting.PoissonSampledDpEvent) and isinstance(
        event.event, dp_accounting.GaussianDpEvent
    ):
        return event.event.noise_multiplier, event.sampling_probability, count
    return None


@functools.lru_cache(maxsize=64)
def _one_round_pld(z: float, q: float) -> pld.privacy_loss_distribution.PrivacyLossDistribution:
    # The part of the work that does not depend on the number of rounds, and most of it: kept, so
    # that epsilon after each round of a run costs one FFT.
    return pld.privacy_loss_distribution.from_gaussian_mechanism(
        z, sampling_prob=q, value_discretization_interval=1e-4
    )


def _composed_pld(z: float, q: float, rounds: int):
    one = _one_round_pld(z, q)
    return one if rounds == 1 else one.self_compose(rounds)


def smallest_noise_multiplier(
    epsilon_of: Callable[[float], float], target: float, *, tolerance: float = 1e-5
) -> float:
    """Returns the smallest z, rounded up by at most `tolerance` (relative), with eps(z) <= target.

    `epsilon_of` must fall with z. Bisection where it must be, secant steps in (log z, log eps),
    on which the curve is nearly straight, where they are safe: each evaluation is expensive.
    """
    target = checks.positive("epsilon", target)
    goal = math.log(target)

    def height(log_z: float) -> float:
        found = epsilon_of(math.exp(log_z))
        return (math.log(found) if found > 0 else -745.0) - goal

    low, high = 0.0, 0.0
    at_low = at_high = height(0.0)
    while at_high > 0:
        low, at_low, high = high, at_high, high + 1.0
        if high > 12:
            raise InputError(f"no noise multiplier below 1e5 reaches epsilon = {target}")
        at_high = height(high)
    while at_low <= 0:
        high, at_high, low = low, at_low, low - 0.5
        if low < -5:
            return math.exp(high)  # next to no noise is enough
        at_low = height(low)
    secant = True
    while high - low > tolerance:
        middle = (low + high) / 2
        if secant and math.isfinite(at_low) and at_high > -700:
            straight = low + (high - low) * at_low / (at_low - at_high)
            # A little beyond the crossing, so that both ends close in.
            nudge = max(tolerance / 2, 0.02 * (high - low))
            middle = min(max(straight + nudge, low + tolerance / 4), high - tolerance / 4)
        width, at_middle = high - low, height(middle)
        if at_middle > 0:
            low, at_low = middle, at_middle
        else:
            high, at_high = middle, at_middle
        secant = high - low < 0.5 * width
    return math.exp(high)


def second_epsilon(
    noise_multiplier: float, sampling_rate: float, rounds: int, delta: float
) -> float:
    """Epsilon of Poisson-subsampled Gaussian rounds under add-or-remove-one, independently.

    Discretises the privacy loss to the nearest grid point, composes by FFT and inverts the
    hockey-stick divergence (Koskela, Jalko, Honkela 2020, "Computing tight differential privacy
    guarantees using FFT"). An estimate, not a bound: its error is below 1e-3 at the sizes here.
    """
    if sampling_rate == 1.0:
        return _gaussian_epsilon(math.sqrt(rounds) / noise_multiplier, delta)
    both = (
        _composed_epsilon(noise_multiplier, sampling_rate, rounds, delta, removed)
        for removed in (True, False)
    )
    return max(both)


def second_epsilon_fixed(
    noise_multiplier: float, clients: int, population: int, rounds: int, delta: float
) -> float:
    """Epsilon of Gaussian rounds on fixed-size cohorts under replace-one, independently.

    Wang, Balle, Kasiviswanathan 2018 ("Subsampled Renyi Differential Privacy and Analytical
    Moments Accountant"), Theorem 9, at integer orders, and the conversion of Balle et al. 2020.

    Args:
      noise_multiplier: noise divided by the shift that replacing one client makes (2 S).
    """
    rate, best = clients / population, math.inf

    def divergence(order):
        return order / (2 * noise_multiplier**2)

    for order in range(2, 129):
        two = divergence(2)
        terms = [
            0.0,
            2 * math.log(rate)
            + math.log(special.comb(order, 2))
            + min(math.log(4) + math.log(math.expm1(two)), math.log(2) + two)
            if two < 700
            else math.inf,
        ]
        for j in range(3, order + 1):
            terms.append(
                j * math.log(rate)
                + math.log(special.comb(order, j))
                + math.log(2)
                + (j - 1) * divergence(j)
            )
        total = rounds * min(special.logsumexp(terms) / (order - 1), divergence(order))
        converted = (
            total + math.log1p(-1 / order) - (math.log(delta) + math.log(order)) / (order - 1)
        )
        best = min(best, converted)
    return max(best, 0.0)


def _gaussian_epsilon(mu: float, delta: float) -> float:
    """Exact epsilon of a mu-GDP mechanism (Balle and Wang 2018, Theorem 8)."""

    def delta_of(eps):
        first = stats.norm.cdf(mu / 2 - eps / mu)
        second = math.exp(eps + stats.norm.logcdf(-mu / 2 - eps / mu))
        return first - second

    low, high = 0.0, 1.0
    if delta_of(low) <= delta:
        return 0.0
    while delta_of(high) > delta:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if delta_of(middle) > delta else (low, middle)
    return high


def _composed_epsilon(z: float, q: float, rounds: int, delta: float, removed: bool) -> float:
    """Privacy loss of (1-q) N(0, z^2) + q N(1, z^2) against N(0, z^2), or the other way round."""
    points, reach = 2**21, 60.0
    edges = np.linspace(-reach, reach, points + 1)
    step = edges[1] - edges[0]
    middles = (edges[:-1] + edges[1:]) / 2

    def place(loss):
        """The x at which log((1-q) + q exp((2x - 1) / (2 z^2))) equals `loss`."""
        inner = np.exp(np.minimum(loss, 700.0)) - (1 - q)
        with np.errstate(divide="ignore", invalid="ignore"):
            x = np.where(inner > 0, z**2 * np.log(inner / q) + 0.5, -np.inf)
        return x

    def mixture(x):
        return (1 - q) * stats.norm.cdf(x / z) + q * stats.norm.cdf((x - 1) / z)

    if removed:
        cdf = mixture(place(edges))
    else:
        # The loss is -log(...), so it falls with x.
        cdf = stats.norm.sf(place(-edges) / z)
    mass = np.clip(np.diff(cdf), 0.0, None)
    infinite = max(0.0, 1.0 - float(cdf[-1]))
    # Put zero loss at index 0, compose, and put it back.
    spectrum = np.fft.rfft(np.roll(mass, -(points // 2)))
    composed = np.roll(np.fft.irfft(spectrum**rounds, points), points // 2)
    # Grid points are cell middles: `rounds` of them add up to half a step each.
    losses = middles + (rounds - 1) * step / 2
    composed = np.clip(composed, 0.0, None)
    infinite = 1.0 - (1.0 - infinite) ** rounds

    def delta_of(eps):
        above = losses > eps
        return infinite + float(np.sum(composed[above] * -np.expm1(eps - losses[above])))

    low, high = 0.0, reach / 2
    if delta_of(low) <= delta:
        return 0.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if delta_of(middle) > delta else (low, middle)
    return high
