"""The memory of this process that the C library keeps after it was freed."""

import ctypes
import functools
from collections.abc import Callable


def give_back() -> None:
    """Gives freed memory back to the system, where the C library can; elsewhere it does nothing.

    The compiler frees almost all that it took, but glibc keeps these pages for whatever is
    allocated next, and arrays are too large for them: the process would hold both.
    """
    trim = malloc_trim()
    if trim is not None:
        trim(0)


@functools.cache
def malloc_trim() -> Callable[[int], int] | None:
    """The function of this name, which glibc alone has."""
    try:
        return ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return None
