"""Convolution, its transpose and pooling, in the form that the backend runs fastest.

On a CPU, XLA runs an ordinary convolution inside `scan`, or vmapped with per-client kernels, 20 to
40 times slower than the same sum written as patches times a matrix, and a pool of patches of 3 x 3
is faster still by Winograd's minimal filtering. Accelerators run the convolution faster. Results
are equal up to rounding.

Winograd's F(4 x 4, 3 x 3) of Lavin and Gray 2016 ("Fast algorithms for convolutional neural
networks", section 4): a 4 x 4 tile y of the output follows from a 6 x 6 tile d of the image and the
kernel k as

    y = A' [(G k G') * (B' d B)] A,

with 36 products for each pair of channels where the sum itself takes 144. Over all tiles of a batch
these are 36 products of matrices, [tiles, C] x [C, O]. A tile of the output has four windows of the
pool, so that the values that the pool drops go no further. The rows of A, G and B are polynomials
at 0, 5/8, -5/8, 3/2, -3/2 and infinity. Rounding is twice (outputs) to seven times (slopes) that of
the plain sum: of 32 channels to 64, root mean squares of 5e-7, 6e-7 and 1.2e-6 of those of outputs
and of the slopes of images and kernels. The paper's points, 0, 1, -1, 2, -2, have twice as much.
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

_IMAGES = 25  # at a time: their tiles take some 15 times their memory
_CORNERS = [(0, 0), (0, 1), (1, 0), (1, 1)]  # windows of a tile, or places of a window


def _transforms() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A [6, 4], G [6, 3] and B [6, 6]."""
    points = [0, 5 / 8, -5 / 8, 3 / 2, -3 / 2]
    others = [[q for q in points if q != p] for p in points]
    scales = [[np.prod(np.subtract(p, rest))] for p, rest in zip(points, others, strict=True)]
    columns = [np.pad(np.poly(roots)[::-1], (0, 5 - len(roots))) for roots in (*others, points)]
    a_6x4 = np.vstack([np.vander(points, 4, increasing=True), [0, 0, 0, 1]])
    g_6x3 = np.vstack([np.vander(points, 3, increasing=True) / scales, [0, 0, 1]])
    return a_6x4, g_6x3, np.stack(columns, axis=1)


_A_6x4, _G_6x3, _B_6x6 = _transforms()


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
    batch, *sides, channels = image_BxHxWxC.shape
    pooled = [(side - 2) // 2 for side in sides]
    # Windows beyond the last whole tile are of a frame of zeros, and are cut off.
    whole = [4 * max(1, -(-side // 2)) + 2 for side in pooled]
    # An odd last row or column, which no window reads, is none of a tile's either.
    read = [max(0, 2 * side + 2) for side in pooled]
    used = image_BxHxWxC[:, : read[0], : read[1]].astype(kernel_3x3xCxO.dtype)
    frame = [(0, size - side) for size, side in zip(whole, used.shape[1:3], strict=True)]
    framed = jnp.pad(used, ((0, 0), *frame, (0, 0)))
    if batch <= _IMAGES:
        out = _tiled(framed, kernel_3x3xCxO)
    else:
        # Equal parts, which images of zeros fill up.
        parts = -(-batch // _IMAGES)
        at_once = -(-batch // parts)
        filled = jnp.pad(framed, ((0, parts * at_once - batch), *[(0, 0)] * 3))
        filled = filled.reshape(parts, at_once, *whole, channels)
        out = lax.map(lambda part: _tiled(part, kernel_3x3xCxO), filled)
        out = out.reshape(parts * at_once, *out.shape[2:])[:batch]
    return out[:, : pooled[0], : pooled[1]]


@jax.custom_vjp
def _tiled(image_BxHxWxC: Array, kernel_3x3xCxO: Array) -> Array:
    return _outputs(image_BxHxWxC, _transformed_kernel(kernel_3x3xCxO))[0]


def _outputs(image_BxHxWxC: Array, kernel_36xCxO: Array) -> tuple[Array, Array]:
    """The pool, and which places of each window have its highest value: bits [4, tiles, O]."""
    batch, height, width, _ = image_BxHxWxC.shape
    down, across, outputs = height // 4, width // 4, kernel_36xCxO.shape[-1]
    m_36xTxO = _matmul(_input_tiles(image_BxHxWxC), kernel_36xCxO, 2, 1)
    m_6x6xTxO = m_36xTxO.reshape(6, 6, -1, outputs)
    y_4x6xTxO = _combined(_A_6x4.T, list(m_6x6xTxO))
    y_4x4xTxO = _combined(_A_6x4.T, [y_4x6xTxO[:, j] for j in range(6)], axis=1)
    highest, winners = [], []
    for a, b in _CORNERS:
        places = [y_4x4xTxO[2 * a + i, 2 * b + j] for i, j in _CORNERS]
        # Pairwise: XLA's reductions over an axis of four are slower.
        highest_TxO = reduce(jnp.maximum, places)
        winners_TxO = jnp.zeros_like(highest_TxO, jnp.uint8)
        for place, y_TxO in enumerate(places):
            won_TxO = (y_TxO == highest_TxO).astype(jnp.uint8)
            winners_TxO = winners_TxO | (won_TxO << jnp.uint8(place))
        highest.append(highest_TxO.reshape(batch, down, across, outputs))
        winners.append(winners_TxO)
    rows = [jnp.stack(highest[place : place + 2], axis=3) for place in (0, 2)]
    out_BxHxWxO = _written(rows, 2).reshape(batch, 2 * down, 2 * across, outputs)
    return out_BxHxWxO, _written(winners)


def _slopes(
    image_BxHxWxC: Array, kernel_36xCxO: Array, winners_4xTxO: Array, slope_BxHxWxO: Array
) -> tuple[Array, Array]:
    batch, height, width, outputs = slope_BxHxWxO.shape
    shares = slope_BxHxWxO.reshape(batch, height // 2, 2, width // 2, 2, outputs)
    shares_4xTxO = shares.transpose(2, 4, 0, 1, 3, 5).reshape(4, -1, outputs)
    shares_4xTxO = shares_4xTxO / lax.population_count(winners_4xTxO).astype(shares.dtype)

    def share(i: int, j: int) -> Array:
        window, place = i // 2 * 2 + j // 2, i % 2 * 2 + j % 2
        won_TxO = (winners_4xTxO[window] >> jnp.uint8(place)) & jnp.uint8(1)
        # Not a selection: where no place won, the value is NaN, and so must be the gradient.
        return won_TxO.astype(shares.dtype) * shares_4xTxO[window]

    rows = [_written([share(i, j) for j in range(4)]) for i in range(4)]
    # The transpose of what `_outputs` does with the products: A y A' of each tile y.
    slope_6x4xTxO = _combined(_A_6x4, rows)
    slope_6x6xTxO = _combined(_A_6x4, [slope_6x4xTxO[:, j] for j in range(4)], axis=1)
    slope_36xTxO = slope_6x6xTxO.reshape(36, -1, outputs)
    kernel_slope_36xCxO = _matmul(_input_tiles(image_BxHxWxC), slope_36xTxO, 1, 1)
    tile_slopes_36xTxC = _matmul(slope_36xTxO, kernel_36xCxO, 2, 2)
    (image_slope,) = jax.linear_transpose(_input_tiles, image_BxHxWxC)(tile_slopes_36xTxC)
    # Its transpose as XLA would compute it is slower: the table must be the other way round.
    kernel_slope = _times(np.kron(_G_6x3, _G_6x3).T, kernel_slope_36xCxO)
    return image_slope, kernel_slope.reshape(3, 3, *kernel_slope.shape[1:])


def _forward(image_BxHxWxC: Array, kernel_3x3xCxO: Array) -> tuple[Array, Any]:
    # Vmapped, the images of one client or example are taken after those of another. A kernel that
    # they share is transformed once.
    kernel_36xCxO = _transformed_kernel(kernel_3x3xCxO)
    out_BxHxWxO, winners_4xTxO = _in_turn(_outputs)(image_BxHxWxC, kernel_36xCxO)
    return out_BxHxWxO, (image_BxHxWxC, kernel_36xCxO, winners_4xTxO)


def _backward(saved: Any, slope_BxHxWxO: Array) -> tuple[Array, Array]:
    return _in_turn(_slopes)(*saved, slope_BxHxWxO)


_in_turn = jax.custom_batching.sequential_vmap
_tiled.defvjp(_forward, _backward)


def _transformed_kernel(kernel_3x3xCxO: Array) -> Array:
    """G k G' for each pair of channels: [36, C, O]."""
    return _times(np.kron(_G_6x3, _G_6x3), kernel_3x3xCxO.reshape(9, *kernel_3x3xCxO.shape[2:]))


def _times(weights_NxK: np.ndarray, array_K: Array) -> Array:
    return jnp.tensordot(jnp.asarray(weights_NxK, array_K.dtype), array_K, 1)


def _input_tiles(image_BxHxWxC: Array) -> Array:
    """B' d B for each 6 x 6 tile d, which overlap by two pixels: [36, tiles, C]."""

    def parts(array: Array, axis: int) -> list[Array]:
        last = array.shape[axis] - 5
        return [lax.slice_in_dim(array, i, i + last, 4, axis) for i in range(6)]

    rows_6xBxIxWxC = _combined(_B_6x6.T, parts(image_BxHxWxC, 1))
    tiles = _combined(_B_6x6.T, parts(rows_6xBxIxWxC, 3), axis=1)
    return tiles.reshape(36, -1, image_BxHxWxC.shape[-1])


def _combined(weights_NxK: np.ndarray, parts: list[Array], axis: int = 0) -> Array:
    """The N weighted sums of K arrays, along a new axis."""
    terms = [[(float(w), part) for w, part in zip(row, parts, strict=True)] for row in weights_NxK]
    return _written([reduce(jnp.add, [w * part for w, part in row if w]) for row in terms], axis)


def _written(parts: list[Array], axis: int = 0) -> Array:
    """The arrays along a new axis, in memory: XLA would compute each again for each use."""
    return lax.optimization_barrier(jnp.stack(parts, axis=axis))


def _matmul(left: Array, right: Array, left_axis: int, right_axis: int) -> Array:
    """36 products of matrices, summed over the given axis of each."""
    return lax.dot_general(left, right, (((left_axis,), (right_axis,)), ((0,), (0,))))
