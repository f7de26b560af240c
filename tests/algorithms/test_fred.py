"""What FreD releases, against numpy in float64, and what it refuses."""

import dataclasses
import json
import math

import numpy as np
import pytest

from jaxpfl.algorithms.fred import FredPlan, PrivateMoments, Split, fred, private_moments, score
from jaxpfl.algorithms.gaussian_moments import Moments, moments
from jaxpfl.data import from_clients
from jaxpfl.errors import InputError
from jaxpfl.federated import RunSecret
from jaxpfl.federated.clients.moments import from_half
from jaxpfl.privacy import Ledger
from tests.algorithms.asking import asked, asking
from tests.algorithms.fred_queries import clients, plan_of, query


def reference(population, plan):
    """Count, mean and covariance by a loop in float64."""

    def clip(x):
        return x * min(1.0, plan.clip_norm / max(np.linalg.norm(x), 1e-300))

    parts = [np.float64(population.examples(i)["embedding"]) for i in range(len(population))]
    if plan.unit == "example":
        parts = [np.float64(population.columns["embedding"])]
        weights = [1.0 / len(parts[0])] * len(parts[0])
    else:
        weights = [1.0 / len(part) for part in parts for _ in part]
        weights = [weight / sum(len(part) > 0 for part in parts) for weight in weights]
    rows = [clip(row) for part in parts for row in part]
    mean = sum(weight * row for weight, row in zip(weights, rows, strict=True))
    centred = [clip(row - mean) for row in rows]
    return mean, sum(weight * np.outer(v, v) for weight, v in zip(weights, centred, strict=True))


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
    population = from_clients(
        {f"{i}": {"embedding": np.zeros((1, dimension), np.float32)} for i in range(30)}
    )
    plan = plan_of(epsilon=8.0, delta=1e-5, clip_norm=0.5, population=30)
    algorithm = fred(plan, units=30, dimension=dimension)
    centre = np.zeros(dimension, np.float32)
    with asking(algorithm, population, tmp_path) as releaser:
        mean, half = (
            np.asarray(releaser.release(query, centre, round=1).value)
            for query in algorithm.queries
        )
    matrix = from_half(half, dimension)
    z = plan.multipliers[1]
    off = matrix[np.triu_indices(dimension, 1)]
    for values, std, tolerance in (
        (mean, z * 0.5, 5 / math.sqrt(2 * dimension)),
        (np.diag(matrix), z * 0.25, 5 / math.sqrt(2 * dimension)),
        (off, z * 0.25 / math.sqrt(2), 5 / math.sqrt(2 * len(off))),
    ):
        assert np.std(values) == pytest.approx(std, rel=tolerance)
    # 2/3 and 3/2 of the std are far outside the tolerance of the off-diagonal.
    assert 5 / math.sqrt(2 * len(off)) < 0.1
    released = query(population, plan, tmp_path).noise
    assert released.mean == pytest.approx(z * 0.5 / 30)
    assert released.diagonal == pytest.approx(z * 0.25 / 30)
    assert released.off_diagonal == pytest.approx(z * 0.25 / 30 / math.sqrt(2))
    assert released.count == 0.0


def test_count_mean_and_covariance_get_noise_of_their_own(tmp_path):
    """TRUST 22: no value is shared between releases."""
    empty = from_clients({f"{i}": {"embedding": np.zeros((0, 6), np.float32)} for i in range(40)})
    algorithm = fred(plan_of(), units=40, dimension=6)
    state = asked(algorithm, empty, tmp_path).state
    draws = np.concatenate([np.ravel(part) for part in state])
    # Single ones may be equal by chance, because releases are on a grid.
    threes = np.lib.stride_tricks.sliding_window_view(draws, 3).tolist()
    assert len(set(map(tuple, threes))) == len(threes) == 1 + 6 + 21 - 2
    # Nor at another scale, at which they would be in proportion.
    _, mean, half = (np.ravel(part) for part in state)
    assert not np.allclose(mean[1:] * half[0], half[1:6] * mean[0], rtol=1e-2)


@pytest.mark.long
def test_a_released_covariance_is_positive_and_its_bias_is_stated(tmp_path):
    """The corrected distance is nearer to the truth, where the noise rules the covariance."""
    population = clients(count=1_000, dimension=24, scale=0.2)
    plan = plan_of(epsilon=3.0, delta=1e-5)
    exact = query(population, FredPlan.without_privacy(), tmp_path)
    near = population.columns["embedding"][::2] * 0.9 + 0.05
    candidate = {"public": moments(near, 1.0)}
    truth = score(exact, candidate)[0].distance
    assert score(exact, candidate)[0].corrected == pytest.approx(truth)
    errors = []
    for trial in range(6):
        found = query(
            population, plan, tmp_path, RunSecret.reproducible(trial), run=f"trial {trial}"
        )
        assert np.linalg.eigvalsh(found.moments.covariance_DxD).min() >= -1e-9
        assert found.noise.trace_bias > 0
        assert np.linalg.norm(found.moments.mean_D) <= 1 + 1e-9
        scored = score(found, candidate)[0]
        errors.append((abs(scored.distance - truth), abs(scored.corrected - truth)))
    plain, corrected = np.mean(errors, axis=0)
    assert corrected < 0.3 * plain


def test_released_moments_survive_a_file(tmp_path):
    plan = plan_of()
    found = query(clients(), plan, tmp_path)
    found.save(tmp_path / "moments.npz")
    again = PrivateMoments.load(tmp_path / "moments.npz", plan)
    np.testing.assert_array_equal(found.moments.covariance_DxD, again.moments.covariance_DxD)
    assert again.noise == found.noise
    assert again.moments.count == found.moments.count


def test_bad_plans_are_refused():
    """TRUST 9, 11, 12."""
    for bad in (
        dict(epsilon=0.0),
        dict(epsilon=math.nan),
        dict(delta=0.0),
        dict(delta=1.0),
        dict(clip_norm=math.inf),
        dict(clip_norm=-1.0),
        dict(unit="user"),
        dict(max_examples=0),
        dict(population=0),
        dict(population=10, delta=0.2),
        dict(split=Split(0.0, 0.5, 0.5)),
        dict(split=Split(), population=100),
        dict(clip_norm=1e7),
    ):
        with pytest.raises(InputError):
            plan_of(**bad)
    for shares in ((0.5, 0.5, 0.5), (-0.1, 0.6, 0.5), (0.5, 0.5, 0.0)):
        with pytest.raises(InputError):
            Split(*shares)
    with pytest.raises(InputError):
        dataclasses.replace(plan_of(), multipliers=(1.0, 0.0, 1.0))
    with pytest.raises(InputError, match="declared"):
        dataclasses.replace(plan_of(), population=50)
    with pytest.raises(InputError, match="no noise"):
        dataclasses.replace(FredPlan.without_privacy(), multipliers=(1.0, 1.0, 1.0))


def test_data_that_does_not_fit_the_plan_is_refused_without_a_private_number(tmp_path):
    """TRUST 7, 9, 40: the number of clients is private where it is not declared."""
    population = clients(count=37)
    for plan, word in (
        (plan_of(population=36), "another number"),
        (plan_of(delta=0.05, epsilon=1.0), "delta"),
    ):
        with pytest.raises(InputError, match=word) as caught:
            query(population, plan, tmp_path)
        assert "37" not in str(caught.value)
    text = from_clients({"a": {"text": ["hello"]}})
    with pytest.raises(InputError, match="embedding"):
        query(text, plan_of(delta=1e-6), tmp_path)
    with pytest.raises(InputError, match="floats"):
        query(from_clients({"a": {"embedding": [[1, 2]]}}), plan_of(), tmp_path)
    exact = query(population, FredPlan.without_privacy(), tmp_path)
    with pytest.raises(InputError, match="'wide'"):
        score(exact, {"wide": Moments(2.0, np.zeros(9), np.eye(9))})


def test_a_query_without_privacy_says_so(tmp_path):
    plan = FredPlan.without_privacy()
    assert plan.epsilon() == plan.mu == math.inf
    assert plan.statement().startswith("NOT PRIVATE")
    population = clients()
    with Ledger(tmp_path / "ledger.jsonl", population) as ledger:
        private_moments(population, plan, ledger=ledger)
        assert not ledger.summary(1e-5)["private"]
    json.dumps(plan.to_dict())
