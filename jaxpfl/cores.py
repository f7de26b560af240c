"""The processor, the number of its cores, and work for all of them."""

import os
import platform
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

_T = TypeVar("_T")
_R = TypeVar("_R")

_CPUINFO = Path("/proc/cpuinfo")
# The fields of that file, on x86 and ARM, of a processor's kind and of its instructions.
_KIND = (
    *("model name", "cpu family", "model", "stepping"),
    *("CPU implementer", "CPU architecture", "CPU variant", "CPU part", "CPU revision"),
)
_INSTRUCTIONS = ("flags", "Features")
# Instructions of floating-point programs. The other flags change with the system's kernel.
_ARITHMETIC = ("amx", "asimd", "avx", "bf16", "f16c", "fma", "fp", "sse", "ssse", "sve", "sme")


def processor() -> dict[str, str]:
    """Returns the kind of the processor and its instructions, as far as the system tells them.

    The name alone is not enough: rented machines hide it ("AMD EPYC"), and on processors of one
    name that have other instructions, one program may round in another way.
    """
    try:
        text = _CPUINFO.read_text(encoding="utf-8")
    except OSError:
        text = ""
    first = (line.partition(":") for line in text.split("\n\n")[0].splitlines())
    fields = {name.strip(): value.strip() for name, _, value in first}
    kind = {name: fields[name] for name in _KIND if name in fields}
    for name in _INSTRUCTIONS:
        if arithmetic := [x for x in fields.get(name, "").split() if x.startswith(_ARITHMETIC)]:
            kind["arithmetic"] = " ".join(sorted(arithmetic))
    return kind or {"model name": platform.processor() or platform.machine()}


def number() -> int:
    """Returns the number of cores that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def mapped(function: Callable[[_T], _R], items: Sequence[_T]) -> list[_R]:
    """Returns `function` of each item. Each core has a thread, and some neighbouring items."""
    if not items:
        return []
    some = -(-len(items) // number())
    parts = [items[start : start + some] for start in range(0, len(items), some)]
    with ThreadPoolExecutor(max(1, len(parts) - 1)) as threads:
        others = threads.map(lambda part: [function(item) for item in part], parts[1:])
        return [function(item) for item in parts[0]] + [value for part in others for value in part]
