"""Torchvision's ResNet-18 for several labels against numpy, its files, its loss and scores."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.metrics import average_precision_score

from jaxpfl.federated.clients.client import Examples, contribution
from jaxpfl.federated.clients.local_training import LocalTraining
from jaxpfl.federated.clients.optimizers import optimizer
from jaxpfl.models import MultiLabelResNet, summarise
from jaxpfl.models.base import named_leaves
from jaxpfl.models.checkpoints import torchvision_files
from tests.refusals import refusal
from tests.trees import drawn

safetensors_numpy = pytest.importorskip("safetensors.numpy", reason="needs jaxpfl[text]")

MODEL = MultiLabelResNet((37, 38, 3), classes=5, crop=34, width=3, stages=(1, 2), groups=3)
CLASSES = MODEL.classes


def state_dict(width: int, stages: tuple[int, ...]) -> dict[str, np.ndarray]:
    """Random tensors with timm's names and PyTorch's shapes, those of the output layer included."""
    rng, tensors = np.random.default_rng(0), {}

    def layer(convolution: str, norm: str, outputs: int, inputs: int, size: int) -> None:
        drawn = rng.normal(size=(outputs, inputs, size, size)) / np.sqrt(inputs * size * size)
        tensors[f"{convolution}.weight"] = drawn.astype(np.float32)
        for name in ("weight", "bias", "running_mean"):
            tensors[f"{norm}.{name}"] = np.float32(rng.normal(name == "weight", 0.3, outputs))
        tensors[f"{norm}.running_var"] = rng.uniform(0.5, 2, outputs).astype(np.float32)
        tensors[f"{norm}.num_batches_tracked"] = np.array(7)

    layer("conv1", "bn1", width, 3, 7)
    inputs = width
    for stage, blocks in enumerate(stages):
        outputs = width * 2**stage
        for block in range(blocks):
            name = f"layer{stage + 1}.{block}"
            layer(f"{name}.conv1", f"{name}.bn1", outputs, inputs, 3)
            layer(f"{name}.conv2", f"{name}.bn2", outputs, outputs, 3)
            if inputs != outputs:
                layer(f"{name}.downsample.0", f"{name}.downsample.1", outputs, inputs, 1)
            inputs = outputs
    tensors |= {"fc.weight": np.zeros((1000, inputs), "f4"), "fc.bias": np.zeros(1000, "f4")}
    return tensors


@pytest.fixture(scope="module")
def loaded(tmp_path_factory) -> tuple[dict[str, np.ndarray], MultiLabelResNet, Any]:
    folder, tensors = tmp_path_factory.mktemp("weights"), state_dict(MODEL.width, MODEL.stages)
    safetensors_numpy.save_file(tensors, folder / "model.safetensors")
    return tensors, *torchvision_files.load(folder, MODEL, jax.random.key(0))


def batch(rows: int, model: MultiLabelResNet = MODEL) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(rows)
    images = rng.integers(0, 256, (rows, *model.image_shape), np.uint8)
    return {"image": images, "labels": rng.integers(0, 2, (rows, model.classes), np.uint8)}


def convolved(x_CxHxW: np.ndarray, weight_OxIxKxK: np.ndarray, stride: int) -> np.ndarray:
    """As PyTorch's conv2d, with half a kernel of zeros on each side."""
    size = weight_OxIxKxK.shape[-1]
    padded = np.pad(x_CxHxW, ((0, 0), *[(size // 2, size // 2)] * 2))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (size, size), (1, 2))
    return np.einsum("chwij,ocij->ohw", windows[:, ::stride, ::stride], weight_OxIxKxK)


def reference(tensors: dict[str, np.ndarray], image_HxWx3: np.ndarray, stages) -> np.ndarray:
    """The features before the output layer, in float64."""

    def layer(x: np.ndarray, convolution: str, norm: str, stride: int) -> np.ndarray:
        x = convolved(x, tensors[f"{convolution}.weight"].astype(np.float64), stride)
        names = ("running_mean", "running_var", "weight", "bias")
        mean, variance, scale, shift = (np.float64(tensors[f"{norm}.{n}"]) for n in names)
        x = (x.T - mean) / np.sqrt(variance + 1e-5) * scale + shift
        return x.T

    x = (image_HxWx3 / 255 - [0.485, 0.456, 0.406]) / [0.229, 0.224, 0.225]
    x = np.maximum(layer(x.transpose(2, 0, 1), "conv1", "bn1", 2), 0)
    padded = np.pad(x, ((0, 0), (1, 1), (1, 1)), constant_values=-np.inf)
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), (1, 2))
    x = windows[:, ::2, ::2].max((3, 4))
    for stage, blocks in enumerate(stages):
        for block in range(blocks):
            name, stride = f"layer{stage + 1}.{block}", 2 if stage and not block else 1
            y = np.maximum(layer(x, f"{name}.conv1", f"{name}.bn1", stride), 0)
            y = layer(y, f"{name}.conv2", f"{name}.bn2", 1)
            if stride > 1:
                x = layer(x, f"{name}.downsample.0", f"{name}.downsample.1", 2)
            x = np.maximum(x + y, 0)
    return x.mean((1, 2))


def test_logits_are_those_of_numpy_and_of_each_image_alone(loaded):
    tensors, model, params = loaded
    images = batch(3)["image"]
    logits = np.asarray(jax.jit(model.logits)(params, images))
    kernel, bias = (np.asarray(params[name], np.float64) for name in ("kernel", "bias"))
    for image, found in zip(images, logits, strict=True):
        # The middle of the image, of 34 x 34 pixels.
        expected = reference(tensors, image[1:35, 2:36], model.stages) @ kernel + bias
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    floats = jax.jit(model.logits)(params, images.astype(np.float32) / np.float32(255))
    np.testing.assert_allclose(floats, logits, rtol=1e-5, atol=1e-6)


def test_without_weights_there_is_group_norm_in_the_same_places(loaded):
    params = drawn(MODEL)
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, loaded[2])
    images = batch(3)["image"]
    logits = jax.jit(MODEL.logits)
    # Group norm sees no constant factor; frozen statistics do.
    dimmed = images.astype(np.float32) / np.float32(255)
    scaled = jax.tree.map(jnp.array, params)
    scaled["stem"]["kernel"] *= 3
    np.testing.assert_allclose(logits(scaled, dimmed), logits(params, dimmed), atol=1e-4)
    found = [jax.jit(loaded[1].logits)(each, dimmed) for each in (scaled, params)]
    assert np.abs(found[0] - found[1]).max() > 1e-4


def test_clients_change_scales_and_shifts_and_send_no_statistics(loaded):
    _, model, params = loaded
    given = {name: jnp.asarray(column)[None] for name, column in batch(4).items()}
    examples = Examples(given, jnp.ones((1, 4), bool), jnp.int32(1))
    train = jax.jit(partial(contribution, LocalTraining(model, optimizer("sgd", 0.1))))
    change = named_leaves(train(params, examples, jax.random.key(0)))
    kinds = {name.rpartition(".")[2] for name in change}
    assert kinds == {"kernel", "bias", "scale", "shift"}
    # As many numbers as torchvision's parameters, with five classes: no running mean or variance.
    learnt = sum(
        each.size for name, each in loaded[0].items()
        if name.endswith((".weight", ".bias")) and not name.startswith("fc.")
    )  # fmt: skip
    assert sum(each.size for each in change.values()) == learnt + 6 * CLASSES + CLASSES
    assert all(np.abs(each).max() > 0 for each in change.values())
    means = {path: mean for path, mean, _ in model.statistics}
    np.testing.assert_array_equal(
        np.float32(means["block_1.projection_norm"]),
        loaded[0]["layer2.0.downsample.1.running_mean"],
    )


def test_the_files_of_the_hub_are_read_whole(tmp_path):
    """The 122 tensors of timm/resnet18.tv_in1k, but for their sizes."""
    model = dataclasses.replace(MODEL, stages=(2, 2, 2, 2))
    tensors = state_dict(model.width, model.stages)
    assert len(tensors) == 122
    safetensors_numpy.save_file(tensors, tmp_path / "model.safetensors")
    found, params = torchvision_files.load(tmp_path, model, jax.random.key(0))
    assert len(found.statistics) == 20
    assert len(jax.tree.leaves(params)) == 20 + 2 * 20 + 2
    np.testing.assert_array_equal(
        params["block_7"]["convolution_2"]["kernel"],
        tensors["layer4.1.conv2.weight"].transpose(2, 3, 1, 0),
    )


ZEROS = np.zeros((3, 6, 3, 3), "f4")


@pytest.mark.parametrize(
    ("name", "tensor", "words"),
    [
        ("layer2.0.bn1.running_var", None, "is missing"),
        ("conv1.weight", np.zeros((3, 3, 7, 5), "f4"), "shape [3, 3, 7, 7], found [3, 3, 7, 5"),
        ("layer2.0.conv1.weight", ZEROS, "[6, 3, 3, 3], found [3, 6,"),
        ("bn1.bias", np.full(3, np.nan, "f4"), "holds values that are not finite"),
        ("bn1.bias", np.zeros(3, np.int32), "must be floating point"),
        ("layer5.0.conv1.weight", np.zeros(1, "f4"), "is not part of"),
    ],
)
def test_odd_tensors_end_in_one_sentence(name, tensor, words, tmp_path):
    tensors = state_dict(MODEL.width, MODEL.stages) | {name: tensor}
    stored = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    safetensors_numpy.save_file(stored, tmp_path / "model.safetensors")
    load = partial(torchvision_files.load, tmp_path, MODEL, jax.random.key(0))
    refusal(load, f"{tmp_path} '{name}' {words}")


def test_loss_and_scores_are_those_of_numpy_and_scikit_learn():
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 3, (200, CLASSES)).astype(np.float32)
    labels = (rng.random((200, CLASSES)) < 1 / (1 + np.exp(-logits / 2))).astype(np.uint8)
    labels[:, 4] = 0
    mask = rng.random(200) < 0.8
    loss_of = jax.jit(MODEL.loss_of)
    sums = [
        loss_of(logits[rows], labels[rows], mask[rows]) for rows in (slice(120), slice(120, 200))
    ]
    z, y = logits[mask].astype(np.float64), labels[mask]
    losses = -np.log(np.where(y == 1, 1 / (1 + np.exp(-z)), 1 / (1 + np.exp(z))))
    np.testing.assert_allclose(sums[0][0], losses[: mask[:120].sum()].mean(), rtol=1e-5)
    found = summarise(jax.tree.map(lambda a, b: np.asarray(a + b), sums[0][1], sums[1][1]))
    assert found["count"] == mask.sum()
    assert found["loss"] == pytest.approx(losses.mean(), rel=1e-5)
    assert found["accuracy"] == pytest.approx(((z > 0) == y).mean(), rel=1e-6)
    # Scores of one of 199 bins are not told apart; a class that no image has counts as 0.
    bins = np.ceil(199 / (1 + np.exp(-z)))
    each = [average_precision_score(y[:, i], bins[:, i]) for i in range(CLASSES - 1)]
    assert found["average_precision"] == pytest.approx(sum(each) / CLASSES, rel=1e-6)
    assert list(found) == ["loss", "accuracy", "average_precision", "count"]
    # Far from 0, the loss is finite and exact.
    far = jnp.full((1, CLASSES), -200.0)
    ones = jnp.ones((1, CLASSES), jnp.uint8)
    assert float(loss_of(far, ones, jnp.array([True]))[0]) == 200


@pytest.mark.parametrize(
    ("column", "values", "words"),
    [
        ("labels", np.full((2, CLASSES), 2, np.uint8), "0 or 1 for each of 5 classes, found other"),
        ("labels", np.zeros((2, CLASSES + 1), np.uint8), "5 classes, found uint8 [6]"),
        ("labels", np.zeros(2, np.uint8), "5 classes, found uint8 []"),
        ("labels", np.zeros((2, CLASSES), np.float32), "5 classes, found float32"),
        ("image", np.zeros((2, 38, 37, 3), np.uint8), "[37, 38, 3], the data has [38, 37"),
    ],
)
def test_columns_that_do_not_fit_are_refused(column, values, words):
    refusal(lambda: MODEL.check({**batch(2), column: values}), words)
    MODEL.check(batch(2))
    MODEL.check({**batch(2), "labels": np.ones((2, CLASSES), bool)})
