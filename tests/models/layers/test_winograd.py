from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpfl.models.layers.convolution import convolve, max_pool, pooled_3x3
from tests.trees import assert_close


def _normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape)


def _windows(image, height, width):
    """Image [b, h, w, c] moved by each place of a kernel: [3, 3, b, height, width, c]."""
    moved = [[image[:, i : i + height, j : j + width] for j in range(3)] for i in range(3)]
    return np.array(moved)


def _plain(image, kernel):
    """The sum of windows times the kernel, in float64."""
    windows = _windows(image, image.shape[1] - 2, image.shape[2] - 2)
    return np.einsum("ijbhwc,ijco->bhwo", windows, kernel)


def _plain_gradients(image, kernel, slope):
    windows = _windows(image, *slope.shape[1:3])
    below, beside = (a - b for a, b in zip(image.shape[1:3], slope.shape[1:3], strict=True))
    padded = np.pad(slope, ((0, 0), (2, below), (2, beside), (0, 0)))
    image_slope = _plain(padded, kernel[::-1, ::-1].swapaxes(2, 3))
    return image_slope, np.einsum("ijbhwc,bhwo->ijco", windows, slope)


def _pooled(out, slope):
    """The pool of `out`, and `slope` where each window had its highest value."""
    height, width = out.shape[1] // 2, out.shape[2] // 2
    pooled, spread = np.zeros_like(slope), np.zeros_like(out)
    for row in range(height):
        for column in range(width):
            window = np.s_[:, 2 * row : 2 * row + 2, 2 * column : 2 * column + 2]
            highest = out[window].max((1, 2), keepdims=True)
            won = out[window] == highest
            share = slope[:, row : row + 1, column : column + 1] / won.sum((1, 2), keepdims=True)
            pooled[:, row, column] = highest[:, 0, 0]
            spread[window] = won * share
    return pooled, spread


@jax.jit
def _ours(image, kernel, slope):
    out, pull = jax.vjp(pooled_3x3, image, kernel)
    return out, *pull(slope)


@pytest.mark.parametrize(
    # One tile, whole tiles, tiles in part, and more images than are computed at a time.
    ("batch", "size"),
    [(2, (6, 6)), (2, (10, 14)), (2, (11, 8)), (1, (5, 9)), (37, (6, 4))],
)
def test_values_and_gradients_are_those_of_the_plain_sum(batch, size):
    image, kernel = _normal(0, batch, *size, 3), _normal(1, 3, 3, 3, 4)
    out = _plain(image, kernel)
    slope = _normal(2, batch, *[side // 2 for side in out.shape[1:3]], 4)
    found = _ours(*(jnp.asarray(array, jnp.float32) for array in (image, kernel, slope)))
    out, spread = _pooled(out, slope)
    assert_close(found, (out, *_plain_gradients(image, kernel, spread)), atol=2e-5)


def test_rounding_is_small_beside_the_values_of_a_whole_layer():
    """Root mean squares, of the size of the EMNIST network; the paper's points have twice these."""
    image = np.maximum(_normal(11, 2, 26, 26, 32), 0)
    kernel, slope = 0.08 * _normal(12, 3, 3, 32, 64), _normal(13, 2, 12, 12, 64)
    given = [np.asarray(array, np.float32) for array in (image, kernel, slope)]
    exact_image, exact_kernel, exact_slope = (array.astype(np.float64) for array in given)
    out, spread = _pooled(_plain(exact_image, exact_kernel), exact_slope)
    expected = out, *_plain_gradients(exact_image, exact_kernel, spread)
    for ours, plain, most in zip(_ours(*given), expected, (8e-7, 9e-7, 1.5e-6), strict=True):
        error = np.sqrt(np.mean(np.square(ours - plain)) / np.mean(np.square(plain)))
        assert error < most


def test_equal_values_share_the_gradient_of_the_pool():
    """Of a blank image, every place of a window is the highest, as in `max_pool`."""
    image, kernel = jnp.zeros((1, 6, 6, 2)), jnp.asarray(_normal(3, 3, 3, 2, 2), jnp.float32)
    slope = jnp.asarray(_normal(4, 1, 2, 2, 2), jnp.float32)
    got = _ours(image, kernel, slope)[1]
    shared = np.repeat(np.repeat(np.asarray(slope, np.float64) / 4, 2, 1), 2, 2)
    expected = _plain_gradients(np.zeros(image.shape), np.asarray(kernel, np.float64), shared)[0]
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


def test_an_image_that_is_not_finite_spoils_the_kernels_gradient_and_no_other_image():
    image, kernel = _normal(5, 2, 6, 6, 2), jnp.asarray(_normal(6, 3, 3, 2, 2), jnp.float32)
    image[0] = np.nan
    slope = jnp.ones((2, 2, 2, 2), jnp.float32)
    out, image_slope, kernel_slope = _ours(jnp.asarray(image, jnp.float32), kernel, slope)
    assert np.isnan(out[0]).all() and np.isnan(kernel_slope).all()
    assert np.isfinite(out[1]).all() and np.isfinite(image_slope[1]).all()


def test_clients_with_kernels_of_their_own_can_lie_side_by_side():
    image = jnp.asarray(_normal(7, 3, 2, 6, 6, 8), jnp.float32)
    kernel = jnp.asarray(_normal(8, 3, 3, 3, 8, 8), jnp.float32)

    def slopes(form, image, kernel):
        def total(image, kernel):
            return jnp.sum(jnp.tanh(convolve(image, kernel, pool=True, form=form)))

        return jax.grad(total, (0, 1))(image, kernel)

    got, expected = (
        jax.jit(jax.vmap(partial(slopes, form)))(image, kernel)
        for form in ("patches", "convolution")
    )
    assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_pooling_follows_every_kind_of_convolution():
    image, kernel = _normal(9, 1, 7, 8, 9), _normal(10, 3, 3, 9, 8)
    convolved = jax.jit(partial(convolve, padding="SAME"), static_argnames=("pool", "form"))
    for channels in (1, 9):
        for form in ("patches", "convolution"):
            parts = image[..., :channels], kernel[:, :, :channels]
            given = [jnp.asarray(part, jnp.float32) for part in parts]
            got = convolved(*given, pool=True, form=form)
            expected = max_pool(convolved(*given, form="convolution"))
            np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)


def test_what_no_window_reads_changes_nothing():
    image, kernel = np.float32(_normal(0, 2, 9, 9, 8)), np.float32(_normal(1, 3, 3, 8, 8))
    spoiled = image.copy()
    spoiled[:, 8], spoiled[:, :, 8] = np.nan, np.inf
    pooled = jax.jit(pooled_3x3)
    assert np.array_equal(pooled(spoiled, kernel), pooled(image, kernel))


def test_images_in_half_precision_have_gradients_of_their_type():
    image, kernel = np.float16(_normal(0, 1, 6, 6, 8)), np.float32(_normal(1, 3, 3, 8, 8))
    slopes = jax.jit(jax.grad(lambda *given: pooled_3x3(*given).sum(), (0, 1)))(image, kernel)
    assert [slope.dtype for slope in slopes] == [np.float16, np.float32]
