"""Cohorts: the promised law, addressed by seed and round alone."""

import itertools
from collections import Counter

import numpy as np
import pytest
from scipy import stats

from jaxpfl.privacy.participation import (
    CyclicPoisson,
    FixedSize,
    MinSeparation,
    Poisson,
    TruncatedPoisson,
)
from tests.plans import FIELDS, OWN, flat_plan
from tests.refusals import refusal


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


@pytest.mark.parametrize(
    ("population", "clients", "separation"), [(40, 3, 13), (40, 3, 5), (9, 9, 1)]
)
def test_a_client_waits_between_two_participations(population, clients, separation):
    """Exactly n of N in each round, and everybody comes in the end where all must."""
    kind, last, gaps = MinSeparation(population, clients, separation), {}, Counter()
    for round in range(1, 301):
        cohort = kind.sample(0, round)
        assert cohort.dtype == np.int64 and len(cohort) == clients and np.all(np.diff(cohort) > 0)
        for client in cohort.tolist():
            gaps[round - last.get(client, -separation)] += round > separation
            last[client] = round
    assert min(gaps) >= separation and separation in gaps
    assert {*last} == {*range(population)}


def test_all_who_waited_long_enough_are_equally_likely():
    """Two of six in each of three rounds, two rounds apart: all 15 x 6 x 6 ways, as often."""
    kind, seen = MinSeparation(6, 2, 2), Counter()
    for seed in range(10_800):
        seen[tuple(tuple(kind.sample(seed, round).tolist()) for round in (1, 2, 3))] += 1
    pairs = [*itertools.combinations(range(6), 2)]
    ways = [
        way
        for way in itertools.product(pairs, repeat=3)
        if not {*way[0]} & {*way[1]} and not {*way[1]} & {*way[2]}
    ]
    assert {*seen} <= {*ways} and len(ways) == 15 * 6 * 6
    assert stats.chisquare([seen[way] for way in ways]).pvalue > 1e-3


def test_cyclic_poisson_has_one_place_and_a_draw_in_each_epoch():
    """Places are independent and uniform, and so are the draws within a client's own round."""
    kind, taken = CyclicPoisson(600, 50, 4), np.zeros((600, 400), bool)  # 50 of 600, 1 of 3 there
    for round in range(1, 401):
        cohort = kind.sample(0, round)
        assert cohort.dtype == np.int64 and np.all(np.diff(cohort) > 0)
        taken[cohort, round - 1] = True
    by_place = taken.reshape(600, 100, 4)
    # Each client only ever takes part in its own round of an epoch.
    assert np.all(np.sum(by_place.any(axis=1), axis=1) == 1)
    place = np.argmax(by_place.any(axis=1), axis=1)
    assert stats.chisquare(np.bincount(place, minlength=4)).pvalue > 1e-3
    own = by_place[np.arange(600), :, place]
    times = np.bincount(own.sum(axis=1), minlength=101)
    law = 600 * stats.binom.pmf(np.arange(101), 100, 1 / 3)
    few = slice(24, 44)
    tails = [times[:24].sum(), *times[few], times[44:].sum()]
    expected = [law[:24].sum(), *law[few], law[44:].sum()]
    assert stats.chisquare(tails, expected).pvalue > 1e-3
    following = np.corrcoef(own[:, :-1].ravel(), own[:, 1:].ravel())[0, 1]
    assert abs(following) < 5 / np.sqrt(own.size)
    # Over seeds, a cohort's size is that of independent clients.
    sizes = [len(kind.sample(seed, 3)) for seed in range(2_000)]
    assert np.var(sizes) == pytest.approx(600 * (1 / 12) * (11 / 12), rel=0.15)


def test_truncated_poisson_leaves_out_anybody_alike():
    """Sizes are those of Poisson, cut; all clients take part equally often."""
    kind, rounds = TruncatedPoisson(200, 20, 24), 6_000
    sizes, times = [], np.zeros(200)
    for round in range(rounds):
        cohort = kind.sample(3, round)
        assert cohort.dtype == np.int64 and np.all(np.diff(cohort) > 0)
        sizes.append(len(cohort))
        times[cohort] += 1
    law = stats.binom(200, 0.1)
    expected = [law.cdf(12), *law.pmf(np.arange(13, 24)), law.sf(23)]
    observed = np.bincount(np.clip(sizes, 12, 24) - 12, minlength=13)
    assert stats.chisquare(observed, rounds * np.array(expected)).pvalue > 1e-3
    q = np.sum(np.minimum(np.arange(201), 24) * law.pmf(np.arange(201))) / 200
    deviation = (times / rounds - q) / np.sqrt(q * (1 - q) / rounds)
    assert np.abs(deviation).max() < 4.5
    assert stats.kstest(deviation, "norm").pvalue > 1e-3


def test_a_separation_that_leaves_too_few_clients_is_refused():
    refusal(lambda: MinSeparation(40, 3, 14), "separation must be at most 13, found 14")
    refusal(lambda: MinSeparation(40, 3, 0), "separation")
    refusal(lambda: CyclicPoisson(40, 4, 11), "separation at most 40 found 11")
    refusal(lambda: TruncatedPoisson(40, 4, 3), "at_most at least 4 found 3")
    refusal(lambda: TruncatedPoisson(40, 40, 40), "population")
    refusal(lambda: flat_plan(**FIELDS, sampling="min_separation"), "needs separation")
    refusal(lambda: flat_plan(**FIELDS, separation=3), "takes no separation")


@pytest.mark.parametrize(
    "kind", ["poisson", "fixed", "min_separation", "cyclic_poisson", "truncated_poisson"]
)
def test_a_cohort_is_a_function_of_seed_and_round_alone(kind):
    """TRUST 21, 33, 37: no state, no order of calls, no time; a resumed run draws it again.

    The seed counts beyond its 32nd and 64th bit.
    """
    plan = flat_plan(**FIELDS, sampling=kind, **OWN.get(kind, {}))
    drawn = {(s, r): plan.sample(s, r) for s in (0, 1, 2**32, 2**64) for r in (1, 2, 9)}
    np.random.default_rng().random()
    for (seed, round), cohort in reversed(drawn.items()):
        np.testing.assert_array_equal(plan.sample(seed, round), cohort)
    cohorts = {tuple(cohort) for cohort in drawn.values()}
    assert len(cohorts) == len(drawn)
