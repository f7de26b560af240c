"""Tag prediction against the formula on dense bags of words."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpfl.models import TagPrediction, count_parameters, summarise
from tests.models.masking import check_all_masked, check_masked, check_parameters_kept

MODEL = TagPrediction(words=6, tags=9)
# The id 6 is a word that is not in the vocabulary, the id 9 such a tag.
WORDS = [[0, 0, 3, 6], [5, -1, -1, -1], [-1, -1, -1, -1], [6, 6, 1, 2]]
TAGS = [[1, 8, -1], [9, -1, -1], [0, 2, 4], [7, 9, -1]]


def batch(rows=slice(None)) -> dict[str, Any]:
    return {"words": np.array(WORDS, np.int16)[rows], "tags": np.array(TAGS, np.int16)[rows]}


def parameters():
    params = MODEL.init(jax.random.key(0))
    return {**params, "bias": jnp.linspace(-1.0, 1.0, 9)}


def test_it_has_the_fields_number_of_parameters():
    shapes = jax.eval_shape(TagPrediction().init, jax.random.key(0))
    assert count_parameters(shapes) == 10_000 * 500 + 500


def test_loss_and_recall_are_those_of_dense_bags():
    params = parameters()
    mask = jnp.array([True, True, False, True])
    bags, tags = np.zeros((4, 7)), np.zeros((4, 10))
    for row in range(4):
        for word in WORDS[row]:
            bags[row, word] += word >= 0
        bags[row] /= max(bags[row].sum(), 1)
        tags[row, [tag for tag in TAGS[row] if tag >= 0]] = 1
    logits = bags[:, :6] @ np.asarray(params["kernel"]) + np.asarray(params["bias"])
    np.testing.assert_allclose(MODEL.logits(params, batch()["words"]), logits, atol=1e-6)
    chance, y = 1 / (1 + np.exp(-logits)), tags[:, :9]
    losses = -(y * np.log(chance) + (1 - y) * np.log(1 - chance)).sum(1)
    loss, metrics = MODEL.loss(params, batch(), mask)
    np.testing.assert_allclose(loss, losses[np.asarray(mask)].mean(), rtol=1e-5)
    top = np.argsort(-logits, axis=1)[:, :5]
    hits = sum(y[row, top[row]].sum() for row in (0, 1, 3))
    found = summarise(jax.device_get(metrics))
    # A sum that is divided on the host rounds otherwise than a mean on the device.
    expected = {"loss": float(loss), "recall_at_5": hits / y[np.asarray(mask)].sum(), "count": 3.0}
    assert found == pytest.approx(expected, rel=1e-6)
    assert 0 < found["recall_at_5"] < 1


def test_padding_and_purity():
    check_masked(MODEL, batch(slice(0, 2)), batch(slice(2, 4)))
    check_all_masked(MODEL, batch())
    check_parameters_kept(MODEL, batch())
