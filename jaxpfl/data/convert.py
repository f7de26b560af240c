"""`jaxpfl convert`: any source, written once to a folder that opens at once.

A folder is mapped into memory (see `data.storage`), so a population may be larger than that.
TensorFlow Federated's files are converted as they are read, in memory that does not grow with them.
"""

import contextlib
import functools
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxpfl.data.open import open as open_population
from jaxpfl.data.open import stream
from jaxpfl.data.stream import Stream, write
from jaxpfl.errors import InputError


def convert(source: str, out: str | Path, *, shown: bool = True) -> dict[str, Any]:
    """Writes the population of `source` to the new folder `out`, which is whole or absent.

    Args:
      source: as `data.open` takes it.
      out: holds private data, and has mode 0700. While it is made, twice its size is needed.
      shown: whether progress goes to stderr.

    Returns:
      The folder, numbers of clients and examples, bytes written, and seconds taken. All but the
      folder is about the clients, for whoever holds their data: private.

    Raises:
      InputError: the folder exists, or the source is not valid.
      CorruptFile: the source is truncated or damaged.
      Terminated: SIGTERM came; like SIGINT it leaves nothing behind.
    """
    with _terminable():
        return _convert(source, Path(out), shown)


class Terminated(KeyboardInterrupt):
    """SIGTERM came."""

    number = signal.SIGTERM


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM as an exception: private data must not stay in a half-made folder."""

    def end(*_: object) -> None:
        raise Terminated("ended by SIGTERM")

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _convert(source: str, out: Path, shown: bool) -> dict[str, Any]:
    if out.exists():
        raise InputError(f"{out} exists already; choose another folder")
    out.parent.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    # Beside the folder: there must be room for the data anyway, which /tmp may not have.
    unpacking = Path(tempfile.mkdtemp(prefix=f".{out.name}.unpack-", dir=out.parent))
    try:
        streaming = stream(source, unpacking)
        if streaming is None:
            population = open_population(source)
            population.save(out)
            clients, examples = len(population), population.num_examples
        else:
            with streaming as opened:
                clients, examples = _write(out, opened, shown)
    finally:
        shutil.rmtree(unpacking, ignore_errors=True)
    size = sum(entry.stat().st_size for entry in os.scandir(out))
    return {
        "out": str(out),
        "clients": clients,
        "examples": examples,
        "bytes": size,
        "seconds": round(time.monotonic() - began, 3),
    }


def _write(out: Path, opened: Stream, shown: bool) -> tuple[int, int]:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    console = Console(stderr=True)
    columns = (TextColumn("[bold]examples"), BarColumn(), MofNCompleteColumn())
    # A log file gets no bar.
    disable = not (shown and console.is_terminal)
    with Progress(*columns, TimeRemainingColumn(), console=console, disable=disable) as bar:
        task = bar.add_task("", total=opened.examples)
        return write(out, opened, functools.partial(bar.advance, task))
