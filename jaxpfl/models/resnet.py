"""ResNet-18 with group norm: the field's CIFAR-100 classifier.

The network of TensorFlow Federated's baseline and of Reddi et al. 2021 ("Adaptive federated
optimization", appendix C.1), after Hsieh et al. 2020, who replaced batch norm, which fails on
clients of few classes, by group norm of two groups. It is the pre-activation network of He et al.
2016 ("Identity mappings in deep residual networks"), with this difference: the stages do not halve
the images, which the first convolution and its pool have reduced to a quarter of their sides.

Images are cropped and standardised, (x - mean) / max(deviation, 1 / sqrt(values)), each by itself.
While a client trains, the crop is random and half of the images are flipped, anew in every step.

`MultiLabelResNet` is ResNet-18 as torchvision has it, whose norms follow its convolutions, for
images of several labels: the model of FLAIR's benchmark, as pfl-research trains it (Granqvist et
al. 2024, `multi_label_cnn`). Weights of ImageNet (`checkpoints.torchvision_files`) come with frozen
batch norm, whose statistics no client changes or sends; without them there is group norm.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array, lax

from jaxpfl.checked import Checked, PositiveInt
from jaxpfl.errors import InputError
from jaxpfl.models.base import Batch, Classifier, Metrics, NetworkModel, Params
from jaxpfl.models.layers.convolution import check_images
from jaxpfl.models.layers.initial import he_normal, normal

_EPSILON = 1e-3


class Norm(nnx.Module):
    """Normalises each image's channels in equal groups, then scales and shifts each channel.

    With constant means and variances of the channels, as `frozen`, it is frozen batch norm.
    """

    def __init__(self, channels: int, groups: int, frozen: Any = None):
        self.groups, self.frozen = groups, frozen
        self.scale = nnx.Param(jnp.ones(channels, jnp.float32))
        self.shift = nnx.Param(jnp.zeros(channels, jnp.float32))

    def __call__(self, x_BxHxWxC: Array) -> Array:
        if self.frozen is None:
            batch, height, width, _ = x_BxHxWxC.shape
            x_BxNxGxD = x_BxHxWxC.reshape(batch, height * width, self.groups, -1)
            mean = jnp.mean(x_BxNxGxD, axis=(1, 3), keepdims=True)
            variance = jnp.mean(jnp.square(x_BxNxGxD - mean), axis=(1, 3), keepdims=True)
            normal_BxNxGxD = (x_BxNxGxD - mean) * lax.rsqrt(variance + _EPSILON)
            normal_BxHxWxC = normal_BxNxGxD.reshape(x_BxHxWxC.shape)
        else:
            mean, variance = (np.array(x, np.float32)[None, None, None] for x in self.frozen)
            normal_BxHxWxC = (x_BxHxWxC - mean) / np.sqrt(variance + np.float32(1e-5))
        scale, shift = self.scale[...], self.shift[...]
        return normal_BxHxWxC * scale[None, None, None, :] + shift[None, None, None, :]


class Convolution(nnx.Module):
    """A convolution without bias, which a norm follows or precedes.

    There are as many zeros on each side of an image if `even`, as in PyTorch, else XLA's "SAME".
    """

    def __init__(self, size: int, inputs: int, outputs: int, key: Array, stride=1, even=False):
        shape = (size, size, inputs, outputs)
        self.kernel = nnx.Param(he_normal(key, shape))
        self.stride = (stride, stride)
        self.pads: Any = ((size // 2, size // 2),) * 2 if even else "SAME"

    def __call__(self, x_BxHxWxC: Array) -> Array:
        strides, pads, order = self.stride, self.pads, ("NHWC", "HWIO", "NHWC")
        return lax.conv_general_dilated(
            x_BxHxWxC, self.kernel[...], strides, pads, dimension_numbers=order
        )


class Block(nnx.Module):
    """x + conv(relu(norm(conv(relu(norm(x)))))); x is projected where the channels change.

    The first block begins with its convolution: a norm and a ReLU came just before it. With `post`
    it is relu(x + norm(conv(relu(norm(conv(x)))))), and the image is halved there, too.
    """

    def __init__(self, name: str, inputs: int, outputs: int, config: "ResNet", key: Array):
        keys = [jax.random.fold_in(key, i) for i in range(3)]
        self.post, same = config.post, inputs == outputs
        first, normed = name == "block_0" and not self.post, outputs if self.post else inputs
        step = (1 if same or not self.post else 2, self.post)
        self.norm_1: Any = None if first else config.norm(f"{name}.norm_1", normed)
        self.convolution_1 = Convolution(3, inputs, outputs, keys[0], *step)
        self.norm_2 = config.norm(f"{name}.norm_2", outputs)
        self.convolution_2 = Convolution(3, outputs, outputs, keys[1])
        self.projection = None if same else Convolution(1, inputs, outputs, keys[2], *step)
        self.projection_norm = None if same else config.norm(f"{name}.projection_norm", outputs)

    def __call__(self, x_BxHxWxC: Array) -> Array:
        projected, relu = x_BxHxWxC, jax.nn.relu
        if self.projection is not None and self.projection_norm is not None:
            projected = self.projection_norm(self.projection(x_BxHxWxC))
        if self.post:
            y = relu(self.norm_1(self.convolution_1(x_BxHxWxC)))
            return relu(projected + self.norm_2(self.convolution_2(y)))
        y = x_BxHxWxC if self.norm_1 is None else relu(self.norm_1(x_BxHxWxC))
        return projected + self.convolution_2(relu(self.norm_2(self.convolution_1(y))))


class Network(nnx.Module):
    """Convolution 7 x 7 and pool, both of stride 2; the blocks; mean over the image; dense."""

    def __init__(self, config: "ResNet", key: Array):
        widths = [config.width * 2**i for i, n in enumerate(config.stages) for _ in range(n)]
        self.depth = len(widths)
        keys = [jax.random.fold_in(key, i) for i in range(2 + self.depth)]
        channels, width = config.image_shape[2], config.width
        self.stem = Convolution(7, channels, width, keys[0], 2, config.post)
        self.stem_norm = config.norm("stem_norm", width)
        inputs = width
        for i, outputs in enumerate(widths):
            name = f"block_{i}"
            setattr(self, name, Block(name, inputs, outputs, config, keys[i + 1]))
            inputs = outputs
        self.norm = None if config.post else config.norm("norm", inputs)
        self.pads: Any = ((1, 1), (1, 1)) if config.post else "SAME"
        self.kernel = nnx.Param(normal(keys[-1], (inputs, config.classes), 0.01))
        self.bias = nnx.Param(jnp.zeros(config.classes, jnp.float32))

    def __call__(self, x_BxHxWxC: Array) -> Array:
        x_BxHxWxC = jax.nn.relu(self.stem_norm(self.stem(x_BxHxWxC)))
        x_BxHxWxC = nnx.max_pool(x_BxHxWxC, (3, 3), (2, 2), self.pads)
        for i in range(self.depth):
            x_BxHxWxC = getattr(self, f"block_{i}")(x_BxHxWxC)
        if self.norm is not None:
            x_BxHxWxC = jax.nn.relu(self.norm(x_BxHxWxC))
        x_BxC = jnp.mean(x_BxHxWxC, axis=(1, 2))
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
    name: Literal["resnet18"] = "resnet18"

    post = False  # whether norms follow convolutions, and stages from the second halve the image

    def check_fields(self) -> None:
        check_images(self.image_shape)
        if self.crop > min(self.image_shape[:2]):
            raise InputError(f"crop must fit image_shape = {self.image_shape}, found {self.crop}")
        if self.width % self.groups:
            raise InputError(f"groups must divide width = {self.width}, found {self.groups}")

    def norm(self, path: str, channels: int) -> Norm:
        """The norm of a path in the network, such as "block_0.norm_2"."""
        return Norm(channels, self.groups)

    def _network(self, key: Array) -> Network:
        return Network(self, key)

    def augment(self, batch: Batch, key: Array) -> Batch:
        """The batch with random crops [B, crop, crop, C], half of which are flipped sideways."""
        image_BxHxWxC, keys = batch["image"], jax.random.split(key)
        size, *shape = image_BxHxWxC.shape
        sizes = (self.crop, self.crop, shape[2])
        # Drawn for the whole batch: XLA for CPUs would draw nested keys anew for each pixel.
        most_1x3 = np.array([shape]) - sizes + 1
        starts_Bx3 = jax.random.randint(keys[0], (size, 3), 0, most_1x3)
        flip_B = jax.random.bernoulli(keys[1], shape=(size,))

        def cut(image_HxWxC: Array, starts: Array, flip: Array) -> Array:
            crop = lax.dynamic_slice(image_HxWxC, starts, sizes)
            return jnp.where(flip, crop[:, ::-1], crop)

        return {**batch, "image": jax.vmap(cut)(image_BxHxWxC, starts_Bx3, flip_B)}

    def logits(self, params: Params, image_BxHxWxC: Array) -> Array:
        """Float32 logits [B, classes]; of images larger than `crop`, the middle is used."""
        height, width = image_BxHxWxC.shape[1:3]
        top, left = (height - self.crop) // 2, (width - self.crop) // 2
        crop = image_BxHxWxC[:, top : top + self.crop, left : left + self.crop]
        return self._merged(params)(self.standardised(crop))

    def standardised(self, crop: Array) -> Array:
        """Images of the crop's size as the network reads them."""
        crop = crop.astype(jnp.float32)
        mean = jnp.mean(crop, axis=(1, 2, 3), keepdims=True)
        deviation = jnp.std(crop, axis=(1, 2, 3), keepdims=True)
        return (crop - mean) / jnp.maximum(deviation, crop[0].size ** -0.5)


# The moments of ImageNet's red, green and blue, in 0 .. 1.
_MEAN = np.array([[[[0.485, 0.456, 0.406]]]], np.float32)
_DEVIATION = np.array([[[[0.229, 0.224, 0.225]]]], np.float32)
_BINS = 199  # between pfl-research's thresholds of scores


@dataclass(frozen=True)
class MultiLabelResNet(ResNet):
    """ResNet-18; batches hold "image" [B, H, W, 3] and "labels" of 0 and 1, [B, classes].

    Images are uint8, or float in 0 .. 1, red, green and blue. With 17 classes and a width of 64 it
    has 11,185,233 parameters. Metrics are "accuracy", of all labels where scores above 0.5 say yes,
    and the macro "average_precision".

    Attributes:
      statistics: for each frozen norm, its path, such as "block_0.norm_1", and its channels' means
        and variances; with (), there is group norm.
    """

    image_shape: tuple[int, int, int] = (256, 256, 3)
    classes: PositiveInt = 17
    crop: PositiveInt = 224
    groups: PositiveInt = 32
    # Each model has a name of its own, by which a config chooses it.
    name: Literal["multi_label_resnet18"] = "multi_label_resnet18"  # pyright: ignore
    statistics: tuple[tuple, ...] = field(default=(), repr=False)

    columns = ("image", "labels")
    post = True

    def check_fields(self) -> None:
        super().check_fields()
        if self.image_shape[2] != 3:
            raise InputError(f"image_shape must have 3 channels, found {self.image_shape[2]}")

    def norm(self, path: str, channels: int) -> Norm:
        """Group norm, or frozen batch norm with the statistics of this path."""
        statistics = {name: tuple(moments) for name, *moments in self.statistics}
        return Norm(channels, self.groups, statistics[path] if statistics else None)

    def check_labels(self, columns: Mapping[str, Any]) -> None:
        """Raises `InputError` if the labels are not a 0 or 1 for each class."""
        labels, classes = np.asarray(columns["labels"]), self.classes
        expected = f"the column 'labels' must hold 0 or 1 for each of {classes} classes, found"
        if labels.dtype.kind not in "iub" or labels.shape[1:] != (classes,):
            raise InputError(f"{expected} {labels.dtype} {list(labels.shape[1:])}")
        if len(labels) and not 0 <= labels.min() <= labels.max() <= 1:
            raise InputError(f"{expected} other numbers")

    def standardised(self, crop: Array) -> Array:
        scale = 255.0 if crop.dtype == jnp.uint8 else 1.0
        return (crop.astype(jnp.float32) / scale - _MEAN) / _DEVIATION

    def loss_of(self, logits_BxC: Array, labels: Array, mask: Array) -> tuple[Array, Metrics]:
        """Binary cross-entropy, its mean over classes and real examples, and the sums."""
        labels_BxC, real_Bx1 = labels.astype(jnp.float32), mask[:, None]
        losses_BxC = jax.nn.softplus(logits_BxC) - labels_BxC * logits_BxC
        hits_BxC = (logits_BxC > 0) == (labels_BxC > 0)
        bins_BxC = jnp.maximum(jnp.ceil(jax.nn.sigmoid(logits_BxC) * _BINS) - 1, 0)
        in_bin_BxCxT = bins_BxC[..., None] == jnp.arange(_BINS, dtype=jnp.float32)[None, None]
        sides_2xBxC = jnp.stack([1 - labels_BxC, labels_BxC]) * real_Bx1[None].astype(jnp.float32)
        sums = {
            "loss_sum": jnp.sum(jnp.where(real_Bx1, losses_BxC, 0)) / self.classes,
            "accuracy_sum": jnp.sum(hits_BxC & real_Bx1, dtype=jnp.float32) / self.classes,
            "by_score": jnp.einsum("sbc,bct->sct", sides_2xBxC, in_bin_BxCxT.astype(jnp.float32)),
            "count": jnp.sum(mask, dtype=jnp.float32),
        }
        return sums["loss_sum"] / jnp.maximum(sums["count"], 1.0), sums
