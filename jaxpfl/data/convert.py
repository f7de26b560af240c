"""Converts any source of clients to a folder that opens without being read.

The folder is mapped into memory (see `data.storage`), so that a population may be larger than the
memory. Files of TensorFlow Federated are converted while they are read, in memory that does not
grow with their size.
"""

import contextlib
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
from jaxpfl.data.stream import write
from jaxpfl.errors import InputError
from jaxpfl.progress import Progress


def convert(source: str, out: str | Path, *, progress: bool = True) -> dict[str, Any]:
    """Writes the population of `source` to the new folder `out`: completely, or not at all.

    Args:
      source: a source as for `data.open`.
      out: the new folder. It contains private data and gets mode 0700. While it is written, twice
        its size is needed on the disk.
      progress: whether a progress bar is shown on stderr.

    Returns:
      The folder, and PRIVATE: numbers of clients and examples, bytes written and seconds taken.

    Raises:
      InputError: the folder exists already, or the source is not valid.
      CorruptFile: the source is truncated or damaged.
      Terminated: SIGTERM was received; as after SIGINT, nothing is left on the disk.
    """
    out = Path(out)
    if out.exists():
        raise InputError(f"{out}: the folder to write must be new, but it exists already")
    out.parent.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    with _terminable(), contextlib.ExitStack() as stack:
        # Next to the folder, where there must be room for the data anyway; /tmp may have less.
        unpacking = Path(tempfile.mkdtemp(prefix=f".{out.name}.unpack-", dir=out.parent))
        stack.callback(shutil.rmtree, unpacking, ignore_errors=True)
        streaming = stream(source, unpacking)
        if streaming is None:
            population = open_population(source)
            population.save(out)
            clients, examples = len(population), population.num_examples
        else:
            opened = stack.enter_context(streaming)
            bar = Progress("converting", total=opened.examples, progress=progress, step="example")
            clients, examples = write(out, opened, stack.enter_context(bar).update)
    return {
        "out": str(out),
        "clients": clients,
        "examples": examples,
        "bytes": sum(entry.stat().st_size for entry in os.scandir(out)),
        "seconds": round(time.monotonic() - began, 3),
    }


class Terminated(KeyboardInterrupt):
    """SIGTERM was received."""

    number = signal.SIGTERM


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """Raises an exception at SIGTERM, so that no private data stays in an incomplete folder."""

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
