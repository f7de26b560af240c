"""Classifiers against numpy, and ResNet-18 against the same network of flax's and XLA's layers."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

from jaxpfl.federated.clients.client import Examples, contribution
from jaxpfl.federated.clients.local_training import LocalTraining
from jaxpfl.federated.clients.optimizers import optimizer
from jaxpfl.models import MLP, ResNet, base, classifier_cnn, emnist_cnn, summarise
from tests.trees import drawn

SMALL = ResNet(image_shape=(11, 10, 3), classes=4, crop=8, width=2, stages=(2, 1))
SHALLOW = ResNet(image_shape=(9, 9, 1), classes=2, crop=8, width=2, stages=(1,))


def batch(model, rows: int) -> dict[str, Any]:
    rng = np.random.default_rng(rows)
    images = rng.integers(0, 256, (rows, *model.image_shape), np.uint8)
    return {"image": images, "label": rng.integers(0, model.classes, rows, np.int32)}


@pytest.mark.parametrize("make", [classifier_cnn, emnist_cnn])
@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 9, 3), (8, 8, 1), (17, 13, 2)])
def test_any_image_size_gives_logits(make, shape):
    model = make(shape, 5)
    params = jax.eval_shape(model.init, jax.random.key(0))
    logits = jax.eval_shape(model.logits, params, jax.ShapeDtypeStruct((3, *shape), jnp.float32))
    assert (logits.shape, logits.dtype) == ((3, 5), jnp.float32)


def test_loss_is_the_mean_cross_entropy_of_images_scaled_to_one():
    model = classifier_cnn((8, 8, 1), 5)
    params = drawn(model, 0)
    given = batch(model, 4)
    mask = np.array([True, False, True, True])
    loss, metrics = jax.jit(model.loss)(params, given, mask)
    scaled = given["image"].astype(np.float32) / np.float32(255)
    logits = np.asarray(jax.jit(model.logits)(params, scaled), np.float64)
    nll = np.log(np.exp(logits).sum(1)) - logits[np.arange(4), given["label"]]
    np.testing.assert_allclose(loss, nll[mask].mean(), rtol=1e-5)
    np.testing.assert_allclose(metrics["loss_sum"], nll[mask].sum(), rtol=1e-5)
    assert metrics["count"] == 3
    assert float(metrics["correct"]) == (logits.argmax(1) == given["label"])[mask].sum()


@pytest.mark.parametrize("hidden", [0, 5])
def test_loss_of_rows_of_numbers_is_that_of_numpy(hidden):
    features = np.array([[0.5, -2e4, 3], [0, 1, -1], [7, 7, 7], [1e-3, 0, 2]], np.float32)
    labels = np.array([1, 0, 3, 2], np.int32)
    model = MLP(3, 4, hidden)
    params = drawn(model, 0)
    assert len(params) == (2 if hidden else 1)
    x = np.arcsinh(features.astype(np.float64))
    for place in range(len(params)):
        layer = params[f"layer_{place}"]
        x = np.maximum(x, 0) if place else x
        x = x @ np.asarray(layer["kernel"], np.float64) + np.asarray(layer["bias"])
    losses = np.log(np.exp(x).sum(1)) - x[np.arange(4), labels]
    given = {"features": features, "label": labels}
    loss, metrics = jax.jit(model.loss)(params, given, np.array([True, True, False, True]))
    np.testing.assert_allclose(loss, losses[[0, 1, 3]].mean(), rtol=1e-4)
    hits = (x.argmax(1) == labels)[[0, 1, 3]].mean()
    assert summarise(jax.device_get(metrics))["accuracy"] == pytest.approx(hits)


def test_a_hit_is_a_first_highest_logit():
    rng = np.random.default_rng(0)
    logits = rng.integers(0, 3, (300, 5)).astype(np.float32)
    logits[0] = np.nan
    targets, real = rng.integers(0, 5, 300, np.int32), np.arange(300) % 7 > 0
    for oov in (None, 2):
        hits = (logits.argmax(1) == targets) & real & (targets != oov)
        assert hits.sum() > 30
        found = jax.jit(partial(base.masked_loss, oov=oov))(logits, targets, real)[1]
        assert float(found["correct"]) == hits.sum()


def reference(params, image):
    """The network layer by layer, with the kernels of `params`."""
    leaves = dict(base.named_leaves(params))

    def convolve(name, x, stride=1):
        kernel, layout = leaves[f"{name}.kernel"], ("NHWC", "HWIO", "NHWC")
        return lax.conv_general_dilated(
            x, kernel, (stride, stride), "SAME", dimension_numbers=layout
        )

    def normalise(name, x):
        layer = nnx.GroupNorm(x.shape[-1], num_groups=2, epsilon=1e-3, rngs=nnx.Rngs(0))
        with jax.numpy_rank_promotion("allow"):
            return layer(x) * leaves[f"{name}.scale"] + leaves[f"{name}.shift"]

    x = image[:, 1:9, 1:9].astype(jnp.float32)
    x = jnp.stack([(one - one.mean()) / one.std() for one in x])
    x = jax.nn.relu(normalise("stem_norm", convolve("stem", x, 2)))
    x = nnx.max_pool(x, (3, 3), (2, 2), "SAME")
    for i in range(3):
        block = f"block_{i}"
        y = x if i == 0 else jax.nn.relu(normalise(f"{block}.norm_1", x))
        y = convolve(f"{block}.convolution_1", y)
        y = jax.nn.relu(normalise(f"{block}.norm_2", y))
        y = convolve(f"{block}.convolution_2", y)
        if i == 2:
            x = normalise(f"{block}.projection_norm", convolve(f"{block}.projection", x))
        x = x + y
    x = jax.nn.relu(normalise("norm", x)).mean((1, 2))
    return x @ params["kernel"] + params["bias"][None, :]


def test_logits_are_those_of_the_network_made_of_other_layers():
    # Scales and shifts that are all different, so that none is in the place of another.
    params = drawn(SMALL)
    images = jnp.asarray(batch(SMALL, 3)["image"])
    logits = jax.jit(SMALL.logits)
    expected = jax.jit(reference)(params, images)
    np.testing.assert_allclose(logits(params, images), expected, rtol=2e-4, atol=2e-4)
    # An image of one colour has no deviation to divide by.
    assert jnp.all(jnp.isfinite(logits(params, jnp.full_like(images, 7))))


def test_crops_are_windows_of_the_image_and_half_of_them_are_flipped():
    images = np.arange(11 * 10, dtype=np.uint8).reshape(1, 11, 10, 1).repeat(64, 0).repeat(3, -1)
    given = {"image": jnp.asarray(images), "label": jnp.zeros(64)}
    crops = jax.jit(SMALL.augment)(given, jax.random.key(0))["image"]
    crops = np.asarray(crops)[..., 0].astype(int)
    assert crops.shape == (64, 8, 8)
    seen = set()
    for crop in crops:
        flipped = bool(crop[0, 0] > crop[0, 1])
        straight = crop[:, ::-1] if flipped else crop
        top, left = divmod(int(straight[0, 0]), 10)
        np.testing.assert_array_equal(straight, images[0, top : top + 8, left : left + 8, 0])
        seen.add((top, left, flipped))
    assert {top for top, _, _ in seen} == set(range(4))
    assert {left for _, left, _ in seen} == set(range(3))
    assert 16 < sum(bool(crop[0, 0] > crop[0, 1]) for crop in crops) < 48


def test_a_client_trains_on_crops_that_its_key_draws():
    given = {name: jnp.asarray(column)[None] for name, column in batch(SHALLOW, 4).items()}
    given["label"] *= 0
    examples = Examples(given, jnp.ones((1, 4), bool), jnp.int32(1))
    train = jax.jit(partial(contribution, LocalTraining(SHALLOW, optimizer("sgd", 0.1))))
    params = drawn(SHALLOW, 0)
    changes = [train(params, examples, jax.random.key(i))["stem"]["kernel"] for i in (0, 0, 1)]
    np.testing.assert_array_equal(changes[0], changes[1])
    assert not np.array_equal(changes[0], changes[2])
