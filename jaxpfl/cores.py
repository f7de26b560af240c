"""The processor, and work of NumPy on all its cores: one thread for each.

BLAS and LAPACK split a product among the cores by themselves. For one large product that is best.
Several small ones, or steps that are no products, are faster if every core has pieces of its own,
which then stay in its cache. In addition, the threads of BLAS go on looking for work for some
milliseconds after each product that they shared, on cores that XLA may need.
"""

import functools
import os
import platform
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from threadpoolctl import ThreadpoolController

T = TypeVar("T")
R = TypeVar("R")

# The number of BLAS's threads belongs to the process: two that changed it at once might each
# restore what the other one had set.
_LIMITING = threading.RLock()
_WORKER = threading.local()


_CPUINFO = Path("/proc/cpuinfo")
# Of that file, on x86 and ARM: the kind of a processor, and the instructions it has.
_KIND = (
    *("model name", "cpu family", "model", "stepping"),
    *("CPU implementer", "CPU architecture", "CPU variant", "CPU part", "CPU revision"),
)
_INSTRUCTIONS = ("flags", "Features")
# Those that floating-point programs are compiled to. The others change with the system's kernel.
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
    found = {name: fields[name] for name in _KIND if name in fields}
    for name in _INSTRUCTIONS:
        known = fields.get(name, "").split()
        listed = sorted(each for each in known if each.startswith(_ARITHMETIC))
        if listed:
            found["arithmetic"] = " ".join(listed)
    return found or {"model name": platform.processor() or platform.machine()}


def number() -> int:
    """Returns the number of cores that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


@contextmanager
def one_thread_a_product() -> Iterator[None]:
    """Within it, BLAS and LAPACK compute every product of this process on one thread."""
    with _LIMITING, _libraries().limit(limits=1, user_api="blas"):
        yield


def side_by_side(function: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """Returns `[function(item) for item in items]`, with a thread for each core.

    `function` must release Python's lock for most of its time, as NumPy does. Where there is one
    item or one core, and inside of another call, it is the plain loop.
    """
    items = list(items)
    threads = min(number(), len(items))
    if threads < 2 or getattr(_WORKER, "busy", False):
        return [function(item) for item in items]
    with one_thread_a_product(), ThreadPoolExecutor(threads, initializer=_become_worker) as pool:
        return list(pool.map(function, items))


def _become_worker() -> None:
    _WORKER.busy = True


@functools.cache
def _libraries() -> ThreadpoolController:
    """The libraries that are loaded when it is first asked for; NumPy's BLAS is among them."""
    return ThreadpoolController()
