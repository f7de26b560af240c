from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpfl.models.layers.convolution import convolve, max_pool, resolve, upsample_convolve
from tests.trees import assert_close

SHAPES = [
    # image, kernel, stride, padding
    ((2, 7, 6, 3), (3, 3, 3, 4), 1, "VALID"),
    ((1, 8, 9, 1), (3, 2, 1, 5), 2, "VALID"),
    ((2, 5, 5, 2), (3, 3, 2, 3), 1, "SAME"),
    ((2, 8, 7, 2), (4, 4, 2, 3), 2, "SAME"),
    ((1, 1, 2, 2), (3, 3, 2, 3), 1, "SAME"),
    ((3, 3, 3, 2), (3, 3, 2, 1), 1, "VALID"),
    ((2, 6, 6, 2), (1, 1, 2, 3), 3, "VALID"),
]


@pytest.mark.parametrize(("image", "kernel", "stride", "padding"), SHAPES)
def test_both_forms_give_the_same_values_and_gradients(image, kernel, stride, padding):
    rng = np.random.default_rng(0)
    x = rng.normal(size=image).astype(np.float32)
    k = rng.normal(size=kernel).astype(np.float32)

    @partial(jax.jit, static_argnums=0)
    def run(form, x, k):
        out, pull = jax.vjp(partial(convolve, stride=stride, padding=padding, form=form), x, k)
        return out, pull(jax.random.normal(jax.random.key(0), out.shape))

    assert_close(run("patches", x, k), run("convolution", x, k), atol=1e-5)


def test_max_pool_drops_an_odd_edge():
    x = jnp.arange(5 * 4, dtype=jnp.float32).reshape(1, 5, 4, 1)
    assert max_pool(x)[0, :, :, 0].tolist() == [[5.0, 7.0], [13.0, 15.0]]


def test_transposed_convolution_is_the_sum_it_claims():
    """Every input pixel lays its kernel, turned around, on the output at twice its place."""
    rng = np.random.default_rng(3)
    x, k = rng.normal(size=(2, 3, 2, 3)), rng.normal(size=(4, 4, 3, 2))
    expected = np.zeros((2, 6 + 2, 4 + 2, 2))
    for row in range(3):
        for column in range(2):
            laid = np.einsum("bc,ijco->bijo", x[:, row, column], k[::-1, ::-1])
            expected[:, 2 * row : 2 * row + 4, 2 * column : 2 * column + 4] += laid
    expected = expected[:, 1:-1, 1:-1]
    for form in ("patches", "convolution"):
        got = upsample_convolve(jnp.asarray(x, jnp.float32), jnp.asarray(k, jnp.float32), form=form)
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.long
def test_forms_of_the_transposed_convolution_give_the_same_gradients_of_both_orders():
    rng = np.random.default_rng(4)
    x = jnp.asarray(rng.normal(size=(2, 3, 4, 3)), jnp.float32)
    k = jnp.asarray(rng.normal(size=(4, 4, 3, 2)), jnp.float32)

    def penalty(x, k, form):
        def total(x):
            return jnp.sum(jnp.tanh(upsample_convolve(x, k, form=form)))

        return jnp.sum(jnp.square(jax.grad(total)(x)))

    first, second = (jax.grad(penalty, (0, 1))(x, k, form) for form in ("patches", "convolution"))
    assert_close(first, second, rtol=1e-4, atol=1e-4)
    assert all(np.abs(slope).max() > 0.1 for slope in first)


@pytest.mark.parametrize(
    ("platform", "form"), [("cpu", "patches"), ("tpu", "convolution"), ("gpu", "convolution")]
)
def test_the_form_follows_the_devices_of_the_mesh(platform, form):
    """Not the machine that traces: programs are compiled for devices that are elsewhere."""
    device = jax.sharding.AbstractDevice("some device", 1, platform)
    mesh = jax.sharding.AbstractMesh((1,), ("clients",), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        assert resolve("auto") == form
        assert resolve("patches") == "patches"
