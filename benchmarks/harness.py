"""What every benchmark shares: fair timing, and results that say where they came from."""

import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import random
import resource
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from jaxpfl import cores, memory

RESULTS = pathlib.Path(__file__).parent / "results"
# Where `record` appends instead, if this variable names a folder.
ELSEWHERE = "JAXPFL_BENCHMARK_RESULTS"
# Seconds, in which threads that wait for work in a loop give up.
_PAUSE = 0.1


def use_cpu_devices(count: int | None) -> None:
    """Sets this process as a command does, before any JAX work; `count` None is one a core."""
    import jax

    jax.config.update("jax_num_cpu_devices", count or os.cpu_count() or 1)
    memory.give_back_after_compiling()


def interleaved(functions: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Returns the best wall time in seconds of each function; see `turns`."""
    taken = turns(functions, repeats)
    return {name: min(turn.seconds for turn in found) for name, found in taken.items()}


class Turn(NamedTuple):
    """The wall time and the processor time, of all threads, of one call, in seconds."""

    seconds: float
    cpu_seconds: float


class Elsewhere(float):
    """The processor time, in seconds, of a call whose work another process did."""


def turns(functions: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, list[Turn]]:
    """Returns what each function took in each of its turns.

    All are warmed up first (compilation stays out), then they take turns in ever new order, so
    that a noisy moment of the machine falls on all alike. Before each is a pause, in which threads
    that still look for work of the program before go to sleep. Results are waited for with
    `block_until_ready`. A function whose work is another process's returns `Elsewhere`.
    """
    import jax

    generator = random.Random(0)
    taken: dict[str, list[Turn]] = {name: [] for name in functions}
    for function in functions.values():
        jax.block_until_ready(function())
    for _ in range(repeats):
        for name, function in generator.sample(list(functions.items()), len(functions)):
            time.sleep(_PAUSE)
            start, cpu = time.perf_counter(), time.process_time()
            found = function()
            jax.block_until_ready(found)
            cpu = found if isinstance(found, Elsewhere) else time.process_time() - cpu
            taken[name].append(Turn(time.perf_counter() - start, cpu))
    return taken


def peak_memory_mb() -> float:
    """Returns the process's peak resident memory in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def record(benchmark: str, rows: list[dict]) -> pathlib.Path:
    """Appends rows to benchmarks/results/<benchmark>.jsonl with device, versions and date.

    The environment's JAXPFL_BENCHMARK_RESULTS, if it is set, names another folder for the file.
    """
    import jax

    device = jax.devices()[0]
    context = {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M"),
        "device": f"{len(jax.devices())} x {device.device_kind}",
        "machine": f"{os.cpu_count()} cores, {_processor()}",
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "flax")},
    }
    folder = pathlib.Path(os.environ.get(ELSEWHERE) or RESULTS)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{benchmark}.jsonl"
    with path.open("a", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps({**context, **row}) + "\n")
    return path


def _processor() -> str:
    """The name, and what tells machines apart that hide it."""
    told = cores.processor()
    numbers = [f"{name} {told[name]}" for name in ("cpu family", "model") if name in told]
    return ", ".join([told.get("model name", platform.machine()), *numbers])


def table(rows: list[dict], columns: list[str]) -> None:
    """Prints rows as a table."""
    from rich.console import Console
    from rich.table import Table

    grid = Table()
    for column in columns:
        grid.add_column(column, justify="left" if column == "what" else "right", no_wrap=True)
    for row in rows:
        cells = (row.get(column, "") for column in columns)
        grid.add_row(*(f"{c:.3g}" if isinstance(c, float) else str(c) for c in cells))
    Console(width=160).print(grid)
