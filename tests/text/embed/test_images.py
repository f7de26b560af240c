"""Image embedders: against a plain float64 forward pass, on real handwriting, and bad files."""

import json
import re

import numpy as np
import pytest

from jaxpfl.errors import CorruptFile, InputError
from jaxpfl.text.embed import embedder
from jaxpfl.text.embed.images import DoodleNet


def _convolution(name, **changed):
    config = {
        "name": name, "activation": "relu", "padding": "same", "strides": [1, 1],
        "dilation_rate": [1, 1], "data_format": "channels_last", "use_bias": True,
    }  # fmt: skip
    return {"class_name": "Conv2D", "config": config | changed}


def _pool(name):
    config = {"name": name, "pool_size": [2, 2], "strides": [2, 2], "padding": "valid"}
    return {"class_name": "MaxPooling2D", "config": config | {"data_format": "channels_last"}}


def _network():
    """A small network on images of 6 x 7, in TensorFlow.js's form: model.json and weights."""
    layers = [
        _convolution("c1", batch_input_shape=[None, 6, 7, 1]),
        _pool("p1"),
        _convolution("c2"),
        {"class_name": "Dropout", "config": {"name": "drop", "rate": 0.1}},
        {"class_name": "Flatten", "config": {"name": "flat"}},
        {"class_name": "Dense", "config": {"name": "d1", "activation": "tanh", "use_bias": True}},
        {"class_name": "Dense", "config": {"name": "d2", "activation": "softmax"}},
    ]
    generator = np.random.default_rng(3)
    weights = {}
    for name, shape in {
        "c1": (3, 3, 1, 4), "c2": (3, 3, 4, 5), "d1": (3 * 3 * 5, 8), "d2": (8, 3),
    }.items():  # fmt: skip
        weights[f"{name}/kernel"] = generator.normal(size=shape).astype("<f4")
        weights[f"{name}/bias"] = generator.normal(size=shape[-1:]).astype("<f4")
    manifest = [
        {
            "paths": ["one.bin", "two.bin"],
            "weights": [
                {"name": name, "shape": list(value.shape), "dtype": "float32"}
                for name, value in weights.items()
            ],
        }
    ]
    model = {
        "modelTopology": {"model_config": {"class_name": "Sequential", "config": layers}},
        "weightsManifest": manifest,
    }
    return model, weights


def _write(folder, model, weights):
    (folder / "model.json").write_text(json.dumps(model))
    content = b"".join(value.tobytes() for value in weights.values())
    # A weight may lie across two files.
    (folder / "one.bin").write_bytes(content[:101])
    (folder / "two.bin").write_bytes(content[101:])


@pytest.fixture
def folder(tmp_path):
    _write(tmp_path, *_network())
    return tmp_path


def _same_convolution(x_HxWxC, kernel, bias):
    height, width, _ = x_HxWxC.shape
    out = np.zeros((height, width, kernel.shape[3]))
    for y in range(height):
        for x in range(width):
            for o in range(kernel.shape[3]):
                total = float(bias[o])
                for i in range(3):
                    for j in range(3):
                        if 0 <= y + i - 1 < height and 0 <= x + j - 1 < width:
                            total += float(x_HxWxC[y + i - 1, x + j - 1] @ kernel[i, j, :, o])
                out[y, x, o] = max(total, 0.0)
    return out


def _reference(image_HxW, weights):
    weights = {name: value.astype(np.float64) for name, value in weights.items()}
    x = _same_convolution(image_HxW[..., None], weights["c1/kernel"], weights["c1/bias"])
    x = np.array(
        [[x[2 * i : 2 * i + 2, 2 * j : 2 * j + 2].max((0, 1)) for j in range(3)] for i in range(3)]
    )
    x = _same_convolution(x, weights["c2/kernel"], weights["c2/bias"])
    return np.maximum(x.ravel() @ weights["d1/kernel"] + weights["d1/bias"], 0)


def test_features_are_those_of_a_plain_loop(folder):
    _, weights = _network()
    images = np.random.default_rng(0).uniform(size=(3, 6, 7))
    network = DoodleNet.load(folder)
    assert network.dimension == 8
    assert network.column == "image"
    found = network(images)
    assert found.dtype == np.float32
    np.testing.assert_allclose(
        found, [_reference(image, weights) for image in images], rtol=1e-5, atol=1e-5
    )
    assert (found > 0).any()


def test_a_vector_does_not_depend_on_the_batch(folder):
    images = np.random.default_rng(1).uniform(size=(300, 6, 7, 1)).astype(np.float32)
    network = DoodleNet.load(folder)
    together = network(images)
    assert together.shape == (300, 8)
    for row in (0, 255, 256, 299):
        np.testing.assert_array_equal(network(images[row : row + 1])[0], together[row])
    assert network(images[:0]).shape == (0, 8)


def test_bytes_are_divided_by_255(folder):
    images = np.random.default_rng(2).integers(0, 256, (5, 6, 7, 1), np.uint8)
    network = DoodleNet.load(folder)
    np.testing.assert_allclose(network(images), network(images / 255), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("images", "expected"),
    [
        (np.zeros((2, 7, 6, 1)), "reads images of shape (6, 7, 1), found (7, 6, 1)"),
        (np.zeros((2, 6, 7, 3)), "found (6, 7, 3)"),
        (np.zeros(4), "found ()"),
        (np.zeros((2, 6, 7), np.int32), "uint8 or floats, found int32"),
        (np.full((2, 6, 7), 1.01), "values in 0 .. 1"),
        (np.full((2, 6, 7), -0.5), "values in 0 .. 1"),
        (np.full((2, 6, 7), np.nan), "values in 0 .. 1"),
    ],
)
def test_other_images_are_refused(folder, images, expected):
    with pytest.raises(InputError, match=re.escape(expected)):
        DoodleNet.load(folder)(images)


def test_name_identifies_the_weights(folder):
    name = embedder(f"doodlenet:{folder}").name
    assert re.fullmatch("doodlenet:[0-9a-f]{12}", name)
    content = bytearray((folder / "two.bin").read_bytes())
    content[0] ^= 1
    (folder / "two.bin").write_bytes(content)
    assert embedder(f"doodlenet:{folder}").name != name


@pytest.mark.parametrize("length", [0, 1, 100, -4, 4])
def test_weights_of_another_length_are_refused(folder, length):
    """TRUST 6."""
    content = (folder / "two.bin").read_bytes()
    (folder / "two.bin").write_bytes(content[:length] if length <= 0 else content + b"\0" * length)
    with pytest.raises(CorruptFile, match=r"end within|expected"):
        DoodleNet.load(folder)


def test_weights_that_are_not_finite_are_refused(folder):
    model, weights = _network()
    weights["c2/bias"][1] = np.nan
    _write(folder, model, weights)
    with pytest.raises(CorruptFile, match="'c2/bias' is not finite"):
        DoodleNet.load(folder)


def _layers(model):
    return model["modelTopology"]["model_config"]["config"]


def _entry(model, index=0):
    return model["weightsManifest"][0]["weights"][index]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda m: m.pop("modelTopology"), "not a sequential Keras network"),
        (lambda m: _layers(m).clear(), "not a sequential Keras network"),
        (lambda m: _layers(m)[0]["config"].update(padding="valid"), "has padding 'valid'"),
        (lambda m: _layers(m)[0]["config"].update(activation="elu"), "has activation 'elu'"),
        (lambda m: _layers(m)[0]["config"].update(strides=[2, 2]), "has strides [2, 2]"),
        (lambda m: _layers(m)[0]["config"].update(batch_input_shape=[None, 6, 7, 3]), "1]"),
        (lambda m: _layers(m)[1]["config"].update(pool_size=[3, 3]), "has pool_size [3, 3]"),
        (lambda m: _layers(m)[3].update(class_name="Lambda"), "is of kind 'Lambda'"),
        (lambda m: _layers(m).__delitem__(slice(5, 7)), "no dense layer"),
        (lambda m: _layers(m)[2]["config"].update(name="other"), "no weight other/kernel"),
        (lambda m: m.pop("weightsManifest"), "no valid weightsManifest"),
        (lambda m: m["weightsManifest"][0].update(paths=["../one.bin"]), "plain file name"),
        (lambda m: m["weightsManifest"][0].update(paths=["/one.bin"]), "plain file name"),
        (lambda m: m["weightsManifest"][0].update(paths=["gone.bin"]), "cannot be read"),
        (lambda m: _entry(m).update(dtype="uint8"), "must be float32"),
        (lambda m: _entry(m).update(quantization={"scale": 1}), "not quantised"),
        (lambda m: _entry(m).update(shape=[3, 3, 1, -4]), "has shape"),
        (lambda m: _entry(m).update(shape=[3, 3, True, 4]), "has shape"),
        (lambda m: _entry(m).update(shape=[3, 3, 4, 1]), "expected 1 inputs"),
        (lambda m: _entry(m, 4).update(shape=[8, 45]), "expected 45 inputs"),
    ],
)
def test_other_networks_are_refused(folder, change, expected):
    model, weights = _network()
    change(model)
    _write(folder, model, weights)
    with pytest.raises(InputError, match=re.escape(expected)):
        DoodleNet.load(folder)


@pytest.mark.parametrize("content", ["", "{", "[]", "7", "[" * 100_000])
def test_files_that_are_no_json_object_are_refused(folder, content):
    (folder / "model.json").write_text(content)
    with pytest.raises(CorruptFile, match="JSON"):
        DoodleNet.load(folder)


def test_missing_folder_is_refused(tmp_path):
    with pytest.raises(InputError, match="No such file"):
        DoodleNet.load(tmp_path / "nowhere")


def test_features_tell_digits_apart(data_folder):
    """Nearest neighbours by features, on handwriting the network was not trained on."""
    network = DoodleNet.load(data_folder / "weights_ml5" / "models" / "doodlenet")
    assert network.dimension == 512
    path = data_folder / "handwriting_mnist_writers" / "mnist_by_writer.npz"
    with np.load(path, allow_pickle=False) as stored:
        chosen = np.random.default_rng(0).permutation(len(stored["labels"]))[:1500]
        images, labels = stored["images"][chosen], stored["labels"][chosen]
    features = network(images).astype(np.float64)
    known, asked = features[:1000], features[1000:]
    distances = (known**2).sum(1)[None, :] - 2 * asked @ known.T
    accuracy = np.mean(labels[:1000][distances.argmin(1)] == labels[1000:])
    assert accuracy > 0.88
