"""Which examples a classifier gets right, against one forward pass in numpy."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpfl.data import from_clients
from jaxpfl.errors import InputError
from jaxpfl.federated.clients.evaluation import correct_examples
from jaxpfl.models import classifier_cnn
from tests.trees import drawn


@dataclass(frozen=True)
class Linear:
    """The logits are the pixels times the parameters."""

    def logits(self, params, image_BxHxWxC):
        flat = image_BxHxWxC.reshape(image_BxHxWxC.shape[0], -1).astype(jnp.float32)
        return flat @ params


RNG = np.random.default_rng(0)
IMAGES = RNG.normal(size=(23, 2, 3, 1)).astype(np.float32)
LABELS = RNG.integers(0, 4, 23).astype(np.int32)
WEIGHTS = RNG.normal(size=(6, 4)).astype(np.float32)


def held(images=IMAGES, labels=LABELS):
    split = 9
    return from_clients(
        {
            "a": {"image": images[:split], "label": labels[:split]},
            "nobody": {"image": images[:0], "label": labels[:0]},
            "b": {"image": images[split:], "label": labels[split:]},
        }
    )


@pytest.mark.parametrize("batch_size", [1, 5, 23, 64])
def test_correct_examples_are_those_of_a_plain_loop(batch_size):
    expected = [
        int(np.argmax(image.reshape(-1).astype(np.float64) @ WEIGHTS)) == label
        for image, label in zip(IMAGES, LABELS, strict=True)
    ]
    found = correct_examples(Linear(), jnp.asarray(WEIGHTS), held(), batch_size=batch_size)
    assert found.dtype == bool and found.tolist() == expected
    assert 0 < sum(expected) < 23


def test_ties_go_to_the_lowest_class_and_what_is_not_finite_is_incorrect():
    """TRUST 2"""
    images = np.zeros((4, 2, 3, 1), np.float32)
    images[1, 0, 0, 0] = np.nan
    images[2, 0, 0, 0] = np.inf
    labels = np.array([0, 0, 0, 1], np.int32)
    found = correct_examples(Linear(), jnp.asarray(WEIGHTS), held(images, labels))
    assert found.tolist() == [True, False, False, False]


def test_a_convolutional_classifier_and_its_own_count_agree():
    model = classifier_cnn((8, 8, 1), classes=4)
    params = drawn(model, 0)
    images = RNG.integers(0, 256, (23, 8, 8, 1)).astype(np.uint8)
    found = correct_examples(model, params, held(images), batch_size=8)
    batch = {"image": jnp.asarray(images), "label": jnp.asarray(LABELS)}
    evaluated = jax.jit(model.evaluate)(params, batch, jnp.ones(23, bool))
    assert found.sum() == float(evaluated["correct"])
    nobody = held().keeping(np.zeros(23, bool))
    assert correct_examples(Linear(), jnp.asarray(WEIGHTS), nobody).shape == (0,)


def test_missing_and_wrong_columns_are_refused():
    """TRUST 7"""
    params = jnp.asarray(WEIGHTS)
    for columns, message in [
        ({"image": IMAGES}, "needs a column 'label' of numbers, found image"),
        ({"image": ["a"] * 23, "label": LABELS}, "needs a column 'image' of numbers"),
        ({"image": IMAGES, "label": LABELS / 2}, "whole numbers, found float64"),
    ]:
        with pytest.raises(InputError, match=message):
            correct_examples(Linear(), params, held().with_columns(columns))
