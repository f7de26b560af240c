"""Arrays with few columns on a TPU: the bits of `reshape`, by another way."""

import jax
import numpy as np
import pytest

from jaxpfl.federated import client_mesh
from jaxpfl.federated.release import vector

WHOLE = [
    np.arange(np.prod(shape), dtype=np.int32).reshape(shape) - 7
    for shape in ((3, 5, 4), (7, 2), (2, 3, 4, 3), (2, 6, 1))
]
# Zeros have signs, and there are numbers that are none.
WHOLE.append(np.array([[-0.0, 0.0], [np.nan, -np.inf], [1e-30, -1.5]], np.float32))


@pytest.mark.parametrize("whole", WHOLE, ids=lambda whole: str(whole.shape))
def test_columns_go_where_reshape_puts_them_to_the_bit(whole, monkeypatch):
    monkeypatch.setattr(vector, "_pads", lambda mesh, shape: True)
    mesh = client_mesh(1)
    flat = jax.jit(vector._flattened, static_argnums=0)(mesh, whole)
    assert np.asarray(flat).tobytes() == whole.tobytes()
    found = jax.jit(vector._shaped, static_argnums=(0, 2))(mesh, flat, whole.shape)
    assert found.shape == whole.shape and np.asarray(found).tobytes() == whole.tobytes()
