"""The product of the output layer and of attention's scores has the gradients of a plain one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpfl.models.decoder.layers import wide_matmul


@pytest.mark.parametrize("outer", [(), (2, 3)])
def test_a_wide_product_has_the_gradients_of_a_plain_one(outer):
    keys = jax.random.split(jax.random.key(0), 3)
    left = jax.random.normal(keys[0], (*outer, 5, 4))
    right = jax.random.normal(keys[1], (*outer, 4, 6))
    weight = jax.random.normal(keys[2], (*outer, 5, 6))

    def gradients(product, left, right):
        def loss(left, right):
            return jnp.sum(product(left, right).astype(jnp.float32) * weight)

        return jax.jit(jax.grad(loss, (0, 1)))(left, right)

    wanted = gradients(jnp.matmul, left, right)
    for found, plain in zip(gradients(wide_matmul, left, right), wanted, strict=True):
        np.testing.assert_allclose(found, plain, rtol=1e-5, atol=1e-5)
    narrow = (left.astype(jnp.bfloat16), right.astype(jnp.bfloat16))
    assert wide_matmul(*narrow).dtype == jnp.float32
    for found, plain in zip(gradients(wide_matmul, *narrow), wanted, strict=True):
        assert found.dtype == jnp.bfloat16
        np.testing.assert_allclose(found.astype(jnp.float32), plain, rtol=0.05, atol=0.1)
