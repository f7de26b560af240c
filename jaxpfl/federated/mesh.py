"""The devices that share a cohort: a one-dimensional mesh whose axis is called `clients`."""

import jax
from jax.sharding import AxisType, Mesh

CLIENTS = "clients"


def client_mesh(devices: int | None = None) -> Mesh:
    """Returns a mesh over the first `devices` devices (default: all of them).

    Clients are independent, so this one axis serves one CPU, several virtual CPU devices,
    several GPUs and several hosts alike.
    """
    available = jax.devices()
    chosen = available if devices is None else available[:devices]
    if devices is not None and len(available) < devices:
        raise ValueError(f"a mesh of {devices} devices was asked for, JAX sees {len(available)}")
    return jax.make_mesh((len(chosen),), (CLIENTS,), axis_types=(AxisType.Auto,), devices=chosen)
