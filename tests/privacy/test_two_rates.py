"""The test of p <= growth r + delta, against sums over all counts."""

import math

import numpy as np
import pytest
from scipy import stats

from jaxpfl.privacy.two_rates import Counts, refuted, upper_rate


@pytest.mark.parametrize(("errors", "trials"), [(0, 10), (3, 10), (9, 10), (5, 4_000)])
def test_an_upper_rate_is_that_at_which_so_few_errors_are_improbable(errors, trials):
    rate = float(upper_rate(np.array(errors), trials, 0.99))
    tail = sum(
        math.comb(trials, k) * rate**k * (1 - rate) ** (trials - k) for k in range(errors + 1)
    )
    assert tail == pytest.approx(0.01, rel=1e-6)
    assert upper_rate(np.array(trials), trials, 0.99) == 1
    assert upper_rate(np.array(0), 0, 0.99) == 1


@pytest.mark.parametrize(("growth", "delta"), [(1.0, 0.0), (3.0, 0.1), (2.0, 0.01)])
def test_a_true_inequality_is_refuted_at_most_as_often_as_stated(growth, delta):
    """By the exact probabilities of all counts, where it holds with equality."""
    n, m, confidence = 9, 7, 0.9
    rejected = np.array(
        [
            [
                refuted(
                    Counts(x, n, y, m),
                    weight=growth,
                    growth=growth,
                    delta=delta,
                    confidence=confidence,
                )
                for y in range(m + 1)
            ]
            for x in range(n + 1)
        ]
    )
    assert rejected.any()
    for r in np.linspace(0, 1, 41):
        p = min(1.0, growth * r + delta)
        density = np.outer(
            stats.binom.pmf(np.arange(n + 1), n, p), stats.binom.pmf(np.arange(m + 1), m, r)
        )
        assert density[rejected].sum() <= 1 - confidence


@pytest.mark.parametrize(
    ("counts", "growth", "delta"),
    [
        (Counts(40, 60, 5, 50), 2.0, 0.05),
        (Counts(230, 1_000, 30, 1_200), 6.0, 0.0),
        (Counts(500, 3_000, 2, 2_500), 90.0, 1e-3),
    ],
)
def test_it_decides_where_a_plain_search_of_likely_rates_does(counts, growth, delta):
    """But for rounding in its cells, which makes it decide a little later."""
    x, n, y, m = counts

    def probability(r: float) -> float:
        """Of counts that are at least as far up, at the rate r."""
        p = min(1.0, growth * r + delta)
        seen = np.arange(m + 1)
        needed = np.ceil(x + n * growth / m * (seen - y) - 1e-9)
        return float(stats.binom.pmf(seen, m, r) @ stats.binom.sf(needed - 1, n, p))

    decided = []
    for error in np.geomspace(1e-4, 0.5, 20):
        spent = error / 20
        low = stats.beta.ppf(spent / 2, y, m - y + 1)
        high = stats.beta.ppf(1 - spent / 2, y + 1, m - y)
        p_value = spent + max(probability(r) for r in np.linspace(low, high, 120))
        found = refuted(
            counts, weight=growth, growth=growth, delta=delta, confidence=1 - float(error)
        )
        if found:
            assert p_value <= error * (1 + 1e-4)
        elif p_value < 0.8 * error:
            raise AssertionError(f"{error:g} should be enough for {p_value:g}")
        decided.append(found)
    assert not decided[0] and decided[-1]


def test_a_larger_growth_or_delta_is_not_refuted_before_a_smaller_one():
    counts, weight = Counts(800, 1_000, 100, 1_000), 5.0

    def found(growth: float, delta: float) -> bool:
        return refuted(counts, weight=weight, growth=growth, delta=delta, confidence=0.99)

    for decided in ([found(g, 0.0) for g in range(1, 12)], [found(3, d / 10) for d in range(9)]):
        assert decided[0] and not decided[-1]
        assert decided == sorted(decided, reverse=True)


def test_without_trials_nothing_is_refuted():
    for counts in (Counts(0, 0, 0, 10), Counts(10, 10, 0, 0)):
        assert not refuted(counts, weight=1.0, growth=1.0, delta=0.0, confidence=0.5)
