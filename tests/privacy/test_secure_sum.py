"""Secure sums: their arithmetic against plain sums, and their cost against exact divergences."""

import dataclasses
import math

import numpy as np
import pytest
from scipy import stats

from jaxpfl.privacy import Guarantee, events, secure_sum
from jaxpfl.privacy.secure_sum import SecureSum, discrete_gaussian
from tests.refusals import refusal

SECURE = SecureSum(clients=6, clip_norm=1.0, noise_multiplier=1.0)


def generator(seed: int = 0) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=seed))


def messages(secure: SecureSum, updates_CxP: np.ndarray) -> list[np.ndarray]:
    return [secure.message(update_P, generator(i)) for i, update_P in enumerate(updates_CxP)]


def updates(clients: int = 6, coordinates: int = 50, scale: float = 1.0) -> np.ndarray:
    return scale * np.random.default_rng(0).normal(size=(clients, coordinates))


def clipped_sum(updates_CxP: np.ndarray, clip_norm: float) -> np.ndarray:
    largest = np.abs(updates_CxP).max()
    norms_C = largest * np.linalg.norm(updates_CxP / largest, axis=1, keepdims=True)
    return (updates_CxP * np.minimum(1, clip_norm / norms_C)).sum(0)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e200])
def test_the_sum_is_that_of_the_clipped_updates_and_the_noise(scale):
    """To the bit in every order; an update that is not finite counts as zero."""
    secure = dataclasses.replace(SECURE, noise_multiplier=1e-4, bits=30)
    updates_CxP = updates(scale=scale)
    sent = messages(secure, updates_CxP)
    assert all((message_P < 2**30).all() for message_P in sent)
    total_P = secure.add(sent)
    # Ten standard deviations.
    np.testing.assert_allclose(secure.value(total_P), clipped_sum(updates_CxP, 1.0), atol=1e-3)
    for order in (sent[::-1], sent[3:] + sent[:3]):
        np.testing.assert_array_equal(secure.add(order), total_P)
    broken_CxP, zero_CxP = updates_CxP.copy(), updates_CxP.copy()
    broken_CxP[1, 3], broken_CxP[2, 0], zero_CxP[1:3] = np.nan, np.inf, 0.0
    np.testing.assert_array_equal(
        secure.add(messages(secure, broken_CxP)), secure.add(messages(secure, zero_CxP))
    )


def test_after_the_planned_dropouts_there_is_enough_noise_left():
    secure = dataclasses.replace(SECURE, dropouts=2, clip_norm=0.1, noise_multiplier=3.0)
    sent = messages(secure, np.zeros((6, 20_000)))
    left = np.std(secure.value(secure.add(sent[:4])))
    assert left == pytest.approx(0.3, rel=0.02)
    assert np.std(secure.value(secure.add(sent))) > left
    for wrong in (sent[:3], [*sent, sent[0]]):
        refusal(lambda wrong=wrong: secure.add(wrong), "nothing is released")


@pytest.mark.parametrize("coordinates", [1, 2, 380, 1_000])
def test_no_update_moves_the_sum_by_more_than_the_sensitivity(coordinates):
    """Updates whose every coordinate is rounded away from zero, and others that try.

    With 380 coordinates, half a step in each is nearly the clip norm, which rounding doubles.
    """
    secure = dataclasses.replace(SECURE, deviation=4)
    step = secure.step
    tried = [
        np.full(coordinates, 0.5000001 * step),
        np.full(coordinates, 1.5000001 * step),
        np.full(coordinates, 1.0),
        np.full(coordinates, 1e300),
        np.full(coordinates, 1e-310),
        np.eye(coordinates)[0] * (1 + 1e-15),
        *np.random.default_rng(0).normal(size=(20, coordinates)),
    ]
    zero_P = secure.message(np.zeros(coordinates), generator(0)).astype(np.int64)
    reached = 0.0
    for update_P in tried:
        moved_P = secure.message(update_P, generator(0)).astype(np.int64) - zero_P
        moved_P = (moved_P + 2**31) % 2**32 - 2**31
        norm = math.sqrt(sum(int(each) ** 2 for each in moved_P))
        assert norm <= secure.sensitivity(coordinates)
        reached = max(reached, norm)
    assert reached > (1.98 if coordinates == 380 else 0.9) * (1.0 / step)


def exact_divergence(masses: np.ndarray, shift: int, order: float) -> float:
    """The Renyi divergence between integer noise and the same noise moved by `shift`."""
    moved = np.roll(masses, shift)
    both = (masses > 1e-280) & (moved > 1e-280)
    logs = order * np.log(moved[both]) + (1 - order) * np.log(masses[both])
    return float(np.logaddexp.reduce(logs) / (order - 1))


def noise_masses(shares: int, deviation: float, reach: int) -> np.ndarray:
    """The distribution of the sum of shares of noise, by convolution."""
    one = np.exp(-(np.arange(-reach, reach + 1) ** 2) / (2 * deviation**2))
    total = one = one / one.sum()
    for _ in range(shares - 1):
        total = np.convolve(total, one, mode="same")
    return total / total.sum()


@pytest.mark.parametrize("deviation", [2, 5])
def test_no_exact_divergence_is_above_the_accounted_one(deviation):
    secure = dataclasses.replace(SECURE, clients=4, deviation=deviation, noise_multiplier=0.8)
    event, masses = secure.event(1), noise_masses(4, deviation, reach=400)
    shift = math.floor(secure.sensitivity(1))
    for order in (1.5, 2, 4, 8, 16):
        exact = exact_divergence(masses, shift, order)
        assert 0 < exact <= event.xi + event.rho * order
        if order <= 2:
            # The bound is not vacuous: for the shift itself, it is close.
            own = event.rho * order * (shift / secure.sensitivity(1)) ** 2
            assert own < 1.3 * exact


@pytest.mark.parametrize("deviation", [0.5, 0.6, 0.75])
@pytest.mark.parametrize("shares", [2, 3, 8])
def test_sums_of_shares_that_are_too_narrow_stay_below_the_bound_that_knows_it(deviation, shares):
    """The theorem holds from deviation 1/2 on, where a sum of shares is no discrete Gaussian.

    Then tau counts, which the deviations that a `SecureSum` accepts make vanish.
    """
    total, beyond = noise_masses(shares, deviation, reach=60), 0.0
    for sensitivity in (1, 2):
        bounds = secure_sum._renyi_bounds(sensitivity, shares * deviation**2, shares, 1)
        for order in (2, 4, 8):
            exact = exact_divergence(total, sensitivity, order)
            assert all(exact <= xi + rho * order for rho, xi in bounds)
            without_tau = order * sensitivity**2 / (2 * shares * deviation**2)
            beyond = max(beyond, exact / without_tau)
    # Not so without tau.
    assert deviation > 0.5 or beyond > 1.03


@pytest.mark.parametrize("deviation", [0.5, 2.0])
@pytest.mark.parametrize("shares", [1, 2, 3, 200])
def test_tau_is_its_series(shares, deviation):
    """Kairouz, Liu, Steinke 2021, Theorem 1; at deviation 2, the narrowest, it has 16 zeros."""
    coordinates, sensitivity = 7, 3.0
    terms = (math.exp(-2 * math.pi**2 * deviation**2 * k / (k + 1)) for k in range(1, shares))
    tau = 10 * math.fsum(terms)
    shift = sensitivity / (deviation * math.sqrt(shares))
    found = secure_sum._renyi_bounds(sensitivity, shares * deviation**2, shares, coordinates)
    expected = [(shift**2 / 2, coordinates * tau), ((shift + math.sqrt(7) * tau) ** 2 / 2, 0.0)]
    for each, wanted in zip(found, expected, strict=True):
        assert each == pytest.approx(wanted, rel=1e-12, abs=0)
    assert tau == 0 if shares == 1 else deviation < 2 or tau < 1e-14


def test_with_fine_steps_a_sum_costs_what_gaussian_noise_costs():
    secure = dataclasses.replace(SECURE, clients=100, deviation=2**14, bits=48)
    event = secure.event(1_000)
    assert event.rho == pytest.approx(0.5, rel=1e-3) and event.xi < 1e-3
    coarse = dataclasses.replace(secure, deviation=4).event(1_000)
    assert coarse.rho > 1.2 * event.rho


def test_its_cost_composes_with_other_releases():
    event = SECURE.event(1_000)
    assert events.from_json(events.to_json(event)) == event
    alone = Guarantee(event, 1e-6, adjacency="zero_out_one", accountant="rdp")
    assert "RDP" in alone.statement() and "zero out one client" in alone.statement()
    assert alone.confirmed_epsilon() == pytest.approx(alone.epsilon(), rel=1e-9)
    refusal(dataclasses.replace(alone, accountant="pld").epsilon, "PLD")
    for other in ("replace_one", "add_or_remove_one"):
        refusal(lambda other=other: dataclasses.replace(alone, adjacency=other), other)
    twice = Guarantee.of_events([event, event], 1e-6)
    assert twice.accountant == "rdp" and alone.epsilon() < twice.epsilon()


def test_overflow_is_at_most_as_likely_as_stated():
    """With few bits, some coordinates wrap around, and with more of them practically none."""
    secure = dataclasses.replace(SECURE, deviation=64, noise_multiplier=4.0, bits=11)
    small = dataclasses.replace(secure, bits=10)
    assert SECURE.overflow_probability(10**6) < 1e-9
    wide = dataclasses.replace(secure, bits=40)
    exact_P = np.rint(wide.value(wide.add(messages(wide, np.zeros((6, 2_000))))) / wide.step)
    for narrow in (secure, small):
        inside = np.abs(exact_P) < 2 ** (narrow.bits - 1)
        assert np.mean(~inside) <= narrow.overflow_probability(1)
    assert small.overflow_probability(1) > secure.overflow_probability(1) > 0
    assert secure.overflow_probability(9) == pytest.approx(9 * secure.overflow_probability(1))
    assert dataclasses.replace(SECURE, bits=8).overflow_probability(1) == 1.0


@pytest.mark.parametrize(
    "wrong",
    [
        {"clients": 0},
        {"clip_norm": math.nan},
        {"noise_multiplier": 0.0},
        {"dropouts": 3},
        {"dropouts": -1},
        {"bits": 64},
        {"bits": 7},
        {"deviation": 1},
        {"deviation": 2**17},
        {"noise_multiplier": 1e-14},
    ],
)
def test_settings_out_of_range_and_updates_of_other_shapes_are_refused(wrong):
    refusal(lambda: dataclasses.replace(SECURE, **wrong), *wrong)
    refusal(lambda: SECURE.message(np.zeros((2, 2)), generator(0)), "vector")
    sent = [SECURE.message(np.zeros(size), generator(0)) for size in (3, 3, 3, 3, 3, 2)]
    refusal(lambda: SECURE.add(sent), "equal lengths")


@pytest.mark.parametrize("deviation", [1, 3, 40])
def test_discrete_gaussian_draws_have_its_probabilities(deviation):
    """A chi-squared test of every value that is expected five times and of those beyond."""
    number, reach = 1_000_000, 12 * deviation
    drawn = discrete_gaussian(generator(3), deviation, number)
    assert drawn.shape == (number,) and drawn.dtype == np.int64
    assert np.abs(drawn).max() <= reach
    values = np.arange(-reach, reach + 1)
    counts = np.bincount(drawn + reach, minlength=len(values))

    def expected(deviation):
        masses = np.exp(-(values**2) / (2 * deviation**2))
        return number * masses / masses.sum()

    def p_value(expected):
        often = expected >= 5
        observed, wanted = (
            np.append(each[often], each[~often].sum()) for each in (counts, expected)
        )
        return stats.chisquare(observed, wanted).pvalue

    assert p_value(expected(deviation)) > 1e-3
    # The same test notices a deviation that is two hundredths off.
    assert p_value(expected(1.02 * deviation)) < 1e-3
    # Twice as much from 4 deviations on would be noticed, and half as much, too.
    far = np.abs(values) >= 4 * deviation
    beyond = stats.poisson(expected(deviation)[far].sum())
    assert beyond.sf(counts[far].sum()) > 1e-3 < beyond.cdf(counts[far].sum())


def test_large_deviations_have_their_variance_and_tails():
    drawn = discrete_gaussian(generator(), 2**12, 50_000) / 2**12
    assert stats.kstest(drawn, "norm").pvalue > 1e-3
    assert np.abs(drawn).max() > 3.5


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
