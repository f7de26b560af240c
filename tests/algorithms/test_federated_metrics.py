"""Private metrics: against a loop, what one client can do, what they cost, and what noise does."""

import dataclasses
import itertools
import json
import math
from functools import partial
from typing import cast

import jax
import numpy as np
import pytest

from jaxpfl.algorithms.federated_metrics import (
    MetricsPlan,
    ReleasedMetrics,
    federated_metrics,
    plan_of_everyone,
    release,
    with_correct,
)
from jaxpfl.data import Population, from_clients
from jaxpfl.privacy import Clip, Ledger
from tests.algorithms.asking import SAME, asked
from tests.data.populations import SECRET
from tests.plans import flat_plan
from tests.refusals import refusal

WRONG_NUMBERS = [-0.1, 0, float("nan"), float("inf"), "0.5", True]


def once(clients, noise=1.0, rounds=1):
    return flat_plan(population=clients, noise_multiplier=noise, rounds=rounds, delta=1e-5)


def of_sizes(sizes) -> Population:
    return from_clients({f"{SECRET} {k}": {"x": np.zeros(size)} for k, size in enumerate(sizes)})


def clients(count: int = 40, seed: int = 0) -> tuple[Population, np.ndarray]:
    """Clients of 0 to 8 examples, and which examples are correct."""
    population = of_sizes(k % 9 for k in range(count))
    return population, np.random.default_rng(seed).uniform(size=population.num_examples) < 0.7


def users(count: int, examples: int, *shape: float, seed: int) -> tuple[Population, np.ndarray]:
    """Clients of equal size whose accuracies have a beta distribution; and their correct ones."""
    rng = np.random.default_rng(seed)
    hits = rng.binomial(examples, rng.beta(*shape, count))
    return of_sizes([examples] * count), hits


def measured(population, correct, plan, folder, **settings) -> ReleasedMetrics:
    path = folder / f"{len(list(folder.iterdir()))}.jsonl"
    with Ledger(path, population) as ledger:
        return release(population, plan, correct=correct, ledger=ledger, **settings)


def first(hits, examples: int) -> np.ndarray:
    return (np.arange(examples)[None, :] < hits[:, None]).reshape(-1)


@pytest.mark.parametrize("share", [0.3, 0.9])
def test_without_noise_the_metrics_are_those_of_a_loop(tmp_path, share):
    population, correct = clients()
    edges = (0, 0.25, 0.5, 0.7, 0.9, 1)
    plan = MetricsPlan.without_privacy(40, edges=edges, histogram_share=share)
    found = measured(population, correct, plan, tmp_path)
    parts = [correct[a:b] for a, b in itertools.pairwise(population.offsets) if b > a]
    accuracies = [part.mean() for part in parts]
    assert found.histogram_B == pytest.approx(np.histogram(accuracies, edges)[0], rel=1e-6)
    assert found.correct == pytest.approx(np.sum(accuracies), rel=1e-5)
    assert found.correct + found.incorrect == pytest.approx(len(parts), rel=1e-5)
    assert found.accuracy() == pytest.approx(np.mean(accuracies), rel=1e-5)


def test_without_noise_percentiles_are_within_a_bin_of_the_exact_ones(tmp_path):
    population, hits = users(300, 50, 12, 2, seed=1)
    plan = MetricsPlan.without_privacy(300, edges=tuple(np.linspace(0, 1, 41).tolist()))
    released = measured(population, first(hits, 50), plan, tmp_path)
    for percent in (0.5, 25, 75, 99.5):
        exact = np.percentile(hits / 50, percent, method="inverted_cdf")
        assert abs(released.percentile(percent) - exact) <= 1 / 40 + 1e-9


@pytest.mark.parametrize("share", [0.2, 0.8])
def test_one_client_moves_the_sum_by_at_most_one(share, tmp_path):
    """TRUST 16: clients that are all right, all wrong, mixed, and empty; without a clip."""
    rng = np.random.default_rng(2)
    kinds = [np.ones(1, bool), np.zeros(64, bool), rng.uniform(size=30) < 0.5, np.zeros(0, bool)]
    queries = ()

    def step(state, release, round):
        return release(*queries).value, {}

    def total(members) -> np.ndarray:
        nonlocal queries
        parts, edges = [kinds[k] for k in members], (0.0, 0.5, 0.8, 1.0)
        plan = MetricsPlan.without_privacy(len(parts), edges=edges, histogram_share=share)
        algorithm = federated_metrics(plan)
        (query,) = algorithm.queries
        wide = dataclasses.replace(query.plan, clip=Clip(1e6))
        queries = (dataclasses.replace(query, plan=wide),)
        algorithm = algorithm._replace(step=step, queries=queries)
        evaluated = with_correct(of_sizes(map(len, parts)), np.concatenate(parts))
        name = f"{len(list(tmp_path.iterdir()))}.jsonl"
        sums = asked(algorithm, evaluated, tmp_path, ledger=name).state
        return np.hstack([np.float64(sums[name]) for name in ("histogram", "correct", "incorrect")])

    others = [2, 0, 1]
    without = total(others)
    moved = [np.linalg.norm(total([*others, kind]) - without) for kind in range(len(kinds))]
    assert max(moved) <= 1 + 1e-6
    assert max(moved) == pytest.approx(1, abs=1e-6), "the bound is reached: no noise is wasted"
    assert moved[3] == 0


def test_a_client_with_many_examples_is_cut_to_its_cap(tmp_path):
    """TRUST 4: accuracies are those of a subset, and the shares still sum to one."""
    plan = MetricsPlan.without_privacy(2, max_examples=10)
    found = measured(of_sizes([500, 3]), np.arange(503) % 2 == 0, plan, tmp_path)
    assert found.correct + found.incorrect == pytest.approx(2, rel=1e-6)
    with_ten = (found.correct - 2 / 3) * 10
    assert with_ten == pytest.approx(round(with_ten), abs=1e-4)


@pytest.mark.parametrize(("epsilon", "delta"), [(1.0, 1e-5), (0.2, 1e-6), (8.0, 1e-5)])
def test_calibrated_plans_cost_what_was_asked_for(epsilon, delta):
    plan = MetricsPlan.calibrated(epsilon, delta, 539)
    assert epsilon * (1 - 1e-3) < plan.release.epsilon() <= epsilon
    json.dumps(plan.to_dict())


def test_the_noise_is_that_of_the_plan(tmp_path):
    """TRUST 18, at the scale of a release: each part's noise is z over its weight."""
    edges = tuple(np.linspace(0, 1, 2_001).tolist())
    plan = MetricsPlan(once(8, 3.0), edges, histogram_share=0.8)
    found = measured(of_sizes([0] * 8), np.zeros(0, bool), plan, tmp_path)
    assert found.noise == pytest.approx((3 / math.sqrt(0.8), 3 / math.sqrt(0.2)))
    # Of n values, a deviation is known to 1 / sqrt(2 n): five of these are 8 percent.
    assert found.histogram_B.std() == pytest.approx(found.noise[0], rel=0.08)
    # A value on a grid of 1/32 deviation is 0 in one draw of a hundred; both of both, in 1e-8.
    other = measured(of_sizes([0] * 8), np.zeros(0, bool), plan, tmp_path)
    totals = [each.correct for each in (found, other)] + [each.incorrect for each in (found, other)]
    assert any(totals) and max(map(abs, totals)) < 6 * found.noise[1]


def of_histogram(counts, edges=None) -> ReleasedMetrics:
    edges = edges or tuple(np.linspace(0, 1, len(counts) + 1).tolist())
    return ReleasedMetrics(MetricsPlan(once(100), edges), np.asarray(counts, float), 0.0, 0.0)


def test_percentiles_of_a_known_histogram():
    metrics, uneven = of_histogram([0, 10, 0, 30]), of_histogram([10, 10], (0.0, 0.9, 1.0))
    percents = (12.5, 25, 62.5, 100 - 1e-9)
    found = [metrics.percentile(percent) for percent in percents]
    assert found == pytest.approx([0.375, 0.5, 0.875, 1])
    assert [uneven.percentile(25), uneven.percentile(75)] == pytest.approx([0.45, 0.95])


def test_percentiles_never_fall_whatever_the_noise():
    rng = np.random.default_rng(0)
    for _ in range(40):
        counts = rng.normal(size=12) * 5 + rng.integers(0, 2, 12) * 4
        found = [of_histogram(counts).percentile(p) for p in np.arange(1, 100, 3)]
        if counts.sum() <= 0 and np.isnan(found).all():
            continue
        assert np.all(np.diff(found) >= 0) and found[0] >= 0 and found[-1] <= 1
    # The cumulative 4, 2, 10 falls: the nearest that does not is 3, 3, 10.
    assert of_histogram([4, -2, 8]).percentile(20) == pytest.approx(2 / 3 / 3)
    assert of_histogram([4, -2, 8]).percentile(65) == pytest.approx((2 + 3.5 / 7) / 3)
    # A dip is no reason to lose the users on either side of it.
    assert of_histogram([10, -2, 2, 10]).percentile(75) > 0.75
    for nothing in ([-1, -2], [0, 0]):
        assert math.isnan(of_histogram(nothing).percentile(50))


def test_private_metrics_are_near_the_exact_ones(tmp_path):
    """At 2,000 users and epsilon 1: a rank error of a few percent, where the histogram is dense."""
    population, hits = users(2_000, 40, 8, 2, seed=5)
    plan = MetricsPlan.calibrated(1.0, 1e-5, 2_000)
    found = measured(population, first(hits, 40), plan, tmp_path, secret=SAME)
    assert found.accuracy() == pytest.approx(hits.mean() / 40, abs=0.02)
    for percent in (25, 50, 75):
        exact = np.percentile(hits / 40, percent)
        assert found.percentile(percent) == pytest.approx(exact, abs=0.04)


@pytest.mark.parametrize(
    ("correct", "incorrect", "accuracy"), [(9.0, 3.0, None), (90.0, 10.0, 0.9), (-30.0, 2.0, None)]
)
def test_users_drowned_in_noise_have_no_accuracy(correct, incorrect, accuracy):
    plan = MetricsPlan(once(100, 10.0 * math.sqrt(0.5)))
    found = ReleasedMetrics(plan, np.zeros(20), correct, incorrect).accuracy()
    assert math.isnan(found) if accuracy is None else found == pytest.approx(accuracy)


@pytest.mark.parametrize("wrong", WRONG_NUMBERS)
def test_wrong_numbers_are_refused(wrong):
    """TRUST 9"""
    refusal(lambda: MetricsPlan.calibrated(wrong, 1e-5, 9), "epsilon")
    refusal(lambda: MetricsPlan.calibrated(1.0, wrong, 9), "delta")
    number = wrong if wrong is not True else 0
    refusal(lambda: MetricsPlan.calibrated(1.0, 1e-5, number), "population")
    percent = wrong if wrong not in ("0.5", 0) else 100
    refusal(lambda: of_histogram([1.0]).percentile(percent), "percent must")


def test_a_plan_without_an_epsilon_is_refused_and_never_without_noise():
    """TRUST 9: what is not private is asked for by name, and not by leaving a number out."""
    refusal(lambda: MetricsPlan.calibrated(cast(float, None), 1e-5, 9), "epsilon")
    refusal(lambda: MetricsPlan.calibrated(1.0, cast(float, None), 9), "delta")
    refusal(lambda: plan_of_everyone(9, 1.0, None, 1e-5), "epsilon")
    refusal(lambda: plan_of_everyone(9, 1.0, 1.0, None), "delta")


def test_each_start_has_a_state_of_its_own():
    algorithm = federated_metrics(MetricsPlan.without_privacy(9))
    first, second = (algorithm.init(jax.random.key(0)) for _ in range(2))
    jax.tree.map(lambda leaf: leaf.delete(), first)
    assert not np.asarray(second["histogram"]).any()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(release=None), "must be a Plan"),
        (dict(release=once(9, rounds=2)), "one round of everyone"),
        (dict(edges=(0, 1, 0.5)), "edges must increase"),
        (dict(edges=(0, 0.5, 0.5, 1)), "edges must increase"),
        (dict(edges=(0.1, 1)), "edges must increase"),
        (dict(edges=(0, math.nan, 1)), "finite"),
        (dict(edges=(0,)), "edges must increase"),
        (dict(histogram_share=1.0), "histogram_share must"),
        (dict(histogram_share=math.nan), "histogram_share must"),
        (dict(max_examples=0), "max_examples must"),
    ],
)
def test_plans_that_make_no_sense_are_refused(changes, words):
    """TRUST 9, 11"""
    refusal(lambda: MetricsPlan(**{"release": once(9), **changes}), words)


def test_other_clients_and_other_columns_are_refused_and_no_value_is_shown(tmp_path):
    """TRUST 7, 31"""
    population, correct = clients()
    plan = MetricsPlan.calibrated(1.0, 1e-5, 40)
    others = from_clients({f"{k}": {"x": np.full(3, k)} for k in range(100, 140)})
    for hits, held, words, settings in (
        (correct[1:], population, "one boolean", {}),
        (correct.astype(int), population, "one boolean", {}),
        (correct, others, "another population", {}),
        (correct, population, "each example", dict(unit="example")),
    ):
        with Ledger(tmp_path / f"{len(list(tmp_path.iterdir()))}", held, **settings) as ledger:
            call = partial(release, population, plan, correct=hits, ledger=ledger)
            assert SECRET not in refusal(call, words)
            assert len(ledger) == 0
    larger = MetricsPlan.calibrated(1.0, 1e-5, 41)
    refusal(lambda: measured(population, correct, larger, tmp_path), "another number")
