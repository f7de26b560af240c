"""The sums of all leaves as one vector, of which each device has a share.

The shares of a vector are added up and get their noise where they are. No device holds more than
two vectors, however many there are.
"""

import dataclasses
import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpfl.federated.mesh import CLIENTS, MODEL, PyTree, splits_model
from jaxpfl.privacy.mechanisms import cut

# All sums are joined to one vector, which is padded to a multiple of such a number of entries, with
# at least one zero. The noise depends on its length, so that numbers of devices that divide both
# multiples (powers of two) release the same bits where the sum has the same bits. A device's share
# of a long vector is a multiple of 1,024 entries, because a TPU would copy other ones repeatedly.
_WIDTH, _LONG_WIDTH = 512, 512 * 1024
LONG = 2**23
# A TPU lays the last axis of an array out in rows of 128 numbers. The compiler stores a matrix with
# four columns the other way round, but turns it back to flatten it, and then it takes 32 times its
# size: LoRA's adapters A [layers, inputs, rank] are such. Column by column, the bits are the same.
# Each column is an instruction of its own, so that only few of them are worth it.
_COLUMNS, _SIZE = 16, 2**18


@dataclasses.dataclass(frozen=True)
class Shapes:
    """A hashable pytree of shapes, for a static argument of jit."""

    structure: Any
    shapes: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, like: PyTree) -> "Shapes":
        leaves, structure = jax.tree.flatten(like)
        return cls(structure, tuple(tuple(leaf.shape) for leaf in leaves))

    def tree(self) -> PyTree:
        leaves = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in self.shapes]
        return jax.tree.unflatten(self.structure, leaves)


@partial(jax.jit, static_argnames=("mesh", "like"))
def gathered(mesh: Mesh, value_W: jax.Array, like: Shapes) -> PyTree:
    """The first entries of a vector of which each device has a share, as a tree like `like`.

    Whole on every device: split among them, a server would add it up in another order than a
    resumed one.
    """
    whole_W = jax.shard_map(
        lambda share: jax.lax.all_gather(share, mesh.axis_names, tiled=True),
        mesh=mesh,
        in_specs=PartitionSpec(mesh.axis_names),
        out_specs=PartitionSpec(),
        check_vma=False,  # of a gathered array it cannot tell that all devices hold the same
    )(value_W)
    return cut(whole_W, like.tree(), partial(_shaped, mesh))


@partial(jax.jit, static_argnames=("mesh",))
def exchanged(mesh: Mesh, leaves: list[jax.Array]) -> jax.Array:
    """The replicas' arrays [replicas, ...] side by side, [replicas, W]: each device a share of W.

    A device sends others only their share, so that none holds more than two vectors, however many
    devices there are. If several devices share a replica, each sends to those in its own place.
    """
    width = sum(math.prod(leaf.shape[1:]) for leaf in leaves)
    padded = _round_up(width + 1, _WIDTH if width < LONG else _LONG_WIDTH)
    padded = _round_up(padded, mesh.size)

    def exchange(*leaves):
        rows = [_flattened(mesh, leaf[0]) for leaf in leaves]
        rows.append(jnp.zeros((padded - width,), leaves[0].dtype))
        shares_DxS = jnp.concatenate(rows).reshape(mesh.size, -1)
        if splits_model(mesh):
            shares_RxMxS = shares_DxS.reshape(*mesh.axis_sizes, -1)
            place = jax.lax.axis_index(MODEL)
            shares_DxS = jax.lax.dynamic_index_in_dim(shares_RxMxS, place, 1, keepdims=False)
        return jax.lax.all_to_all(shares_DxS, CLIENTS, split_axis=0, concat_axis=0)

    by_client, shares = PartitionSpec(CLIENTS), PartitionSpec(None, mesh.axis_names)
    return jax.shard_map(exchange, mesh=mesh, in_specs=by_client, out_specs=shares)(*leaves)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def dealt(mesh: Mesh, array: jax.Array) -> jax.Array:
    """Splits the last axis evenly among the devices."""
    spec = PartitionSpec(*[None] * (array.ndim - 1), mesh.axis_names)
    return jax.lax.with_sharding_constraint(array, NamedSharding(mesh, spec))


def _flattened(mesh: Mesh, array: jax.Array) -> jax.Array:
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


def _shaped(mesh: Mesh, vector: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    if not _pads(mesh, shape):
        return vector.reshape(shape)
    columns = [vector[place :: shape[-1]] for place in range(shape[-1])]
    return jnp.stack(columns, axis=-1).reshape(shape)


def _pads(mesh: Mesh, shape: tuple[int, ...]) -> bool:
    """Whether the devices would pad an array of this shape to many times its size."""
    if mesh.devices.flat[0].platform != "tpu" or len(shape) < 2:
        return False
    return shape[-1] <= _COLUMNS and math.prod(shape) >= _SIZE
