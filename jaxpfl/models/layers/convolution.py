"""Convolution, its transpose and pooling, in the form that the backend runs fastest.

On a CPU, XLA runs an ordinary convolution inside `scan`, or vmapped with per-client kernels, 20 to
40 times slower than the same sum written as patches times a matrix, and a pool of patches of 3 x 3
is faster still by `winograd`. Accelerators run the convolution faster. Results are equal up to
rounding.
"""

from typing import Literal

import jax.numpy as jnp
from jax import Array, lax

from jaxpfl.checks import positive_int
from jaxpfl.errors import InputError
from jaxpfl.models.base import traced_platform
from jaxpfl.models.layers.winograd import pooled_3x3

Form = Literal["auto", "patches", "convolution"]
Padding = Literal["VALID", "SAME"]

# With fewer channels on either side, the transforms cost more than the products that they save.
_CHANNELS_OF_TILES = 8


def resolve(form: Form) -> Form:
    """The form that is traced: "auto" is "patches" on a CPU and "convolution" elsewhere."""
    if form != "auto":
        return form
    return "patches" if traced_platform() == "cpu" else "convolution"


def check_images(image_shape: object) -> None:
    """Refuses an `image_shape` that is not (height, width, channels)."""
    if not isinstance(image_shape, tuple) or len(image_shape) != 3:
        raise InputError(f"image_shape must be (height, width, channels), found {image_shape!r}")
    for size in image_shape:
        positive_int("image_shape", size)


def convolve(
    image_BxHxWxC: Array,
    kernel_IxJxCxO: Array,
    *,
    stride: int = 1,
    padding: Padding = "VALID",
    pool: bool = False,
    form: Form = "auto",
) -> Array:
    """2-D cross-correlation without bias: [B, H, W, C] with [I, J, C, O] -> [B, H', W', O].

    `padding` is XLA's: "VALID" gives H' = (H - I) // stride + 1, "SAME" gives
    H' = ceil(H / stride) with the odd row of zeros at the end. With `pool`, `max_pool` follows.
    """
    if resolve(form) == "convolution":
        out_BxHxWxO = lax.conv_general_dilated(
            image_BxHxWxC,
            kernel_IxJxCxO,
            window_strides=(stride, stride),
            padding=padding,
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )
        return max_pool(out_BxHxWxO) if pool else out_BxHxWxO
    rows, columns, channels, outputs = kernel_IxJxCxO.shape
    if padding == "SAME":
        pads = lax.padtype_to_pads(
            image_BxHxWxC.shape[1:3], (rows, columns), (stride, stride), "SAME"
        )
        image_BxHxWxC = jnp.pad(image_BxHxWxC, ((0, 0), *pads, (0, 0)))
    tiles = pool and (rows, columns, stride) == (3, 3, 1)
    if tiles and min(channels, outputs) >= _CHANNELS_OF_TILES:
        return pooled_3x3(image_BxHxWxC, kernel_IxJxCxO)
    batch, height, width, _ = image_BxHxWxC.shape
    height, width = (height - rows) // stride + 1, (width - columns) // stride + 1
    parts = []
    for i in range(rows):
        down = slice(i, i + stride * (height - 1) + 1, stride)
        for j in range(columns):
            parts.append(image_BxHxWxC[:, down, j : j + stride * (width - 1) + 1 : stride])
    patches_MxP = jnp.concatenate(parts, axis=-1).reshape(batch * height * width, -1)
    out_MxO = patches_MxP @ kernel_IxJxCxO.reshape(-1, outputs)
    out_BxHxWxO = out_MxO.reshape(batch, height, width, outputs)
    return max_pool(out_BxHxWxO) if pool else out_BxHxWxO


def upsample_convolve(image_BxHxWxC: Array, kernel_4x4xCxO: Array, *, form: Form = "auto") -> Array:
    """Transposed convolution with stride 2, "SAME", no bias: [B, H, W, C] -> [B, 2 H, 2 W, O].

    The values are those of `lax.conv_transpose` (kernel not flipped): zeros are put between the
    pixels, and output pixel (2p, 2q) sees the 4 x 4 window that begins two pixels before it. Only 2
    x 2 of its values are pixels, so the patches form is a 2 x 2 convolution to four sub-pixels,
    which are then interleaved.
    """
    if resolve(form) == "convolution":
        return lax.conv_transpose(
            image_BxHxWxC,
            kernel_4x4xCxO,
            strides=(2, 2),
            padding="SAME",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )
    batch, height, width, _ = image_BxHxWxC.shape
    channels, outputs = kernel_4x4xCxO.shape[2:]
    # Tap 2 i + a of the kernel is tap i of sub-pixel a, in both directions.
    taps_IxAxJxBxCxO = kernel_4x4xCxO.reshape(2, 2, 2, 2, channels, outputs)
    kernel_IxJxCxP = taps_IxAxJxBxCxO.transpose(0, 2, 4, 1, 3, 5).reshape(2, 2, channels, -1)
    framed = jnp.pad(image_BxHxWxC, ((0, 0), (1, 1), (1, 1), (0, 0)))
    windows = convolve(framed, kernel_IxJxCxP, form="patches")
    windows = windows.reshape(batch, height + 1, width + 1, 2, 2, outputs)
    rows = []
    for a in range(2):
        columns = [windows[:, a : a + height, b : b + width, a, b] for b in range(2)]
        rows.append(jnp.stack(columns, axis=3))
    out_BxHx2xWx2xO = jnp.stack(rows, axis=2)
    return out_BxHx2xWx2xO.reshape(batch, 2 * height, 2 * width, outputs)


def max_pool(image_BxHxWxC: Array) -> Array:
    """Max over 2 x 2 windows: [B, H, W, C] -> [B, H // 2, W // 2, C]; odd ends are dropped."""
    batch, height, width, channels = image_BxHxWxC.shape
    height, width = height // 2, width // 2
    cropped = image_BxHxWxC[:, : 2 * height, : 2 * width]
    return cropped.reshape(batch, height, 2, width, 2, channels).max(axis=(2, 4))
