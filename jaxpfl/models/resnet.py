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
from flax import nnx
from jax import Array, lax

from jaxpfl.checked import Checked, PositiveInt
from jaxpfl.errors import InputError
from jaxpfl.models.base import Batch, Classifier, NetworkModel, Params
from jaxpfl.models.layers.convolution import check_images
from jaxpfl.models.layers.initial import he_normal, normal

_EPSILON = 1e-3


class GroupNorm(nnx.Module):
    """Normalises each image's channels in equal groups, then scales and shifts each channel."""

    def __init__(self, channels: int, groups: int):
        self.groups = groups
        self.scale = nnx.Param(jnp.ones(channels, jnp.float32))
        self.shift = nnx.Param(jnp.zeros(channels, jnp.float32))

    def __call__(self, x_BxHxWxC: Array) -> Array:
        batch, height, width, channels = x_BxHxWxC.shape
        x_BxNxGxD = x_BxHxWxC.reshape(batch, height * width, self.groups, -1)
        mean = jnp.mean(x_BxNxGxD, axis=(1, 3), keepdims=True)
        variance = jnp.mean(jnp.square(x_BxNxGxD - mean), axis=(1, 3), keepdims=True)
        normal_BxNxGxD = (x_BxNxGxD - mean) * lax.rsqrt(variance + _EPSILON)
        normal_BxHxWxC = normal_BxNxGxD.reshape(batch, height, width, channels)
        scale, shift = self.scale[...], self.shift[...]
        return normal_BxHxWxC * scale[None, None, None, :] + shift[None, None, None, :]


class Convolution(nnx.Module):
    """A convolution without bias, which a norm follows or precedes."""

    def __init__(self, size: int, inputs: int, outputs: int, key: Array, *, stride: int = 1):
        shape = (size, size, inputs, outputs)
        self.kernel = nnx.Param(he_normal(key, shape))
        self.stride = stride

    def __call__(self, x_BxHxWxC: Array) -> Array:
        kernel, strides, order = self.kernel[...], (self.stride,) * 2, ("NHWC", "HWIO", "NHWC")
        return lax.conv_general_dilated(x_BxHxWxC, kernel, strides, "SAME", dimension_numbers=order)


class Block(nnx.Module):
    """x + conv(relu(norm(conv(relu(norm(x)))))); x is projected where the channels change.

    The first block begins with its convolution: a norm and a ReLU came just before it.
    """

    def __init__(self, inputs: int, outputs: int, first: bool, config: "ResNet", key: Array):
        keys = [jax.random.fold_in(key, i) for i in range(3)]
        groups = config.groups
        self.norm_1 = None if first else GroupNorm(inputs, groups)
        self.convolution_1 = Convolution(3, inputs, outputs, keys[0])
        self.norm_2 = GroupNorm(outputs, groups)
        self.convolution_2 = Convolution(3, outputs, outputs, keys[1])
        same = inputs == outputs
        self.projection = None if same else Convolution(1, inputs, outputs, keys[2])
        self.projection_norm = None if same else GroupNorm(outputs, groups)

    def __call__(self, x_BxHxWxC: Array) -> Array:
        y = x_BxHxWxC if self.norm_1 is None else jax.nn.relu(self.norm_1(x_BxHxWxC))
        y = self.convolution_2(jax.nn.relu(self.norm_2(self.convolution_1(y))))
        if self.projection is None or self.projection_norm is None:
            return x_BxHxWxC + y
        return self.projection_norm(self.projection(x_BxHxWxC)) + y


class Network(nnx.Module):
    """Convolution 7 x 7 and pool, both of stride 2; the blocks; mean over the image; dense."""

    def __init__(self, config: "ResNet", key: Array):
        widths = [
            config.width * 2**stage
            for stage, blocks in enumerate(config.stages)
            for _ in range(blocks)
        ]
        self.depth = len(widths)
        keys = [jax.random.fold_in(key, i) for i in range(2 + self.depth)]
        channels, width = config.image_shape[2], config.width
        self.stem = Convolution(7, channels, width, keys[0], stride=2)
        self.stem_norm = GroupNorm(width, config.groups)
        inputs = width
        for i, outputs in enumerate(widths):
            setattr(self, f"block_{i}", Block(inputs, outputs, i == 0, config, keys[i + 1]))
            inputs = outputs
        self.norm = GroupNorm(inputs, config.groups)
        self.kernel = nnx.Param(normal(keys[-1], (inputs, config.classes), 0.01))
        self.bias = nnx.Param(jnp.zeros(config.classes, jnp.float32))

    def __call__(self, x_BxHxWxC: Array) -> Array:
        x_BxHxWxC = jax.nn.relu(self.stem_norm(self.stem(x_BxHxWxC)))
        x_BxHxWxC = nnx.max_pool(x_BxHxWxC, (3, 3), (2, 2), "SAME")
        for i in range(self.depth):
            x_BxHxWxC = getattr(self, f"block_{i}")(x_BxHxWxC)
        x_BxC = jnp.mean(jax.nn.relu(self.norm(x_BxHxWxC)), axis=(1, 2))
        return x_BxC @ self.kernel[...] + self.bias[...][None, :]


@dataclass(frozen=True)
class ResNet(Checked, NetworkModel, Classifier):
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

    def _network(self, key: Array) -> Network:
        return Network(self, key)

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
        crop = image_BxHxWxC[:, top : top + self.crop, left : left + self.crop].astype(jnp.float32)
        mean = jnp.mean(crop, axis=(1, 2, 3), keepdims=True)
        deviation = jnp.std(crop, axis=(1, 2, 3), keepdims=True)
        standardised = (crop - mean) / jnp.maximum(deviation, crop[0].size ** -0.5)
        return self._merged(params)(standardised)
