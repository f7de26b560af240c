"""Folders of stored populations: converts any source of clients to one, and checks one.

A folder is mapped into memory (see `data.storage`), so that a population may be larger than the
memory. Files of TensorFlow Federated, and tables that are grouped on the disk, are converted while
they are read, in memory that does not grow with their size.
"""

import os
import time
from pathlib import Path
from typing import Any

import numpy as np

from jaxpfl import files
from jaxpfl.data import storage
from jaxpfl.data.columns import read
from jaxpfl.data.mapped import Mapped, MappedText
from jaxpfl.data.open import streamed
from jaxpfl.data.population import Population
from jaxpfl.data.sequences import Sequences
from jaxpfl.data.stream import Encoder
from jaxpfl.errors import CorruptFile, InputError
from jaxpfl.progress import Progress, track


def convert(
    source: str, out: str | Path, encoder: Encoder | None = None, *, progress: bool = True
) -> dict[str, Any]:
    """Writes the population of `source`, as for `data.open`, to the new folder `out`.

    `out` is complete or absent. It is written as `.NAME.partial`; the next call removes the files
    that a killed process left there. It contains private data and gets mode 0700. Returned are its
    name and, PRIVATE, the numbers of clients and examples, bytes written and seconds taken.

    Args:
      encoder: writes token ids in place of the texts and all other columns, such as a
        `text.Vocabulary`.

    Raises:
      InputError: the folder exists already, or the source is not valid.
      CorruptFile: the source is truncated or damaged.
    """
    out = files.user_path(out)
    if out.exists():
        raise InputError(f"{out}: the folder to write must be new, but it exists already")
    began = time.monotonic()
    with Progress("converting", progress=progress, step="example") as bar:
        clients, examples = storage.write(out, streamed(source), encoder, bar)
    return {
        "out": str(out),
        "clients": clients,
        "examples": examples,
        "bytes": sum(entry.stat().st_size for entry in os.scandir(out)),
        "seconds": round(time.monotonic() - began, 3),
    }


def check_folder(folder: str | Path, *, progress: bool = True) -> Population:
    """Reads all of a folder that `Population.save` or `convert` wrote, and returns it.

    `Population.load` verifies a block when it is first read. This verifies every block, and that
    what they hold makes sense: clients and their ids, where texts and sequences begin, that texts
    are UTF-8, that token ids are in the vocabulary.

    Raises:
      InputError: the folder holds no population, or one of an older format.
      CorruptFile: something is missing, truncated, altered or makes no sense.
    """
    folder = files.user_path(folder)
    population = Population.load(folder)
    stored = storage.read(folder).columns
    for name in track(list(stored), "checking columns", progress=progress):
        fault = _fault(stored[name])
        if fault:
            raise CorruptFile(f"{folder}: column {name!r}: {fault}")
    return population


def _fault(column: Any) -> str:
    """Reads a column, all blocks of which are verified thereby; "" if nothing is wrong with it."""
    if isinstance(column, Sequences) and isinstance(column.edges, Mapped):
        edges, values = column.edges.whole, read(column.values)
        if edges[0] or edges[-1] != len(values) or not np.all(edges[1:] >= edges[:-1]):
            return "its sequences do not begin one after the other"
        words = column.encoding.get("vocabulary_size")
        if words is not None and len(values) and values.max() >= words:
            return f"a token id is not below {words}, the size of its vocabulary"
        return ""
    whole = read(column)
    if isinstance(column, Mapped) and column.dtype == bool and len(column):
        return "" if whole.view(np.uint8).max() <= 1 else "a boolean is neither 0 nor 1"
    if isinstance(column, MappedText) and len(column):
        first, last = column.edges[:1][0], column.edges[-1:][0]
        return "" if (first, last) == (0, len(column.content)) else "some of its bytes are no text"
    return ""
