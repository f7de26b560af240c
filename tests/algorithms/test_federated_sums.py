"""Counts of what clients hold: against a loop, what one client can do, and what noise does."""

import itertools

import numpy as np
import pytest

from jaxpfl.algorithms.federated_metrics import Rates, federated_sums, plan_of_everyone
from jaxpfl.data import Population, from_clients
from tests.algorithms.asking import asked


def clients(sizes, seed: int = 0) -> tuple[Population, np.ndarray]:
    """Clients whose examples have two counts, of which the second is the larger."""
    counts_NxC = np.random.default_rng(seed).integers(0, 4, (sum(sizes), 2)) + [[0, 9]]
    parts = np.split(counts_NxC.astype(np.float32), np.cumsum(sizes)[:-1])
    return from_clients({str(k): {"counts": part} for k, part in enumerate(parts)}), counts_NxC


def total(population: Population, folder, **settings) -> np.ndarray:
    plan = plan_of_everyone(len(population), settings.pop("clip_norm", 1e5), None, None)
    name = f"{len(list(folder.iterdir()))}.jsonl"
    algorithm = federated_sums(plan, length=2, **{"max_examples": 100} | settings)
    return np.asarray(asked(algorithm, population, folder, ledger=name).state, np.float64)


def test_without_noise_the_sums_are_those_of_a_loop(tmp_path):
    population, counts_NxC = clients([3, 0, 300, 7])
    bounds = [0, *np.cumsum(population.sizes())]
    expected_C = np.zeros(2)
    for start, stop in itertools.pairwise(bounds):
        expected_C += np.sum(counts_NxC[start:stop], axis=0)
    np.testing.assert_allclose(total(population, tmp_path, max_examples=400), expected_C, rtol=1e-6)


def test_one_client_moves_the_sum_by_at_most_the_clip_norm(tmp_path):
    """TRUST 16: of few and of very many examples, whose ratio the clip leaves as it is."""
    few, _ = clients([2, 2])
    for size, moved in ((100, 30.0), (1, None)):
        both, counts_NxC = clients([2, 2, size])
        change_C = total(both, tmp_path, clip_norm=30.0) - total(few, tmp_path, clip_norm=30.0)
        added_C = counts_NxC[4:].sum(axis=0)
        norm = np.linalg.norm(added_C) if moved is None else moved
        assert np.linalg.norm(change_C) == pytest.approx(norm, rel=1e-4)
        assert change_C[0] / change_C[1] == pytest.approx(added_C[0] / added_C[1], rel=1e-3)


def test_a_client_counts_at_most_its_cap_of_examples(tmp_path):
    sum_C = total(from_clients({"0": {"counts": np.ones((500, 2), np.float32)}}), tmp_path)
    np.testing.assert_allclose(sum_C, [100, 100], rtol=1e-6)


def test_rates_have_the_spread_that_they_state():
    plan = plan_of_everyone(1000, 20.0, 1.0, 1e-5)
    noise = plan.value_noise_std(plan.clip_norm)
    assert plan.epsilon() == pytest.approx(1.0, rel=1e-3)
    exact_C, generator = np.array([900.0, 8100.0, 0.0, 0.0]), np.random.default_rng(0)
    drawn = [Rates.of(plan, exact_C + noise * generator.normal(size=4)) for _ in range(400)]
    rates_RxG = np.array([each.rate_G for each in drawn])
    assert rates_RxG[:, 0].mean() == pytest.approx(0.1, abs=0.002)
    assert rates_RxG[:, 0].std() == pytest.approx(drawn[0].noise_G[0], rel=0.15)
    # Where nobody has anything to count, a rate would be of noise alone.
    assert np.isnan(rates_RxG[:, 1]).mean() > 0.8
