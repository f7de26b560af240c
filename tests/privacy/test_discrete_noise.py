"""Integer noise against the distributions' own formulas. Seeds are fixed, and so is the outcome."""

import numpy as np
import pytest
from scipy import stats

from jaxpfl.privacy import secure_sum
from jaxpfl.privacy.secure_sum import discrete_gaussian

DRAWS = 200_000


def generator(seed: int = 0) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=seed))


def gaussian_probabilities(deviation: float, values: np.ndarray) -> np.ndarray:
    support = np.arange(-60 * 8, 60 * 8 + 1)
    total = np.exp(-(support**2) / (2 * deviation**2)).sum()
    return np.exp(-(values**2) / (2 * deviation**2)) / total


def p_value(drawn: np.ndarray, expected: np.ndarray, values: np.ndarray) -> float:
    """Of a chi-squared test of the values that are expected at least ten times."""
    often = expected * len(drawn) >= 10
    counts = np.array([np.count_nonzero(drawn == value) for value in values[often]])
    rest = len(drawn) - counts.sum()
    observed = np.append(counts, rest)
    probabilities = np.append(expected[often], 1 - expected[often].sum())
    return stats.chisquare(observed, probabilities * len(drawn)).pvalue


@pytest.mark.parametrize("deviation", [1, 3, 40])
def test_discrete_gaussian_draws_have_its_probabilities(deviation):
    drawn = discrete_gaussian(generator(), deviation, DRAWS)
    values = np.arange(-8 * deviation, 8 * deviation + 1)
    assert drawn.shape == (DRAWS,) and drawn.dtype == np.int64
    assert p_value(drawn, gaussian_probabilities(deviation, values), values) > 1e-3
    # The same test notices a deviation that is two hundredths off.
    off = gaussian_probabilities(1.02 * deviation, values)
    assert p_value(drawn, off, values) < 1e-3


def test_large_deviations_have_their_variance_and_tails():
    drawn = discrete_gaussian(generator(), 2**12, 50_000) / 2**12
    assert stats.kstest(drawn, "norm").pvalue > 1e-3
    assert np.abs(drawn).max() > 3.5


def test_the_noise_is_a_function_of_the_seed():
    first, again, other = (discrete_gaussian(generator(seed), 7, 1_000) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert abs(np.corrcoef(first, other)[0, 1]) < 0.2


@pytest.mark.parametrize("deviation", [1, pytest.param(3, marks=pytest.mark.long)])
def test_a_million_draws_have_the_distributions_tails(deviation):
    """A chi-squared test of every value that is expected five times, and of both tails beyond."""
    number = 1_000_000
    drawn = discrete_gaussian(generator(3), deviation, number)
    reach = 12 * deviation
    values = np.arange(-reach, reach + 1)
    expected = gaussian_probabilities(deviation, values)
    assert np.abs(drawn).max() <= reach
    counts = np.bincount(drawn + reach, minlength=len(values))
    inside = np.flatnonzero(expected * number >= 5)
    first, last = inside[0], inside[-1]
    assert values[last] >= 4 * deviation
    cells = [(0, first), *((i, i + 1) for i in inside), (last + 1, len(values))]
    observed = np.array([counts[a:b].sum() for a, b in cells])
    share = np.array([expected[a:b].sum() for a, b in cells])
    assert stats.chisquare(observed, share / share.sum() * number).pvalue > 1e-3
    # Twice as much from 4 deviations on would be noticed, and half as much, too.
    far = np.abs(values) >= 4 * deviation
    assert stats.poisson.sf(counts[far].sum(), expected[far].sum() * number) > 1e-3
    assert stats.poisson.cdf(counts[far].sum(), expected[far].sum() * number) > 1e-3


class Undecided(Exception):
    """The next number is not told; there are so many."""


class Numbers:
    """Gives the numbers that it was told, one a call."""

    def __init__(self, told: tuple[int, ...]) -> None:
        self.told = list(told)

    def integers(self, low: int, bound_N: np.ndarray) -> np.ndarray:
        if not self.told:
            raise Undecided(int(bound_N[0]))
        return np.array([self.told.pop(0)])


@pytest.mark.parametrize(("numerator", "denominator"), [(0, 1), (1, 3), (2, 2), (3, 2), (9, 5)])
def test_the_coins_of_a_discrete_gaussian_are_exponentials_of_fractions(numerator, denominator):
    """By all sequences of random numbers but for those that are together improbable."""
    fraction = np.array([numerator]), np.array([denominator])
    open_, heads, left_out = [((), 1.0)], 0.0, 0.0
    while open_:
        told, probability = open_.pop()
        if probability < 1e-7:
            left_out += probability
            continue
        try:
            (head,) = secure_sum._exponential_coins(Numbers(told), *fraction)
            heads += probability * bool(head)
        except Undecided as next_:
            (bound,) = next_.args
            open_ += [((*told, number), probability / bound) for number in range(bound)]
    assert left_out < 0.02
    assert heads <= np.exp(-numerator / denominator) + 1e-12 <= heads + left_out + 2e-12
