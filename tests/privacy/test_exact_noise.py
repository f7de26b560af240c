"""The exact Gaussian in whole steps: its probabilities, its tails, and what is charged for it."""

import math
from decimal import Context, Decimal

import jax
import numpy as np
import pytest
import scipy.stats

from jaxpfl.errors import InputError
from jaxpfl.federated import client_mesh
from jaxpfl.privacy import Clip, Cyclic, Noise, Plan, Poisson, exact_noise
from jaxpfl.privacy.exact_noise import STEPS, exact_normal
from jaxpfl.privacy.keys import NOISE_IMPLEMENTATION

COUNT = 400_000


def draws(seed: int, count: int = COUNT) -> np.ndarray:
    key = jax.random.key(seed, impl=NOISE_IMPLEMENTATION)
    return np.sort(np.asarray(exact_normal(key, count, client_mesh())))


def p_value(drawn_N: np.ndarray, width: int) -> float:
    """Of the chi-squared test of ascending draws, in steps of `width`, against the normal CDF."""
    edges = np.arange(-3 * STEPS, 3 * STEPS + 1, width)
    counts = np.diff(np.searchsorted(drawn_N, edges), prepend=0, append=len(drawn_N))
    expected = np.diff(scipy.stats.norm.cdf([-np.inf, *(edges / STEPS), np.inf])) * len(drawn_N)
    return float(scipy.stats.chisquare(counts, expected).pvalue)


@pytest.fixture(scope="module")
def many() -> np.ndarray:
    return draws(seed=1, count=600_000)


# Cells of the proposal, halves of them, and parts that cells do not divide.
@pytest.mark.parametrize("width", [STEPS // 16, STEPS // 32, STEPS // 48])
def test_its_probabilities_are_those_of_a_rounded_down_gaussian(many, width):
    assert p_value(many, width) > 1e-3
    assert p_value((many * 1.02).astype(np.int64), width) < 1e-6
    assert p_value(many + STEPS // 50, width) < 1e-6


def test_its_mean_is_0_and_its_deviation_1(many):
    """In standard errors; a deviation that is 1 % off, or a shift by 1 % of it, shows."""

    def off(drawn_N):
        x = drawn_N / STEPS
        return abs(x.mean()) * len(x) ** 0.5, abs((x**2).mean() - 1) * (len(x) / 2) ** 0.5

    assert max(off(many)) < 3.5
    assert off(many * 1.01)[1] > 7 and off(many + STEPS // 100)[0] > 6


def test_without_its_coins_the_proposals_have_other_probabilities(monkeypatch):
    """Each proposal is kept: weights of whole cells, uniform within."""
    less = exact_noise._less
    words = iter([less, lambda *_: np.bool_(False), lambda *_: np.bool_(False)] * 100)
    monkeypatch.setattr(exact_noise, "_less", lambda *numbers: next(words)(*numbers))
    assert p_value(draws(seed=1, count=COUNT + 2), STEPS // 48) < 1e-6


def test_its_low_bits_are_uniform(many):
    low = many & 0xFFFF
    assert scipy.stats.chisquare(np.bincount(low >> 6, minlength=1024)).pvalue > 1e-3
    assert scipy.stats.chisquare(np.bincount(low & 0x3F, minlength=64)).pvalue > 1e-3


def test_draws_that_wait_for_room_are_finished_alike(monkeypatch):
    """Where more coordinates are left after the first toss than are continued at a time."""
    monkeypatch.setattr(exact_noise, "_room", lambda count: 500)
    assert p_value(draws(seed=3, count=COUNT // 4 + 4), STEPS // 16) > 1e-3


def test_the_table_has_the_weights_of_the_cells_to_80_bits():
    below, other = exact_noise._alias_table()
    share = [0] * 256
    for slot, words in enumerate(below.tolist()):
        number = (words[0] << 64) | (words[1] << 32) | words[2]
        share[slot] += number
        share[other[slot]] += 2**96 - number
    exact, total = Context(prec=60), sum(share)
    weights = [exact.exp(exact.divide(Decimal(-k * k), Decimal(512))) for k in range(16 * 14)]
    for k, weight in enumerate(weights):
        wanted = exact.divide(weight, sum(weights))
        found = exact.divide(Decimal(share[k]), Decimal(total))
        assert abs(found - wanted) < Decimal(2) ** -88, k
    # Draws beyond the last cell are left out, and less likely than 2^-140.
    assert share[224:] == [0] * 32
    assert math.erfc(14 / math.sqrt(2)) < 2.0**-140


def test_a_plan_with_it_costs_what_gaussian_noise_costs():
    target = dict(epsilon=2.0, delta=1e-6, rounds=100, clip=Clip(1.0))
    sampled = Poisson(100_000, 500)
    exact, other = (
        Plan.calibrated(**target, participation=sampled, noise=kind)
        for kind in ("exact", "independent")
    )
    assert exact.noise_multiplier == other.noise_multiplier
    assert exact.event() == other.event()
    assert Plan.from_dict(exact.to_dict()) == exact


def test_it_is_drawn_anew_in_every_round():
    assert not Noise(1.0, "exact").correlated
    epochs = Plan(8, Clip(1.0), Noise(1.0, "exact"), Cyclic(8, 2), 1e-2)
    assert not epochs.correlated
    with pytest.raises(InputError, match="noise"):
        Noise(1.0, "precise")  # type: ignore
