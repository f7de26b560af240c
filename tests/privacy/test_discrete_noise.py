"""Integer noise against the distributions' own formulas. Seeds are fixed, and so is the outcome."""

import numpy as np
import pytest
from scipy import stats

from jaxpfl.errors import InputError
from jaxpfl.privacy.discrete_noise import Words, discrete_gaussian, skellam

DRAWS = 200_000


def words(seed: int = 0) -> Words:
    return Words(seed.to_bytes(16, "little"))


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
    drawn = discrete_gaussian(words(), deviation, DRAWS)
    values = np.arange(-8 * deviation, 8 * deviation + 1)
    assert drawn.shape == (DRAWS,) and drawn.dtype == np.int64
    assert p_value(drawn, gaussian_probabilities(deviation, values), values) > 1e-3
    # The same test notices a deviation that is two hundredths off.
    off = gaussian_probabilities(1.02 * deviation, values)
    assert p_value(drawn, off, values) < 1e-3


@pytest.mark.parametrize("deviation", [1, 3, 40])
def test_skellam_draws_have_its_probabilities(deviation):
    drawn = skellam(words(), deviation, DRAWS)
    values = np.arange(-8 * deviation, 8 * deviation + 1)
    half = deviation**2 / 2
    assert drawn.shape == (DRAWS,) and drawn.dtype == np.int64
    assert p_value(drawn, stats.skellam.pmf(values, half, half), values) > 1e-3
    off = 1.02**2 * half
    assert p_value(drawn, stats.skellam.pmf(values, off, off), values) < 1e-3


@pytest.mark.parametrize("draw", [discrete_gaussian, skellam])
def test_large_deviations_have_their_variance_and_tails(draw):
    drawn = draw(words(), 2**12, 50_000) / 2**12
    assert stats.kstest(drawn, "norm").pvalue > 1e-3
    assert np.abs(drawn).max() > 3.5


@pytest.mark.parametrize("draw", [discrete_gaussian, skellam])
def test_the_noise_is_a_function_of_the_seed(draw):
    first, again, other = (draw(words(seed), 7, 1_000) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert abs(np.corrcoef(first, other)[0, 1]) < 0.2


def test_words_are_uniform_below_any_bound():
    for bound in (1, 3, 1_000, 3 * 2**61):
        drawn = words().below(np.full(20_000, bound))
        assert drawn.min() >= 0 and drawn.max() < bound
        if bound > 1:
            assert abs(drawn.mean() / (bound - 1) - 0.5) < 0.02
    # One bound each.
    bounds = np.arange(1, 2_000)
    assert (words().below(bounds) < bounds).all()


def test_words_that_would_favour_small_numbers_are_drawn_again(monkeypatch):
    """2^64 is 1 modulo 3, so that the word 0 alone would make the number 0 likelier."""
    source = words()
    given = [np.array([0, 5], np.uint64), np.array([4], np.uint64)]
    monkeypatch.setattr(source, "take", lambda count: given.pop(0))
    np.testing.assert_array_equal(source.below(np.array([3, 3])), [1, 2])


@pytest.mark.parametrize("draw", [discrete_gaussian, skellam])
@pytest.mark.parametrize("deviation", [0, -1, 1.5, True, 2**16 + 1])
def test_other_deviations_are_refused(draw, deviation):
    with pytest.raises(InputError, match="deviation"):
        draw(words(), deviation, 1)


def test_short_seeds_are_refused():
    with pytest.raises(InputError, match="16 bytes"):
        Words(b"short")
