"""The prefetch thread: order, errors, how far ahead, and that it always ends."""

import threading
import time

import pytest

from jaxpfl.data import prefetch
from jaxpfl.errors import InputError


@pytest.fixture(autouse=True)
def no_leaked_threads():
    before = set(threading.enumerate())
    yield
    leaked = set(threading.enumerate()) - before
    assert not leaked, f"threads outlive the with block: {leaked}"


def wait_until(condition) -> None:
    for _ in range(1000):
        if condition():
            return
        time.sleep(0.005)
    raise AssertionError("the thread did not get there within 5 seconds")


@pytest.mark.parametrize("depth", [1, 2, 50])
@pytest.mark.parametrize("count", [0, 1, 20])
def test_items_come_in_order_and_once(count, depth):
    with prefetch(iter(range(count)), depth) as items:
        assert list(items) == list(range(count))


def test_the_items_are_made_in_another_thread():
    with prefetch(threading.current_thread() for _ in range(1)) as items:
        assert next(items) is not threading.current_thread()


def test_an_error_reaches_the_consumer_after_the_items_before_it():
    def broken():
        yield 1
        yield 2
        raise OSError("disk")

    seen = []
    with pytest.raises(OSError, match="disk"), prefetch(broken()) as items:
        for item in items:
            seen.append(item)
    assert seen == [1, 2]


def test_an_error_is_raised_again_when_the_consumer_asks_again():
    def broken():
        raise OSError("disk")
        yield

    with prefetch(broken()) as items, pytest.raises(OSError, match="disk"):
        next(items)
    with prefetch(range(2)) as items:
        assert list(items) == [0, 1]
        assert list(items) == []


def test_leaving_early_ends_the_thread():
    with prefetch(iter(int, 1)) as items:
        assert next(items) == 0


def test_an_error_of_the_consumer_ends_the_thread_and_is_not_hidden():
    with pytest.raises(ZeroDivisionError), prefetch(iter(int, 1)) as items:
        1 // next(items)


def test_an_error_of_the_producer_after_an_early_exit_is_nobodys():
    entered, release = threading.Event(), threading.Event()

    def broken():
        yield 1
        entered.set()
        release.wait(5)
        raise OSError("disk")

    with prefetch(broken()) as items:
        assert next(items) == 1
        assert entered.wait(5)
        release.set()


@pytest.mark.parametrize("depth", [1, 3])
def test_memory_is_bounded_by_the_depth(depth):
    """TRUST 4: `depth` items wait, one more is in the making, whatever the cohort."""
    made = []

    def endless():
        while True:
            made.append(None)
            yield len(made)

    with prefetch(endless(), depth) as items:
        for used in range(5):
            wait_until(lambda used=used: len(made) == used + depth + 1)
            time.sleep(0.02)  # a thread that does not wait would run on
            assert len(made) == used + depth + 1
            assert next(items) == used + 1


@pytest.mark.parametrize("depth", [0, -1, 1.5, True, "2", float("nan")])
def test_a_wrong_depth_is_refused(depth):
    with pytest.raises(InputError, match="depth"), prefetch([], depth):
        pass
