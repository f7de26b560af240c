"""ResNet-18 as torchvision has it, for images of several labels: the model of FLAIR's benchmark.

The network of He et al. 2016 ("Deep residual learning for image recognition"), whose norms follow
its convolutions, as pfl-research trains it (Granqvist et al. 2024, `multi_label_cnn`). Weights of
ImageNet (`checkpoints.torchvision_files`) come with frozen batch norm, whose statistics no client
changes or sends; without them there is group norm.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxpfl.checked import PositiveInt
from jaxpfl.errors import InputError
from jaxpfl.models.base import Metrics
from jaxpfl.models.resnet import Norm, ResNet

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

    def __post_init__(self):
        super().__post_init__()
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
