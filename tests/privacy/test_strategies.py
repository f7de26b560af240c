"""Strategies whose epochs overlap: what a client moves, the error, and the coefficients found."""

import itertools
import math

import dp_accounting
import numpy as np
import pytest
from jax_privacy.matrix_factorization import toeplitz

from jaxpfl.privacy import Clip, MinSeparation, Noise, Plan, confirmation
from jaxpfl.privacy.strategies import BufferedToeplitz, tree_errors, tree_shifts, unit
from tests.plans import flat_plan
from tests.refusals import refusal

BLT = BufferedToeplitz((0.9, 0.5), (0.2, 0.3))
FIELDS = dict(
    population=40, clients_per_round=4, clip_norm=0.5, noise_multiplier=2.0, delta=1e-5,
    sampling="min_separation",
)  # fmt: skip


def dense(blt: BufferedToeplitz, rounds: int) -> np.ndarray:
    """C by its definition, float64 [rounds, rounds]."""
    strategy = np.eye(rounds)
    for row, column in itertools.product(range(rounds), repeat=2):
        if row > column:
            powers = zip(blt.scales, blt.decays, strict=True)
            strategy[row, column] = sum(w * d ** (row - column - 1) for w, d in powers)
    return strategy


def tree(rounds: int) -> np.ndarray:
    """The nodes that prefixes consist of, float64 [nodes, rounds]."""
    rows = []
    for level in range(rounds.bit_length()):
        for first in range(0, rounds - 2**level + 1, 2 ** (level + 1)):
            rows.append([first <= t < first + 2**level for t in range(rounds)])
    return np.array(rows, float)


def furthest(strategy: np.ndarray, rounds: int, separation: int) -> float:
    """How far a client can move C X in the first rounds: all its rounds, and all signs.

    For C without negative numbers; a client who sends vectors moves it no further.
    """
    most = 0.0
    for taken in itertools.product([0, 1], repeat=rounds):
        (at,) = np.nonzero(taken)
        if len(at) and np.all(np.diff(at) >= separation):
            for signs in itertools.product([-1, 1], repeat=len(at) - 1):
                most = max(most, np.linalg.norm(strategy[:, at] @ np.array([1, *signs])))
    return most


@pytest.mark.parametrize("separation", [1, 2, 3, 9])
def test_no_client_moves_the_sums_further_than_is_charged(separation):
    """After each epoch, of all ways to take part; and somebody does so far, by a BLT."""
    for rounds in (1, 5, 9):
        ends = [min((j + 1) * separation, rounds) for j in range(-(-rounds // separation))]
        bounds = {"blt": BLT.shifts(rounds, separation), "tree": tree_shifts(rounds, separation)}
        for kind, found in bounds.items():
            # What is released after `end` rounds holds these rows alone.
            shown = [dense(BLT, end) if kind == "blt" else tree(end) for end in ends]
            moved = [furthest(c, end, separation) for c, end in zip(shown, ends, strict=True)]
            assert len(found) == len(moved) and np.all(found >= np.array(moved) * (1 - 1e-12))
            if kind == "blt":
                np.testing.assert_allclose(found, moved, rtol=1e-9)
            charged = unit(BLT if kind == "blt" else None, rounds, separation)
            epochs = np.arange(1, len(found) + 1)
            assert np.all(charged * np.sqrt(epochs) >= np.array(moved))
        again = confirmation.buffered_shifts(BLT.decays, BLT.scales, rounds, separation)
        np.testing.assert_allclose(again, bounds["blt"], rtol=1e-9)


@pytest.mark.parametrize("rounds", [1, 2, 30])
def test_errors_are_those_of_the_dense_matrices(rounds):
    prefixes = np.tril(np.ones((rounds, rounds)))
    noise = prefixes @ np.linalg.inv(dense(BLT, rounds))
    np.testing.assert_allclose(BLT.errors(rounds), np.sum(noise**2, axis=1), rtol=1e-9)
    # Each prefix of rounds is a sum of nodes.
    nodes = np.rint(np.linalg.lstsq(tree(rounds).T, prefixes.T, rcond=None)[0])
    np.testing.assert_array_equal(tree(rounds).T @ nodes, prefixes.T)
    ones = [bin(t).count("1") for t in range(1, rounds + 1)]
    np.testing.assert_array_equal(tree_errors(rounds), ones)


def test_errors_and_shifts_are_those_of_jax_privacy():
    column = dense(BLT, 100)[:, 0]
    for separation in (1, 7, 20, 100):
        epochs = -(-100 // separation)
        theirs = toeplitz.minsep_sensitivity_squared(column, separation, epochs, n=100)
        assert BLT.shifts(100, separation)[-1] ** 2 == pytest.approx(float(theirs), rel=1e-4)
    theirs = toeplitz.per_query_error(strategy_coef=column, n=100)
    np.testing.assert_allclose(BLT.errors(100), theirs, rtol=1e-3)


def rmse(rounds: int, separation: int, strategy: BufferedToeplitz | None) -> float:
    """The deviation of the prefix sums' noise where the whole run costs a Gaussian of 1."""
    errors = tree_errors(rounds) if strategy is None else strategy.errors(rounds)
    epochs = -(-rounds // separation)
    return unit(strategy, rounds, separation) * math.sqrt(epochs * np.mean(errors))


def test_three_buffers_do_as_well_as_all_coefficients():
    """One participation: the error of the best Toeplitz matrix of all, and no tree comes near it.

    That has the square root's coefficients (Fichtenberger, Henzinger, Upadhyay 2023; Dvijotham et
    al. 2024, section 2), whose largest error is sum_k c_k^2 in both factors.
    """
    for rounds in (100, 1_000, 4_000):
        steps = np.arange(1, rounds)
        root = np.cumprod(np.concatenate([[1.0], (2 * steps - 1) / (2 * steps)]))
        best = np.sum(root**2)
        # The published form of its growth.
        growth = (math.log(rounds) + np.euler_gamma + 4 * math.log(2)) / math.pi
        assert best == pytest.approx(growth, rel=1e-3)
        found = BufferedToeplitz.best(rounds, rounds)
        largest = unit(found, rounds, rounds) * math.sqrt(found.errors(rounds)[-1])
        assert best * (1 - 1e-9) <= largest <= 1.1 * best
        assert rmse(rounds, rounds, None) > 1.9 * rmse(rounds, rounds, found)


def test_coefficients_are_found_once_and_kept():
    """In the plan's record; with others, the same noise costs as much."""
    plan = flat_plan(**FIELDS, rounds=12, separation=3, noise="blt")
    found = plan.to_dict()
    assert plan.noise.blt == BufferedToeplitz.best(12, 3)
    again = Plan.from_dict(found)
    assert again == plan and again.noise.blt == plan.noise.blt
    own = Plan.from_dict(found | {"blt": {"decays": [0.9, 0.5], "scales": [0.2, 0.3]}})
    assert own.noise.blt == BLT and own.epsilon() == plan.epsilon()
    assert own.to_dict() != found


def exact_epsilon(mu: float, delta: float) -> float:
    """From the likelihoods of N(0, 1) and N(mu, 1), by quadrature and bisection."""
    x = np.linspace(-12, 12 + mu, 40_001)
    absent, present = (np.exp(-((x - mean) ** 2) / 2) for mean in (0, mu))
    step = (x[1] - x[0]) / math.sqrt(2 * math.pi)

    def spent(epsilon: float) -> float:
        return float(np.sum(np.maximum(present - math.exp(epsilon) * absent, 0))) * step

    low, high = 0.0, 200.0
    while high - low > 1e-9:
        middle = (low + high) / 2
        low, high = (middle, high) if spent(middle) > delta else (low, middle)
    return high


@pytest.mark.parametrize("noise", ["independent", "banded", "blt", "tree"])
def test_epsilon_is_that_of_the_furthest_client(noise):
    """12 plans: C from its definition, the client who takes part most often, and likelihoods."""
    kinds = ((0.8, 1e-6), (3.0, 1e-3))
    for rounds, separation, (z, delta) in itertools.product((1, 10), (1, 3, 10), kinds):
        fields = FIELDS | dict(noise_multiplier=z, delta=delta, noise=noise, rounds=rounds)
        plan = flat_plan(**fields, separation=separation)
        if noise == "tree":
            strategy = tree(rounds) / unit(None, rounds, separation)
        elif noise == "blt":
            blt = plan.noise.blt
            strategy = dense(blt, rounds) / unit(blt, rounds, separation)
        else:
            bands = plan.bands if noise == "banded" else 1
            root = np.cumprod([1.0] + [(2 * k - 1) / (2 * k) for k in range(1, bands)])
            root /= np.linalg.norm(root)
            strategy = sum(np.diag(np.full(rounds - k, c), -k) for k, c in enumerate(root))
        moved = np.linalg.norm(strategy[:, ::separation].sum(axis=1))
        exact = exact_epsilon(moved / z, delta)
        stated = plan.epsilon()
        assert stated >= exact * (1 - 1e-5)
        if rounds % separation == 0 and noise != "tree":
            assert stated <= exact * (1 + 1e-3)
    # A likelihood that sees nothing would not do.
    assert exact_epsilon(1.0, 1e-5) == pytest.approx(
        dp_accounting.get_epsilon_gaussian(1.0, 1e-5), rel=1e-5
    )


REFUSED = {
    "growing coefficients": (lambda: BufferedToeplitz((0.9,), (1.1,)), "must not increase"),
    "a decay of 1": (lambda: BufferedToeplitz((1.0,), (0.1,)), "must not increase"),
    "a negative scale": (lambda: BufferedToeplitz((0.5,), (-0.1,)), "scales"),
    "no buffers": (lambda: BufferedToeplitz((), ()), "found 0"),
    "another number": (lambda: BufferedToeplitz((0.5, 0.4), (0.1,)), "found 2 and 1"),
    "other noise": (lambda: Noise(1.0, "banded", BLT), "takes no blt"),
    "cyclic": (
        lambda: flat_plan(**FIELDS | {"sampling": "cyclic"}, rounds=5, noise="blt"),
        "needs sampling = 'min_separation'",
    ),
    "Poisson": (
        lambda: flat_plan(**FIELDS | {"sampling": "poisson"}, rounds=5, noise="tree"),
        "needs sampling",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_strategy_is_refused(case):
    """TRUST 13."""
    refusal(*REFUSED[case])


def test_a_plan_whose_client_moves_further_than_is_charged_is_refused(monkeypatch):
    real = BufferedToeplitz.shifts
    monkeypatch.setattr(BufferedToeplitz, "shifts", lambda *a: real(*a) / 2)
    refusal(lambda: flat_plan(**FIELDS, rounds=9, separation=3, noise="blt"), "disagree")


def test_a_plan_is_calibrated_with_its_strategy():
    taken = MinSeparation(40, 4, 3)
    plan = Plan.calibrated(
        epsilon=2.0, delta=1e-3, rounds=12, clip=Clip(1.0), participation=taken, noise="blt"
    )
    assert 1.99 < plan.epsilon() <= 2.0 and plan.noise.blt is not None
    assert "zero out one client" in plan.statement()
