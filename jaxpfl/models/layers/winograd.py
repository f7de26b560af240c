"""3 x 3 convolution and 2 x 2 max-pool by Winograd's minimal filtering, for CPUs.

F(2 x 2, 3 x 3) of Lavin and Gray 2016 ("Fast algorithms for convolutional neural networks", section
4.1): a 2 x 2 tile y of the output follows from a 4 x 4 tile d of the image and the kernel k as

    y = A' [(G k G') * (B' d B)] A,

with 16 products for each pair of channels where the sum itself takes 36. Over all tiles of an image
these are 16 products of matrices, [tiles, C] x [C, O]. A tile of the output is a window of the
pool, so that the values that the pool drops are never written.

Images are taken one at a time, and their tiles are made anew in the backward pass, so that what
lies between two products stays in a core's cache. Rounding is a few times that of the plain sum.
"""

from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

_G_4x3 = np.array([[1, 0, 0], [0.5, 0.5, 0.5], [0.5, -0.5, 0.5], [0, 0, 1]], np.float32)
_B_4x4 = np.array([[1, 0, 0, 0], [0, 1, -1, 1], [-1, 1, 1, 0], [0, 0, 0, -1]], np.float32)
_A_4x2 = np.array([[1, 0], [1, 1], [1, -1], [0, -1]], np.float32)


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

    start = jnp.zeros_like(kernel_16xCxO)
    kernel_slope_16xCxO, image_slope = lax.scan(
        one, start, (image_BxHxWxC, slope_BxHxWxO, winners_BxTxO)
    )
    return image_slope, kernel_slope_16xCxO


def _forward(image_BxHxWxC: Array, kernel_3x3xCxO: Array) -> tuple[Array, Any]:
    # Vmapped, as for single images, the images are taken in turn. The kernel, which they share, is
    # transformed once, and its gradients are transformed side by side.
    kernel_16xCxO = _transformed_kernel(kernel_3x3xCxO)
    out_BxHxWxO, winners_BxTxO = _in_turn(_outputs)(image_BxHxWxC, kernel_16xCxO)
    return out_BxHxWxO, (image_BxHxWxC, kernel_16xCxO, winners_BxTxO)


def _backward(saved: Any, slope_BxHxWxO: Array) -> tuple[Array, Array]:
    image_slope, kernel_slope_16xCxO = _in_turn(_slopes)(*saved, slope_BxHxWxO)
    return image_slope, _transposed_kernel(kernel_slope_16xCxO)


_in_turn = jax.custom_batching.sequential_vmap
_tiled.defvjp(_forward, _backward)


def _transformed_kernel(kernel_3x3xCxO: Array) -> Array:
    """G k G' for each pair of channels: [16, C, O]."""
    columns_4x3xCxO = _weighted(_G_4x3, [kernel_3x3xCxO[:, j] for j in range(3)])
    kernel_4x4xCxO = _weighted(_G_4x3, [columns_4x3xCxO[:, i] for i in range(3)])
    return kernel_4x4xCxO.reshape(16, *kernel_3x3xCxO.shape[2:])


def _transposed_kernel(slope_16xCxO: Array) -> Array:
    """The transpose of `_transformed_kernel`: G' s G for each pair of channels, [3, 3, C, O]."""
    slope_4x4xCxO = slope_16xCxO.reshape(4, 4, *slope_16xCxO.shape[1:])
    columns_3x4xCxO = _weighted(_G_4x3.T, [slope_4x4xCxO[:, j] for j in range(4)])
    return _weighted(_G_4x3.T, [columns_3x4xCxO[:, i] for i in range(4)])


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
    combined = (
        columns[0] - columns[2],
        columns[1] + columns[2],
        columns[2] - columns[1],
        columns[1] - columns[3],
    )
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
