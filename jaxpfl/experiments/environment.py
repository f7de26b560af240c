"""Where a run is computed, and the noise that it has there."""

import hashlib
import json
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax

from jaxpfl.experiments.tracking import jsonable
from jaxpfl.privacy.keys import bound_to


def environment() -> dict[str, Any]:
    """What the bits of a computation follow from, besides its input."""
    return {
        "devices": [device.device_kind for device in jax.devices()],
        "processor": _processor(),
        "jax": version("jax"),
        "jaxlib": version("jaxlib"),
    }


def _processor() -> str:
    """The CPU's name, as far as the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if "model name" in line)
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def noise_root_in(
    environment: dict[str, Any], identity: dict[str, Any], noise_key: jax.Array
) -> jax.Array:
    """The root of a run's noise in one environment.

    A replayed round that comes out otherwise, because another machine rounds otherwise, must not
    carry the noise of the first release: their difference would be free of noise.
    """
    described = json.dumps(jsonable([identity, environment]), sort_keys=True)
    return bound_to(noise_key, hashlib.sha256(described.encode()).digest())
