"""Freed memory goes back to the system, but for what the next arrays need."""

import ctypes
import subprocess
import sys
from pathlib import Path

import pytest

from jaxpfl.federated.release import door

BLOCK, BLOCKS = 4096, 16_000  # 64 MB in blocks that the C library keeps when they are freed


def _resident() -> int:
    """The bytes of memory that this process occupies."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith("VmRSS:")))


def _glibc() -> ctypes.CDLL:
    library = ctypes.CDLL(None)
    if not hasattr(library, "malloc_trim") or not Path("/proc/self/status").exists():
        pytest.skip("malloc_trim is glibc's, and /proc Linux's")
    library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    library.free.argtypes = [ctypes.c_void_p]
    return library


def test_blocks_that_were_freed_are_given_back():
    library = _glibc()
    blocks = [library.malloc(BLOCK) for _ in range(BLOCKS)]
    for block in blocks:
        ctypes.memset(block, 1, BLOCK)
    # The last ones stay, so that the C library cannot cut off what lies before them.
    for block in blocks[:-10]:
        library.free(block)
    kept = _resident()
    door.give_back_memory()
    given_back = kept - _resident()
    for block in blocks[-10:]:
        library.free(block)
    assert given_back > BLOCK * BLOCKS // 2


_AGAIN = """
import ctypes, resource
from jaxpfl.federated.release.door import give_back_memory
library, size = ctypes.CDLL(None), 2**24
library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
library.free.argtypes = [ctypes.c_void_p]
give_back_memory()
for _ in range(3):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    array = library.malloc(size)
    ctypes.memset(array, 1, size)
    library.free(array)
print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) * resource.getpagesize() / size)
"""


def test_an_array_of_the_last_rounds_size_needs_no_new_pages():
    """In a process of its own, whose heap has no holes of other tests."""
    _glibc()
    done = subprocess.run(
        [sys.executable, "-c", _AGAIN], capture_output=True, text=True, check=True
    )
    assert float(done.stdout) < 0.1


def test_without_glibc_nothing_happens(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    door.give_back_memory()
