"""Trees of arrays are compared leaf by leaf."""

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
