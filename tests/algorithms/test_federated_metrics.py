"""Private metrics: against a loop, what one client can do, what they cost, and what noise does."""

import dataclasses
import itertools
import json
import math

import numpy as np
import pytest

from jaxpfl.algorithms.federated_metrics import (
    MetricsPlan,
    ReleasedMetrics,
    federated_metrics,
    release,
    with_metrics,
)
from jaxpfl.data import Population, from_clients
from jaxpfl.errors import InputError
from jaxpfl.federated import RunSecret
from jaxpfl.privacy import Clip, Ledger, accounting
from tests.algorithms.asking import SAME, asked
from tests.data.populations import SECRET

WRONG_NUMBERS = [-0.1, 0, float("nan"), float("inf"), "0.5", True]


def clients(count: int = 40, seed: int = 0) -> tuple[Population, np.ndarray]:
    """Clients of 0 to 8 examples in slices 0 .. 3, and which examples are correct."""
    rng = np.random.default_rng(seed)
    population = from_clients(
        {
            f"{SECRET} {k}": {"label": rng.integers(0, 4, k % 9).astype(np.int32)}
            for k in range(count)
        }
    )
    return population, rng.uniform(size=population.num_examples) < 0.7


def measured(population, correct, plan, folder, **settings) -> ReleasedMetrics:
    path = folder / f"{len(list(folder.iterdir()))}.jsonl"
    with Ledger(path, population) as ledger:
        return release(population, plan, correct=correct, ledger=ledger, **settings)


def looped(population, correct, plan, numbers):
    """The three sums by a loop over clients, in float64."""
    histogram = np.zeros(len(plan.edges) - 1)
    right, wrong = np.zeros(len(plan.slices)), np.zeros(len(plan.slices))
    for client in range(len(population)):
        rows = range(population.offsets[client], population.offsets[client + 1])
        if not rows:
            continue
        accuracy = sum(correct[row] for row in rows) / len(rows)
        number = max(i for i, edge in enumerate(plan.edges[:-1]) if accuracy >= edge)
        histogram[number] += 1
        for row in rows:
            if numbers[row] < len(plan.slices):
                (right if correct[row] else wrong)[numbers[row]] += 1 / len(rows)
    return histogram, right, wrong


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_without_noise_the_metrics_are_those_of_a_loop(tmp_path, share):
    population, correct = clients()
    plan = MetricsPlan.without_privacy(
        40, edges=(0, 0.25, 0.5, 0.7, 0.9, 1), slices=("a", "b", "c"), histogram_share=share
    )
    found = measured(population, correct, plan, tmp_path, slice_column="label")
    histogram, right, wrong = looped(population, correct, plan, population.columns["label"])
    if share > 0:
        assert found.histogram_B is not None
        np.testing.assert_allclose(found.histogram_B, histogram, rtol=1e-6)
        assert histogram.sum() == np.count_nonzero(population.sizes()) < 40
    else:
        assert found.histogram_B is None
        with pytest.raises(InputError, match="no histogram was released"):
            found.percentile(50)
    if share == 1:
        assert found.correct_J is None and found.incorrect_J is None
        for tell in (found.accuracy, lambda: found.slices):
            with pytest.raises(InputError, match="no slices were released"):
                tell()
        return
    np.testing.assert_allclose(found.correct_J, right, rtol=1e-5)
    np.testing.assert_allclose(found.incorrect_J, wrong, rtol=1e-5)
    assert found.accuracy() == pytest.approx(right.sum() / (right + wrong).sum(), rel=1e-5)
    for index, (name, metric) in enumerate(found.slices.items()):
        assert name == "abc"[index]
        assert metric.accuracy == pytest.approx(right[index] / (right + wrong)[index], rel=1e-5)


def test_accuracy_over_one_slice_is_the_mean_of_user_accuracies(tmp_path):
    population, correct = clients()
    found = measured(population, correct, MetricsPlan.without_privacy(40), tmp_path)
    parts = [correct[a:b] for a, b in itertools.pairwise(population.offsets) if b > a]
    assert found.accuracy() == pytest.approx(np.mean([part.mean() for part in parts]), rel=1e-5)


@pytest.mark.parametrize("percent", [0.5, 10, 25, 50, 75, 99.5])
def test_without_noise_percentiles_are_within_a_bin_of_the_exact_ones(tmp_path, percent):
    rng = np.random.default_rng(1)
    hits = rng.binomial(50, rng.beta(12, 2, 300))
    population = from_clients({f"{k}": {"x": np.zeros(50)} for k in range(300)})
    correct = (np.arange(50)[None, :] < hits[:, None]).reshape(-1)
    plan = MetricsPlan.without_privacy(300, edges=tuple(np.linspace(0, 1, 41).tolist()))
    found = measured(population, correct, plan, tmp_path).percentile(percent)
    exact = np.percentile(hits / 50, percent, method="inverted_cdf")
    assert abs(found - exact) <= 1 / 40 + 1e-9


# What one client can do.


def noiseless_sum(population, correct, share, folder) -> np.ndarray:
    """What the server would see without noise, clipping switched off, as one vector."""
    edges, slices = (0.0, 0.5, 0.8, 1.0), ("a", "b", "c")
    settings = dict(edges=edges, slices=slices, histogram_share=share)
    plan = MetricsPlan.without_privacy(len(population), **settings)
    algorithm = federated_metrics(plan)
    (query,) = algorithm.queries
    wide = dataclasses.replace(query, plan=dataclasses.replace(query.plan, clip=Clip(1e6)))

    def step(state, release, round):
        return release(wide).value, {}

    held = with_metrics(population, correct, "label")
    name = f"{len(list(folder.iterdir()))}.jsonl"
    total = asked(algorithm._replace(step=step, queries=(wide,)), held, folder, ledger=name).state
    parts = ("histogram", "correct", "incorrect")
    return np.concatenate([np.float64(total[name]) for name in parts])


@pytest.mark.parametrize("share", [0.0, 0.5, 0.8, 1.0])
def test_one_client_moves_the_sum_by_at_most_one(share, tmp_path):
    """TRUST 16: clients that are all right, all wrong, of one slice, of many, and large."""
    rng = np.random.default_rng(2)
    kinds = [
        (np.ones(1, bool), np.zeros(1, np.int32)),
        (np.zeros(64, bool), np.full(64, 2, np.int32)),
        (np.ones(64, bool), np.zeros(64, np.int32)),
        (rng.uniform(size=30) < 0.5, rng.integers(0, 3, 30).astype(np.int32)),
        (np.ones(5, bool), np.array([-1, 3, 7, 2**31 - 1, -(2**31)], np.int32)),
        (np.zeros(0, bool), np.zeros(0, np.int32)),
    ]

    def total(members) -> np.ndarray:
        parts = [kinds[k] for k in members]
        population = from_clients(
            {f"{i}": {"label": numbers} for i, (_, numbers) in enumerate(parts)}
        )
        correct = np.concatenate([part[0] for part in parts])
        return noiseless_sum(population, correct, share, tmp_path)

    others = [3, 0, 2]
    without = total(others)
    moved = [np.linalg.norm(total([*others, kind]) - without) for kind in range(len(kinds))]
    assert max(moved) <= 1 + 1e-6
    assert max(moved) == pytest.approx(1, abs=1e-6), "the bound is reached: no noise is wasted"
    assert moved[5] == 0


def test_a_client_with_many_examples_is_cut_to_its_cap(tmp_path):
    """TRUST 4: accuracies are those of a subset, and the shares still sum to one."""
    population = from_clients({"a": {"x": np.zeros(500)}, "b": {"x": np.zeros(3)}})
    correct = np.arange(503) % 2 == 0
    plan = MetricsPlan.without_privacy(2, max_examples=10)
    found = measured(population, correct, plan, tmp_path)
    assert found.correct_J is not None and found.incorrect_J is not None
    assert (found.correct_J + found.incorrect_J)[0] == pytest.approx(2, rel=1e-6)
    with_ten = (found.correct_J[0] - 2 / 3) * 10
    assert with_ten == pytest.approx(round(with_ten), abs=1e-4)


# What it costs.


@pytest.mark.parametrize("target", [(1.0, 1e-5), (0.2, 1e-6), (8.0, 1e-5)])
def test_calibrated_plans_cost_what_was_asked_for(target):
    epsilon, delta = target
    plan = MetricsPlan.calibrated(epsilon, delta, 539)
    assert epsilon * (1 - 1e-3) < plan.epsilon() <= epsilon
    by_event = accounting.epsilon(plan.event(), delta, "pld", "add_or_remove_one")
    assert by_event == pytest.approx(plan.epsilon(), rel=1e-6)
    statement = plan.statement()
    assert f"delta = {delta:g}" in statement and "add or remove one client" in statement
    assert "NOT PRIVATE" in MetricsPlan.without_privacy(5).statement()
    json.dumps(plan.to_dict())


def test_a_replay_is_the_same_release_and_anything_else_is_charged(tmp_path):
    """TRUST 29, 31: with one key and equal noise, a difference would be free of noise."""
    population, correct = clients()
    plan = MetricsPlan.calibrated(1.0, 1e-5, 40, slices=("a", "b"))
    flipped = correct.copy()
    flipped[0] = not flipped[0]
    base = dict(data=correct, plan=plan, slice_column="label", run="run", seed=0)
    changes = [
        {},
        {},
        # What slices are called is nothing that clients are asked.
        dict(plan=dataclasses.replace(plan, slices=("a", "c"))),
        dict(data=flipped),
        dict(plan=dataclasses.replace(plan, noise_multiplier=2 * plan.noise_multiplier)),
        dict(plan=dataclasses.replace(plan, histogram_share=0.4)),
        dict(plan=dataclasses.replace(plan, slices=("a", "b", "c"))),
        dict(slice_column=None),
        dict(run="again"),
        dict(seed=1),
    ]
    draws = []
    with Ledger(tmp_path / "ledger.jsonl", population) as ledger:
        for change in changes:
            each = {**base, **change}
            settings = dict(correct=each["data"], slice_column=each["slice_column"])
            found = release(
                population, each["plan"], ledger=ledger, run=each["run"],
                secret=RunSecret.reproducible(each["seed"]), **settings,
            )  # fmt: skip
            numbers = population.columns["label"] * (each["slice_column"] is not None)
            _, right, _ = looped(population, each["data"], each["plan"], numbers)
            noise = found.correct_J - right
            draws.append(noise[0] / found.noise[1])
        assert len(ledger) == len(changes) - 2
        assert ledger.spent(1e-5) > 1.5 * plan.epsilon()
    assert draws[0] == draws[1] == draws[2]
    apart = np.abs(np.subtract.outer(draws[2:], draws[2:]))[np.triu_indices(len(draws) - 2, 1)]
    assert apart.min() > 1e-4


def test_the_noise_is_that_of_the_plan(tmp_path):
    """TRUST 18, at the scale of a release: each part's noise is z over its weight."""
    population = from_clients({f"{k}": {"x": np.zeros(0)} for k in range(8)})
    edges = tuple(np.linspace(0, 1, 2_001).tolist())
    names = tuple(str(j) for j in range(1_000))
    plan = MetricsPlan(8, 3.0, 1e-5, edges, names, histogram_share=0.8)
    found = measured(population, np.zeros(0, bool), plan, tmp_path)
    assert found.noise == pytest.approx((3 / math.sqrt(0.8), 3 / math.sqrt(0.2)))
    assert found.histogram_B is not None
    # Of n values, a deviation is known to 1 / sqrt(2 n): five of these are 8 and 11 percent.
    assert found.histogram_B.std() == pytest.approx(found.noise[0], rel=0.08)
    for sums in (found.correct_J, found.incorrect_J):
        assert sums is not None and sums.std() == pytest.approx(found.noise[1], rel=0.11)
    assert abs(np.corrcoef(found.correct_J, found.incorrect_J)[0, 1]) < 0.16


# What is made of the release.


def of_histogram(counts, edges=None) -> ReleasedMetrics:
    edges = edges or tuple(np.linspace(0, 1, len(counts) + 1).tolist())
    return ReleasedMetrics(
        MetricsPlan(100, 1.0, 1e-5, edges), np.asarray(counts, float), None, None
    )


def test_percentiles_of_a_known_histogram():
    metrics = of_histogram([0, 10, 0, 30])
    assert metrics.percentile(12.5) == pytest.approx(0.375)
    assert metrics.percentile(25) == pytest.approx(0.5)
    assert metrics.percentile(62.5) == pytest.approx(0.875)
    assert metrics.percentile(100 - 1e-9) == pytest.approx(1)
    uneven = of_histogram([10, 10], (0.0, 0.9, 1.0))
    assert uneven.percentile(25) == pytest.approx(0.45)
    assert uneven.percentile(75) == pytest.approx(0.95)


def test_percentiles_never_fall_whatever_the_noise():
    rng = np.random.default_rng(0)
    for _ in range(200):
        counts = rng.normal(size=12) * 5 + rng.integers(0, 2, 12) * 4
        found = [of_histogram(counts).percentile(p) for p in np.arange(1, 100)]
        if counts.sum() <= 0 and np.isnan(found).all():
            continue
        assert np.all(np.diff(found) >= 0) and found[0] >= 0 and found[-1] <= 1
    # The cumulative 4, 2, 10 falls: the nearest that does not is 3, 3, 10.
    assert of_histogram([4, -2, 8]).percentile(20) == pytest.approx(2 / 3 / 3)
    assert of_histogram([4, -2, 8]).percentile(65) == pytest.approx((2 + 3.5 / 7) / 3)
    # A dip is no reason to lose the users on either side of it.
    assert of_histogram([10, -2, 2, 10]).percentile(75) > 0.75
    assert math.isnan(of_histogram([-1, -2]).percentile(50))
    assert math.isnan(of_histogram([0, 0]).percentile(50))


def test_private_percentiles_are_near_the_exact_ones(tmp_path):
    """At 2,000 users and epsilon 1: a rank error of a few percent, where the histogram is dense."""
    rng = np.random.default_rng(5)
    hits = rng.binomial(40, rng.beta(8, 2, 2_000))
    population = from_clients({f"{k}": {"x": np.zeros(40)} for k in range(2_000)})
    correct = (np.arange(40)[None, :] < hits[:, None]).reshape(-1)
    plan = MetricsPlan.calibrated(1.0, 1e-5, 2_000)
    found = measured(population, correct, plan, tmp_path, secret=SAME)
    assert found.accuracy() == pytest.approx(hits.mean() / 40, abs=0.02)
    for percent in (25, 50, 75):
        exact = np.percentile(hits / 40, percent)
        assert found.percentile(percent) == pytest.approx(exact, abs=0.04)


def test_slices_drowned_in_noise_have_no_accuracy():
    plan = MetricsPlan(100, 10.0, 1e-5, slices=("few", "many", "none"), histogram_share=0.0)
    found = ReleasedMetrics(plan, None, np.array([9.0, 90, -30]), np.array([3.0, 10, 2])).slices
    assert math.isnan(found["few"].accuracy) and math.isnan(found["none"].accuracy)
    assert found["many"].accuracy == pytest.approx(0.9)
    assert found["many"].count == 100
    assert found["many"].noise == pytest.approx(10 * math.hypot(0.1, 0.9) / 100)


def test_the_stated_noise_of_a_slice_is_what_releases_spread():
    rng = np.random.default_rng(0)
    plan = MetricsPlan(1_000, 10.0, 1e-5, histogram_share=0.0)
    sums = np.array([700.0, 200.0]) + 10 * rng.normal(size=(4_000, 2))
    found = [ReleasedMetrics(plan, None, pair[:1], pair[1:]).slices["all"] for pair in sums]
    spread = np.std([metric.accuracy for metric in found])
    assert found[0].noise == pytest.approx(spread, rel=0.1)


# What is refused.


@pytest.mark.parametrize("wrong", WRONG_NUMBERS)
def test_wrong_numbers_are_refused(wrong):
    """TRUST 9"""
    for epsilon, delta, population in ((wrong, 1e-5, 9), (1.0, wrong, 9)):
        with pytest.raises(InputError):
            MetricsPlan.calibrated(epsilon, delta, population)
    with pytest.raises(InputError, match="noise_multiplier"):
        MetricsPlan(9, wrong, 1e-5)
    with pytest.raises(InputError, match="population"):
        MetricsPlan.calibrated(1.0, 1e-5, wrong if wrong is not True else 0)
    with pytest.raises(InputError, match="percent must"):
        of_histogram([1.0]).percentile(wrong if wrong != "0.5" and wrong != 0 else 100)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(delta=0.2), "1 / population"),
        (dict(edges=(0, 1, 0.5)), "edges must increase"),
        (dict(edges=(0, 0.5, 0.5, 1)), "edges must increase"),
        (dict(edges=(0.1, 1)), "edges must increase"),
        (dict(edges=(0, math.nan, 1)), "finite"),
        (dict(edges=(0,)), "edges must increase"),
        (dict(slices=()), "slices.*at least one"),
        (dict(slices="abc"), "slices.*'abc'"),
        (dict(slices=("a", "a")), "twice"),
        (dict(histogram_share=1.1), "histogram_share must"),
        (dict(histogram_share=math.nan), "histogram_share must"),
        (dict(max_examples=0), "max_examples must"),
        (dict(private=False), "without_privacy"),
    ],
)
def test_plans_that_make_no_sense_are_refused(changes, message):
    """TRUST 9, 11"""
    settings = dict(population=9, noise_multiplier=1.0, delta=1e-5)
    MetricsPlan(**settings)
    with pytest.raises(InputError, match=message):
        MetricsPlan(**{**settings, **changes})


def test_other_clients_and_other_columns_are_refused_and_no_value_is_shown(tmp_path):
    """TRUST 7, 31"""
    population, correct = clients()
    plan = MetricsPlan.calibrated(1.0, 1e-5, 40)
    for data, hits, each, column, message in [
        (population, correct[1:], plan, None, "one boolean"),
        (population, correct.astype(int), plan, None, "one boolean"),
        (population, correct, plan, "labels", "a column 'labels'"),
        (population, correct, dataclasses.replace(plan, population=41), None, "another number"),
    ]:
        with pytest.raises(InputError, match=message) as raised:
            measured(data, hits, each, tmp_path, slice_column=column)
        assert SECRET not in str(raised.value)
    rows = np.arange(100, 140, dtype=np.int32)
    others = from_clients({f"{k}": {"label": np.full(3, k)} for k in rows})
    for held, settings, message in [
        (others, {}, "another population"),
        (population, dict(unit="example"), "each example"),
    ]:
        with Ledger(tmp_path / f"{message}.jsonl", held, **settings) as ledger:
            with pytest.raises(InputError, match=message):
                release(population, plan, correct=correct, ledger=ledger)
            assert len(ledger) == 0
