"""What FreD releases, against numpy in float64, what it costs and what it refuses."""

import dataclasses
import json
import math

import dp_accounting
import numpy as np
import pytest

from jaxpfl.algorithms.fred import FredPlan, PrivateMoments, fred, private_moments, score
from jaxpfl.algorithms.fred.query import MomentNoise
from jaxpfl.algorithms.gaussian_moments import Moments
from jaxpfl.data import from_clients
from jaxpfl.federated import RunSecret
from jaxpfl.federated.clients.moments import from_half
from jaxpfl.privacy import Ledger
from jaxpfl.privacy.confirmation import gaussian_epsilon
from tests.algorithms.asking import asked, asking
from tests.plans import epsilon_of
from tests.refusals import refusal
from tests.trees import assert_same


def reference(population, plan):
    """Mean and covariance by a loop in float64."""

    def clip(x):
        return x * min(1.0, plan.clip_norm / max(np.linalg.norm(x), 1e-300))

    parts = [np.float64(population.examples(i)["embedding"]) for i in range(len(population))]
    if plan.unit == "example":
        parts = [np.concatenate(parts)]
    real = [part for part in parts if len(part)]
    rows = [(clip(row), 1 / len(part) / len(real)) for part in real for row in part]
    mean = sum(weight * row for row, weight in rows)
    centred = [(clip(row - mean), weight) for row, weight in rows]
    return mean, sum(weight * np.outer(v, v) for v, weight in centred)


@pytest.mark.parametrize("unit", ["example", "client"])
@pytest.mark.parametrize("clip_norm", [pytest.param(10.0, marks=pytest.mark.long), 0.5])
def test_without_noise_the_moments_are_those_of_a_loop(tmp_path, unit, clip_norm):
    """Also with clients of no example, which count as no client."""
    population = clients()
    plan = FredPlan.without_privacy(clip_norm=clip_norm, unit=unit)
    found = query(population, plan, tmp_path).moments
    mean, covariance = reference(population, plan)
    sizes = population.sizes()
    assert found.count == (np.count_nonzero(sizes) if unit == "client" else sizes.sum())
    # Coordinates are cut to multiples of a power of two of at most this size.
    cut = clip_norm * 2.0**-18
    np.testing.assert_allclose(found.mean_D, mean, rtol=1e-5, atol=cut)
    np.testing.assert_allclose(found.covariance_DxD, covariance, rtol=1e-5, atol=2 * cut)


def test_examples_beyond_one_block_and_the_last_partial_block_count(tmp_path):
    rows = np.random.default_rng(0).normal(size=(2 * 1024 + 77, 3)).astype(np.float32) * 0.1
    population = from_clients({"one": {"embedding": rows[:5]}, "two": {"embedding": rows[5:]}})
    found = query(population, FredPlan.without_privacy(unit="example"), tmp_path).moments
    assert found.count == len(rows)
    np.testing.assert_allclose(found.mean_D, np.float64(rows).mean(0), rtol=1e-4, atol=1e-7)


def test_the_noise_is_that_of_the_plan(tmp_path):
    """TRUST 18 at the scale of a query: mean, diagonal and off the diagonal, each its own std."""
    dimension = 120
    centre = np.zeros(dimension, np.float32)
    population = from_clients({f"{i}": {"embedding": centre[None]} for i in range(30)})
    plan = plan_of(epsilon=8.0, delta=1e-5, clip_norm=0.5, population=30)
    algorithm = fred(plan, units=30, dimension=dimension)
    with asking(algorithm, population, tmp_path) as releaser:
        released = [releaser.release(query, centre, round=1) for query in algorithm.queries]
    mean, half = (np.asarray(each.value) for each in released)
    matrix = from_half(half, dimension)
    z = plan.multipliers[1]
    off = matrix[np.triu_indices(dimension, 1)]
    for values, std, tolerance in (
        (mean, z * 0.5, 6 / math.sqrt(2 * dimension)),
        (np.diag(matrix), z * 0.25, 6 / math.sqrt(2 * dimension)),
        (off, z * 0.25 / math.sqrt(2), 6 / math.sqrt(2 * len(off))),
    ):
        assert np.std(values) == pytest.approx(std, rel=tolerance)
    # 2/3 and 3/2 of the std are far outside the tolerance of the off-diagonal.
    assert 6 / math.sqrt(2 * len(off)) < 0.1
    released = query(population, plan, tmp_path).noise
    assert released.mean == pytest.approx(z * 0.5 / 30)
    assert released.diagonal == pytest.approx(z * 0.25 / 30)
    assert released.off_diagonal == pytest.approx(z * 0.25 / 30 / math.sqrt(2))
    assert released.count == 0.0


def test_the_released_covariance_is_not_projected(tmp_path):
    """Without a signal its trace has mean zero; a projection would leave it far above."""
    dimension = 120
    nothing = [np.zeros((1, dimension), np.float32)] * 30
    population = from_clients({f"{i}": {"embedding": part} for i, part in enumerate(nothing)})
    plan = plan_of(epsilon=8.0, delta=1e-5, population=30)
    released = query(population, plan, tmp_path)
    trace = np.trace(released.moments.covariance_DxD) - released.noise.mean_bias
    assert abs(trace) < 6 * released.noise.diagonal * math.sqrt(dimension)
    assert np.linalg.eigvalsh(released.moments.covariance_DxD)[0] < 0


def test_count_mean_and_covariance_get_noise_of_their_own(tmp_path):
    """TRUST 22: no value is shared between releases."""
    empty = from_clients({f"{i}": {"embedding": np.zeros((0, 6), np.float32)} for i in range(40)})
    algorithm = fred(plan_of(), units=40, dimension=6)
    state = asked(algorithm, empty, tmp_path).state
    draws = np.concatenate([np.ravel(part) for part in state])
    # Single ones may be equal by chance, because releases are on a grid.
    fives = np.lib.stride_tricks.sliding_window_view(draws, 5).tolist()
    assert len(set(map(tuple, fives))) == len(fives) == 1 + 6 + 21 - 4
    # Nor at another scale, at which they would be in proportion.
    _, mean, half = (np.ravel(part) for part in state)
    cosine = np.dot(mean, half[:6]) / np.linalg.norm(mean) / np.linalg.norm(half[:6])
    assert abs(cosine) < 0.999


def made(plan):
    """As if released."""
    covariance = np.eye(DIM) + 0.1
    noise = MomentNoise(0.0, 0.1, 0.2, 0.3, 0.4)
    return PrivateMoments(Moments(39.5, np.arange(DIM) / 7, covariance), noise, plan)


def test_released_moments_survive_a_file(tmp_path):
    plan = plan_of()
    found = made(plan)
    found.save(tmp_path / "moments.npz")
    again = PrivateMoments.load(tmp_path / "moments.npz", plan)
    np.testing.assert_array_equal(found.moments.covariance_DxD, again.moments.covariance_DxD)
    np.testing.assert_array_equal(found.moments.mean_D, again.moments.mean_D)
    assert (again.noise, again.moments.count) == (found.noise, found.moments.count)


BAD_PLANS = {
    **{lambda bad=bad: plan_of(**bad): next(iter(bad)) for bad in (
        dict(epsilon=0.0), dict(epsilon=math.nan), dict(delta=0.0), dict(delta=1.0),
        dict(clip_norm=math.inf), dict(clip_norm=-1.0), dict(unit="user"), dict(max_examples=0),
        dict(population=0), dict(population=10, delta=0.2), dict(clip_norm=1e7),
    )},
    lambda: dataclasses.replace(plan_of(), multipliers=(1.0, 0.0, 1.0)): "multiplier",
    lambda: dataclasses.replace(plan_of(), population=50): "declared",
    lambda: dataclasses.replace(FredPlan.without_privacy(), multipliers=(1.0,) * 3): "no noise",
}  # fmt: skip


@pytest.mark.parametrize("call", BAD_PLANS)
def test_bad_plans_are_refused(call):
    """TRUST 9, 11, 12."""
    refusal(call, BAD_PLANS[call])


def test_data_that_does_not_fit_the_plan_is_refused_without_a_private_number(tmp_path):
    """TRUST 7, 9, 40: the number of clients is private where it is not declared."""
    population = clients(count=37)
    text = from_clients({"a": {"text": ["hello"]}})
    whole = from_clients({"a": {"embedding": [[1, 2]]}})
    for held, plan, word in (
        (population, plan_of(population=36), "another number"),
        (population, plan_of(delta=0.05, epsilon=1.0), "delta must be below"),
        (population, plan_of(shares=(0.5, 0.5)), "several"),
        (text, plan_of(delta=1e-6), "embedding"),
        (whole, plan_of(), "floats"),
    ):
        said = refusal(lambda held=held, plan=plan: query(held, plan, tmp_path), word)
        assert "37" not in said.replace(str(tmp_path), "")
    exact = made(FredPlan.without_privacy())
    refusal(lambda: score(exact, {"wide": Moments(2.0, np.zeros(9), np.eye(9))}), "'wide'")


def test_a_query_without_privacy_says_so(tmp_path):
    plan = FredPlan.without_privacy(clip_norm=0.5)
    assert plan.epsilon() == plan.mu == math.inf
    assert plan.statement().startswith("NOT PRIVATE")
    population = clients()
    with Ledger(tmp_path / "ledger.jsonl", population) as ledger:
        private_moments(population, plan, ledger=ledger)
        assert not ledger.summary(1e-5)["private"]
    json.dumps(plan.to_dict())


DIM = 5


def clients(count=40, dimension=DIM, seed=0, scale=0.5):
    """Clients of 0 to 6 embeddings."""
    rng = np.random.default_rng(seed)
    axes = rng.normal(size=(dimension, dimension)) / math.sqrt(dimension)
    centre = rng.normal(size=dimension) * 0.3
    held = {}
    for index in range(count):
        rows = rng.normal(size=(index % 7, dimension)) @ axes * scale + centre
        held[f"client {index}"] = {"embedding": np.float32(rows).reshape(-1, dimension)}
    return from_clients(held)


def query(population, plan, tmp_path, secret=None, **settings):
    name = f"{abs(hash((plan, population.fingerprint)))}.jsonl"
    with Ledger(tmp_path / name, population, unit=plan.unit) as ledger:
        return private_moments(population, plan, ledger=ledger, secret=secret, **settings)


def plan_of(**changes):
    settings = dict(epsilon=0.6, delta=2e-6)
    return FredPlan.calibrated(**{**settings, **changes})


def test_the_exact_gaussian_of_the_papers_budget():
    """SPEC A.2: mu = 0.1527 for (0.6, 2e-6); 9.26 for each of two equal releases."""
    plan = plan_of(population=1000)
    assert plan.mu == pytest.approx(0.1527, abs=5e-5)
    assert plan.multipliers[0] == math.inf
    assert plan.multipliers[1] == plan.multipliers[2] == pytest.approx(9.26, abs=5e-3)


@pytest.mark.parametrize("target", [(0.6, 2e-6), (8.0, 1e-5), (0.1, 1e-7)])
def test_the_default_split_composes_to_the_target(target):
    """By three accountants: the closed form, dp-accounting's own on the event, and RDP above."""
    epsilon, delta = target
    plan = plan_of(epsilon=epsilon, delta=delta)
    assert epsilon * (1 - 1e-3) < plan.epsilon() <= epsilon
    total = epsilon_of(plan.guarantee().event, delta, "pld", "add_or_remove_one")
    assert total == pytest.approx(epsilon, rel=1e-3)
    accountant = dp_accounting.pld.PLDAccountant(value_discretization_interval=1e-3)
    accountant.compose(plan.guarantee().event)
    assert accountant.get_epsilon(delta) == pytest.approx(epsilon, rel=2e-3)
    assert total <= epsilon_of(plan.guarantee().event, delta, "rdp", "add_or_remove_one")
    # A split that forgets a release costs visibly less.
    assert gaussian_epsilon(1 / plan.multipliers[1], delta) < 0.9 * epsilon


def test_algorithm_1_as_printed_really_costs_what_the_specification_found():
    """SPEC A.1: the mean at (0.3, 1e-6) costs 344 at n = 150,000 and 18.9 at n = 3,000."""
    shared = dict(epsilon=0.6, delta=2e-6, clients=3_000)
    large, small = (FredPlan.as_printed(**shared, examples=n) for n in (150_000, 3_000))
    # Without the share of the shift that is for rounding.
    costs = [
        gaussian_epsilon(1 / z / (1 + 2**-7), 1e-6)
        for z in (large.multipliers[1], small.multipliers[1], large.multipliers[2])
    ]
    assert costs[:2] == [pytest.approx(344, abs=0.5), pytest.approx(18.9, abs=0.05)]
    assert costs[2] < 0.01
    # d = 768: the noise inflates the trace by 58 c^2, against 1.06 with one Gaussian.
    radius = 2 * large.noise_stds[2] / 150_000 * math.sqrt(768)
    positive_half = 768 * 2 * radius / (3 * math.pi)  # of Wigner's semicircle
    assert positive_half == pytest.approx(58, rel=0.01)
    assert positive_half / math.sqrt(3_000) == pytest.approx(1.06, rel=0.01)


def algorithm_1(parts, epsilon, delta, c, rng):
    """The paper's Algorithm 1, sentence by sentence; the parts are of clients, [examples, d].

    Returns mean and covariance before the projection, and the deviations tau_1 and tau_2.
    """

    def clip(x):
        return x * np.minimum(1.0, c / np.maximum(np.linalg.norm(x, axis=1), 1e-300))[:, None]

    parts = [clip(np.float64(part)) for part in parts]
    n2, d = sum(map(len, parts)), parts[0].shape[1]
    tau_1 = (2 * c / n2) * math.sqrt(2 * math.log(1.25 / delta)) / epsilon
    mean = sum(np.sum(x + tau_1 * rng.normal(size=x.shape), axis=0) for x in parts) / n2
    tau_2 = (c**2 / n2) * math.sqrt(2 * math.log(1.25 / delta)) / epsilon
    covariance = np.zeros((d, d))
    for x in parts:
        v = clip(x - mean)
        upper = np.triu(v.T @ v / n2 + tau_2 * rng.normal(size=(d, d)))
        covariance += upper + np.triu(upper, 1).T
    return mean, covariance, tau_1, tau_2


def test_algorithm_1_is_the_papers(tmp_path):
    """With hardly any noise the moments of a loop; with the noise of (8, 1e-3) its deviations."""
    population = clients()
    parts = [population.examples(i)["embedding"] for i in range(len(population))]
    examples, rng = population.num_examples, np.random.default_rng(5)
    sharp = dict(epsilon=1e4, delta=1e-3, clip_norm=0.5)
    plan = FredPlan.as_printed(**sharp, examples=examples, clients=40)
    found = query(population, plan, tmp_path).moments
    mean, covariance, *_ = algorithm_1(parts, 5e3, 5e-4, 0.5, rng)
    np.testing.assert_allclose(found.mean_D, mean, atol=1e-4)
    np.testing.assert_allclose(found.covariance_DxD, covariance, atol=1e-4)
    assert found.count == examples

    dimension = 120
    nothing = [np.zeros((3, dimension), np.float32)] * 30
    population = from_clients({f"{i}": {"embedding": part} for i, part in enumerate(nothing)})
    plan = FredPlan.as_printed(epsilon=8.0, delta=1e-3, examples=90, clients=30, clip_norm=0.5)
    algorithm = fred(plan, units=90, dimension=dimension)
    with asking(algorithm, population, tmp_path, ledger="noise.jsonl") as releaser:
        mean, half = (
            np.asarray(releaser.release(query, np.zeros(dimension, np.float32), round=1).value)
            for query in algorithm.queries
        )
    ours = mean / 90, from_half(half, dimension, isometric=False) / 90
    theirs = algorithm_1(nothing, 4.0, 5e-4, 0.5, rng)
    released, above = query(population, plan, tmp_path).noise, np.triu_indices(dimension, 1)
    # The paper's covariance is about its noisy mean, and has its outer product in it.
    theirs_noise = theirs[1] - np.outer(theirs[0], theirs[0])
    for mine, paper, exact, stated in (
        (ours[0], theirs[0], theirs[2] / math.sqrt(90), released.mean),
        (np.diag(ours[1]), np.diag(theirs_noise), theirs[3] * math.sqrt(30), released.diagonal),
        (ours[1][above], theirs_noise[above], theirs[3] * math.sqrt(30), released.off_diagonal),
    ):
        assert stated == pytest.approx(exact)
        for draws in (mine, paper):
            assert np.std(draws) == pytest.approx(exact, rel=6 / math.sqrt(2 * len(draws)))


def test_algorithm_1_is_charged_what_it_realises(tmp_path):
    """By hand: a replaced example moves the mean by 2 c / n2, the triangle by sqrt(2) c^2 / n2."""
    population = clients()
    n2, c = population.num_examples, 0.7
    plan = FredPlan.as_printed(epsilon=2.0, delta=1e-3, examples=n2, clients=40, clip_norm=c)
    *_, tau_1, tau_2 = algorithm_1([np.zeros((n2, 2))], 1.0, 5e-4, c, np.random.default_rng(0))
    accountant = dp_accounting.pld.PLDAccountant(value_discretization_interval=1e-3)
    for std, moved in (
        (tau_1 / math.sqrt(n2), 2 * c / n2),
        (tau_2 * math.sqrt(40), math.sqrt(2) * c**2 / n2),
    ):
        # The noise covers what rounding in float32 may add, too.
        accountant.compose(dp_accounting.GaussianDpEvent(std / moved / (1 + 2**-7)))
    by_hand = accountant.get_epsilon(1e-3)
    with Ledger(tmp_path / "ledger.jsonl", population, unit="example") as ledger:
        private_moments(population, plan, ledger=ledger)
        assert ledger.spent(1e-3) == pytest.approx(by_hand, rel=2e-3)
    assert plan.epsilon() == pytest.approx(by_hand, rel=2e-3) and by_hand > 3 * 2.0
    assert "states 2 at delta 0.001;" in plan.statement()
    # As the specification found it, with 0.8 % more shift for rounding: 344 and 18.9.
    for examples, expected in ((150_000, 345.2), (3_000, 18.69)):
        plan = FredPlan.as_printed(epsilon=0.6, delta=2e-6, examples=examples, clients=3_000)
        assert plan.epsilon() == pytest.approx(expected, rel=1e-3)


def test_a_replaced_example_moves_the_plain_triangle_by_no_more_than_is_charged():
    """The largest shift has two orthogonal axes; the diagonal of both counts in full."""
    rng, largest = np.random.default_rng(0), 0.0
    for _ in range(2_000):
        v, w = (x / np.linalg.norm(x) for x in rng.normal(size=(2, 3)))
        largest = max(largest, np.linalg.norm(np.triu(np.outer(v, v) - np.outer(w, w))))
    axes = np.diag([1.0, -1.0, 0.0])
    assert 1.2 < largest <= np.linalg.norm(axes) == pytest.approx(math.sqrt(2))
    plan = FredPlan.as_printed(epsilon=1.0, delta=1e-3, examples=9, clients=4, clip_norm=3.0)
    assert plan.sensitivities[1:] == pytest.approx((2 * 3.0, math.sqrt(2) * 9.0))


@pytest.mark.parametrize("declared", [None, 40])
def test_the_ledger_is_charged_what_the_plan_says(tmp_path, declared):
    population = clients()
    plan = plan_of(delta=1e-3, population=declared)
    with Ledger(tmp_path / "ledger.jsonl", population) as ledger:
        found = private_moments(population, plan, ledger=ledger)
        labels = ["fred count", "fred sum", "fred second"]
        assert [charge.label for charge in ledger.charges] == labels[declared is not None :]
        assert ledger.spent(1e-3) == pytest.approx(plan.epsilon(), rel=1e-4)
    # As declared, to the last digit.
    assert (found.moments.count == 40) == (declared is not None)


def test_a_query_that_broke_off_between_its_releases_goes_on_at_no_further_cost(tmp_path):
    """The covariance alone is left: count and mean are made again, to the bit."""
    population = clients()
    algorithm = fred(plan_of(), units=40, dimension=DIM)

    def crashing(state, release, round):
        def asked_but_the_last(query, broadcast):
            if query.label == "second":
                raise RuntimeError("crash")
            return release(query, broadcast)

        return algorithm.step(state, asked_but_the_last, round)

    with pytest.raises(RuntimeError, match="crash"):
        asked(algorithm._replace(step=crashing), population, tmp_path)
    resumed = asked(algorithm, population, tmp_path)
    assert len(resumed.ledger) == 3
    straight = asked(algorithm, population, tmp_path, ledger="straight.jsonl")
    assert_same(resumed.state, straight.state)


def test_which_examples_of_a_client_are_used_is_secret(tmp_path):
    """With a public choice by index, one client's removal would change the others' subsets."""
    drawn = np.random.default_rng(0).normal(size=(5, 9, 3)).astype(np.float32)
    population = from_clients({f"{i}": {"embedding": rows} for i, rows in enumerate(drawn)})
    exact = FredPlan.without_privacy(max_examples=2, clip_norm=10.0)
    secrets = [RunSecret.reproducible(k) for k in (0, 0, 1)]
    means = [query(population, exact, tmp_path, secret).moments.mean_D for secret in secrets]
    np.testing.assert_array_equal(means[0], means[1])
    assert not np.allclose(means[0], means[2])


def test_a_simulated_plan_has_the_larger_populations_noise_of_the_mean_and_says_so():
    """Its charges are those of its own clients, whose epsilon is no useful one."""
    plan = FredPlan.calibrated(epsilon=7.0, delta=1e-6)
    small = plan.simulated_by(600, 1e-4, larger=72_000)
    for large, here in zip(plan.plans(72_000), small.plans(600), strict=True):
        assert here.value_noise_std(1.0) / 600 == pytest.approx(large.value_noise_std(1.0) / 72_000)
        assert here.simulates is not None and here.simulates.population == 72_000
        assert here.scaled_to(here.simulates).epsilon() == pytest.approx(large.epsilon())
    assert small.delta == 1e-4 and small.epsilon() > 1_000
    assert small.statement().startswith("SIMULATED: noise as if 72,000 clients took part; no")
