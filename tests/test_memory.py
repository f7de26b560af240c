"""Freed memory goes back to the system, but for what the next arrays need.

That only commands set this is a rule of `tools.architecture`.
"""

import ctypes
import subprocess
import sys
from pathlib import Path

import pytest

from jaxpfl import memory

_HEAD = """
import ctypes, resource
import jax
from jaxpfl import memory
library = ctypes.CDLL(None)
library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
library.free.argtypes = [ctypes.c_void_p]
resident = lambda: resource.getpagesize() * int(open("/proc/self/statm").read().split()[1])
compiled = lambda: jax.monitoring.record_event_duration_secs(
    "/jax/core/compile/backend_compile_duration", 1.0
)
memory.give_back_after_compiling()
"""

_FREED = """
blocks = [library.malloc(4096) for _ in range(16_000)]
for block in blocks:
    ctypes.memset(block, 1, 4096)
# The last ones stay, so that the C library cannot cut off what lies before them.
for block in blocks[:-10]:
    library.free(block)
kept = resident()
compiled()
print((kept - resident()) / (4096 * len(blocks)))
"""

_AGAIN = """
compiled()
size = 2**24
for _ in range(3):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    array = library.malloc(size)
    ctypes.memset(array, 1, size)
    library.free(array)
print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) * resource.getpagesize() / size)
"""
_COMPILES = """
from types import SimpleNamespace
import jax.numpy as jnp
trims = []
fake = SimpleNamespace(malloc_trim=trims.append, mallopt=lambda limit, size: None)
ctypes.CDLL = lambda name: fake
memory._LEAST_SECONDS = 0.0
memory.give_back_after_compiling.__wrapped__()
jax.jit(lambda x: x @ x)(jnp.ones((3, 3)))
print(len(trims))
"""


def test_what_a_compilation_freed_is_given_back_and_what_a_round_needs_again_is_not():
    if not hasattr(ctypes.CDLL(None), "malloc_trim") or not Path("/proc/self/status").exists():
        pytest.skip("malloc_trim is glibc's, and /proc Linux's")
    # In a process of its own, whose heap has no holes of other tests.
    program = _HEAD + _FREED + _AGAIN + _COMPILES
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    given_back, new_pages, trims = map(float, done.stdout.split())
    assert given_back > 0.5
    assert new_pages < 0.1
    # Each compilation is followed by it.
    assert trims > 0


def test_with_another_c_library_nothing_happens(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    memory.give_back_after_compiling.__wrapped__()
