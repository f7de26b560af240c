"""Sums of clipped gradients of single examples, against a loop in float64, and their bound."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpfl.errors import InputError
from jaxpfl.federated import ClippedGradients, contribution
from tests.federated.test_local_training import DIM, LinearModel, examples

CLIP = 0.7
PARAMS = {"w": jnp.array([0.5, -1.0, 2.0], jnp.float32), "b": jnp.float32(0.3)}


def gradients(held) -> np.ndarray:
    """Float64 [examples, DIM + 1] of the real examples of a linear model, at PARAMS."""
    rows = held.mask.reshape(-1)
    x = np.float64(held.batches["x"].reshape(-1, DIM)[rows])
    y = np.float64(held.batches["y"].reshape(-1)[rows])
    error = x @ np.float64(PARAMS["w"]) + float(PARAMS["b"]) - y
    return np.concatenate([error[:, None] * x, error[:, None]], axis=1)


def clipped(gradients_NxP: np.ndarray, clip_norm: float) -> np.ndarray:
    norm_N = np.linalg.norm(gradients_NxP, axis=1)
    kept = np.isfinite(norm_N)
    factor_N = np.minimum(1.0, clip_norm / np.maximum(norm_N[kept], 1e-300))
    return (gradients_NxP[kept] * factor_N[:, None]).sum(0)


def vector(tree) -> np.ndarray:
    return np.append(np.float64(tree["w"]), np.float64(tree["b"]))


client = jax.jit(partial(contribution, ClippedGradients(LinearModel(), CLIP)))


def summed(held) -> np.ndarray:
    return -vector(client(PARAMS, held, jax.random.key(0)))


@pytest.mark.parametrize("sizes", [(), (0,), (1,), (4, 4, 2), (4, 0, 3)])
@pytest.mark.parametrize("poison", [0.0, np.nan, np.inf, 1e30])
def test_a_sum_is_that_of_a_loop_and_padding_adds_exactly_nothing(sizes, poison):
    """TRUST 1, 23: whatever values stand in rows that are no examples."""
    held = examples(sizes, steps=4, batch=4, poison=poison)
    expected = clipped(gradients(held), CLIP)
    found = summed(held)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(found, summed(examples(sizes, steps=4, batch=4, poison=0.0)))


ADVERSARIAL = {
    "huge": 1e8,
    "its square overflows": 1e25,
    "largest": 3e38,
    "NaN": np.nan,
    "infinite": -np.inf,
    "tiny": 1e-30,
    "ordinary": 1.0,
}


@pytest.mark.parametrize("what", ADVERSARIAL)
def test_one_example_moves_the_sum_by_at_most_the_bound(what):
    """TRUST 16: with and without it, alone and among others; and it does no harm to these."""
    without = examples((4, 3), steps=2, batch=4, poison=0.0)
    for place in range(DIM):
        held = examples((4, 3), steps=2, batch=4, poison=0.0)
        held.batches["x"][1, 3, place] = ADVERSARIAL[what]
        held.batches["y"][1, 3] = -5.0
        held.mask[1, 3] = True
        moved = np.linalg.norm(summed(held) - summed(without))
        assert moved <= ClippedGradients(LinearModel(), CLIP).example_bound * (1 + 1e-6) + 1e-6
        if what == "huge":
            assert moved >= CLIP * (1 - 1e-5)
        if what in ("NaN", "infinite", "largest"):
            assert moved == 0


@dataclasses.dataclass(frozen=True)
class Moved(LinearModel):
    """Draws its examples anew: each is moved by as much as the batch's key says."""

    def augment(self, batch, key):
        return batch | {"x": batch["x"] + jax.random.normal(key, batch["x"].shape)}


def test_examples_of_an_augmenting_model_are_drawn_anew():
    held = examples((4,), steps=1, batch=4)
    client = jax.jit(partial(contribution, ClippedGradients(Moved(), CLIP)))
    found = [vector(client(PARAMS, held, jax.random.key(seed))) for seed in (0, 0, 1)]
    np.testing.assert_array_equal(found[0], found[1])
    assert np.abs(found[0] - found[2]).max() > 1e-3


@pytest.mark.parametrize("clip_norm", [0.0, -1.0, np.nan, 1e-13, "1"])
def test_a_bad_clip_norm_is_refused(clip_norm):
    with pytest.raises(InputError, match="clip_norm"):
        ClippedGradients(LinearModel(), clip_norm)
