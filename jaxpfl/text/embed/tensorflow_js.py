"""Convolutional networks that TensorFlow.js saved from Keras: `model.json` and raw weights.

A network must be a sequence of convolutions (padding "same", stride 1, ReLU), 2 x 2 max-pools and
dense layers on images of one channel; it is read up to the first dense layer. Weights are
little-endian float32 in the order of the manifest. No file can name another folder or run code.
"""

import hashlib
import math
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np

from jaxpfl.errors import CorruptFile, InputError
from jaxpfl.files import parse_json, record_of

# Far above any network of this kind; a larger file is something else.
_MAX_WEIGHT_BYTES = 2**28
_MAX_JSON_BYTES = 2**22
_IGNORED = ("InputLayer", "Dropout", "Flatten")

Kind = Literal["convolution", "pool", "dense"]
Layers: TypeAlias = tuple[tuple[Kind, dict[str, np.ndarray]], ...]
"""For each layer its kind, and its "kernel" and "bias", float32; a pool has neither."""


def read_network(folder: str | Path) -> tuple[Layers, tuple[int, int, int], str]:
    """The layers of a saved network up to its first dense one.

    Returns:
      The layers, the shape [H, W, 1] of an image, and the SHA-256 (hex) of all files.

    Raises:
      InputError: a file is missing, or the network has a layer that is not supported.
      CorruptFile: model.json is not JSON, or the weights are too few, too many or not finite.
    """
    path = Path(folder) / "model.json"
    content = _read(path, _MAX_JSON_BYTES)
    try:
        model = record_of(parse_json(content), str(path))
    except CorruptFile:
        raise
    except ValueError:
        raise CorruptFile(f"{path} is not valid JSON") from None
    named, image_shape = _topology(path, model)
    weights, digest = _read_weights(path, model, hashlib.sha256(content))
    layers: Layers = tuple(
        (kind, {} if kind == "pool" else _layer_weights(path, name, weights))
        for kind, name in named
    )
    _check_shapes(path, layers, image_shape)
    return layers, image_shape, digest


def _read(path: Path, limit: int) -> bytes:
    try:
        with path.open("rb") as file:
            content = file.read(limit + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no name of a file"
        raise InputError(f"{path} cannot be read: {reason}") from None
    if len(content) > limit:
        raise InputError(f"{path} is longer than the {limit} bytes that are read")
    return content


def _topology(
    path: Path, model: dict[str, Any]
) -> tuple[list[tuple[Kind, str]], tuple[int, int, int]]:
    """Kinds and names of the layers up to the first dense one, and the shape of an image."""
    try:
        listed = model["modelTopology"]["model_config"]["config"]
        listed = listed if isinstance(listed, list) else listed["layers"]
        described = [(layer["class_name"], layer["config"]) for layer in listed]
        image_shape = described[0][1]["batch_input_shape"][1:]
        names = [config["name"] for _, config in described]
    except (KeyError, TypeError, IndexError):
        raise InputError(f"{path} is not a sequential Keras network of TensorFlow.js") from None
    if (
        len(image_shape) != 3
        or not all(isinstance(size, int) and 0 < size <= 1024 for size in image_shape)
        or image_shape[2] != 1
    ):
        raise InputError(f"{path}: an image must be of shape [height, width, 1]")
    layers: list[tuple[Kind, str]] = []
    for (kind, config), name in zip(described, names, strict=True):
        if kind == "Dense":
            _expect(path, name, config, {"use_bias": True})
            layers.append(("dense", name))
            return layers, tuple(image_shape)
        if kind == "Conv2D":
            expected = {"activation": "relu", "padding": "same", "strides": [1, 1]}
            expected |= {"dilation_rate": [1, 1], "use_bias": True}
            _expect(path, name, config, expected | {"data_format": "channels_last"})
            layers.append(("convolution", name))
        elif kind == "MaxPooling2D":
            expected = {"pool_size": [2, 2], "strides": [2, 2], "padding": "valid"}
            _expect(path, name, config, expected | {"data_format": "channels_last"})
            layers.append(("pool", name))
        elif kind not in _IGNORED:
            raise InputError(
                f"{path}: layer {name!r} is of kind {kind!r}, expected Conv2D, MaxPooling2D, "
                "Dropout, Flatten or Dense"
            )
    raise InputError(f"{path} has no dense layer to take features from")


def _expect(path: Path, name: str, config: dict[str, Any], expected: dict[str, Any]) -> None:
    for field, value in expected.items():
        if config.get(field) != value:
            raise InputError(
                f"{path}: layer {name!r} has {field} {config.get(field)!r}, expected {value!r}"
            )


def _read_weights(
    path: Path, model: dict[str, Any], digest: "hashlib._Hash"
) -> tuple[dict[str, np.ndarray], str]:
    """The arrays by name, and the digest of all files."""
    weights: dict[str, np.ndarray] = {}
    groups, left = [], _MAX_WEIGHT_BYTES
    try:
        for group in model["weightsManifest"]:
            entries = [(str(w["name"]), list(w["shape"]), w["dtype"], w) for w in group["weights"]]
            groups.append((list(group["paths"]), entries))
    except (KeyError, TypeError):
        raise InputError(f"{path} has no valid weightsManifest") from None
    for files, entries in groups:
        for file in files:
            # The name comes from a file, so it must not lead outside the folder.
            if not isinstance(file, str) or Path(file).name != file or file in ("", ".", ".."):
                raise InputError(f"{path}: a weight file must be a plain file name")
        pieces = []
        for file in files:
            # One file may be named many times.
            pieces.append(_read(path.parent / file, left))
            left -= len(pieces[-1])
        raw = b"".join(pieces)
        digest.update(raw)
        offset = 0
        for name, shape, dtype, entry in entries:
            if dtype != "float32" or "quantization" in entry:
                raise InputError(f"{path}: weight {name!r} must be float32, not quantised")
            if len(shape) > 4 or not all(type(size) is int and size > 0 for size in shape):
                raise InputError(f"{path}: weight {name!r} has shape {shape}")
            count = math.prod(shape)
            if offset + 4 * count > len(raw):
                raise CorruptFile(f"{path.parent}: the weight files end within {name!r}")
            array = np.frombuffer(raw, "<f4", count, offset).reshape(shape).astype(np.float32)
            if not np.isfinite(array).all():
                raise CorruptFile(f"{path.parent}: weight {name!r} is not finite")
            weights[name] = array
            offset += 4 * count
        if offset != len(raw):
            raise CorruptFile(
                f"{path.parent}: the weight files hold {len(raw)} bytes, expected {offset}"
            )
    return weights, digest.hexdigest()


def _layer_weights(path: Path, name: str, weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    for part in ("kernel", "bias"):
        if f"{name}/{part}" not in weights:
            raise InputError(f"{path}: there is no weight {name}/{part}")
    return {part: weights[f"{name}/{part}"] for part in ("kernel", "bias")}


def _check_shapes(path: Path, layers: Layers, image_shape: tuple[int, int, int]) -> None:
    height, width, channels = image_shape
    for index, (kind, own) in enumerate(layers):
        if kind == "pool":
            height, width = height // 2, width // 2
            continue
        kernel, bias = own["kernel"].shape, own["bias"].shape
        rank, inputs = (4, channels) if kind == "convolution" else (2, height * width * channels)
        if len(kernel) != rank or kernel[-2] != inputs or bias != kernel[-1:]:
            raise InputError(
                f"{path}: layer {index} has a kernel of shape {kernel} and a bias of shape {bias}, "
                f"expected {inputs} inputs and as many outputs as biases"
            )
        channels = kernel[-1]
