"""Strict modes for every test: what a user's machine forgives is an error here."""

import ctypes
import gc
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from tests import offline

# Before anything that starts threads is imported.
_NETWORK = offline.close()

# Read by JAX when it is first imported: two devices, so that sharding is always exercised.
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "2")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("MPLBACKEND", "Agg")
# Nobody reads of which lines of Python a compiled program is: that takes time to write down.
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")
# NumPy's products of a few thousand numbers would wake a thread for each core, which takes a
# thousand times as long where these have other work, as with two processes of tests.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# Most of the time of the tests is compilation. Without LLVM's optimisation, without the emitters of
# fusions, which have a compiler of their own, and with one module a program it takes a fifth.
# JAXPFL_TEST_XLA=full compiles as a user's process does: `make test-newest` and `test-slow`.
_QUICK = (
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    " --xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"
    " --xla_cpu_parallel_codegen_split_count=1"
)
# XLA ends a process whose devices do not meet within 40 s, as on a machine that is too busy.
_PATIENT = "--xla_cpu_collective_call_terminate_timeout_seconds=1200"
# Cohorts and noise follow from a run's identity, and so from processor, flags and versions: a test
# may hold on one machine and fail on another. A salt is another machine, as far as that goes: a
# flag of dumps, which has no effect without them, and which is in no key of JAX's cache.
_flags = os.environ.get("XLA_FLAGS", "")
if "JAXPFL_TEST_SALT" in os.environ:
    _salt = f"--xla_dump_max_hlo_modules={os.environ['JAXPFL_TEST_SALT']}"
    if _salt not in _flags.split():
        os.environ["XLA_FLAGS"] = _flags = f"{_flags} {_salt}".strip()
_FULL = os.environ.get("JAXPFL_TEST_XLA") == "full"
if _PATIENT not in _flags:
    wanted = _PATIENT if _FULL else f"{_PATIENT} {_QUICK}"
    os.environ["XLA_FLAGS"] = f"{_flags} {wanted}".strip()

from jaxpfl import compilation_cache

# Most of a test's time is compilation: what one process compiled, no other compiles again, and nor
# does the same process for a function that is made anew.
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
compilation_cache.enable()

import hypothesis
import jax
import matplotlib.figure
import psutil
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
# With it, every call of a compiled program and every single operation goes through Python.
jax.config.update("jax_debug_key_reuse", _FULL)

# The modules imported so far live as long as the process, and tracing makes objects by the million
# that are not garbage: looking through both again and again took a tenth of the time.
gc.freeze()
gc.set_threshold(100_000, 20, 50)

# No deadline: a test must not fail because the machine is busy. Derandomised: a red build stays
# red, on every machine.
hypothesis.settings.register_profile(
    "jaxpfl", deadline=None, derandomize=True, database=None, max_examples=100 if _FULL else 20
)
hypothesis.settings.load_profile("jaxpfl")

# The files that take longest, longest first; some only with the tests that `make test` leaves out.
_LONGEST = (
    "federated/test_hosts.py", "test_docs.py", "experiments/test_without_data.py",
    "tools/test_audits.py", "experiments/systems/synthetic_text/test_killed.py",
    "experiments/systems/synthetic_text/test_study.py", "faults/test_resume.py",
    "experiments/systems/federated_training/test_stages.py", "federated/test_canaries.py",
    "experiments/systems/federated_training/test_published.py",
    "experiments/systems/synthetic_text/test_published.py",
)  # fmt: skip


def pytest_report_header() -> str:
    return f"network: {_NETWORK}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begins with the files that take longest: processes that share the files end together."""
    tests = Path(__file__).parent
    rank = {tests / file: number for number, file in enumerate(_LONGEST)}
    items.sort(key=lambda item: rank.get(item.path, len(rank)))


@pytest.fixture(scope="module", autouse=True)
def _forget_compiled_programs() -> Iterator[None]:
    """A process would grow to gigabytes: few programs of one file are used by the next."""
    yield
    if psutil.Process().memory_info().rss > psutil.virtual_memory().total / 4:
        jax.clear_caches()
        gc.collect()
        # Else the memory stays the process's own, and every file to come would begin without any.
        if sys.platform == "linux":
            getattr(ctypes.CDLL(None), "malloc_trim", int)(0)


_draw = matplotlib.figure.Figure.savefig
_BLANK = bytes.fromhex(  # a PNG of one white pixel
    "89504e470d0a1a0a0000000d49484452000000010000000108000000003a7e9b5500"
    "00000a49444154789c63f80f0001010100b138f6140000000049454e44ae426082"
)


@pytest.fixture(scope="session", autouse=True)
def _pictures_are_blank() -> Iterator[None]:
    """Every run draws its pictures, which took nearly a tenth of the time; `drawn` draws them."""

    def save(self: object, file: Any, **options: object) -> None:
        with open(file, "wb") if isinstance(file, str | Path) else nullcontext(file) as target:
            target.write(_BLANK)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(matplotlib.figure.Figure, "savefig", save)
        # It lays out the ticks of each.
        patch.setattr("jaxpfl.experiments.report.page.plain", lambda figure: figure)
        yield


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures are drawn in this test."""
    from jaxpfl.experiments.report import page, plots

    monkeypatch.setattr(matplotlib.figure.Figure, "savefig", _draw)
    monkeypatch.setattr(page, "plain", plots.plain)


@pytest.fixture(scope="session", autouse=True)
def _nothing_waits_for_the_disk() -> Iterator[None]:
    """Tests kill processes and no machine: what was written is there without `fsync`.

    That it is called, and when, tests see by watching it.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda file: os.fstat(file) and None)
        yield


@pytest.fixture(scope="session", autouse=True)
def _certificates_are_short() -> Iterator[tuple[float, ...]]:
    """Accounting at a dozen deltas took a third of the time of a run; `whole_curves` has all."""
    from jaxpfl.privacy import certificate

    deltas = certificate.DELTAS
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(certificate, "DELTAS", deltas[2:4])
        yield deltas


@pytest.fixture(scope="module")
def whole_curves(_certificates_are_short: tuple[float, ...]) -> Iterator[None]:
    """Certificates of this module have their epsilons at all deltas."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jaxpfl.privacy.certificate.DELTAS", _certificates_are_short)
        yield


@pytest.fixture
def interruptible() -> Iterator[None]:
    """A shell's background jobs ignore SIGINT, those of nohup SIGHUP, and so do their tests."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    hung_up = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGINT, before)
    signal.signal(signal.SIGHUP, hung_up)


@pytest.fixture(scope="session")
def data_folder() -> Path:
    """The folder of real data sets; the test is skipped where there is none."""
    folder = os.environ.get("JAXPFL_DATA")
    if not folder:
        pytest.skip("JAXPFL_DATA is not set: real data sets are not at hand")
    path = Path(folder)
    if not path.is_dir():
        pytest.fail(f"JAXPFL_DATA names {folder!r}, which is not a folder")
    return path
