"""DP-FTRL: what correlated noise costs, that it is what it says, and what it gains."""

import functools
import itertools
import math
from fractions import Fraction

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax_privacy.matrix_factorization import toeplitz

from jaxpfl.federated import client_mesh
from jaxpfl.privacy import AdaptiveClip, confirmation, correlated_noise
from jaxpfl.privacy.correlated_noise import NoiseStream, column_norm
from jaxpfl.privacy.exact_noise import STEPS, exact_cells
from jaxpfl.privacy.keys import training_root
from jaxpfl.privacy.mechanisms import standard_normal
from tests.federated.cohorts import door, through
from tests.plans import flat_plan
from tests.refusals import refusal

FIELDS = dict(
    population=50, clients_per_round=7, rounds=15, clip_norm=0.5, noise_multiplier=2.0, delta=1e-5,
    sampling="cyclic",
)  # fmt: skip


def mixing(noise, rounds, per_epoch):
    """The matrix from independent draws (columns, by round) to the noise of each round."""
    return np.eye(rounds) if noise == "independent" else np.linalg.inv(strategy(rounds, per_epoch))


def test_correlated_noise_makes_prefix_sums_quieter():
    """One epoch of 64 rounds: mean variance of what the server's sum carries, at one epsilon."""

    def mean_variance(noise):
        prefixes = np.cumsum(mixing(noise, 64, 64), axis=0)
        return float(np.mean(np.sum(prefixes**2, axis=1)))

    independent, banded = map(mean_variance, ("independent", "banded"))
    assert independent == pytest.approx(32.5)
    # Of a tree: 7 levels, and 192 of the bits of 1 .. 64 are set, and one for 64 itself.
    tree = 7 * np.mean([count.bit_count() for count in range(1, 65)])
    assert banded < tree / 4


@pytest.mark.parametrize("noise", ["banded", "exact_banded"])
def test_the_door_adds_this_noise(noise):
    """The stream's noise at z S = 1, whatever the sum and the release's own keys are.

    That of exact noise has the deviation z S n, and steps which are a little coarser.
    """
    plan, like = flat_plan(**FIELDS, noise=noise), jax.ShapeDtypeStruct((3,), jnp.float32)
    stream = NoiseStream(plan.bands, training_root(3), 3, plan.exact)
    # Of a grid of 1/32.
    scale, tolerance = 1.0, dict(rtol=1e-6, atol=1 / 64)
    if plan.exact:
        norm = np.linalg.norm(toeplitz.optimal_max_error_strategy_coefs(plan.bands))
        scale, tolerance = norm / (1 - 2**-16) / STEPS, dict(rtol=1e-5)
    for round in (1, 2, 8):
        shared, found = stream.noise(round), []
        for mesh in (client_mesh(1), client_mesh()):
            opened = door(lambda broadcast, examples, key: broadcast, plan, like, mesh=mesh)
            found.append(through(opened, jnp.zeros(3), [], shared=shared).value)
        np.testing.assert_array_equal(*found)
        unit = scale * np.asarray(shared, np.float64)
        np.testing.assert_allclose(found[0], 2.0 * 0.5 * unit, **tolerance)
        assert np.all(np.abs(unit) > 1e-3)


@pytest.mark.parametrize("noise", ["independent", "banded"])
def test_with_more_than_half_a_round_everyone_takes_part_and_pays_in_each(noise):
    """R = 1: noise z S in every round, each a Gaussian on everyone, and the mean is of everyone."""
    fields = FIELDS | {"population": 50, "clients_per_round": 26, "rounds": 3}
    plan = flat_plan(**fields, noise=noise)
    assert plan.participation.rounds_per_epoch == 1
    for round in (1, 2, 3):
        np.testing.assert_array_equal(plan.sample(0, round), np.arange(50))
        assert plan.charge_number(round) == round
    assert plan.charge_event() == dp_accounting.GaussianDpEvent(2.0)
    np.testing.assert_allclose(np.sum(mixing(noise, 3, 1) ** 2, axis=1), 1.0)
    assert plan.epsilon() == pytest.approx(
        confirmation.gaussian_epsilon(3**0.5 / 2.0, plan.delta), rel=1e-3
    )
    assert plan.denominator == 50.0


def test_means_are_of_the_cohorts_that_are_expected():
    """Of 50 clients in 3 rounds, 50 / 3 take part, whatever fewer was planned."""
    plan = flat_plan(**FIELDS | {"population": 50, "clients_per_round": 14})
    sizes = [len(plan.sample(seed, 1)) for seed in range(400)]
    assert plan.denominator == 50 / 3
    # The mean's standard deviation is 0.17.
    assert np.mean(sizes) == pytest.approx(plan.denominator, abs=0.7)


@pytest.mark.parametrize("noise", ["independent", "banded", "exact_banded"])
def test_cost_is_one_gaussian_an_epoch(noise):
    plan = flat_plan(**FIELDS, noise=noise)
    assert plan.participation.rounds_per_epoch == 7
    gaussian = dp_accounting.GaussianDpEvent(2.0)
    assert [plan.charge_number(round) for round in range(1, 16)] == [1] * 7 + [2] * 7 + [3]
    assert plan.charge_event() == gaussian
    assert plan.event() == dp_accounting.SelfComposedDpEvent(gaussian, 3)
    assert plan.released_again_event() == gaussian
    exact = [confirmation.gaussian_epsilon(count**0.5 / 2.0, 1e-5) for count in (1, 2, 3)]
    np.testing.assert_allclose([plan.epsilon(1), plan.epsilon(8), plan.epsilon()], exact, rtol=1e-3)
    assert plan.epsilon(7) == plan.epsilon(1) and plan.epsilon(0) == 0
    assert "add or remove one client" in plan.statement()


def test_everyone_takes_part_once_an_epoch():
    plan = flat_plan(**FIELDS)
    cohorts = [plan.sample(5, round) for round in range(1, 15)]
    assert sorted(np.concatenate(cohorts[:7]).tolist()) == list(range(50))
    for first, second in zip(cohorts[:7], cohorts[7:], strict=True):
        np.testing.assert_array_equal(first, second)
    assert len({len(cohort) for cohort in cohorts}) > 1
    assert not np.array_equal(cohorts[0], plan.sample(6, 1))


WIDTH = 12


def stream(per_epoch=4, seed=0, width=WIDTH, exact=False) -> NoiseStream:
    return NoiseStream(per_epoch, training_root(seed), width, exact)


def rounds_of(noises: NoiseStream, rounds) -> np.ndarray:
    """float64 [rounds, parameters]."""
    return np.stack([noises.noise(round) for round in rounds]).astype(np.float64)


def strategy(rounds: int, bands: int) -> np.ndarray:
    """C by its definition, float64 [rounds, rounds], from jax_privacy's coefficients."""
    coefficients = np.asarray(toeplitz.optimal_max_error_strategy_coefs(bands), np.float64)
    coefficients = coefficients / np.linalg.norm(coefficients)
    return sum(np.diag(np.full(rounds - k, c), -k) for k, c in enumerate(coefficients[:rounds]))


@jax.jit
def drawn(round):
    return standard_normal(jax.random.fold_in(training_root(0), round), (WIDTH,))


@jax.jit
def drawn_cells(round):
    return exact_cells(jax.random.fold_in(training_root(0), round), jnp.arange(40))


@functools.cache
def draws_of(rounds: int) -> np.ndarray:
    """The independent draws by their addresses, float64 [rounds, WIDTH]."""
    return np.asarray([drawn(jnp.int32(round)) for round in range(1, rounds + 1)], np.float64)


@pytest.mark.parametrize("bands", [1, 2, 3, 10])
def test_noise_of_all_rounds_is_the_inverse_strategy_times_the_draws(bands):
    """A dense inverse in float64; more rounds than bands, and than the ring goes round twice."""
    found = rounds_of(stream(per_epoch=bands), range(1, 26))
    wanted = np.linalg.inv(strategy(25, bands)) @ draws_of(25)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)
    # The draws can be had back from the noise: nothing else is in it.
    np.testing.assert_allclose(strategy(25, bands) @ found, draws_of(25), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("bands", [1, 2, 3, 20])
def test_exact_sums_follow_from_what_the_gaussian_mechanism_releases(bands):
    """A loop in whole numbers that sees C x + noise alone gives the sums plus the stream's noise.

    And that costs what it should: a column of C is no longer than the draws' deviation is for.
    """
    rounds, width, found = 3 * bands + 2, 40, stream(bands, width=40, exact=True)
    whole = [round(Fraction(2**16 * math.comb(2 * k, k), 4**k)) for k in range(bands)]
    assert Fraction(column_norm(bands)) ** 2 >= Fraction(sum(m * m for m in whole), 2**32)
    assert column_norm(bands) == pytest.approx(math.hypot(*whole) / 2**16, rel=1e-15)
    sums = np.random.default_rng(0).integers(-(2**45), 2**45, (rounds, width)).tolist()
    seen = []
    for t in range(rounds):
        cells, parts = (each.tolist() for each in drawn_cells(t + 1))
        seen.append([])
        for p in range(width):
            mixed = sum(m * sums[t - k][p] for k, m in enumerate(whole[: t + 1]))
            rest = sum(m * seen[t - k][p] for k, m in enumerate(whole[: t + 1]) if k)
            seen[t].append(mixed + cells[p] * 2**32 + parts[p] + -rest // 2**16)
        noise = found.noise(t + 1).tolist()
        assert [v >> 16 for v in seen[t]] == [x + w for x, w in zip(sums[t], noise, strict=True)]


@pytest.mark.parametrize(("bands", "rounds"), [(1, 3), (2, 5), (2, 6), (3, 7), (4, 8)])
def test_a_client_moves_the_sums_as_far_as_is_charged_in_all_its_rounds(bands, rounds):
    """Every place in the epoch and every sign of what it sends; C from the noise itself."""
    found = rounds_of(stream(per_epoch=bands), range(1, rounds + 1))
    own = draws_of(rounds) @ np.linalg.pinv(found)
    epochs, shift = -(-rounds // bands), 0.0
    for place in range(bands):
        taken = range(place, rounds, bands)
        for signs in itertools.product((-1, 1), repeat=len(taken)):
            shift = max(shift, np.linalg.norm(own[:, taken] @ np.array(signs)))
    weights = correlated_noise.band_weights(bands)
    bound = confirmation.banded_shift(weights, bands, epochs)
    assert bound**2 == pytest.approx(epochs, rel=1e-6)
    assert shift <= bound * (1 + 1e-5)
    if rounds % bands == 0:
        assert shift == pytest.approx(bound, rel=1e-5)


def test_overlapping_columns_move_further():
    """More bands than an epoch has rounds: all patterns of 4 participations, 2 rounds apart."""
    weights = correlated_noise.band_weights(5)
    column = np.concatenate([[1.0], weights[1:]]) / weights[0]
    columns = [np.pad(column, (2 * k, 6 - 2 * k)) for k in range(4)]
    shifts = [
        np.linalg.norm(np.array(signs) @ columns) for signs in itertools.product((-1, 1), repeat=4)
    ]
    assert max(shifts) > 2.1
    assert confirmation.banded_shift(weights, 2, 4) == pytest.approx(max(shifts))


@pytest.mark.parametrize("noise", ["banded", "exact_banded"])
def test_a_plan_whose_noise_is_too_small_for_its_charge_is_refused(noise, monkeypatch):
    """The strategy's columns are twice as long, and the charge is the same."""
    for name, factor in (("band_weights", 1 / 2), ("column_norm", 1 / 2)):
        real = getattr(correlated_noise, name)
        monkeypatch.setattr(correlated_noise, name, lambda n, r=real, f=factor: f * r(n))
    refusal(lambda: flat_plan(**FIELDS, noise=noise), "disagree")


@pytest.mark.parametrize("exact", [False, True])
def test_a_resumed_stream_gives_the_same_bits(exact):
    """From the start to any round at once, again, backwards: as round after round."""
    straight = rounds_of(stream(exact=exact), range(1, 15))
    for rounds in ([14], [1, 5, 6, 14], [3, 3, 2, 14, 13, 1]):
        found = rounds_of(stream(exact=exact), rounds)
        np.testing.assert_array_equal(found, straight[np.array(rounds) - 1])
    assert not np.any(rounds_of(stream(seed=1, exact=exact), range(1, 15)) == straight)


def test_one_program_serves_all_rounds():
    noises = stream(per_epoch=6)
    noises.noise(1)
    compiled = correlated_noise._advance
    before = compiled._cache_size()
    for round in (2, 3, 7, 20, 4):
        noises.noise(round)
    assert compiled._cache_size() == before


REFUSED = {
    "Poisson cohorts": (
        lambda: flat_plan(**FIELDS | {"noise": "banded", "sampling": "poisson"}),
        "noise = 'banded' needs sampling = 'cyclic'",
    ),
    "Poisson cohorts, exact": (
        lambda: flat_plan(**FIELDS | {"noise": "exact_banded", "sampling": "poisson"}),
        "needs sampling = 'cyclic'",
    ),
    "adaptive": (
        lambda: flat_plan(**FIELDS | {"adaptive_clip": AdaptiveClip()}),
        "needs a constant clip norm",
    ),
    "no bands": (lambda: stream(per_epoch=0), "bands"),
    "no width": (lambda: stream(width=0), "width"),
    "another generator": (lambda: NoiseStream(3, jax.random.key(0), WIDTH), "threefry4x32"),
    "bare words": (lambda: NoiseStream(3, jnp.zeros(4, jnp.uint32), WIDTH), "typed JAX key"),
    # Of which the noise would be zero.
    "round 0": (lambda: stream().noise(0), "round must"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_has_no_stream_of_noise_is_refused(case):
    """TRUST 13, 20."""
    refusal(*REFUSED[case])
