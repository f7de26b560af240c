"""Packing the next buckets while the device works on the last."""

import queue
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

Item = TypeVar("Item")

_END = object()


@contextmanager
def prefetch(items: Iterable[Item], ahead: int = 2) -> Iterator[Iterator[Item]]:
    """Iterates over `items` on a thread of its own, at most `ahead` of the consumer.

        with prefetch(Cohort(...)) as buckets:
            state, metrics = algorithm.step(state, buckets, keys)

    An exception in `items` is raised where the consumer asks for the next one. On leaving, also
    early or by an exception, the thread has ended.
    """
    ready: queue.Queue = queue.Queue(maxsize=ahead)
    stopped = threading.Event()

    def offer(item) -> bool:
        while not stopped.is_set():
            try:
                ready.put(item, timeout=0.05)
                return True
            except queue.Full:
                continue
        return False

    def work():
        try:
            for item in items:
                if not offer((item, None)):
                    return
            offer((_END, None))
        except BaseException as error:  # handed over to the consumer, whatever it is
            offer((_END, error))

    thread = threading.Thread(target=work, name="prefetch", daemon=True)
    thread.start()

    def taken():
        while True:
            item, error = ready.get()
            if error is not None:
                raise error
            if item is _END:
                return
            yield item

    try:
        yield taken()
    finally:
        stopped.set()
        thread.join()
