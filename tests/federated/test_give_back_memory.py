"""Freed memory goes back to the system."""

import ctypes
from pathlib import Path

import pytest

from jaxpfl.federated.release import door

BLOCK, BLOCKS = 4096, 16_000  # 64 MB in blocks that the C library keeps when they are freed


def _resident() -> int:
    """The bytes of memory that this process occupies."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith("VmRSS:")))


def test_blocks_that_were_freed_are_given_back():
    library = ctypes.CDLL(None)
    if not hasattr(library, "malloc_trim") or not Path("/proc/self/status").exists():
        pytest.skip("malloc_trim is glibc's, and /proc Linux's")
    library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    library.free.argtypes = [ctypes.c_void_p]
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


def test_without_glibc_nothing_happens(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    door.give_back_memory()
