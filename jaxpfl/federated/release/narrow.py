"""Flattens arrays with few columns, and shapes them again, without the padding of a TPU.

A TPU lays the last axis of an array out in rows of 128 numbers. The compiler stores a matrix with
four columns the other way round, but turns it back to flatten it, and then it takes 32 times its
size: LoRA's adapters A [layers, inputs, rank] are such. Here each column is a vector of its own on
the way. The results have the same bits as those of `reshape`.
"""

import math

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

# Each column is an instruction of its own, so that only few of them are worth it.
_COLUMNS, _SIZE = 16, 2**18


def flattened(mesh: Mesh, array: jax.Array) -> jax.Array:
    """`array.reshape(-1)`, on the devices of this mesh."""
    if not _pads(mesh, array.shape):
        return array.reshape(-1)
    columns = array.shape[-1]
    # Unlike zero, it changes nothing that it is added to, not even the sign of a zero.
    nothing = jnp.asarray(-0.0, array.dtype)

    def interleaved(matrix_CxR: jax.Array) -> jax.Array:
        parts = (
            jax.lax.pad(column_R, nothing, [(place, columns - 1 - place, columns - 1)])
            for place, column_R in enumerate(matrix_CxR)
        )
        return sum(parts, start=jnp.full(matrix_CxR.size, nothing))

    # One matrix after the other, which compiles in a twentieth of the time.
    matrices_NxRxC = array.reshape(-1, *array.shape[-2:])
    return jax.lax.map(interleaved, jnp.swapaxes(matrices_NxRxC, 1, 2)).reshape(-1)


def shaped(mesh: Mesh, vector: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """`vector.reshape(shape)`, on the devices of this mesh."""
    if not _pads(mesh, shape):
        return vector.reshape(shape)
    columns = [vector[place :: shape[-1]] for place in range(shape[-1])]
    return jnp.stack(columns, axis=-1).reshape(shape)


def _pads(mesh: Mesh, shape: tuple[int, ...]) -> bool:
    """Whether the devices would pad an array of this shape to many times its size."""
    if mesh.devices.flat[0].platform != "tpu" or len(shape) < 2:
        return False
    return shape[-1] <= _COLUMNS and math.prod(shape) >= _SIZE
