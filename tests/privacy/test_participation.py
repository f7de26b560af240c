"""Cohorts: the promised law, addressed by seed and round alone."""

import numpy as np
import pytest
from scipy import stats

from jaxpfl.privacy.participation import FixedSize, Poisson
from tests.plans import FIELDS, flat_plan


def test_poisson_cohorts_have_binomial_sizes():
    """TRUST 13: a chi-square test on 4,000 rounds; a cohort of fixed size would fail it."""
    population, q, rounds = 500, 0.02, 4000
    sizes = [len(Poisson(population, 10).sample(0, round)) for round in range(rounds)]
    edges = np.arange(4, 18)
    law = stats.binom(population, q)
    expected = rounds * np.diff(np.concatenate([[0], law.cdf(edges), [1]]))
    observed = np.bincount(np.searchsorted(edges, sizes), minlength=len(edges) + 1)
    assert stats.chisquare(observed, expected).pvalue > 1e-3


def test_poisson_takes_each_client_at_the_same_rate_and_independently():
    population, q, rounds = 100, 0.3, 4000
    taken = np.zeros((rounds, population), bool)
    for round in range(rounds):
        taken[round, Poisson(population, 30).sample(1, round)] = True
    deviation = (taken.mean(axis=0) - q) / np.sqrt(q * (1 - q) / rounds)
    assert stats.kstest(deviation, "norm").pvalue > 1e-3
    pairs = np.corrcoef(taken.T)[np.triu_indices(population, 1)]
    assert np.abs(pairs).max() < 5 / np.sqrt(rounds)


def test_a_poisson_cohort_may_be_empty():
    """TRUST 24: neither refused nor drawn again."""
    plan = flat_plan(**FIELDS | {"population": 50, "clients_per_round": 1, "rounds": 400})
    cohorts = [plan.sample(0, round) for round in range(1, 401)]
    empty = [cohort for cohort in cohorts if not len(cohort)]
    assert stats.binomtest(len(empty), 400, (1 - 1 / 50) ** 50).pvalue > 1e-3
    assert {cohort.dtype for cohort in cohorts} == {np.dtype(np.int64)}


def test_poisson_with_everyone_takes_everyone():
    np.testing.assert_array_equal(Poisson(30, 30).sample(0, 0), np.arange(30))


def test_fixed_size_cohorts_are_exact_distinct_and_uniform():
    population, clients, rounds = 60, 7, 3000
    times = np.zeros(population)
    for round in range(rounds):
        cohort = FixedSize(population, clients).sample(0, round)
        assert cohort.dtype == np.int64
        assert len(cohort) == clients
        assert np.all(np.diff(cohort) > 0)
        assert cohort[0] >= 0 and cohort[-1] < population
        times[cohort] += 1
    q = clients / population
    deviation = (times / rounds - q) / np.sqrt(q * (1 - q) / rounds)
    assert np.abs(deviation).max() < 4.5
    np.testing.assert_array_equal(FixedSize(9, 9).sample(0, 0), np.arange(9))


@pytest.mark.parametrize("kind", ["poisson", "fixed"])
def test_a_cohort_is_a_function_of_seed_and_round_alone(kind):
    """TRUST 21, 33, 37: no state, no order of calls, no time; a resumed run draws it again.

    The seed counts beyond its 32nd and 64th bit.
    """
    plan = flat_plan(**FIELDS, sampling=kind)
    drawn = {(s, r): plan.sample(s, r) for s in (0, 1, 2**32, 2**64) for r in (1, 2, 9)}
    np.random.default_rng().random()
    for (seed, round), cohort in reversed(drawn.items()):
        np.testing.assert_array_equal(plan.sample(seed, round), cohort)
    cohorts = {tuple(cohort) for cohort in drawn.values()}
    assert len(cohorts) == len(drawn)
