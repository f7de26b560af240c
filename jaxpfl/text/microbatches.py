"""Rows of arrays and parameters on the devices of a mesh, along its axis "data"."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpfl.errors import InputError
from jaxpfl.models.base import Params

DATA = "data"
"""The mesh axis whose devices share the rows."""


def filled(
    chosen: np.ndarray, microbatch_size: int, mesh: Mesh | None
) -> tuple[np.ndarray, np.ndarray]:
    """The rows of a microbatch, filled up by repeating the first, and which of them are real."""
    devices = 1 if mesh is None else mesh.shape[DATA]
    size = -(-microbatch_size // devices) * devices
    indices = np.concatenate([chosen, np.full(size - len(chosen), chosen[0])])
    return indices, np.arange(size) < len(chosen)


def dealt(tree: Any, mesh: Mesh | None) -> Any:
    """The arrays of a microbatch on the devices."""
    sharding = None if mesh is None else NamedSharding(mesh, PartitionSpec(DATA))
    return jax.device_put(tree, sharding)


def read(array: Array) -> np.ndarray:
    """All of an array, in each process of those whose devices hold parts of it."""
    whole = array.is_fully_addressable or array.is_fully_replicated
    return np.asarray(array if whole else multihost_utils.process_allgather(array, tiled=True))


def placed(params: Params, mesh: Mesh | None) -> Params:
    """The parameters on all devices of the mesh; those that are there keep their sharding."""
    if mesh is None:
        return jax.tree.map(jnp.asarray, params)
    if DATA not in mesh.axis_names:
        raise InputError(f"the mesh must have an axis {DATA!r}, found axes {mesh.axis_names}")
    devices = set(mesh.devices.flat)

    def place(leaf: Any) -> Array:
        if isinstance(leaf, Array) and leaf.sharding.device_set == devices:
            return leaf
        return jax.device_put(leaf, NamedSharding(mesh, PartitionSpec()))

    return jax.tree.map(place, params)
