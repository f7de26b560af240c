"""Amplified bands and truncated cohorts: epsilon against the likelihoods of what is released."""

import dataclasses
import itertools
import math

import dp_accounting
import numpy as np
import pytest
from scipy import stats

from jaxpfl.privacy import Clip, CyclicPoisson, Noise, Plan, Poisson, TruncatedPoisson
from jaxpfl.privacy.correlated_noise import square_root

POPULATION = 240


def strategy(rounds: int, bands: int) -> np.ndarray:
    """C with columns of norm 1, but for those that the last round cuts, [rounds, rounds]."""
    column = square_root(bands) / np.linalg.norm(square_root(bands))
    return sum(np.diag(np.full(rounds - k, c), -k) for k, c in enumerate(column[:rounds]))


def largest_delta(plan: Plan, epsilon: float, places: list[int], draws: int = 40_000) -> float:
    """The delta of a client whose place is one of `places`, in or out, by simulated releases.

    It sends 1 in each of its rounds. Releases are shown as C X + z Z, in all coordinates at once.
    """
    rounds, b, z = plan.rounds, plan.participation.rounds_per_epoch, plan.noise_multiplier
    q = plan.participation.sampling_rate
    column = strategy(rounds, min(b, rounds) if plan.correlated else 1)
    means, weights = [], []
    for place in places:
        at = range(place, rounds, b)
        for took in itertools.product([0, 1], repeat=len(at)):
            means.append(column[:, list(at)] @ np.array(took) if at else np.zeros(rounds))
            weights.append(math.prod(q if t else 1 - q for t in took) / len(places))
    mean_KxT, weight_K = np.array(means) / z, np.array(weights)
    generator, deltas = np.random.default_rng(0), []
    for present in (True, False):
        seen = generator.normal(size=(draws, rounds))
        if present:
            seen += mean_KxT[generator.choice(len(weight_K), draws, p=weight_K)]
        exponent = seen @ mean_KxT.T - np.sum(mean_KxT**2, axis=1) / 2
        loss = np.log(np.exp(exponent) @ weight_K) * (1 if present else -1)
        deltas.append(np.mean(np.maximum(-np.expm1(epsilon - loss), 0)))
    return max(deltas)


@pytest.mark.parametrize("noise", ["independent", "banded"])
def test_amplified_bands_hide_a_client_as_well_as_is_charged(noise):
    """18 plans: whoever knows the place sees as much as is charged; nobody sees more.

    Half the rate, or no place at all, would be charged too little.
    """
    tight = 0
    cohorts = ((20, 0.8), (60, 1.5))
    for rounds, b, (taken, z) in itertools.product((1, 4, 6), (1, 2, 3), cohorts):
        plan = Plan(
            rounds, Clip(1.0), Noise(z, noise), CyclicPoisson(POPULATION, taken, b), 3e-2,
            allow_large_delta="a large one can be simulated",
        )  # fmt: skip
        assert plan.guarantee().adjacency == "add_or_remove_one"
        assert plan.charge_number(rounds) == -(-rounds // b)
        epsilon = plan.epsilon()
        known = largest_delta(plan, epsilon, [0])
        # A thousand of the simulated releases decide.
        assert known <= plan.delta * 1.12
        assert largest_delta(plan, epsilon, [*range(min(b, rounds))]) <= plan.delta * 1.12
        tight += known >= plan.delta * 0.88
    # The last columns are shorter in rounds that are no whole epochs.
    assert tight >= 9
    half = dataclasses.replace(plan, participation=CyclicPoisson(POPULATION, taken // 2, b))
    assert largest_delta(plan, half.epsilon(), [0]) > 1.5 * plan.delta


def of_one_round(
    taken: TruncatedPoisson, present: bool, sent: float
) -> tuple[np.ndarray, np.ndarray]:
    """The sums of a round and their probabilities, if the others send `sent`, the client 1 or 0."""
    population, q, most = taken.population, taken.sampling_rate, taken.at_most
    sums, weights = [], []
    for others in range(population):
        weight = stats.binom.pmf(others, population - 1, q)
        stays = min(1.0, most / (others + 1))
        out = sent * min(others, most)
        sums += [out, out, present + sent * min(others, most - 1)]
        weights += [weight * (1 - q), weight * q * (1 - stays), weight * q * stays]
    return np.array(sums), np.array(weights)


def spent_delta(taken: TruncatedPoisson, z: float, epsilon: float, rounds: int) -> float:
    """The largest delta of both directions and of others who send 0, or the opposite.

    Losses of a round are rounded to a grid, to the nearest point, and composed by FFT: an estimate.
    """
    x = np.linspace(-taken.at_most - 10 * z, 1 + 10 * z, 4_001)
    step, points, worst = 2e-3, 2**15, 0.0
    for sent in (0.0, -1.0):
        densities = []
        for present in (True, False):
            sums, weights = of_one_round(taken, present, sent)
            densities.append(np.exp(-(((x[:, None] - sums) / z) ** 2) / 2) @ weights)
        for first, second in (densities, densities[::-1]):
            fits = (first > 1e-250) & (second > 1e-250)
            loss = np.log(first[fits] / second[fits])
            spectrum = np.zeros(points)
            places = np.rint(loss / step).astype(int) % points
            np.add.at(spectrum, places, first[fits] / first.sum())
            composed = np.fft.irfft(np.fft.rfft(spectrum) ** rounds, points)
            index = np.arange(points)
            total = step * np.where(index < points // 2, index, index - points)
            above = total > epsilon
            worst = max(worst, float(composed[above] @ -np.expm1(epsilon - total[above])))
    return worst


def test_truncated_cohorts_hide_a_client_as_well_as_is_charged():
    """8 plans: what is charged is never below; and no more than needed where a cap is far."""
    kinds = ((0.8, 4, 1e-4), (2.0, 1, 1e-2))
    for at_most, q, (z, rounds, delta) in itertools.product((1.0, 3.0), (0.1, 0.3), kinds):
        clients = round(q * 30)
        taken = TruncatedPoisson(30, clients, math.ceil(at_most * clients))
        plan = Plan(
            rounds, Clip(1.0), Noise(z), taken, delta, allow_large_delta="few clients are exact"
        )
        assert plan.guarantee().adjacency == "zero_out_one"
        shown = spent_delta(taken, z, plan.epsilon(), rounds)
        assert shown <= delta * 1.01
        if at_most * q > 0.5:
            assert shown >= delta * 0.95


def test_what_a_cap_costs():
    """Seven deviations above the mean nothing that could be printed, two of them half as much."""
    costs = {}
    for cap in (None, 670, 545):
        taken = Poisson(100_000, 500) if cap is None else TruncatedPoisson(100_000, 500, cap)
        plan = Plan(200, Clip(1.0), Noise(0.7), taken, 1e-6)
        costs[cap] = plan.epsilon()
        assert "one accountant" not in plan.statement()
    assert costs[670] == pytest.approx(costs[None], rel=1e-4)
    assert costs[None] < 1.01 * costs[670] < costs[545]


def test_a_second_release_on_a_truncated_cohort_is_for_another_client_in_its_place():
    plan = Plan(3, Clip(1.0), Noise(2.0), TruncatedPoisson(1000, 10, 40), 1e-5)
    again = plan.released_again_event()
    assert again.event == dp_accounting.GaussianDpEvent(1.0)
