"""DP-FTRL: what correlated noise costs, that it is what it says, and what it gains."""

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpfl.errors import InputError
from jaxpfl.privacy import AdaptiveClip, confirmation, correlated_noise
from jaxpfl.privacy.correlated_noise import NoiseStream
from jaxpfl.privacy.keys import training_root
from tests.federated.cohorts import door, through
from tests.plans import flat_calibrated, flat_plan

FIELDS = dict(
    population=50,
    clients_per_round=7,
    rounds=15,
    clip_norm=0.5,
    noise_multiplier=2.0,
    delta=1e-5,
    sampling="cyclic",
)


def inverse_of_bands(bands: int, rounds: int) -> np.ndarray:
    """C^-1 of the banded strategy, dense."""
    coefficients = correlated_noise.square_root(bands)
    coefficients = coefficients / np.linalg.norm(coefficients)
    strategy = sum(np.diag(np.full(rounds - k, c), -k) for k, c in enumerate(coefficients[:rounds]))
    return np.linalg.inv(strategy)


def mixing(noise, rounds, per_epoch):
    """The matrix from independent draws (columns, by round) to the noise of each round."""
    return np.eye(rounds) if noise == "independent" else inverse_of_bands(per_epoch, rounds)


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


def test_the_door_adds_this_noise():
    """The stream's noise at z S = 1, whatever the sum and the release's own keys are."""
    plan, like = flat_plan(**FIELDS, noise="banded"), jax.ShapeDtypeStruct((3,), jnp.float32)
    stream = NoiseStream(plan.bands, training_root(3), 3)
    opened = door(lambda broadcast, examples, key: broadcast, plan, like)
    for round in (1, 2, 8):
        shared = stream.noise(round)
        released = through(opened, jnp.zeros(3), [], shared=shared)
        # Of a grid of 1/32.
        np.testing.assert_allclose(released.value, 2.0 * 0.5 * shared, rtol=1e-6, atol=1 / 64)
        assert np.all(np.abs(shared) > 1e-3)


@pytest.mark.parametrize("noise", ["independent", "banded"])
def test_with_more_than_half_a_round_everyone_takes_part_and_pays_in_each(noise):
    """R = 1: noise z S in every round, each a Gaussian on everyone, and the mean is of everyone."""
    fields = FIELDS | {"population": 50, "clients_per_round": 26, "rounds": 3}
    plan = flat_plan(**fields, noise=noise)
    assert plan.rounds_per_epoch == 1
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


@pytest.mark.parametrize("noise", ["independent", "banded"])
def test_cost_is_one_gaussian_an_epoch(noise):
    plan = flat_plan(**FIELDS, noise=noise)
    assert plan.rounds_per_epoch == 7
    gaussian = dp_accounting.GaussianDpEvent(2.0)
    assert [plan.charge_number(round) for round in range(1, 16)] == [1] * 7 + [2] * 7 + [3]
    assert plan.charge_event() == gaussian
    assert plan.event() == dp_accounting.SelfComposedDpEvent(gaussian, 3)
    assert plan.released_again_event() == gaussian
    exact = [confirmation.gaussian_epsilon(count**0.5 / 2.0, 1e-5) for count in (1, 2, 3)]
    np.testing.assert_allclose([plan.epsilon(1), plan.epsilon(8), plan.epsilon()], exact, rtol=1e-3)
    assert plan.epsilon(7) == plan.epsilon(1) and plan.epsilon(0) == 0
    assert "add or remove one client" in plan.statement()


def test_calibrated_to_an_epsilon():
    target = {k: v for k, v in FIELDS.items() if k != "noise_multiplier"}
    plan = flat_calibrated(epsilon=3.0, noise="banded", **target)
    assert 2.99 < plan.epsilon() <= 3.0 and plan.guarantee().confirmed_epsilon() <= 3.0
    alone = flat_calibrated(epsilon=3.0, **target)
    assert plan.noise_multiplier == alone.noise_multiplier
    prior = dp_accounting.GaussianDpEvent(3.0)
    assert flat_calibrated(
        epsilon=3.0, noise="banded", prior_releases=prior, **target
    ).noise_multiplier > 1.05 * (plan.noise_multiplier)


def test_everyone_takes_part_once_an_epoch():
    plan = flat_plan(**FIELDS)
    cohorts = [plan.sample(5, round) for round in range(1, 15)]
    assert sorted(np.concatenate(cohorts[:7]).tolist()) == list(range(50))
    for first, second in zip(cohorts[:7], cohorts[7:], strict=True):
        np.testing.assert_array_equal(first, second)
    assert len({len(cohort) for cohort in cohorts}) > 1
    assert not np.array_equal(cohorts[0], plan.sample(6, 1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"noise": "banded", "sampling": "poisson"}, "noise = 'banded' needs sampling = 'cyclic'"),
        ({"noise": "bands"}, "noise must be one of 'independent', 'exact', 'banded'"),
        ({"unit": "example"}, "unit = 'example' needs sampling = 'poisson'"),
        ({"adaptive_clip": AdaptiveClip()}, "needs a constant clip norm"),
    ],
)
def test_bad_plans(change, message):
    """TRUST 13"""
    with pytest.raises(InputError, match=message):
        flat_plan(**FIELDS | change)
