"""The classifier of rows of numbers, against numpy."""

import jax
import numpy as np
import pytest

from jaxpfl.errors import InputError
from jaxpfl.models import MLP, count_parameters, summarise
from tests.models.masking import check_all_masked, check_masked, check_parameters_kept

FEATURES = np.array([[0.5, -2e4, 3], [0, 1, -1], [7, 7, 7], [1e-3, 0, 2]], np.float32)
LABELS = np.array([1, 0, 3, 2], np.int32)


def batch(rows=slice(None)):
    return {"features": FEATURES[rows], "label": LABELS[rows]}


@pytest.mark.parametrize("hidden", [0, 5])
def test_loss_is_that_of_numpy(hidden):
    model = MLP(3, 4, hidden)
    params = model.init(jax.random.key(0))
    assert count_parameters(params) == (3 * 5 + 5 + 5 * 4 + 4 if hidden else 3 * 4 + 4)
    x = np.arcsinh(FEATURES.astype(np.float64))
    for place in range(len(params)):
        layer = params[f"layer_{place}"]
        x = np.maximum(x, 0) if place else x
        x = x @ np.asarray(layer["kernel"], np.float64) + np.asarray(layer["bias"])
    losses = np.log(np.exp(x).sum(1)) - x[np.arange(4), LABELS]
    loss, metrics = model.loss(params, batch(), np.array([True, True, False, True]))
    np.testing.assert_allclose(loss, losses[[0, 1, 3]].mean(), rtol=1e-4)
    hits = (x.argmax(1) == LABELS)[[0, 1, 3]].mean()
    assert summarise(jax.device_get(metrics))["accuracy"] == pytest.approx(hits)


def test_padding_and_purity():
    model = MLP(3, 4, 5)
    check_masked(model, batch(slice(0, 2)), batch(slice(2, 4)))
    check_all_masked(model, batch())
    check_parameters_kept(model, batch())


def test_sizes_are_checked():
    with pytest.raises(InputError, match="features must be at least 1"):
        MLP(0, 2)
