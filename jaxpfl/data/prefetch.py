"""A thread that packs the next buckets while the device works on this one."""

import queue
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

from jaxpfl import checks

T = TypeVar("T")


class _End(NamedTuple):
    """The last entry of the queue: the iterable is exhausted, or raised `error`."""

    error: BaseException | None


@contextmanager
def prefetch(items: Iterable[T], depth: int = 2) -> Iterator[Iterator[T]]:
    """Iterates over `items` in a thread, at most `depth` >= 1 items ahead.

        with prefetch(cohort) as buckets:
            state, metrics = algorithm.step(state, buckets, keys)

    An exception in `items` is raised in the consumer, after the items before it. When the `with`
    block is left, also early or by an exception, the thread has ended. In memory are `depth` items
    in the queue, the one that is being made and the one in use.
    """
    ahead: queue.Queue[T | _End] = queue.Queue(checks.positive_int("depth", depth))
    stopped = threading.Event()

    def produce() -> None:
        error = None
        try:
            for item in items:
                ahead.put(item)
                if stopped.is_set():
                    return
        except BaseException as raised:
            error = raised
        ahead.put(_End(error))

    def consume() -> Iterator[T]:
        while True:
            item = ahead.get()
            if not isinstance(item, _End):
                yield item
                continue
            # A second iteration must find it too, or else it would wait for ever.
            ahead.put(item)
            if item.error is not None:
                raise item.error
            return

    thread = threading.Thread(target=produce, name="jaxpfl-prefetch", daemon=True)
    thread.start()
    try:
        yield consume()
    finally:
        stopped.set()
        while thread.is_alive():
            # Makes room for a producer that waits to put an item, so that it sees `stopped`.
            try:
                ahead.get_nowait()
            except queue.Empty:
                thread.join(0.01)
