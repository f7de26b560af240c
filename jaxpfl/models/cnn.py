"""Two convolutional classifiers, for any image size and number of classes.

`classifier_cnn` is the primary classifier of Augenstein et al. 2020 ("Generative models for
effective ML on private, decentralized datasets"), `emnist_cnn` the EMNIST network of Reddi et al.
2021 ("Adaptive federated optimization") without its dropout: a client takes few local steps, and
clipping and noise regularise already.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array

from jaxpfl.checked import Checked, PositiveInt
from jaxpfl.models.base import Classifier, Params, affine, dense
from jaxpfl.models.layers.convolution import Form, Padding, check_images, convolve

_KERNEL = 3


@dataclass(frozen=True)
class CNN(Checked, Classifier):
    """3 x 3 convolutions, each with a bias and a ReLU, and two dense layers.

    Batches hold "image" [B, H, W, C] and "label" int32 [B].

    Float images are used as they are; uint8 images are divided by 255. Initial kernels are
    Glorot-uniform, biases zero.

    Attributes:
      image_shape: (height, width, channels).
      classes: number of classes; labels are 0 .. classes - 1.
      features: for each convolution, (output channels, whether a 2 x 2 max-pool follows).
      hidden: width of the dense layer before the output.
      form: how convolutions are computed, see `jaxpfl.models.layers.convolution`.
    """

    name: str
    image_shape: tuple[int, int, int]
    classes: PositiveInt
    features: tuple[tuple[int, bool], ...]
    hidden: PositiveInt
    form: Form = "auto"

    def __post_init__(self):
        super().__post_init__()
        check_images(self.image_shape)

    def init(self, key: Array) -> Params:
        params, inputs = {}, self.image_shape[2]
        for i, (outputs, _) in enumerate(self.features):
            own = jax.random.fold_in(key, i)
            params[f"convolution_{i}"] = affine(own, _KERNEL, _KERNEL, inputs, outputs)
            inputs = outputs
        image = jax.ShapeDtypeStruct((1, *self.image_shape), jnp.float32)
        flat = jax.eval_shape(self._convolved, params, image).shape[1]
        keys = [jax.random.fold_in(key, len(self.features) + i) for i in range(2)]
        params["hidden"] = affine(keys[0], flat, self.hidden)
        params["output"] = affine(keys[1], self.hidden, self.classes)
        return params

    def logits(self, params: Params, image_BxHxWxC: Array) -> Array:
        if image_BxHxWxC.dtype == jnp.uint8:
            image_BxHxWxC = image_BxHxWxC.astype(jnp.float32) / 255.0
        x_BxF = self._convolved(params, image_BxHxWxC)
        return dense(params["output"], jax.nn.relu(dense(params["hidden"], x_BxF)))

    def _convolved(self, params: Params, x_BxHxWxC: Array) -> Array:
        """What the convolutions make of images, [B, features]."""
        for i, (_, pool) in enumerate(self.features):
            layer, side = params[f"convolution_{i}"], min(x_BxHxWxC.shape[1:3])
            # A map smaller than the kernel is padded and a map of one row is not pooled, so that
            # the network exists for any image size.
            padding: Padding = "SAME" if side < _KERNEL else "VALID"
            pool = pool and side >= (2 if padding == "SAME" else _KERNEL + 1)
            x_BxHxWxC = convolve(
                x_BxHxWxC, layer["kernel"], padding=padding, pool=pool, form=self.form
            )
            # After the pool, of a quarter of the elements: both are monotone, so that the result is
            # that of the usual order.
            x_BxHxWxC = jax.nn.relu(x_BxHxWxC + layer["bias"][None, None, None, :])
        return x_BxHxWxC.reshape(x_BxHxWxC.shape[0], -1)


def classifier_cnn(
    image_shape: tuple[int, int, int] = (28, 28, 1), classes: int = 36, form: Form = "auto"
) -> CNN:
    """Conv 32, pool, conv 64, pool, conv 64, dense 64, dense: 95,012 parameters by default."""
    features = ((32, True), (64, True), (64, False))
    return CNN("classifier_cnn", image_shape, classes, features, hidden=64, form=form)


def emnist_cnn(
    image_shape: tuple[int, int, int] = (28, 28, 1), classes: int = 62, form: Form = "auto"
) -> CNN:
    """Conv 32, conv 64, pool, dense 128, dense: 1,206,590 parameters by default."""
    features = ((32, False), (64, True))
    return CNN("emnist_cnn", image_shape, classes, features, hidden=128, form=form)
