"""What commands share: the devices of a config, and the name of a new directory."""

import dataclasses
import os
from pathlib import Path
from typing import Any


def use_devices(config: Any) -> Any:
    """Gives JAX the config's number of virtual CPU devices, before it starts.

    Returns:
      The config with that number, which a resumed run needs. Accelerators ignore it.
    """
    import jax

    devices = config.run.devices
    if devices is None:
        affinity = getattr(os, "sched_getaffinity", None)
        devices = len(affinity(0)) if affinity else os.cpu_count() or 1
    jax.config.update("jax_num_cpu_devices", devices)
    return dataclasses.replace(config, run=dataclasses.replace(config.run, devices=devices))


def unused_directory(name: str) -> Path:
    """`runs/NAME`, or `runs/NAME-2` and so on where that exists."""
    number = 1
    while True:
        path = Path("runs", name if number == 1 else f"{name}-{number}")
        if not path.exists():
            return path
        number += 1
