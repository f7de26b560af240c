"""A generative adversarial network for images: a generator and a critic.

The networks of Augenstein et al. 2020 ("Generative models for effective ML on private,
decentralized datasets", appendix C.2), for an image of H x W pixels and noise of size 128:

    generator  dense 1024, BN, ReLU; dense H/4 x W/4 x 256, BN, ReLU; transposed convolution 64
               (4 x 4, stride 2), BN, ReLU; the same with 32; convolution to the image's channels
               (4 x 4), bias, tanh. Only the last layer has a bias.
    critic     convolution 64 (4 x 4, stride 2), bias, leaky ReLU (0.01); the same with 128; dense
               1024, BN, leaky ReLU; dense 1, bias.

At 28 x 28 x 1 the generator has 13,285,217 parameters and the critic 6,556,865 trainable ones, and
6,558,913 with the moving statistics of its batch normalisation.

BN is batch normalisation with an offset and no scale, by the statistics of the current batch. Its
moving statistics (momentum 0.999) enter no result. The critic keeps them nevertheless, so that the
same parameters are clipped and noised as in the paper.

Inside the networks images are float32 in [-1, 1]: the data's 0 (paper) is -1, its 1 (ink) is 1.
"""

import math
from dataclasses import dataclass
from functools import cached_property, partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from jaxpfl import checks
from jaxpfl.checked import Checked, Positive, PositiveInt
from jaxpfl.errors import InputError
from jaxpfl.models.base import Params, split
from jaxpfl.models.layers.convolution import check_images, convolve, upsample_convolve
from jaxpfl.models.layers.initial import glorot_uniform

GRADIENT_PENALTY = 10.0
"""The weight of the gradient penalty in the critic's loss."""

WEIGHT_DECAY = 2.5e-5
"""Half of it times the sum of the squares of a network's kernels is added to the network's loss;
biases, offsets and statistics do not decay."""

_MOMENTUM = 0.999
_EPSILON = 1e-3  # added to a variance before its root
_KERNEL = 4
_LEAK = 0.01
_DRAWN_TOGETHER = 64

Statistics = tuple[Array, Array]
"""Mean and variance of a batch before normalisation, float32 [..., features]."""


def normalise(x_BxF: Array, real_B: Array) -> tuple[Array, Statistics]:
    """Batch normalisation of [B, ..., F] by the statistics of the rows where `real_B` is True.

    The mean and the (biased) variance are taken over those rows and over all axes but the last.
    Other rows, if finite, influence nothing. Without any real row, mean and variance are 0.
    """
    axes = tuple(range(x_BxF.ndim - 1))
    pixels = math.prod(x_BxF.shape[1:-1])
    count = jnp.maximum(jnp.sum(real_B, dtype=jnp.float32), 1.0) * jnp.float32(pixels)
    weight = jnp.expand_dims(real_B.astype(jnp.float32), tuple(range(1, x_BxF.ndim)))

    def mean_over_real(values):
        return jnp.sum(values * weight, axis=axes, keepdims=True) / count

    mean = mean_over_real(x_BxF)
    centred = x_BxF - mean
    variance = mean_over_real(jnp.square(centred))
    normal = centred * jax.lax.rsqrt(variance + jnp.float32(_EPSILON))
    return normal, (mean.reshape(-1), variance.reshape(-1))


class Layer(nnx.Module):
    """A Glorot-uniform kernel, with a bias unless batch normalisation follows."""

    def __init__(self, shape: tuple[int, ...], key: Array, *, bias: bool = False):
        self.kernel = nnx.Param(glorot_uniform(key, shape))
        self.bias = nnx.Param(jnp.zeros(shape[-1], jnp.float32)) if bias else None

    def shifted(self, x: Array) -> Array:
        """`x` [..., F] plus the bias."""
        assert self.bias is not None
        return x + jnp.expand_dims(self.bias[...], tuple(range(x.ndim - 1)))


class Normalisation(nnx.Module):
    """Batch normalisation with an offset; `moving` adds the moving statistics."""

    def __init__(self, features: int, *, moving: bool = False):
        self.offset = nnx.Param(jnp.zeros(features, jnp.float32))
        self.mean = nnx.BatchStat(jnp.zeros(features, jnp.float32)) if moving else None
        self.variance = nnx.BatchStat(jnp.ones(features, jnp.float32)) if moving else None

    def __call__(self, x_BxF: Array, real_B: Array) -> tuple[Array, Statistics]:
        normal, statistics = normalise(x_BxF, real_B)
        return normal + jnp.expand_dims(self.offset[...], tuple(range(x_BxF.ndim - 1))), statistics


class Generator(nnx.Module):
    """From noise [B, Z] to images [B, H, W, C] in [-1, 1]."""

    def __init__(self, config: "GAN", key: Array):
        height, width, channels = config.image_shape
        self.small = (height // 4, width // 4, config.scaled(256))
        seed = self.small[0] * self.small[1] * self.small[2]
        hidden, first, second = config.scaled(1024), config.scaled(64), config.scaled(32)
        keys = [jax.random.fold_in(key, i) for i in range(5)]
        window = (_KERNEL, _KERNEL)
        self.hidden = Layer((config.noise, hidden), keys[0])
        self.seed = Layer((hidden, seed), keys[1])
        self.upsample_0 = Layer((*window, self.small[2], first), keys[2])
        self.upsample_1 = Layer((*window, first, second), keys[3])
        self.output = Layer((*window, second, channels), keys[4], bias=True)
        self.normalisation_0 = Normalisation(hidden)
        self.normalisation_1 = Normalisation(seed)
        self.normalisation_2 = Normalisation(first)
        self.normalisation_3 = Normalisation(second)

    def __call__(self, noise_BxZ: Array, real_B: Array) -> Array:
        def activated(normalisation: Normalisation, x: Array) -> Array:
            return jax.nn.relu(normalisation(x, real_B)[0])

        x = activated(self.normalisation_0, noise_BxZ @ self.hidden.kernel[...])
        x = activated(self.normalisation_1, x @ self.seed.kernel[...]).reshape(-1, *self.small)
        x = upsample_convolve(x, self.upsample_0.kernel[...])
        x = activated(self.normalisation_2, x)
        x = upsample_convolve(x, self.upsample_1.kernel[...])
        x = activated(self.normalisation_3, x)
        x = convolve(x, self.output.kernel[...], padding="SAME")
        return jnp.tanh(self.output.shifted(x))


class Critic(nnx.Module):
    """From images [G, B, H, W, C] to scores [G, B]; each of the G batches is normalised alone."""

    def __init__(self, config: "GAN", key: Array):
        height, width, channels = config.image_shape
        first, second, hidden = config.scaled(64), config.scaled(128), config.scaled(1024)
        keys = [jax.random.fold_in(key, i) for i in range(4)]
        window = (_KERNEL, _KERNEL)
        self.convolution_0 = Layer((*window, channels, first), keys[0], bias=True)
        self.convolution_1 = Layer((*window, first, second), keys[1], bias=True)
        self.hidden = Layer((height // 4 * (width // 4) * second, hidden), keys[2])
        self.normalisation = Normalisation(hidden, moving=True)
        self.output = Layer((hidden, 1), keys[3], bias=True)

    def __call__(self, image_GxBxHxWxC: Array, real_B: Array) -> tuple[Array, Statistics]:
        groups, batch = image_GxBxHxWxC.shape[:2]
        x = image_GxBxHxWxC.reshape(groups * batch, *image_GxBxHxWxC.shape[2:])
        for layer in (self.convolution_0, self.convolution_1):
            x = convolve(x, layer.kernel[...], stride=2, padding="SAME")
            x = jax.nn.leaky_relu(layer.shifted(x), _LEAK)
        hidden_NxF = x.reshape(groups * batch, -1) @ self.hidden.kernel[...]
        hidden_GxBxF = hidden_NxF.reshape(groups, batch, -1)
        # Each batch is normalised alone: a mixed one's statistics would tell real from generated.
        normal = [self.normalisation(hidden_BxF, real_B) for hidden_BxF in hidden_GxBxF]
        x = jax.nn.leaky_relu(jnp.concatenate([values for values, _ in normal]), _LEAK)
        score_NxO = self.output.shifted(x @ self.output.kernel[...])
        statistics = jax.tree.map(lambda *group: jnp.stack(group), *(s for _, s in normal))
        return score_NxO.reshape(groups, batch), statistics


@dataclass(frozen=True)
class GAN(Checked):
    """Generator, critic and their losses, Wasserstein's with gradient penalty (Gulrajani 2017).

    Batches hold "image" [B, H, W, C], uint8 (0 .. 255) or float32 (0 .. 1) with 0 = paper and 1 =
    ink; see `to_range`.

    Attributes:
      image_shape: (height, width, channels); height and width are multiples of 4.
      width: multiplies all numbers of channels and dense units; 1 is the paper's network.
      noise: size of the generator's input.
    """

    image_shape: tuple[int, int, int] = (28, 28, 1)
    width: Positive = 1.0
    noise: PositiveInt = 128
    name: str = "gan"

    columns = ("image",)

    def check_fields(self) -> None:
        check_images(self.image_shape)
        if any(size % 4 for size in self.image_shape[:2]):
            raise InputError(f"image_shape: sides must be multiples of 4, found {self.image_shape}")

    def scaled(self, features: int) -> int:
        """The number of channels or units at this width, for the paper's number `features`."""
        return max(1, round(self.width * features))

    @cached_property
    def _graphdefs(self) -> list[nnx.GraphDef]:
        makers = [partial(make, self, jax.random.key(0)) for make in (Generator, Critic)]
        return [nnx.split(nnx.eval_shape(make))[0] for make in makers]

    def init(self, key: Array) -> Params:
        """{"generator", "critic"}: Glorot-uniform kernels, variances of one, all else zero."""
        generator_key, critic_key = jax.random.split(key)
        generator, critic = Generator(self, generator_key), Critic(self, critic_key)
        return {"generator": split(generator)[1], "critic": split(critic)[1]}

    def draw_noise(self, key: Array, batch: int) -> Array:
        """The generator's input: standard normal, float32 [batch, noise]."""
        return jax.random.normal(key, (batch, self.noise), jnp.float32)

    def generate(self, generator: Params, noise_BxZ: Array, real_B: Array) -> Array:
        """Images [B, H, W, C] in [-1, 1]; rows where `real_B` is False influence no other."""
        return nnx.merge(self._graphdefs[0], generator)(noise_BxZ, real_B)

    def scores(
        self, critic: Params, image_GxBxHxWxC: Array, real_B: Array
    ) -> tuple[Array, Statistics]:
        """Scores [G, B] of G batches, and each batch's statistics [G, F] (mean, variance).

        The images are finite float32 in [-1, 1]. `real_B` is True for the rows that count, which
        are the same in all batches.
        """
        return nnx.merge(self._graphdefs[1], critic)(image_GxBxHxWxC, real_B)

    def critic_loss(
        self,
        critic: Params,
        drawn_BxHxWxC: Array,
        image_BxHxWxC: Array,
        real_B: Array,
        share_B: Array,
    ) -> tuple[Array, Statistics]:
        """The critic's loss on generated and on real images, and both batches' statistics [2, F].

        mean D(drawn) - mean D(image) + 10 mean (||grad D(x)|| - 1)^2 + the weight decay, where x =
        drawn + share (image - drawn). Means are over the rows where `real_B` is True.

        Args:
          drawn_BxHxWxC, image_BxHxWxC: in [-1, 1].
          share_B: for each example a number drawn uniformly from [0, 1).
        """
        both = jnp.stack([drawn_BxHxWxC, image_BxHxWxC])
        (drawn_B, score_B), statistics = self.scores(critic, both, real_B)
        share = share_B[:, None, None, None]
        between = drawn_BxHxWxC + share * (image_BxHxWxC - drawn_BxHxWxC)

        def total_score(image):
            scores, _ = self.scores(critic, image[None], real_B)
            return jnp.sum(jnp.where(real_B, scores[0], 0.0))

        slope_B = _norm_per_example(jax.grad(total_score)(between))
        loss_B = drawn_B - score_B + jnp.float32(GRADIENT_PENALTY) * jnp.square(slope_B - 1.0)
        return _mean_over(loss_B, real_B) + _decay(critic), statistics

    def generator_loss(self, generator: Params, critic: Params, noise_BxZ: Array) -> Array:
        """The generator's loss, -mean D(drawn), plus weight decay."""
        everyone = jnp.ones(noise_BxZ.shape[:1], bool)
        drawn = self.generate(generator, noise_BxZ, everyone)
        score_B = self.scores(critic, drawn[None], everyone)[0][0]
        return _mean_over(-score_B, everyone) + _decay(generator)


def to_range(image: Array, real_B: Array) -> Array:
    """Images [B, ...], uint8 or in 0 .. 1, as float32 in [-1, 1]; 0 where `real_B` is False."""
    scale = 2.0 / 255.0 if image.dtype == jnp.uint8 else 2.0
    ranged = image.astype(jnp.float32) * jnp.float32(scale) - jnp.float32(1)
    return jnp.where(jnp.expand_dims(real_B, tuple(range(1, image.ndim))), ranged, 0.0)


def with_statistics(critic: Params, statistics: Statistics) -> Params:
    """The critic's parameters after moving = 0.999 moving + 0.001 batch, for G batches in order."""
    normalisation = dict(critic["normalisation"])
    for name, values_GxF in zip(("mean", "variance"), statistics, strict=True):
        for values_F in values_GxF:
            step = jnp.float32(1 - _MOMENTUM) * (values_F - normalisation[name])
            normalisation[name] = normalisation[name] + step
    return {**critic, "normalisation": normalisation}


def sample_images(gan: GAN, params: Params, key: Array, number: int) -> np.ndarray:
    """Draws float32 images [number, H, W, C] in 0 .. 1, where 0 is paper and 1 is ink.

    Images are drawn and normalised in blocks of 64, each with a key of its own: the first images do
    not depend on `number`. Of `params` only "generator" is read.
    """
    blocks = -(-checks.positive_int("number", number) // _DRAWN_TOGETHER)
    keys = (jax.random.fold_in(key, block) for block in range(blocks))
    drawn = [np.asarray(_drawn_block(gan, params["generator"], own)) for own in keys]
    return np.concatenate(drawn)[:number]


@partial(jax.jit, static_argnames=("gan",))
def _drawn_block(gan: GAN, generator: Params, key: Array) -> Array:
    everyone = jnp.ones(_DRAWN_TOGETHER, bool)
    images = gan.generate(generator, gan.draw_noise(key, _DRAWN_TOGETHER), everyone)
    return (images + 1.0) / 2.0


def _decay(params: Params) -> Array:
    leaves = jax.tree_util.tree_leaves_with_path(params)
    squares = [jnp.sum(jnp.square(leaf)) for path, leaf in leaves if path[-1].key == "kernel"]
    return jnp.float32(0.5 * WEIGHT_DECAY) * sum(squares, jnp.float32(0))


def _mean_over(values_B: Array, real_B: Array) -> Array:
    count = jnp.maximum(jnp.sum(real_B, dtype=jnp.float32), 1.0)
    return jnp.sum(jnp.where(real_B, values_B, 0.0)) / count


def _norm_per_example(x_BxHxWxC: Array) -> Array:
    """L2 norms [B] with gradient 0 at 0, which occurs: BN makes a batch of one constant."""
    square_B = jnp.sum(jnp.square(x_BxHxWxC), axis=(1, 2, 3))
    positive_B = square_B > 0
    return jnp.where(positive_B, jnp.sqrt(jnp.where(positive_B, square_B, 1.0)), 0.0)
