"""The processor and the number of its cores."""

import os
import platform
from pathlib import Path

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
        return {"model name": platform.processor() or platform.machine()}
    first = (line.partition(":") for line in text.split("\n\n")[0].splitlines())
    fields = {name.strip(): value.strip() for name, _, value in first}
    kind = {name: fields[name] for name in _KIND if name in fields}
    for name in _INSTRUCTIONS:
        arithmetic = [x for x in fields.get(name, "").split() if x.startswith(_ARITHMETIC)]
        if arithmetic:
            kind["arithmetic"] = " ".join(sorted(arithmetic))
    return kind or {"model name": platform.processor() or platform.machine()}


def number() -> int:
    """Returns the number of cores that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1
