"""From events to epsilon by two accountants, each a bound; `privacy.guarantee` confirms them.

PLD composes the privacy loss distribution, discretised pessimistically, so that its epsilon is an
upper bound within about 1e-3 of the truth (Koskela et al. 2020; Doroshenko et al. 2022, "Connect
the dots"). For releases on everyone, "pld" means their exact formula (Balle and Wang 2018, Theorem
8). RDP composes Renyi divergences (Mironov 2017; Wang et al. 2018 for cohorts of fixed size). It is
looser, and uses the orders of Opacus so that published figures can be compared.

| releases                       | adjacency         | PLD   | RDP   |
|--------------------------------|-------------------|-------|-------|
| Gaussian on everyone           | either            | exact | bound |
| on Poisson cohorts             | add or remove one | bound | bound |
| on cohorts of fixed size       | replace one       | none  | bound |
| with `events.ZeroOut`          | zero out one      | exact | bound |
| on truncated Poisson cohorts   | zero out one      | bound | bound |
| secure sums                    | zero out one      | none  | bound |
| the best of a number of runs   | the run's         | none  | bound |
| without noise                  | either            | inf   | inf   |

dp-accounting is called with multipliers relative to the shift under the adjacency in use (see
`events`), because its own REPLACE_ONE relation doubles the shift in PLD but not in RDP.
"""

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, NamedTuple, TypeAlias, cast, get_args

import dp_accounting
import numpy as np
import scipy

from jaxpfl import checks
from jaxpfl.errors import InputError
from jaxpfl.privacy import events
from jaxpfl.privacy.events import Adjacency, Counts, counts

Accountant = Literal["pld", "rdp"]

RDP_ORDERS = tuple(1 + x / 10 for x in range(1, 100)) + tuple(float(x) for x in range(12, 64))

LARGEST_STEP = 500.0
"""The largest step of a grid of privacy losses: PLD exponentiates it in double precision."""

FrozenCounts = tuple[tuple[dp_accounting.DpEvent, int], ...]
_LossDistribution: TypeAlias = "dp_accounting.pld.privacy_loss_distribution.PrivacyLossDistribution"


def epsilon_of_counts(
    releases: Counts,
    delta: float,
    accountant: Accountant,
    adjacency: Adjacency,
    coarsening: float = 1.0,
) -> float:
    """Returns the epsilon of counted elementary releases; infinite for one without noise.

    Raises:
      InputError: the table above has no entry for a kind of release.
    """
    delta = checks.open_fraction("delta", delta)
    checks.one_of("accountant", accountant, tuple(ACCOUNTANTS))
    checks.one_of("adjacency", adjacency, get_args(Adjacency))
    return _epsilon(frozen(releases), delta, accountant, adjacency, coarsening)


def frozen(releases: Counts) -> FrozenCounts:
    """Returns the counts in one order: that of releases must not change a result's last bits."""
    return tuple(sorted(releases.items(), key=lambda item: repr(item[0])))


def supporting(releases: Counts) -> list[Accountant]:
    """Returns the accountants that support all these releases, the tightest first."""
    return [
        name
        for name, spec in ACCOUNTANTS.items()
        if not any(isinstance(leaf, tuple(spec.unsupported)) for leaf in releases)
    ]


def default_accountant(releases: Counts) -> Accountant:
    return supporting(releases)[0]


def require_support(releases: Iterable[dp_accounting.DpEvent], accountant: Accountant) -> None:
    """Raises `InputError` if the accountant does not support one of the releases."""
    for leaf in releases:
        for kind, name in ACCOUNTANTS[accountant].unsupported.items():
            if isinstance(leaf, kind):
                raise InputError(
                    f"{accountant.upper()} does not support {name}: use accountant "
                    f"{default_accountant({leaf: 1})!r}"
                )


def rounded_up(epsilon: float) -> str:
    """Returns epsilon in four digits, never less than was spent."""
    if not 0 < epsilon < math.inf:
        return f"{epsilon:g}"
    scale = 10.0 ** (3 - math.floor(math.log10(epsilon)))
    return f"{math.ceil(round(epsilon * scale, 6)) / scale:.4g}"


@functools.lru_cache(maxsize=16384)
def _epsilon(
    releases: FrozenCounts,
    delta: float,
    accountant: Accountant,
    adjacency: Adjacency,
    coarsening: float,
) -> float:
    if any(isinstance(leaf, dp_accounting.NonPrivateDpEvent) for leaf, _ in releases):
        return math.inf
    if not releases:
        return 0.0
    for leaf, _ in releases:
        _require_adjacency(leaf, adjacency)
    require_support((leaf for leaf, _ in releases), accountant)
    return ACCOUNTANTS[accountant].epsilon(releases, delta, coarsening)


def _pld_epsilon(releases: FrozenCounts, delta: float, coarsening: float) -> float:
    precision, sampled = gaussians_apart(releases)
    if not sampled:
        with np.errstate(divide="ignore"):  # a delta too small for a float is -inf as a logarithm
            return float(dp_accounting.get_epsilon_gaussian(precision**-0.5, delta))
    interval = coarsening * _interval(releases, delta)
    if interval > LARGEST_STEP:
        # Privacy losses so large protect nobody, and PLD takes the exponential of a step. RDP's
        # bound holds, too.
        return _rdp_epsilon(releases, delta)
    total = composed(sampled, precision, interval)
    with np.errstate(over="ignore"):
        epsilon = float(total.get_epsilon_for_delta(delta))
    # exp(-epsilon) underflows for an epsilon above 700. RDP's bound holds, too.
    return epsilon if epsilon < math.inf else _rdp_epsilon(releases, delta)


def _pld_excess(releases: FrozenCounts, delta: float) -> float:
    """The epsilon that rounding up to a grid of step s adds: about s^2 a release, at most s."""
    if not gaussians_apart(releases)[1]:
        return 0.0
    step = _interval(releases, delta)
    if step > LARGEST_STEP:
        return math.inf
    return sum(count for _, count in releases) * step * min(step, 1.0)


def gaussians_apart(
    releases: Iterable[tuple[dp_accounting.DpEvent, int]],
) -> tuple[float, FrozenCounts]:
    """Returns Gaussians on everyone as one, by its 1 / z^2, which is exact; and the others."""
    precision, others = 0.0, []
    for leaf, count in releases:
        if isinstance(leaf, dp_accounting.GaussianDpEvent):
            precision += count / leaf.noise_multiplier**2
        else:
            others.append((leaf, count))
    return precision, tuple(others)


# One composition answers for every delta.
@functools.lru_cache(maxsize=8)
def composed(sampled: FrozenCounts, precision: float, interval: float) -> _LossDistribution:
    """Sampled releases, and Gaussians on everyone whose 1 / z^2 add up to `precision`."""
    parts = [_losses_of(leaf, interval).self_compose(count) for leaf, count in sampled]
    if precision:
        parts.insert(0, _losses_of(dp_accounting.GaussianDpEvent(precision**-0.5), interval))
    return functools.reduce(lambda whole, part: whole.compose(part), parts)


def _rdp_epsilon(releases: FrozenCounts, delta: float, _: float = 1.0) -> float:
    divergences = renyi_divergences(releases)
    epsilon, _ = dp_accounting.rdp.compute_epsilon(RDP_ORDERS, divergences, delta)
    return float(epsilon)


class AccountantSpec(NamedTuple):
    """One accountant, for all code that offers a choice of them."""

    # Of (releases with noise, delta, coarsening); coarsening above 1 may make it faster and less
    # tight, for a first search.
    epsilon: Callable[[FrozenCounts, float, float], float]
    # The kinds of release that it does not support, with their names.
    unsupported: Mapping[type[dp_accounting.DpEvent], str]
    exact: bool  # whether it computes epsilon itself, up to its grid, and not a looser bound
    excess: Callable[[FrozenCounts, float], float]  # what its grid may add to epsilon


# From the tightest and slowest to the loosest and fastest, which supports everything: what fits a
# budget under one also fits it under those before it.
ACCOUNTANTS: dict[Accountant, AccountantSpec] = {
    "pld": AccountantSpec(
        _pld_epsilon,
        {
            dp_accounting.SampledWithoutReplacementDpEvent: "fixed-size cohorts, only Poisson ones",
            dp_accounting.ZCDpEvent: "secure sums",
            dp_accounting.dp_event.RepeatAndSelectDpEvent: "the best of a random number of runs",
        },
        exact=True,
        excess=_pld_excess,
    ),
    "rdp": AccountantSpec(_rdp_epsilon, {}, exact=False, excess=lambda releases, delta: 0.0),
}


def rate_and_multiplier(leaf: dp_accounting.DpEvent) -> tuple[float, float]:
    """Returns sampling rate and noise multiplier of a Gaussian on everyone or a Poisson cohort."""
    rate = getattr(leaf, "sampling_probability", 1.0)
    return rate, cast(Any, getattr(leaf, "event", leaf)).noise_multiplier


def _require_adjacency(leaf: dp_accounting.DpEvent, adjacency: Adjacency) -> None:
    own = events.adjacency(leaf)
    allowed = [own] if own == "replace_one" else [*dict.fromkeys((own, "zero_out_one"))]
    everyone = all(isinstance(part, dp_accounting.GaussianDpEvent) for part in events.noises(leaf))
    if not everyone and adjacency not in allowed:
        fixed = ": whoever joins a cohort of fixed size takes the place of another"
        raise InputError(
            f"this release is accounted for under {' or '.join(allowed)} only, found {adjacency}"
            + (fixed if own == "replace_one" else "")
        )


@functools.lru_cache(maxsize=4096)
def _rdp(leaf: dp_accounting.DpEvent) -> np.ndarray:
    """The Renyi divergence of one release at RDP_ORDERS."""
    if isinstance(leaf, dp_accounting.PoissonSampledDpEvent):
        return _poisson_rdp(*rate_and_multiplier(leaf))
    if isinstance(leaf, dp_accounting.dp_event.RepeatAndSelectDpEvent):
        # Only who selects trusts it.
        from jaxpfl.privacy import selection

        one = np.array(renyi_divergences(counts(leaf.event).items()))
        return selection.divergences(np.array(RDP_ORDERS), one, leaf.mean, leaf.shape)
    if isinstance(leaf, dp_accounting.TruncatedSubsampledGaussianDpEvent):
        return _truncated_rdp(leaf)
    if isinstance(leaf, dp_accounting.ZCDpEvent):
        # The bounds are proven at whole orders. Between them, (order - 1) times the divergence is
        # convex (van Erven and Harremoes 2014, Corollary 2), and 0 at order 1.
        whole = np.arange(1.0, RDP_ORDERS[-1] + 1)
        bounds = np.interp(RDP_ORDERS, whole, (whole - 1) * (leaf.xi + leaf.rho * whole))
        return bounds / (np.array(RDP_ORDERS) - 1)
    relation = dp_accounting.NeighboringRelation.REPLACE_ONE
    account = dp_accounting.rdp.RdpAccountant(list(RDP_ORDERS), relation)
    account.compose(leaf)
    return account.rdp


def renyi_divergences(releases: Iterable[tuple[dp_accounting.DpEvent, int]]) -> list[float]:
    """Returns the composition's Renyi divergences at `RDP_ORDERS`."""
    total = np.zeros(len(RDP_ORDERS))
    for leaf, count in releases:
        total += count * _rdp(leaf)
    return total.tolist()


def _poisson_rdp(q: float, z: float) -> np.ndarray:
    """Mironov, Talwar, Zhang 2019, section 3: E over N(0, z^2) of ((1-q) + q e^((2x-1)/2z^2))^a.

    Uses the trapezoidal rule, whose error is far below rounding for such a smooth integrand. For
    fractional orders, dp-accounting 0.6.0 sums an alternating series by the size of its terms: it
    does not always converge, or gives an epsilon up to 0.1 percent too large.

    Below z = 1e-3, the divergence without sampling, which is never smaller (the divergence is
    quasi-convex) and hardly larger, spares a sum over millions of points.
    """
    if z < 1e-3:
        return np.array(RDP_ORDERS) / (2 * z**2)
    step = z / 40
    x = np.arange(-12 * z, RDP_ORDERS[-1] + 12 * z, step)
    loss = np.logaddexp(math.log1p(-q), math.log(q) + (2 * x - 1) / (2 * z**2))
    density = -(x**2) / (2 * z**2) + math.log(step / (z * math.sqrt(2 * math.pi)))
    return np.array([_log_sum(order * loss + density) / (order - 1) for order in RDP_ORDERS])


def truncation(leaf: dp_accounting.TruncatedSubsampledGaussianDpEvent) -> tuple[float, float]:
    """How often B or more others were drawn, and how often a client then takes part.

    Whoever takes part then displaces another client, and only then.
    """
    from scipy import stats  # which takes long to load

    size, q, most = leaf.dataset_size, leaf.sampling_probability, leaf.truncated_batch_size
    full = float(stats.binom.sf(most - 1, size - 1, q))
    if not full:
        return 0.0, 0.0
    return full, min(1.0, float(stats.binom.sf(most, size, q)) * most / size / full)


def _truncated_rdp(leaf: dp_accounting.TruncatedSubsampledGaussianDpEvent) -> np.ndarray:
    """A mixture of a Poisson cohort and, where it is cut, of a Gaussian on everyone.

    Told which of the two it was, moments are averaged. A sum then moves by 2 S to one side at most,
    for either data set.
    """
    order, (full, _) = np.array(RDP_ORDERS), truncation(leaf)
    poisson = (order - 1) * _poisson_rdp(*rate_and_multiplier(leaf)) + math.log1p(-full)
    with np.errstate(divide="ignore"):
        cut = np.log(full) + (order - 1) * order * 8 / leaf.noise_multiplier**2
    return np.maximum(np.logaddexp(poisson, cut), 0.0) / (order - 1)


@functools.lru_cache(maxsize=32)
def _losses_of(leaf: dp_accounting.DpEvent, interval: float) -> _LossDistribution:
    """The privacy loss distribution of one release, on a grid of this interval."""
    (q, z), distributions = rate_and_multiplier(leaf), dp_accounting.pld.privacy_loss_distribution
    if isinstance(leaf, dp_accounting.TruncatedSubsampledGaussianDpEvent):
        return distributions.from_truncated_subsampled_gaussian_mechanism(
            leaf.dataset_size, q, leaf.truncated_batch_size, z, interval
        )
    return distributions.from_gaussian_mechanism(
        z, sampling_prob=q, value_discretization_interval=interval
    )


def _log_sum(exponents: np.ndarray) -> float:
    largest = float(exponents.max())
    # log E >= 0; rounding may leave it just below.
    return max(0.0, largest + math.log(float(np.exp(exponents - largest).sum())))


def _interval(releases: FrozenCounts, delta: float) -> float:
    """The step of the grid of privacy losses.

    The overestimate grows as (rounds x step^2) and stays near 1e-5, or 0.1 percent. Only few
    different steps are used, so that a cached distribution serves many numbers of rounds. Losses
    that are too large to protect anybody get coarser steps, since a noise multiplier of 0.01 would
    otherwise need 10^8 points.
    """
    rounds = sum(count for _, count in releases)
    steps = ((2, 2e-3), (10, 1e-3), (40, 5e-4), (250, 2e-4))
    step = next((step for most, step in steps if rounds <= most), 1e-4)
    usual, single = [], 0.0
    for leaf, count in releases:
        q, z = rate_and_multiplier(leaf)
        single = max(single, (1 / z + 20) / (2 * z))
        if isinstance(leaf, dp_accounting.TruncatedSubsampledGaussianDpEvent):
            # It counts as Poisson's: its rare losses are large.
            leaf = dp_accounting.PoissonSampledDpEvent(q, dp_accounting.GaussianDpEvent(z))
        usual.append((leaf, count))
    divergences, rough = renyi_divergences(usual), _rdp_epsilon(tuple(usual), delta)
    # For small losses, the Renyi divergence of order 2 is the variance of the loss, to which
    # rounding adds less than 0.1 percent.
    deviation = math.sqrt(divergences[RDP_ORDERS.index(2.0)])
    while step > max(deviation * min(1e-2, math.sqrt(3e-3 / rounds)), single / 1e5):
        step /= 10
    width = max(rough, single)
    return step * 10.0 ** max(0, math.ceil(math.log10(min(width, 1e12) / 100)))


def smallest_multiplier(guarantee_of: Callable[[float], Any], epsilon: float) -> float:
    """Returns the smallest noise multiplier z with guarantee_of(z).epsilon() at most `epsilon`.

    The `Guarantee`'s accountant finds it, rounded up to 5 digits; its second accountant may raise
    it by up to 0.1 percent.

    Raises:
      InputError: no z between 1e-3 and 1e6 reaches `epsilon`, or the accountants disagree.
    """
    target = checks.positive("epsilon", epsilon)
    trial = guarantee_of(1.0)
    terms = trial.delta, trial.accountant, trial.adjacency

    def excess(log_z: float, coarsening: float) -> float:
        releases = counts(guarantee_of(math.exp(log_z)).event)
        spent = epsilon_of_counts(releases, *terms, coarsening)
        return math.log(min(max(spent, 1e-9), 1e9) / target)

    # The root is found on a coarse discretisation and then corrected on the fine one.
    coarse, fine = 8.0, 1.0
    low = high = 0.0
    while excess(high, coarse) > 0:
        low, high = high, high + 1.0
        if high > math.log(1e6):
            raise InputError(f"no noise multiplier below 1e6 reaches epsilon = {target:g}")
    while excess(low, coarse) <= 0:
        low, high = low - 0.5, low
        if low < math.log(1e-3):
            raise InputError(
                f"epsilon = {target:g} is too large to protect anybody: a noise multiplier of 1e-3 "
                "already reaches it"
            )
    root = cast(float, scipy.optimize.brentq(excess, low, high, args=(coarse,), xtol=1e-6))
    slope = (excess(root + 1e-2, coarse) - excess(root, coarse)) / 1e-2
    for _ in range(2 if slope < 0 else 0):
        gap = excess(root, fine)
        root -= gap / slope
        if abs(gap) < 1e-4:
            break
    least = _round_up(math.exp(root))
    while excess(math.log(least), fine) > 0:
        least = _round_up(least * (1 + 1e-5))
    for raised in (0.0, 1e-5, 1e-4, 1e-3):
        z = least * (1 + raised)
        if guarantee_of(z).epsilon() <= target:
            return z
    raise InputError(
        f"noise multiplier {least:g} reaches epsilon = {target:g} by one accountant and misses it "
        "by the second: ask for a larger epsilon"
    )


def _round_up(z: float) -> float:
    """The smallest number with 5 significant digits that is at least z."""
    digits = 4 - math.floor(math.log10(z))
    rounded = round(math.ceil(round(z * 10**digits, 6)) / 10**digits, max(digits, 0))
    return rounded if rounded >= z else z
