"""Work of NumPy on all cores: one thread for each, with products of one thread inside.

BLAS and LAPACK split a product among the cores by themselves. For one large product that is best.
Several small ones, or steps that are no products, are faster if every core has pieces of its own,
which then stay in its cache. Besides, the threads of BLAS go on looking for work for some
milliseconds after each product that they shared, on cores that XLA may need.
"""

import functools
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

from threadpoolctl import ThreadpoolController

T = TypeVar("T")
R = TypeVar("R")

# The number of BLAS's threads belongs to the process: two that changed it at once might each
# restore what the other one had set.
_LIMITING = threading.RLock()
_WORKER = threading.local()


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
