"""Convolution, its transpose and pooling, in the form that the backend runs fastest.

On a CPU, XLA runs an ordinary convolution inside `scan`, or vmapped with per-client kernels, 20 to
40 times slower than the same sum written as patches times a matrix, and a pool of patches of 3 x 3
is faster still by Winograd's minimal filtering. Accelerators run the convolution faster. Results
are equal up to rounding.

Winograd's F(2 x 2, 3 x 3) of Lavin and Gray 2016 ("Fast algorithms for convolutional neural
networks", section 4.1): a 2 x 2 tile y of the output follows from a 4 x 4 tile d of the image and
the kernel k as

    y = A' [(G k G') * (B' d B)] A,

with 16 products for each pair of channels where the sum itself takes 36. Over all tiles of an image
these are 16 products of matrices, [tiles, C] x [C, O]. A tile of the output is a window of the
pool, so that the values that the pool drops are never written. Images are taken one at a time, and
their tiles are made anew in the backward pass, so that what lies between two products stays in a
core's cache. Rounding is a few times that of the plain sum.
"""

from functools import reduce
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxpfl.checks import positive_int
from jaxpfl.errors import InputError
from jaxpfl.models.base import traced_platform

Form = Literal["auto", "patches", "convolution"]
Padding = Literal["VALID", "SAME"]

# With fewer channels on either side, the transforms cost more than the products that they save.
_CHANNELS_OF_TILES = 8

_G_4x3 = np.array([[1, 0, 0], [0.5, 0.5, 0.5], [0.5, -0.5, 0.5], [0, 0, 1]], np.float32)
_B_4x4 = np.array([[1, 0, 0, 0], [0, 1, -1, 1], [-1, 1, 1, 0], [0, 0, 0, -1]], np.float32)
_A_4x2 = np.array([[1, 0], [1, 1], [1, -1], [0, -1]], np.float32)


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
        sides, strides = image_BxHxWxC.shape[1:3], (stride, stride)
        pads = lax.padtype_to_pads(sides, (rows, columns), strides, "SAME")
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


def pooled_3x3(image_BxHxWxC: Array, kernel_3x3xCxO: Array) -> Array:
    """[B, H, W, C] -> [B, (H - 2) // 2, (W - 2) // 2, O], without padding or bias.

    The max is over 2 x 2 windows with stride 2 of the cross-correlation; an odd last row or column
    is dropped, and among equal values the gradient is divided. It has derivatives in reverse mode
    alone.
    """
    height, width = (2 * (size // 2) for size in image_BxHxWxC.shape[1:3])
    return _tiled(image_BxHxWxC[:, :height, :width], kernel_3x3xCxO)


@jax.custom_vjp
def _tiled(image_BxHxWxC: Array, kernel_3x3xCxO: Array) -> Array:
    return _outputs(image_BxHxWxC, _transformed_kernel(kernel_3x3xCxO))[0]


def _outputs(image_BxHxWxC: Array, kernel_16xCxO: Array) -> tuple[Array, Array]:
    """The pool, and which places of each window have its highest value."""
    height, width = image_BxHxWxC.shape[1:3]
    outputs = kernel_16xCxO.shape[-1]
    tiles = (height // 2 - 1, width // 2 - 1)

    def one(image_HxWxC: Array) -> tuple[Array, Array]:
        places = _output_tiles(_matmul(_input_tiles(image_HxWxC), kernel_16xCxO, 2, 1))
        # Pairwise: XLA's reductions over an axis of four are slower.
        highest_TxO = reduce(jnp.maximum, places)
        winners_TxO = jnp.zeros_like(highest_TxO, jnp.uint8)
        for place, y_TxO in enumerate(places):
            won_TxO = (y_TxO == highest_TxO).astype(jnp.uint8)
            winners_TxO = winners_TxO | (won_TxO << jnp.uint8(place))
        return highest_TxO.reshape(*tiles, outputs), winners_TxO

    return lax.map(one, image_BxHxWxC)


def _slopes(
    image_BxHxWxC: Array, kernel_16xCxO: Array, winners_BxTxO: Array, slope_BxHxWxO: Array
) -> tuple[Array, Array]:
    outputs = slope_BxHxWxO.shape[-1]
    tiles = (image_BxHxWxC.shape[1] // 2 - 1, image_BxHxWxC.shape[2] // 2 - 1)

    def one(kernel_slope_16xCxO: Array, image: tuple[Array, ...]) -> tuple[Array, Array]:
        image_HxWxC, slope_HxWxO, winners_TxO = image
        shares_TxO = slope_HxWxO.reshape(-1, outputs)
        shares_TxO = shares_TxO / lax.population_count(winners_TxO).astype(shares_TxO.dtype)
        # Not a selection: where no place won, the value is NaN, and so must be the gradient.
        won = [(winners_TxO >> jnp.uint8(place)) & jnp.uint8(1) for place in range(4)]
        slopes = [won_TxO.astype(shares_TxO.dtype) * shares_TxO for won_TxO in won]
        # The transpose of `_output_tiles`: A y A' of each tile y.
        slope_16xTxO = _weighted(np.kron(_A_4x2, _A_4x2), lax.optimization_barrier(slopes))
        added = kernel_slope_16xCxO + _matmul(_input_tiles(image_HxWxC), slope_16xTxO, 1, 1)
        tile_slopes_16xTxC = _matmul(slope_16xTxO, kernel_16xCxO, 2, 2)
        return added, _transposed_input(tile_slopes_16xTxC, tiles)

    start, images = jnp.zeros_like(kernel_16xCxO), (image_BxHxWxC, slope_BxHxWxO, winners_BxTxO)
    kernel_slope_16xCxO, image_slope = lax.scan(one, start, images)
    return image_slope, kernel_slope_16xCxO


def _forward(image_BxHxWxC: Array, kernel_3x3xCxO: Array) -> tuple[Array, Any]:
    # Vmapped, as for single images, the images are taken in turn. The kernel, which they share, is
    # transformed once, and its gradients are transformed side by side.
    kernel_16xCxO = _transformed_kernel(kernel_3x3xCxO)
    out_BxHxWxO, winners_BxTxO = _in_turn(_outputs)(image_BxHxWxC, kernel_16xCxO)
    return out_BxHxWxO, (image_BxHxWxC, kernel_16xCxO, winners_BxTxO)


def _backward(saved: Any, slope_BxHxWxO: Array) -> tuple[Array, Array]:
    image_slope, kernel_slope_16xCxO = _in_turn(_slopes)(*saved, slope_BxHxWxO)
    # The transpose of `_transformed_kernel`: G' s G for each pair of channels, [3, 3, C, O].
    slope_4x4xCxO = kernel_slope_16xCxO.reshape(4, 4, *kernel_slope_16xCxO.shape[1:])
    columns_3x4xCxO = _weighted(_G_4x3.T, [slope_4x4xCxO[:, j] for j in range(4)])
    return image_slope, _weighted(_G_4x3.T, [columns_3x4xCxO[:, i] for i in range(4)])


_in_turn = jax.custom_batching.sequential_vmap
_tiled.defvjp(_forward, _backward)


def _transformed_kernel(kernel_3x3xCxO: Array) -> Array:
    """G k G' for each pair of channels: [16, C, O]."""
    columns_4x3xCxO = _weighted(_G_4x3, [kernel_3x3xCxO[:, j] for j in range(3)])
    kernel_4x4xCxO = _weighted(_G_4x3, [columns_4x3xCxO[:, i] for i in range(3)])
    return kernel_4x4xCxO.reshape(16, *kernel_3x3xCxO.shape[2:])


def _input_tiles(image_HxWxC: Array) -> Array:
    """B' d B for each 4 x 4 tile d, which overlap by two pixels: [16, tiles, C]."""
    height, width, channels = image_HxWxC.shape
    down, across = height // 2 - 1, width // 2 - 1
    pairs_HxPxWxC = image_HxWxC.reshape(height // 2, 2, width, channels)
    rows = [pairs_HxPxWxC[i // 2 : i // 2 + down, i % 2] for i in range(4)]
    # Written between the two halves: XLA would compute each row again for four columns.
    rows_4xIxWxC = lax.optimization_barrier(_weighted(_B_4x4.T, rows))
    pairs_4xIxWxPxC = rows_4xIxWxC.reshape(4, down, width // 2, 2, channels)
    columns = [pairs_4xIxWxPxC[:, :, j // 2 : j // 2 + across, j % 2] for j in range(4)]
    first, second, third, last = columns
    combined = (first - third, second + third, third - second, second - last)
    return jnp.stack(combined, axis=1).reshape(16, down * across, channels)


def _transposed_input(slope_16xTxC: Array, tiles: tuple[int, int]) -> Array:
    """The transpose of `_input_tiles`: adds up tiles where they overlap, [H, W, C].

    Written out, because the transpose that JAX derives is slower.
    """
    down, across = tiles
    channels = slope_16xTxC.shape[-1]
    slope_4x4xIxJxC = slope_16xTxC.reshape(4, 4, down, across, channels)
    columns = _uncombined([slope_4x4xIxJxC[:, j] for j in range(4)])
    joined = lax.optimization_barrier(_overlapped(columns, axis=2))
    joined_4xIxWxC = joined.reshape(4, down, 2 * across + 2, channels)
    rows = _uncombined([joined_4xIxWxC[i] for i in range(4)])
    return _overlapped(rows, axis=0).reshape(2 * down + 2, 2 * across + 2, channels)


def _uncombined(d: list[Array]) -> list[Array]:
    """B d of four rows or columns d."""
    return [d[0], d[1] - d[2] + d[3], d[1] + d[2] - d[0], -d[3]]


def _overlapped(parts: list[Array], axis: int) -> Array:
    """Adds parts 2 and 3 of each tile to parts 0 and 1 of the next, the two along a new axis."""

    def shifted(part: Array, before: int) -> Array:
        widths = [(0, 0)] * part.ndim
        widths[axis] = (before, 1 - before)
        return jnp.pad(part, widths)

    pairs = [shifted(parts[i], 0) + shifted(parts[i + 2], 1) for i in range(2)]
    return jnp.stack(pairs, axis=axis + 1)


def _output_tiles(m_16xTxO: Array) -> list[Array]:
    """A' m A for each tile m of products: the four places of a 2 x 2 tile, each [tiles, O]."""
    m = m_16xTxO.reshape(4, 4, *m_16xTxO.shape[1:])
    rows = (m[0] + m[1] + m[2], m[1] - m[2] - m[3])
    return [part for r in rows for part in (r[0] + r[1] + r[2], r[1] - r[2] - r[3])]


def _weighted(weights_NxK: np.ndarray, parts: list[Array]) -> Array:
    """The N weighted sums of K arrays, along a new first axis.

    XLA vectorises the products with a table of weights, and not a stack of N expressions.
    """
    terms = []
    for weights_N, part in zip(weights_NxK.T, parts, strict=True):
        column = weights_N.reshape(-1, *(1,) * part.ndim)
        terms.append(jnp.asarray(column, part.dtype) * part[None])
    return reduce(jnp.add, terms)


def _matmul(left: Array, right: Array, left_axis: int, right_axis: int) -> Array:
    """16 products of matrices, summed over the given axis of each."""
    return lax.dot_general(left, right, (((left_axis,), (right_axis,)), ((0,), (0,))))
