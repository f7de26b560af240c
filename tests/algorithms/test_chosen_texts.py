"""One look chooses texts: the problem's optimum, the rule that holds it back, and the drawing."""

import math

import dp_accounting
import numpy as np
import pytest

from jaxpfl.algorithms.chosen_texts import Evidence, choose, descend
from jaxpfl.algorithms.chosen_texts import choice as choice_module
from jaxpfl.algorithms.chosen_texts.choice import _halves, systematic_sample
from jaxpfl.algorithms.chosen_texts.matching import MomentMatching, capped_softmax, weighted_moments
from jaxpfl.algorithms.frechet import distance
from jaxpfl.algorithms.fred import FredPlan
from jaxpfl.algorithms.fred.query import MomentNoise, PrivateMoments
from jaxpfl.algorithms.gaussian_moments import Moments
from jaxpfl.errors import InputError
from jaxpfl.privacy import Guarantee
from jaxpfl.privacy.auditing import lower_bound, weight_trials

D, N = 4, 400
PLAN = FredPlan.calibrated(epsilon=4.0, delta=1e-5, population=1000)


def pool(seed=0, number=N):
    rows = np.random.default_rng(seed).normal(size=(number, D)) * 0.2
    return rows.astype(np.float32)


def released(moments, std=0.0, rng=None):
    """A release of these moments, with noise of one deviation on every coordinate."""
    rng = rng or np.random.default_rng(7)
    lower = np.tril(rng.normal(size=(D, D)) / np.sqrt(2), -1)
    drawn = lower + lower.T + np.diag(rng.normal(size=D))
    noise = MomentNoise(0.0, std, std, std / np.sqrt(2), D * std**2)
    mean, covariance = moments.mean_D + std * rng.normal(size=D), moments.covariance_DxD
    return PrivateMoments(Moments(1000.0, mean, covariance + std * drawn), noise, PLAN)


def tilted(rows, a, b, cap=1.0):
    """Weights proportional to exp(-a'x - x'Bx), in a plain loop, and their moments."""
    energies = np.array([-(a @ x + x @ b @ x) for x in rows.astype(np.float64)])
    weights = capped_softmax(energies, cap)
    return weights, weighted_moments(weights, rows)


def a_tilt():
    b = np.diag([2.0, -1.0, 0.0, 1.0])
    b[0, 1] = b[1, 0] = 0.7
    return np.array([3.0, -2.0, 0.0, 1.0]), b


def matching(moments, rows, cap=1.0):
    return MomentMatching([Evidence(released(moments), rows)], np.ones(len(rows)), cap)


def test_the_gradient_of_the_dual_is_that_of_finite_differences():
    rows = pool()
    two = [Evidence(released(tilted(rows, *a_tilt())[1]), rows)]
    two.append(Evidence(released(weighted_moments(np.full(N, 1 / N), rows)), rows[:, ::-1]))
    problem = MomentMatching(two, np.linspace(1, 2, N), 1 / 150)
    at = np.random.default_rng(1).normal(size=problem.size)
    gradient = problem.dual(at, 0.3)[1]
    for index in range(problem.size):
        step = np.zeros(problem.size)
        step[index] = 1e-3
        slope = problem.dual(at + step, 0.3)[0] - problem.dual(at - step, 0.3)[0]
        assert slope / 2e-3 == pytest.approx(gradient[index], rel=2e-3, abs=2e-4)


def test_the_weights_are_the_optimum_of_the_printed_problem():
    """Any small move within the constraints makes the primal objective larger."""
    rows, cap, kappa = pool(), 1 / 150, 0.01
    target = tilted(rows, *a_tilt())[1]
    mean = target.mean_D

    def objective(weights):
        away = rows - mean
        second = (away * weights[:, None]).T @ away
        relative = np.sum(weights * np.log(np.maximum(weights, 1e-300) * N))
        error = np.sum((weights @ away) ** 2) + np.sum((second - target.covariance_DxD) ** 2)
        return relative + error / (2 * kappa)

    weights = matching(target, rows, cap).solve(kappa).weights_N
    assert weights.sum() == pytest.approx(1) and weights.max() <= cap * (1 + 1e-9)
    assert np.sum(weights > cap * 0.999) > 5  # the cap holds some back
    rng = np.random.default_rng(2)
    for _ in range(200):
        other = np.minimum(cap, weights * np.exp(0.05 * rng.normal(size=N)))
        other = np.minimum(cap, other / other.sum())
        moved = weights + 0.2 * (other / other.sum() - weights)
        if moved.max() <= cap:
            assert objective(moved) > objective(weights) - 1e-9


def test_another_start_ends_at_the_same_weights():
    rows = pool()
    problem = matching(tilted(rows, *a_tilt())[1], rows, 1 / 150)
    first = problem.solve(0.003).weights_N
    for seed in range(3):
        start = 3 * np.random.default_rng(seed).normal(size=problem.size)
        np.testing.assert_allclose(problem.solve(0.003, start).weights_N, first, atol=2e-5)


def test_a_known_tilt_of_the_pool_is_recovered():
    """Moments of a tilt about its own mean: the weights with these moments are the tilt's."""
    rows = pool(number=2000)
    weights, moments = tilted(rows, *a_tilt())
    recovered = matching(moments, rows).solve(1e-6).weights_N
    assert np.abs(recovered - weights).sum() < 0.02
    assert np.abs(1 / len(rows) - weights).sum() > 0.3


def test_a_capped_softmax_is_that_of_a_bisection():
    rng = np.random.default_rng(3)
    for cap in (1 / 40, 1 / 60, 1 / 300, 1.0):
        logits = 3 * rng.normal(size=400)
        low, high = -50.0, 50.0
        for _ in range(200):
            middle = (low + high) / 2
            total = np.minimum(cap, np.exp(logits + middle)).sum()
            low, high = (middle, high) if total < 1 else (low, middle)
        expected = np.minimum(cap, np.exp(logits + middle))
        np.testing.assert_allclose(capped_softmax(logits, cap), expected, rtol=1e-6)


def test_a_text_is_drawn_with_the_probability_of_its_weight():
    """Without repetition, always as many; the largest weights are always among them.

    Of each corpus as many are drawn as its weight says, to within one.
    """
    corpora = np.random.default_rng(9).choice(["a", "bb", "c"], 60, p=[0.2, 0.3, 0.5])
    weights = capped_softmax(2 * np.random.default_rng(4).normal(size=60), 1 / 20)
    generator = np.random.default_rng(5)
    draws = 4000
    counts = np.zeros(60)
    for _ in range(draws):
        rows = systematic_sample(weights, corpora, 20, generator)
        assert len(set(rows.tolist())) == 20
        for corpus in ("a", "bb", "c"):
            share = 20 * weights[corpora == corpus].sum()
            assert abs(np.sum(corpora[rows] == corpus) - share) < 1
        counts[rows] += 1
    expected = 20 * weights
    error = np.abs(counts / draws - expected)
    assert (error <= 4.5 * np.sqrt(expected * (1 - expected) / draws) + 1e-9).all()


def test_the_halves_of_a_release_are_independent_and_of_twice_the_variance():
    moments = weighted_moments(np.full(N, 1 / N), pool())
    rng, generator = np.random.default_rng(6), np.random.default_rng(8)
    first, second = [], []
    for _ in range(3000):
        pair = _halves(released(moments, 0.1, rng), generator)
        for half, values in zip(pair, (first, second), strict=True):
            lower = half.moments.covariance_DxD[np.tril_indices(D, -1)]
            diagonal = np.diag(half.moments.covariance_DxD)
            values.append(np.concatenate([half.moments.mean_D, diagonal, np.sqrt(2) * lower]))
    both = np.stack([np.array(first), np.array(second)])
    both -= both.mean(axis=1, keepdims=True)
    correlation = np.mean(both[0] * both[1], axis=0) / 0.02
    assert np.abs(correlation).max() < 0.1
    np.testing.assert_allclose(both.var(axis=1), 0.02, rtol=0.12)


def two_corpora():
    """A pool of two corpora, and clients who are like some texts of both."""
    rows = np.concatenate([pool(0, 1500), pool(1, 1500) + np.float32([0.3, 0, 0, 0])])
    names = np.repeat(["plain", "moved"], 1500)
    a, b = np.array([0.0, -6.0, 5.0, 0.0]), np.diag([0.0, 6.0, 6.0, -2.0])
    return rows, names, tilted(rows, a, b)[1]


def test_chosen_texts_are_nearer_than_the_best_mixture_of_corpora():
    rows, names, clients = two_corpora()
    choice = choose([Evidence(released(clients, 1e-3), rows)], names, 500)
    assert choice.kappa is not None and len(choice.rows_M) == 500
    assert sum(choice.shares.values()) == pytest.approx(1)
    drawn = weighted_moments(np.bincount(choice.rows_M, minlength=3000) / 500, rows)
    by_mixture = np.random.default_rng(0).choice(3000, 500, replace=False)
    mixed = weighted_moments(np.bincount(by_mixture, minlength=3000) / 500, rows)
    assert distance(clients, drawn) < 0.3 * distance(clients, mixed)
    assert choice.distance < 0.3 * choice.mixture_distance
    again = choose([Evidence(released(clients, 1e-3), rows)], names, 500)
    np.testing.assert_array_equal(again.rows_M, choice.rows_M)


def test_where_nothing_is_to_be_gained_the_mixture_is_taken():
    """The clients are the mixture: what a choice gains on its half is noise on the other."""
    rows, names, _ = two_corpora()
    clients = weighted_moments(np.repeat([0.7, 0.3], 1500) / 1500, rows)
    taken = []
    for seed in range(4):
        noisy = released(clients, 0.02, np.random.default_rng(seed))
        choice = choose([Evidence(noisy, rows)], names, 500, seed=100 + seed)
        taken.append(choice.kappa)
        assert choice.weights_N.max() <= 1 / 500
    assert taken.count(None) >= 3


@pytest.mark.parametrize("seed", [1, 2])
def test_texts_written_after_the_choice_do_not_stand_in_for_public_corpora(seed):
    """They are like what was chosen, noise and all: as a corpus they would be the mixture."""
    (rows, names, clients), rng = two_corpora(), np.random.default_rng(9)
    evidence, number = released(clients, 0.02, np.random.default_rng(seed)), 300
    first = choose([Evidence(evidence, rows)], names, number)
    written = rows[rng.choice(first.rows_M, number)] + 0.05 * rng.normal(size=(number, D))
    more = np.concatenate([rows, written.astype(np.float32)])
    names = np.append(names, np.repeat("written", number))
    again = choose([Evidence(evidence, more)], names, number, written="written")
    before = distance(clients, weighted_moments(first.weights_N, rows))
    assert distance(clients, weighted_moments(again.weights_N, more)) < 1.1 * before
    assert 0 < again.shares["written"] < 0.5


def test_the_half_that_was_not_fitted_decides(monkeypatch):
    """One half shows a gain, the other one shows none: nothing is chosen."""
    rows, names, clients = two_corpora()
    mixture = weighted_moments(np.full(3000, 1 / 3000), rows)
    one, other = released(clients, 0.01), released(mixture, 0.01)
    monkeypatch.setattr(choice_module, "_halves", lambda *_: (one, other))
    assert choose([Evidence(one, rows)], names, 500).kappa is None
    monkeypatch.setattr(choice_module, "_halves", lambda *_: (one, one))
    assert choose([Evidence(one, rows)], names, 500).kappa is not None


def test_an_embedder_that_sees_a_loss_outweighs_one_that_sees_nothing(monkeypatch):
    """Gains and their errors are of the sum over embedders."""
    rows, names, clients = two_corpora()
    mixture = weighted_moments(np.full(3000, 1 / 3000), rows)
    blind, seen = released(clients, 0.3), released(mixture, 0.003)
    halves = iter([(released(clients, 1e-3), blind), (released(clients, 1e-3), seen)])
    monkeypatch.setattr(choice_module, "_halves", lambda *_: next(halves))
    evidence = [Evidence(released(clients, 1e-3), rows)] * 2
    assert choose(evidence, names, 500).kappa is None


def test_embeddings_are_clipped_as_the_clients_were():
    """Rows beyond the clip norm, and further than it from the mean, count as their clipped ones."""
    rows = 12 * pool()
    away = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1)
    mean = np.array([-0.5, 0, 0, 0])
    far = away - mean
    far /= np.maximum(np.linalg.norm(far, axis=1, keepdims=True), 1)
    second = (far * np.full((N, 1), 1 / N)).T @ far
    problem = matching(Moments(1.0, mean, np.eye(D)), rows)
    gradient = problem.dual(np.zeros(problem.size), 1.0)[1]
    lower = np.sqrt(2) * second[np.tril_indices(D, -1)]
    expected = np.concatenate([away.mean(0) - mean, np.diag(second) - 1, lower])
    np.testing.assert_allclose(gradient, expected, atol=1e-5)


def test_the_first_form_brings_the_pool_nearer():
    rows, _, clients = two_corpora()
    base = np.full(3000, 1 / 3000)
    weights = descend(Evidence(released(clients, 1e-3), rows), base, 1 / 500)
    assert weights.max() <= 1 / 500 + 1e-12
    nearer = distance(clients, weighted_moments(weights, rows))
    assert nearer < 0.3 * distance(clients, weighted_moments(base, rows))


@pytest.mark.parametrize("texts", [0, 3000, 5000])
def test_more_texts_than_the_pool_has_are_refused(texts):
    rows, names, clients = two_corpora()
    with pytest.raises(InputError):
        choose([Evidence(released(clients), rows)], names, texts)


def test_embeddings_of_another_dimension_are_refused():
    rows, names, clients = two_corpora()
    with pytest.raises(InputError):
        choose([Evidence(released(clients), rows[:, :3])], names, 10)


def log_weights(sums, rng, std, dimension):
    """Log-weights of a pool of unit vectors by the noisy moments of clients who hold some."""
    mean, second = sums
    lower = np.tril(rng.normal(size=(dimension, dimension)) / np.sqrt(2), -1)
    covariance = second + std * (lower + lower.T + np.diag(rng.normal(size=dimension)))
    noise = MomentNoise(0.0, std, std, std / np.sqrt(2), dimension * std**2)
    moments = Moments(1.0, mean + std * rng.normal(size=dimension), covariance)
    evidence = Evidence(PrivateMoments(moments, noise, PLAN), np.eye(dimension, dtype=np.float32))
    matched = MomentMatching([evidence], np.ones(dimension), 1.0).solve(0.1)
    return np.log(np.maximum(matched.weights_N, 1e-300))


@pytest.mark.parametrize("leaks", [False, True])
def test_weights_show_no_more_of_a_client_than_its_release_states(leaks):
    """Four of 16 texts of a pool are a client's. With a tenth of the noise the audit sees them."""
    dimension, rounds, planted = 16, 60, 4
    rng, places = np.random.default_rng(9), []
    stated = Guarantee(dp_accounting.GaussianDpEvent(1.0), 1e-5)
    # Sum and second moment of a client with one unit vector: mu^2 = 1 in all.
    std = math.sqrt(2) * (0.1 if leaks else 1.0)
    weights: tuple[list, list] = [], []
    for _ in range(rounds):
        places.append(rng.permutation(dimension)[:planted])
        held = np.zeros(dimension)
        held[places[-1]] = 1
        for values, scale in zip(weights, (1.0, 0.0), strict=True):
            sums = scale * held, np.diag(scale * held)
            values.append(log_weights(sums, rng, std, dimension))
    trials = weight_trials(*map(np.array, weights), np.array(places))
    assert (lower_bound(trials, stated).epsilon > stated.epsilon()) == leaks
