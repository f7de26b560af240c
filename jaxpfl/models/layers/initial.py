"""Initial values of parameters, as `jax.nn.initializers` draws them, in less time to compile.

XLA takes two to four times as long to compile a draw for an array of several axes as for one of a
single axis, and a first round waits mostly for the draws of all parameters. The numbers are the
same: number i of an array in row-major order is a function of the key and of i. (Normal draws
are scaled in a program of their own, because XLA would join both factors of one, and round anew.)
"""

import math
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

Shape = tuple[int, ...]


@partial(jax.jit, static_argnums=1)
def glorot_uniform(key: Array, shape: Shape) -> Array:
    """Float32, uniform; variance 2 / (inputs + outputs) (Glorot and Bengio 2010).

    The shape is [..., inputs, outputs]; of a convolution, the axes of its window come first.
    """
    window = math.prod(shape[:-2])
    variance = np.float32(2 / ((shape[-2] + shape[-1]) * window))
    return uniform(key, shape, 1.0) * np.sqrt(3 * variance)


def normal(key: Array, shape: Shape, deviation: float) -> Array:
    """Float32, normal with this standard deviation."""
    return _rows(partial(jax.random.normal, key), shape) * np.float32(deviation)


def he_normal(key: Array, shape: Shape) -> Array:
    """Float32, normal within two deviations; variance 2 / inputs (He et al. 2015)."""
    deviation = np.sqrt(np.float32(2 / math.prod(shape[:-1])))
    drawn = _rows(partial(jax.random.truncated_normal, key, -2.0, 2.0), shape)
    # Divided by the deviation of the truncated standard normal.
    return drawn * (deviation / np.float32(0.87962566103423978))


@partial(jax.jit, static_argnums=(1, 2))
def uniform(key: Array, shape: Shape, bound: float) -> Array:
    """Float32, uniform in [-bound, bound)."""
    draw = partial(jax.random.uniform, key, minval=-bound, maxval=bound)
    return _rows(draw, shape)


def _rows(draw: Callable[..., Array], shape: Shape) -> Array:
    return draw(shape=(math.prod(shape),), dtype=jnp.float32).reshape(shape)
