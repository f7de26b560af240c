"""The prefetch thread: order, errors, and that it ends."""

import threading
import time

import pytest

from jaxpfl.data import prefetch
from jaxpfl.errors import InputError


def threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("jaxpfl-prefetch")]


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    assert threads() == []


@pytest.mark.parametrize("depth", [1, 2, 50])
def test_items_come_in_order(depth):
    with prefetch(range(20), depth) as items:
        assert list(items) == list(range(20))
        assert list(items) == []
    assert threads() == []


def test_work_goes_ahead_by_the_depth_and_no_further():
    """TRUST 4: memory is bounded by the depth."""
    made = []

    def source():
        for i in range(100):
            made.append(i)
            yield i

    with prefetch(source(), depth=2) as items:
        assert next(items) == 0
        deadline = time.monotonic() + 10
        while len(made) < 3 and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(0.05)
        # One handed out, two ahead.
        assert made == [0, 1, 2]


@pytest.mark.parametrize("before", [[], [1, 2]])
def test_an_error_reaches_the_consumer_after_the_items_before_it(before):
    def source():
        yield from before
        raise InputError("row 3 is bad")

    seen = []
    with pytest.raises(InputError, match="row 3 is bad"), prefetch(source()) as items:
        for item in items:
            seen.append(item)
    assert seen == before


def test_leaving_early_or_by_an_error_ends_the_thread():
    with prefetch(iter(range(10**9)), depth=1) as items:
        assert next(items) == 0
    assert threads() == []
    with pytest.raises(KeyError, match="mine"), prefetch(iter(range(10**9))) as items:
        next(items)
        raise KeyError("mine")
    assert threads() == []


@pytest.mark.parametrize("depth", [0, -1, 1.5, True])
def test_depth_is_a_positive_whole_number(depth):
    with pytest.raises(InputError, match="depth"), prefetch([], depth):
        pass
