"""ResNet-18 with group norm: the field's CIFAR-100 classifier.

The network of TensorFlow Federated's baseline and of Reddi et al. 2021 ("Adaptive federated
optimization", appendix C.1), after Hsieh et al. 2020, who replaced batch norm, which fails on
clients of few classes, by group norm of two groups. It is the pre-activation network of He et al.
2016 ("Identity mappings in deep residual networks"), with this difference: the stages do not halve
the images, which the first convolution and its pool have reduced to a quarter of their sides.

Images are cropped and standardised, (x - mean) / max(deviation, 1 / sqrt(values)), each by itself.
While a client trains, the crop is random and half of the images are flipped, anew in every step.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxpfl.checked import Checked, PositiveInt
from jaxpfl.errors import InputError
from jaxpfl.models.base import Batch, Classifier, Params
from jaxpfl.models.layers.convolution import check_images, convolve

_EPSILON = 1e-3


@dataclass(frozen=True)
class ResNet(Checked, Classifier):
    """ResNet-18; batches hold "image" [B, H, W, C], uint8 or float, and "label" int32 [B].

    With 100 classes, 3 channels and a width of 64 it has 11,227,812 parameters. Initial kernels are
    He-normal, the output layer normal with deviation 0.01.

    Attributes:
      image_shape: (height, width, channels) of the images before they are cropped.
      classes: number of classes; labels are 0 .. classes - 1.
      crop: side of the square that is cut from each image: from its middle, and at random in
        training (`augment`).
      width: channels of the first stage; each next stage has twice as many.
      stages: how many blocks each stage has.
      groups: groups of channels of a norm; must divide `width`.
    """

    image_shape: tuple[int, int, int] = (32, 32, 3)
    classes: PositiveInt = 100
    crop: PositiveInt = 24
    width: PositiveInt = 64
    stages: tuple[PositiveInt, ...] = (2, 2, 2, 2)
    groups: PositiveInt = 2
    name: str = "resnet18"

    def __post_init__(self):
        super().__post_init__()
        check_images(self.image_shape)
        if self.crop > min(self.image_shape[:2]):
            raise InputError(
                f"crop must fit into image_shape = {list(self.image_shape)}, found {self.crop}"
            )
        if self.width % self.groups:
            raise InputError(
                f"width must be a multiple of groups = {self.groups}, found {self.width}"
            )

    def init(self, key: Array) -> Params:
        numbers, width = enumerate(self.stages), self.width
        widths = [width * 2**stage for stage, blocks in numbers for _ in range(blocks)]
        keys = [jax.random.fold_in(key, i) for i in range(2 + len(widths))]
        kernel = 0.01 * jax.random.normal(keys[-1], (widths[-1], self.classes), jnp.float32)
        params = {
            "stem": _kernel(keys[0], 7, self.image_shape[2], width),
            "stem_norm": _norm(width),
            "norm": _norm(widths[-1]),
            "kernel": kernel,
            "bias": jnp.zeros(self.classes, jnp.float32),
        }
        for i, (inputs, outputs) in enumerate(zip([width, *widths], widths, strict=False)):
            own = [jax.random.fold_in(keys[i + 1], j) for j in range(3)]
            params[f"block_{i}"] = block = {
                "convolution_1": _kernel(own[0], 3, inputs, outputs),
                "norm_2": _norm(outputs),
                "convolution_2": _kernel(own[1], 3, outputs, outputs),
            }
            # The first block begins with its convolution: a norm and a ReLU come just before it.
            if i:
                block["norm_1"] = _norm(inputs)
            if inputs != outputs:
                block["projection"] = _kernel(own[2], 1, inputs, outputs)
                block["projection_norm"] = _norm(outputs)
        return params

    def augment(self, batch: Batch, key: Array) -> Batch:
        """The batch with random crops [B, crop, crop, C], half of which are flipped sideways."""
        image_BxHxWxC = batch["image"]
        batch_size, height, width, channels = image_BxHxWxC.shape
        keys = jax.random.split(key, 3)
        tops_B = jax.random.randint(keys[0], (batch_size,), 0, height - self.crop + 1)
        lefts_B = jax.random.randint(keys[1], (batch_size,), 0, width - self.crop + 1)
        flip_B = jax.random.bernoulli(keys[2], shape=(batch_size,))

        def cut(image_HxWxC: Array, top: Array, left: Array, flip: Array) -> Array:
            size = (self.crop, self.crop, channels)
            zero = jnp.zeros_like(top)
            crop = lax.dynamic_slice(image_HxWxC, (top, left, zero), size)
            return jnp.where(flip, crop[:, ::-1], crop)

        return {**batch, "image": jax.vmap(cut)(image_BxHxWxC, tops_B, lefts_B, flip_B)}

    def logits(self, params: Params, image_BxHxWxC: Array) -> Array:
        """Float32 logits [B, classes]; of images larger than `crop`, the middle is used."""
        height, width = image_BxHxWxC.shape[1:3]
        top, left = (height - self.crop) // 2, (width - self.crop) // 2
        crop = image_BxHxWxC[:, top : top + self.crop, left : left + self.crop]
        x = _convolved(params["stem"], _standardised(crop.astype(jnp.float32)), stride=2)
        x = self._activated(params["stem_norm"], x)
        x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
        for i in range(sum(self.stages)):
            x = self._block(params[f"block_{i}"], x)
        x_BxC = jnp.mean(self._activated(params["norm"], x), axis=(1, 2))
        return x_BxC @ params["kernel"] + params["bias"][None, :]

    def _block(self, block: Params, x: Array) -> Array:
        """x + conv(relu(norm(conv(relu(norm(x)))))); x is projected where the channels change."""
        y = self._activated(block["norm_1"], x) if "norm_1" in block else x
        y = self._activated(block["norm_2"], _convolved(block["convolution_1"], y))
        y = _convolved(block["convolution_2"], y)
        if "projection" in block:
            x = self._normalised(block["projection_norm"], _convolved(block["projection"], x))
        return x + y

    def _activated(self, norm: Params, x: Array) -> Array:
        return jax.nn.relu(self._normalised(norm, x))

    def _normalised(self, norm: Params, x_BxHxWxC: Array) -> Array:
        """Each image's channels normalised in equal groups, then scaled and shifted one by one."""
        batch, height, width, channels = x_BxHxWxC.shape
        x_BxNxGxD = x_BxHxWxC.reshape(batch, height * width, self.groups, -1)
        mean = jnp.mean(x_BxNxGxD, axis=(1, 3), keepdims=True)
        variance = jnp.mean(jnp.square(x_BxNxGxD - mean), axis=(1, 3), keepdims=True)
        normal_BxNxGxD = (x_BxNxGxD - mean) * lax.rsqrt(variance + _EPSILON)
        normal_BxHxWxC = normal_BxNxGxD.reshape(batch, height, width, channels)
        scale, shift = (norm[name][None, None, None, :] for name in ("scale", "shift"))
        return normal_BxHxWxC * scale + shift


def _norm(channels: int) -> Params:
    return {"scale": jnp.ones(channels, jnp.float32), "shift": jnp.zeros(channels, jnp.float32)}


def _kernel(key: Array, size: int, inputs: int, outputs: int) -> Params:
    shape = (size, size, inputs, outputs)
    return {"kernel": jax.nn.initializers.he_normal()(key, shape, jnp.float32)}


def _convolved(layer: Params, x: Array, *, stride: int = 1) -> Array:
    return convolve(x, layer["kernel"], stride=stride, padding="SAME", form="convolution")


def _standardised(image_BxHxWxC: Array) -> Array:
    values = image_BxHxWxC[0].size
    mean = jnp.mean(image_BxHxWxC, axis=(1, 2, 3), keepdims=True)
    deviation = jnp.std(image_BxHxWxC, axis=(1, 2, 3), keepdims=True)
    return (image_BxHxWxC - mean) / jnp.maximum(deviation, values**-0.5)
