"""Trees of arrays are compared leaf by leaf, and drawn."""

from typing import Any

import jax
import numpy as np


def assert_same(found: Any, expected: Any) -> None:
    """To the bit."""
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def assert_close(found: Any, expected: Any, rtol: float = 1e-5, atol: float = 0.0) -> None:
    """But for rounding."""
    jax.tree.map(
        lambda one, other: np.testing.assert_allclose(one, other, rtol=rtol, atol=atol),
        found,
        expected,
    )


def drawn(model: Any, seed: int = 1, scale: float = 0.3) -> Any:
    """Parameters in which every scale, bias and matrix matters; a Gemma adds 1 to its scales.

    NumPy's arrays: to compile `init`, and each slice of what it returns, takes longer than most
    of what is done with it.
    """
    rng = np.random.default_rng(seed)
    near_one = getattr(getattr(model, "config", None), "model_type", "") != "gemma3_text"

    def leaf(path, shape):
        mean = float(near_one and getattr(path[-1], "key", "") == "scale")
        return rng.normal(mean, scale, shape.shape).astype(shape.dtype)

    return jax.tree.map_with_path(leaf, jax.eval_shape(model.init, jax.random.key(0)))
