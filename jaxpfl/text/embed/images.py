"""Embedders of images: a pretrained network for drawings.

`DoodleNet` reads the network that ml5.js publishes under this name, a Keras CNN trained on the
drawings of Quick, Draw!, as TensorFlow.js saved it: `model.json` and files of raw little-endian
float32. It was trained without handwriting, so it is a public feature extractor for handwriting.
"""

from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxpfl.errors import InputError
from jaxpfl.models.base import Params
from jaxpfl.models.layers.convolution import convolve, max_pool
from jaxpfl.text.embed.tensorflow_js import Layers, read_network

# Images are padded to whole batches of this size, so that one program is compiled and a vector does
# not depend on how many others are embedded with it.
_BATCH = 256


class DoodleNet:
    """The features of a TensorFlow.js CNN: the ReLU of its first dense layer.

    The trained network applies tanh there. Because tanh saturates on most images, it leaves little
    more than signs; with the ReLU nearest neighbours are better.

    Images are [n, H, W] or [n, H, W, 1] of the network's size (28 x 28), white ink (1) on black
    (0): floats in 0 .. 1, or uint8, which is divided by 255. The caller must invert images with
    dark ink (1 - image). Vectors are not scaled: those of handwriting have lengths of about 20, so
    clip them to that, or to 1 to compare directions only.
    """

    column = "image"

    def __init__(self, layers: Layers, image_shape: tuple[int, int, int], name: str) -> None:
        self._weights = [jax.tree.map(jnp.asarray, weights) for _, weights in layers]
        self._image_shape = image_shape
        self.dimension = int(self._weights[-1]["bias"].shape[0])
        self.name = name
        self._features = jax.jit(partial(_features, tuple(kind for kind, _ in layers)))

    @classmethod
    def load(cls, folder: str | Path) -> "DoodleNet":
        """Reads model.json and the weight files it names.

        Raises:
          InputError: the folder lacks a file, or the network has a layer that is not supported.
          CorruptFile: the number of weights is not the network's, or they are not finite.
        """
        layers, image_shape, digest = read_network(folder)
        return cls(layers, image_shape, f"doodlenet:{digest[:12]}")

    def __call__(self, examples: Any) -> np.ndarray:
        image_NxHxWxC = _images(self.name, examples, self._image_shape)
        vectors_NxD = np.empty((len(image_NxHxWxC), self.dimension), np.float32)
        for start in range(0, len(image_NxHxWxC), _BATCH):
            batch = image_NxHxWxC[start : start + _BATCH]
            padding = ((0, _BATCH - len(batch)), (0, 0), (0, 0), (0, 0))
            found = self._features(self._weights, jnp.asarray(np.pad(batch, padding)))
            vectors_NxD[start : start + len(batch)] = found[: len(batch)]
        return vectors_NxD


def _features(kinds: tuple[str, ...], weights: list[Params], image_BxHxWxC: Array) -> Array:
    x = image_BxHxWxC
    if x.dtype == jnp.uint8:
        x = x.astype(jnp.float32) / 255.0
    for kind, own in zip(kinds, weights, strict=True):
        if kind == "pool":
            x = max_pool(x)
        elif kind == "convolution":
            x = convolve(x, own["kernel"], padding="SAME", form="convolution")
            x = jax.nn.relu(x + own["bias"][None, None, None, :])
        else:
            x = x.reshape(x.shape[0], -1) @ own["kernel"]
            x = jax.nn.relu(x + own["bias"][None, :])
    return x


def _images(name: str, examples: Any, shape: tuple[int, int, int]) -> np.ndarray:
    """Images uint8 or float32 [n, H, W, C]."""
    images = np.asarray(examples)
    if images.ndim == 3 and shape[2] == 1:
        images = images[..., None]
    if images.shape[1:] != shape:
        raise InputError(
            f"embedder {name!r} reads images of shape {shape}, found {images.shape[1:]}"
        )
    if images.dtype == np.uint8:
        return images
    if images.dtype.kind != "f":
        raise InputError(f"embedder {name!r} reads images of uint8 or floats, found {images.dtype}")
    if not np.all((images >= 0) & (images <= 1)):
        raise InputError(
            f"embedder {name!r} reads images with values in 0 .. 1, found others (uint8 images "
            "are divided by 255)"
        )
    return images.astype(np.float32)
