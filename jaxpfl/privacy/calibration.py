"""The smallest noise whose epsilon is not above a target's."""

import math
from collections.abc import Callable
from typing import cast

import scipy

from jaxpfl import checks
from jaxpfl.errors import InputError
from jaxpfl.privacy import accounting, events
from jaxpfl.privacy.guarantee import Guarantee


def smallest_multiplier(guarantee_of: Callable[[float], Guarantee], epsilon: float) -> float:
    """Returns the smallest noise multiplier z with guarantee_of(z).epsilon() at most `epsilon`.

    The guarantee's accountant finds it, rounded up to 5 digits. A second accountant confirms its
    epsilon (`guarantee.stated`), which may raise it by up to 0.1 percent.

    Raises:
      InputError: no z between 1e-3 and 1e6 reaches `epsilon`, or the accountants disagree.
    """
    target = checks.positive("epsilon", epsilon)
    trial = guarantee_of(1.0)
    terms = trial.delta, trial.accountant, trial.adjacency

    def excess(log_z: float, coarsening: float) -> float:
        releases = events.counts(guarantee_of(math.exp(log_z)).event)
        spent = accounting.epsilon_of_counts(releases, *terms, coarsening)
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
