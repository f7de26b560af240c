"""Where something is computed: what may round otherwise elsewhere."""

import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax


def environment() -> dict[str, Any]:
    """What the bits of a computation follow from, besides its input; plain values for JSON."""
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
