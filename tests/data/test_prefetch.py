"""The prefetch thread: order, errors, and that it ends."""

import threading
import time

import pytest

from jaxpfl.data import prefetch
from jaxpfl.errors import InputError


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    assert not any(t.name.startswith("jaxpfl-prefetch") for t in threading.enumerate())


@pytest.mark.parametrize("count", [0, 1, 20])
def test_items_come_in_order_and_then_what_their_source_raised(count):
    def source():
        yield from range(count)
        raise InputError("row 3 is bad")

    with prefetch(range(count)) as items:
        assert list(items) == list(range(count))
        assert list(items) == []
    seen = []
    with pytest.raises(InputError, match="row 3 is bad"), prefetch(source()) as items:
        for item in items:
            seen.append(item)
    assert seen == list(range(count))


def test_leaving_early_or_by_an_error_ends_the_thread():
    with pytest.raises(KeyError, match="mine"), prefetch(iter(range(10**9))) as items:
        next(items)
        raise KeyError("mine")


def test_work_goes_two_items_ahead_and_no_further():
    """TRUST 4: memory is bounded."""
    made = []

    def source():
        for i in range(100):
            made.append(i)
            yield i

    with prefetch(source()) as items:
        assert next(items) == 0
        deadline = time.monotonic() + 10
        while len(made) < 3 and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(0.05)
        # One handed out, two ahead.
        assert made == [0, 1, 2]
