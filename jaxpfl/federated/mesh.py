"""The devices of a query, and the one rule for where its arrays are on them.

A mesh has the axis `clients`, and may have a second one, `model`. Clients are dealt to the rows,
each of which is one replica: its devices share the parameters, compute one client together, and
each has a part of the replica's sums. The compiler splits the client function among them as the
places of the parameters ask, and adds the exchanges between devices that this needs.

Where the model is split, all replicas run the same loops equally often, because some exchanges wait
for all devices, and not for those of one replica alone.
"""

from typing import Any, Protocol, runtime_checkable

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxpfl import checks
from jaxpfl.errors import InputError
from jaxpfl.federated.hosts import processes

PyTree = Any
CLIENTS, MODEL = "clients", "model"


@runtime_checkable
class Placing(Protocol):
    """A model or client function with a rule of its own for splitting parameters."""

    def shardings(self, mesh: Mesh, params: PyTree) -> PyTree:
        """A tree of `NamedSharding` like `params`, which holds arrays or shapes."""
        ...


def client_mesh(devices: int | None = None, *, model: int = 1) -> Mesh:
    """Returns a mesh over the first `devices` devices (default: all).

    Args:
      model: the devices that share one copy of the model. With 1, each device has its own, and the
        only axis is `clients`; otherwise the axes are `clients` and `model`.

    Raises:
      InputError: JAX sees fewer devices, or `model` does not divide their number, or there are
        several processes, which cannot share a model.
    """
    available = jax.devices()
    wanted = len(available) if devices is None else checks.positive_int("devices", devices)
    if wanted > len(available):
        raise InputError(f"a mesh of {wanted} devices was asked for, JAX sees {len(available)}")
    if wanted % checks.positive_int("model", model):
        raise InputError(
            f"model = {model} devices must share each copy of the model, but the mesh has {wanted} "
            "devices, which is not a multiple"
        )
    if model == 1:
        sizes, axes = (wanted,), (CLIENTS,)
    else:
        sizes, axes = (wanted // model, model), (CLIENTS, MODEL)
    kinds = (AxisType.Auto,) * len(axes)
    return checked(jax.make_mesh(sizes, axes, axis_types=kinds, devices=available[:wanted]))


def checked(mesh: Mesh) -> Mesh:
    """The mesh, if clients can be dealt to it.

    Raises:
      InputError: its axes are others, or several processes would share a copy of the model.
    """
    if mesh.axis_names not in ((CLIENTS,), (CLIENTS, MODEL)):
        raise InputError(
            "a mesh of clients must have the axis 'clients', or the axes 'clients' and 'model', "
            f"found {', '.join(map(repr, mesh.axis_names))}"
        )
    if splits_model(mesh) and processes.several():
        raise InputError(
            "a copy of the model can be split over the devices of one process only, found "
            f"{jax.process_count()} processes of jax.distributed: leave out the axis 'model'"
        )
    return mesh


def splits_model(mesh: Mesh) -> bool:
    """Whether several devices share a copy of the model."""
    return mesh.shape.get(MODEL, 1) > 1


def replicas(mesh: Mesh) -> int:
    """The number of copies of the model, each of which computes clients of its own."""
    return mesh.shape[CLIENTS]


def default_chunk(mesh: Mesh) -> int:
    """The number of clients that one replica of the mesh trains side by side, by platform.

    On a CPU, 1 is fastest (benchmarks/results/round.jsonl): a client's matrix products already fill
    the cores, and its weights stay in the cache. An accelerator needs many.
    """
    return 1 if mesh.devices.flat[0].platform == "cpu" else 32


def shardings(owner: Any, mesh: Mesh, tree: PyTree) -> PyTree:
    """Where parameters, or changes of them, are on a mesh: a tree like `tree` of `NamedSharding`.

    Without the axis `model`, every device holds all of them. With it, the owner's rule counts, if
    it is `Placing`; otherwise each array is split along its longest axis that the number of devices
    divides, and is whole on all of them where there is none.

    Args:
      owner: a client function or a model.
      tree: arrays or shapes.
    """
    if not splits_model(mesh):
        return jax.tree.map(lambda leaf: NamedSharding(mesh, PartitionSpec()), tree)
    if isinstance(owner, Placing):
        return owner.shardings(mesh, tree)
    return jax.tree.map(lambda leaf: NamedSharding(mesh, _longest(mesh, leaf.shape)), tree)


def _longest(mesh: Mesh, shape: tuple[int, ...]) -> PartitionSpec:
    """The longest axis of this shape that can be split, the last of equal ones."""
    parts = mesh.shape[MODEL]
    fitting = [(size, axis) for axis, size in enumerate(shape) if size and size % parts == 0]
    if not fitting:
        return PartitionSpec()
    _, chosen = max(fitting)
    return PartitionSpec(*[MODEL if axis == chosen else None for axis in range(len(shape))])
