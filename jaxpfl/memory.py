"""Settings of malloc for the whole process; the command line makes them, no import or release does.

A program that calls `jaxpfl` from Python may call `give_back_after_compiling` itself.
"""

import ctypes
import functools

# The settings M_TRIM_THRESHOLD, M_TOP_PAD and M_MMAP_THRESHOLD of glibc's malloc.h, in bytes.
_LIMITS = {-1: 1 << 27, -2: 1 << 26, -3: 1 << 25}
# Short compilations are many, and free little.
_LEAST_SECONDS = 0.1


@functools.cache
def give_back_after_compiling() -> None:
    """Makes glibc give back the memory of the compiler; does nothing with another C library.

    The compiler frees almost all that it took. glibc keeps these pages for what is allocated next,
    but arrays are too large for them: so each compilation is followed by `malloc_trim`. Arrays of
    over 32 MiB get pages of their own: as this limit is fixed, the process does not grow over its
    rounds. With 1 MiB, rounds of few clients take up to 1.9 times as long, because the system
    clears new pages for each array. So up to 128 MiB that are free again are kept, too, and an
    emptied part of 64 MiB of a thread: with 32 MiB, a round of 10 clients asked for 15,000 pages.
    """
    import jax

    try:
        library = ctypes.CDLL(None)
        give_back, set_limit = library.malloc_trim, library.mallopt
    except (AttributeError, OSError, TypeError):
        return
    for limit, size in _LIMITS.items():
        set_limit(limit, size)

    def measured(event: str, duration_secs: float, **_: str | int) -> None:
        if event.endswith("backend_compile_duration") and duration_secs >= _LEAST_SECONDS:
            give_back(0)

    jax.monitoring.register_event_duration_secs_listener(measured)
