"""Arrays with few columns on a TPU: the bits of `reshape`, by another way."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpfl.federated import client_mesh
from jaxpfl.federated.release import vector

SHAPES = [(3, 5, 4), (7, 2), (2, 3, 4, 3), (2, 6, 1)]


@pytest.fixture(autouse=True)
def as_on_a_tpu(monkeypatch):
    monkeypatch.setattr(vector, "_pads", lambda mesh, shape: True)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_columns_go_where_reshape_puts_them(shape):
    mesh = client_mesh(1)
    whole = np.arange(np.prod(shape), dtype=np.int32).reshape(shape) - 7
    flat = jax.jit(vector._flattened, static_argnums=0)(mesh, whole)
    np.testing.assert_array_equal(flat, whole.reshape(-1))
    found = jax.jit(vector._shaped, static_argnums=(0, 2))(mesh, flat, shape)
    np.testing.assert_array_equal(found, whole)


def test_every_bit_is_kept():
    """Zeros have signs, and there are numbers that are none."""
    held = np.array([[-0.0, 0.0], [np.nan, -np.inf], [1e-30, -1.5]], np.float32)
    flat = jax.jit(vector._flattened, static_argnums=0)(client_mesh(1), jnp.asarray(held))
    np.testing.assert_array_equal(
        np.asarray(flat).view(np.uint32), held.reshape(-1).view(np.uint32)
    )
