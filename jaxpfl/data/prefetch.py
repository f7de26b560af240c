"""A thread that packs the next buckets while the device works on this one."""

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar, cast

T = TypeVar("T")
_END = object()
_AHEAD = 2


@contextmanager
def prefetch(items: Iterable[T]) -> Iterator[Iterator[T]]:
    """Iterates over `items` in a thread, at most two items ahead.

    An exception in `items` is raised in the consumer, after the items before it. When the `with`
    block is left, also early or by an exception, the thread has ended. In memory are two items that
    are made or being made, and the one in use.
    """
    source = iter(items)
    with ThreadPoolExecutor(1, "jaxpfl-prefetch") as thread:
        ahead = deque(thread.submit(next, source, _END) for _ in range(_AHEAD))

        def consume() -> Iterator[T]:
            # The last future stays in the queue, so that a second iteration ends, too.
            while (item := ahead[0].result()) is not _END:
                ahead.popleft()
                ahead.append(thread.submit(next, source, _END))
                yield cast(T, item)

        try:
            yield consume()
        finally:
            for future in ahead:
                future.cancel()
