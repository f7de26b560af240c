"""The devices of a query, and the one rule for where its arrays are on them.

A mesh has the axis `clients`, and may have a second one, `model`. Clients are dealt to the rows,
each of which is one replica: its devices share the parameters, compute one client together, and
each has a part of the replica's sums. The compiler splits the client function among them as the
places of the parameters ask, and adds the exchanges between devices that this needs.

The devices may belong to several processes, which `jax.distributed` joined. Each process puts the
shards of its own devices in place, and has memory and files of its own.

Where the model is split, all replicas run the same loops equally often, because some exchanges wait
for all devices, and not for those of one replica alone.
"""

import itertools
import os
from functools import partial
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

# JAX has no public access to its key-value store, and does not say whether it has begun to compute.
from jax._src import distributed, xla_bridge  # isort: skip

from jaxpfl import checks
from jaxpfl.errors import InputError

PyTree = Any
CLIENTS, MODEL = "clients", "model"

WAIT_MS = 7 * 24 * 3600 * 1000
"""Every wait is as long as a run may be; a thread ends a process whose others are gone."""
# Each process meets the others in the same order, so that the numbers agree.
_MEETINGS = itertools.count()
# Whether this process was forked from one in which JAX computed: its threads are not here, and what
# one of them had locked stays so.
_forked = [False]
os.register_at_fork(after_in_child=lambda: _forked.append(bool(xla_bridge._backends)))


@runtime_checkable
class Placing(Protocol):
    """A model or client function with a rule of its own for splitting parameters."""

    def shardings(self, mesh: Mesh, params: PyTree) -> PyTree:
        """A tree of `NamedSharding` like `params`, which holds arrays or shapes."""


def client_mesh(devices: int | None = None, *, model: int = 1) -> Mesh:
    """Returns a mesh over the first `devices` devices (default: all).

    Args:
      model: the devices that share one copy of the model. With 1, each device has its own, and the
        only axis is `clients`; otherwise the axes are `clients` and `model`.

    Raises:
      InputError: JAX sees fewer devices, `model` does not divide their number, or the devices of
        one copy of the model would belong to several processes.
    """
    available = all_devices()
    wanted = len(available) if devices is None else checks.positive_int("devices", devices)
    if wanted > len(available):
        raise InputError(f"a mesh of {wanted} devices was asked for, JAX sees {len(available)}")
    return checked(grid(available[:wanted], CLIENTS, model))


def all_devices() -> list[Any]:
    """`jax.devices()`; `InputError` if JAX cannot start, or could only wait in a forked process."""
    if any(_forked):
        raise InputError(
            "this process was forked after JAX had begun to compute, and could only wait for ever: "
            "start processes by multiprocessing.get_context('spawn'), or before JAX computes"
        )
    try:
        return jax.devices()
    except (RuntimeError, AssertionError) as error:
        platforms: Any = jax.config
        reason = next(iter(str(error).splitlines()), "there is none")
        raise InputError(
            f"JAX finds no device of JAX_PLATFORMS={platforms.jax_platforms or ''}: name one that "
            f"this machine and this installation have, such as cpu, or none ({reason})"
        ) from error


def grid(devices: list[Any], first: str, model: int = 1) -> Mesh:
    """A mesh with the axis `first` and, where several devices share a copy of it, `model`."""
    if len(devices) % checks.positive_int("model", model):
        raise InputError(
            f"model = {model} devices must share each copy of the model, but the mesh has "
            f"{len(devices)} devices, which is not a multiple"
        )
    number = 1 if model == 1 else 2
    sizes, axes = (len(devices) // model, model)[:number], (first, MODEL)[:number]
    return jax.make_mesh(sizes, axes, axis_types=(AxisType.Auto,) * number, devices=devices)


def checked(mesh: Mesh) -> Mesh:
    """The mesh, if clients can be dealt to it."""
    if mesh.axis_names not in ((CLIENTS,), (CLIENTS, MODEL)):
        raise InputError(
            "a mesh of clients must have the axis 'clients', or the axes 'clients' and 'model', "
            f"found {', '.join(map(repr, mesh.axis_names))}"
        )
    rows = mesh.devices.reshape(mesh.devices.shape[0], -1)
    if any(len({device.process_index for device in row}) > 1 for row in rows):
        raise InputError(
            "the devices of one copy of the model must belong to one process, found several"
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
    """The places of parameters, or their changes, on a mesh: a tree of `NamedSharding`.

    Without the axis `model`, every device holds all of them. With it, the owner's rule counts, if
    it is `Placing`; otherwise each array is split along its longest axis that the number of devices
    divides, and is whole on all of them where there is none.
    """
    if not splits_model(mesh):
        return jax.tree.map(lambda leaf: NamedSharding(mesh, PartitionSpec()), tree)
    if isinstance(owner, Placing):
        return owner.shardings(mesh, tree)
    return jax.tree.map(lambda leaf: NamedSharding(mesh, _longest(mesh, leaf.shape)), tree)


def _longest(mesh: Mesh, shape: tuple[int, ...]) -> PartitionSpec:
    parts = mesh.shape[MODEL]
    fitting = [(size, axis) for axis, size in enumerate(shape) if size and size % parts == 0]
    if not fitting:
        return PartitionSpec()
    _, chosen = max(fitting)
    return PartitionSpec(*[MODEL if axis == chosen else None for axis in range(len(shape))])


def several() -> bool:
    """Whether this process is one of several that `jax.distributed` joined."""
    # Asked first, because the second question takes hold of the accelerators.
    return jax.distributed.is_initialized() and jax.process_count() > 1


def leads() -> bool:
    """Whether this process holds the secret, the ledger and the files: it is the only one or 0."""
    return not several() or jax.process_index() == 0


def require_one_process(what: str, instead: str) -> None:
    """Refuses to share `what` among processes, and says why, or what to do `instead`."""
    if several():
        raise InputError(
            f"{what} needs one process, found {jax.process_count()} processes of jax.distributed, "
            f"each with a secret and a ledger of its own: {instead}; nothing was charged"
        )


def put(tree: PyTree, sharding: NamedSharding) -> PyTree:
    """`jax.device_put`; each process gives the part of an array that its own devices hold."""
    if sharding.is_fully_addressable:
        return jax.device_put(tree, sharding)
    made = partial(jax.make_array_from_process_local_data, sharding)
    return jax.tree.map(lambda leaf: made(np.asarray(leaf)), tree)


def shares(mesh: Mesh) -> tuple[int, ...]:
    """The places of this process's devices on the mesh's first axis, that of clients."""
    own, rows = jax.process_index(), mesh.devices.reshape(mesh.devices.shape[0], -1)
    return tuple(i for i, row in enumerate(rows) if row[0].process_index == own)


def put_shares(tree: PyTree, mesh: Mesh) -> PyTree:
    """Splits the first axis of arrays evenly along the mesh's first axis, that of clients.

    A process gives the shares of its own devices alone, in their order.
    """
    return put(tree, NamedSharding(mesh, PartitionSpec(mesh.axis_names[0])))


def whole(tree: PyTree) -> PyTree:
    """Arrays of numpy, in all processes, of those that are split among them (`put_shares`)."""
    from jax.experimental import multihost_utils

    meet(tree)
    return multihost_utils.process_allgather(tree, tiled=True)


def here(tree: PyTree) -> PyTree:
    """Arrays that all devices hold whole, on this process's devices alone."""

    def local(array: jax.Array) -> jax.Array:
        if not isinstance(array, jax.Array) or array.is_fully_addressable:
            return array
        spread: Any = array.sharding
        sharding = NamedSharding(spread.mesh.local_mesh, spread.spec)
        shards = [shard.data for shard in array.addressable_shards]
        return jax.make_array_from_single_device_arrays(array.shape, sharding, shards)

    return jax.tree.map(local, tree)


def settle(tree: PyTree) -> None:
    """On several CPU devices: waits until the arrays are computed.

    If programs are dispatched while a collective runs there, XLA (jax 0.10.2) on a busy machine may
    not start the collective on one device any more; the others wait, and after 40 seconds it ends
    the process.
    """
    leaf = jax.tree.leaves(tree)[0]
    devices = [] if isinstance(leaf, Tracer) else [*leaf.sharding.device_set]
    if len(devices) > 1 and devices[0].platform == "cpu":
        jax.block_until_ready(tree)


def meet(tree: PyTree) -> None:
    """Waits until all processes have computed arrays that are spread over them."""
    leaves = jax.tree.leaves(tree)
    local = (isinstance(leaf, Tracer) or leaf.is_fully_addressable for leaf in leaves)
    if not several() or all(local):
        return
    jax.block_until_ready(tree)
    store().wait_at_barrier(f"jaxpfl/meeting/{next(_MEETINGS)}", WAIT_MS)


def of_all_processes(words: str) -> list[str]:
    """The words of each process, in their order; all of them call it."""
    name = f"jaxpfl/said/{next(_MEETINGS)}"
    own = f"{name}/{jax.process_index()}"
    store().key_value_set(own, words)
    every = range(jax.process_count())
    texts = [store().blocking_key_value_get(f"{name}/{index}", WAIT_MS) for index in every]
    store().wait_at_barrier(name, WAIT_MS)
    store().key_value_delete(own)
    return texts


def store() -> Any:
    """The key-value store of the processes that `jax.distributed` joined."""
    return distributed.global_state.client
