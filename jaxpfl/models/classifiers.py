"""Classifiers: two convolutional networks, for any image size, and one for rows of numbers.

`classifier_cnn` is the primary classifier of Augenstein et al. 2020 ("Generative models for
effective ML on private, decentralized datasets"), `emnist_cnn` the EMNIST network of Reddi et al.
2021 ("Adaptive federated optimization") without its dropout: a client takes few local steps, and
clipping and noise regularise already. `MLP` has a hidden layer, or none for logistic regression.
"""

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from jaxpfl.checked import Checked, NonNegativeInt, PositiveInt
from jaxpfl.checks import positive_int
from jaxpfl.errors import InputError
from jaxpfl.models.base import Classifier, NetworkModel, Params
from jaxpfl.models.layers.convolution import Form, Padding, check_images, convolve
from jaxpfl.models.layers.initial import glorot_uniform

_KERNEL = 3
# Features and width of the hidden layer, as `CNN` has them.
_SIZES = {
    "classifier_cnn": (((32, True), (64, True), (64, False)), 64),
    "emnist_cnn": (((32, False), (64, True)), 128),
}


class Convolution(nnx.Module):
    """3 x 3 convolution, optional 2 x 2 max-pool, bias, ReLU.

    The bias and the ReLU are applied after the pool, to a quarter of the elements; because both are
    monotone, the result is that of the usual order.
    """

    def __init__(
        self, height: int, width: int, inputs: int, outputs: int, pool: bool, form: Form, key: Array
    ):
        # A map smaller than the kernel is padded and a map of one row is not pooled, so that the
        # network exists for any image size.
        self.padding: Padding = "SAME"
        if min(height, width) >= _KERNEL:
            self.padding = "VALID"
            height, width = height - _KERNEL + 1, width - _KERNEL + 1
        self.pool = pool and min(height, width) >= 2
        if self.pool:
            height, width = height // 2, width // 2
        self.form: Form = form
        self.shape = (height, width, outputs)
        shape = (_KERNEL, _KERNEL, inputs, outputs)
        self.kernel = nnx.Param(glorot_uniform(key, shape))
        self.bias = nnx.Param(jnp.zeros(outputs, jnp.float32))

    def __call__(self, x_BxHxWxC: Array) -> Array:
        x_BxHxWxC = convolve(
            x_BxHxWxC, self.kernel[...], padding=self.padding, pool=self.pool, form=self.form
        )
        return jax.nn.relu(x_BxHxWxC + self.bias[...][None, None, None, :])


class Dense(nnx.Module):
    """x W + b."""

    def __init__(self, inputs: int, outputs: int, key: Array):
        self.kernel = nnx.Param(glorot_uniform(key, (inputs, outputs)))
        self.bias = nnx.Param(jnp.zeros(outputs, jnp.float32))

    def __call__(self, x_BxI: Array) -> Array:
        return x_BxI @ self.kernel[...] + self.bias[...][None, :]


class Network(nnx.Module):
    """Convolutions, then two dense layers."""

    def __init__(self, config: "CNN", key: Array):
        shape = config.image_shape
        self.depth = len(config.features)
        for i, (outputs, pool) in enumerate(config.features):
            layer = Convolution(*shape, outputs, pool, config.form, jax.random.fold_in(key, i))
            setattr(self, f"convolution_{i}", layer)
            shape = layer.shape
        keys = [jax.random.fold_in(key, self.depth + i) for i in range(2)]
        self.hidden = Dense(shape[0] * shape[1] * shape[2], config.hidden, keys[0])
        self.output = Dense(config.hidden, config.classes, keys[1])

    def __call__(self, x_BxHxWxC: Array) -> Array:
        for i in range(self.depth):
            x_BxHxWxC = getattr(self, f"convolution_{i}")(x_BxHxWxC)
        x_BxI = x_BxHxWxC.reshape(x_BxHxWxC.shape[0], -1)
        return self.output(jax.nn.relu(self.hidden(x_BxI)))


@dataclass(frozen=True)
class CNN(Checked, NetworkModel, Classifier):
    """An image classifier; batches hold "image" [B, H, W, C] and "label" int32 [B].

    Float images are used as they are; uint8 images are divided by 255. Initial kernels are
    Glorot-uniform, biases zero.

    Attributes:
      name: one of the two networks above, or "cnn", which has no sizes of its own.
      image_shape: (height, width, channels).
      classes: number of classes; labels are 0 .. classes - 1.
      features: for each convolution, (output channels, whether a 2 x 2 max-pool follows); () means
        those of the network of this name.
      hidden: width of the dense layer before the output; 0 means that of the network of this name.
      form: how convolutions are computed, see `jaxpfl.models.layers.convolution`.
    """

    name: Literal["classifier_cnn", "emnist_cnn", "cnn"]
    image_shape: tuple[int, int, int]
    classes: PositiveInt
    features: tuple[tuple[int, bool], ...] = ()
    hidden: NonNegativeInt = 0
    form: Form = "auto"

    def check_fields(self) -> None:
        check_images(self.image_shape)
        features, hidden = _SIZES.get(self.name, ((), 0))
        object.__setattr__(self, "features", self.features or features)
        object.__setattr__(self, "hidden", self.hidden or hidden)
        if not self.features or not self.hidden:
            raise InputError(f"features and hidden must be given where name is {self.name!r}")
        for outputs, _ in self.features:
            positive_int("features", outputs)

    def _network(self, key: Array) -> Network:
        return Network(self, key)

    def logits(self, params: Params, image_BxHxWxC: Array) -> Array:
        if image_BxHxWxC.dtype == jnp.uint8:
            image_BxHxWxC = image_BxHxWxC.astype(jnp.float32) / 255.0
        return self._merged(params)(image_BxHxWxC)


def classifier_cnn(image_shape: tuple[int, int, int] = (28, 28, 1), classes: int = 36) -> CNN:
    """Conv 32, pool, conv 64, pool, conv 64, dense 64, dense: 95,012 parameters by default."""
    return CNN("classifier_cnn", image_shape, classes)


def emnist_cnn(
    image_shape: tuple[int, int, int] = (28, 28, 1), classes: int = 62, form: Form = "auto"
) -> CNN:
    """Conv 32, conv 64, pool, dense 128, dense: 1,206,590 parameters by default."""
    return CNN("emnist_cnn", image_shape, classes, form=form)


@dataclass(frozen=True)
class MLP(Checked, Classifier):
    """Features to classes; batches hold "features" float [B, features] and "label" int32 [B].

    Each feature x becomes arcsinh(x), which is x near 0 and sign(x) log(2 |x|) far from it: the
    scale of private features is not known, and raw ones of size 10,000 would let the gradient of a
    single one use up the clip norm. `hidden` is the width of the layer of rectified linear units; 0
    is logistic regression.
    """

    features: PositiveInt
    classes: PositiveInt
    hidden: NonNegativeInt = 64
    name: Literal["classifier_mlp"] = "classifier_mlp"

    columns = ("features", "label")

    @property
    def input_shape(self) -> tuple[int, ...]:
        return (self.features,)

    def init(self, key: Array) -> Params:
        """Glorot-uniform kernels and zero biases."""
        sizes = [self.features, *([self.hidden] if self.hidden else []), self.classes]
        return {
            f"layer_{place}": {
                "kernel": glorot_uniform(jax.random.fold_in(key, place), shape),
                "bias": jnp.zeros(shape[1], jnp.float32),
            }
            for place, shape in enumerate(zip(sizes, sizes[1:], strict=False))
        }

    def logits(self, params: Params, features_BxF: Array) -> Array:
        x_BxF = jnp.arcsinh(features_BxF.astype(jnp.float32))
        for place in range(len(params)):
            layer = params[f"layer_{place}"]
            x_BxF = jax.nn.relu(x_BxF) if place else x_BxF
            x_BxF = x_BxF @ layer["kernel"] + layer["bias"][None, :]
        return x_BxF
