"""`check(folder)`: whether a stored population is whole, down to its last byte."""

from pathlib import Path
from typing import Any

import numpy as np

from jaxpfl.data import storage
from jaxpfl.data.blocks import BLOCK
from jaxpfl.data.mapped import Mapped, MappedText
from jaxpfl.data.population import Population
from jaxpfl.data.sequences import Sequences
from jaxpfl.errors import CorruptFile
from jaxpfl.progress import Progress

_PIECE = 64 * BLOCK


def check(folder: str | Path, *, progress: bool = True) -> Population:
    """Reads all of a folder that `Population.save` or `data.convert` wrote, and returns it.

    `Population.load` verifies a block when it is first read. This verifies every block, and that
    what they hold makes sense: clients and their ids, where texts and sequences begin, that texts
    are UTF-8, that token ids are in the vocabulary.

    Raises:
      InputError: the folder holds no population, or one of an older format.
      CorruptFile: something is missing, truncated, altered or makes no sense.
    """
    folder = Path(folder)
    population = Population.load(folder)
    stored = storage.read(folder).columns
    parts = [part for column in stored.values() for part in _parts(column)]
    with Progress("checking", progress=progress, step="MB") as bar:
        bar.begin(0, sum(part.nbytes for part in parts) >> 20)
        done = 0
        for part in parts:
            for start in range(0, part.nbytes, _PIECE):
                end = min(start + _PIECE, part.nbytes)
                part.blocks.verify(start, end)
                done += end - start
                bar.update(done >> 20)
    for name, column in stored.items():
        fault = _fault(column)
        if fault:
            raise CorruptFile(f"{folder}: column {name!r}: {fault}")
    return population


def _parts(column: Any) -> list[Mapped]:
    if isinstance(column, Mapped):
        return [column]
    if isinstance(column, MappedText):
        return [column.edges, column.content]
    if isinstance(column, Sequences):
        return [each for each in (column.edges, column.values) if isinstance(each, Mapped)]
    return []


def _fault(column: Any) -> str:
    """What is wrong with a column whose blocks were verified; "" if nothing is."""
    if isinstance(column, Mapped) and column.dtype == bool and len(column):
        return "" if column[:].view(np.uint8).max() <= 1 else "a boolean is neither 0 nor 1"
    if isinstance(column, MappedText):
        _ = column.whole  # refuses by itself
        first, last = column.edges[:1], column.edges[-1:]
        if len(column) and (first[0] or last[0] != len(column.content)):
            return "its texts are not all of its content"
    if isinstance(column, Sequences) and isinstance(column.edges, Mapped):
        if not _in_order(column.edges, len(column.values)):
            return "its sequences do not begin one after the other"
        words = column.encoding.get("vocabulary_size")
        if words is not None and len(column.values) and column.values[:].max() >= words:
            return f"a token id is not below {words}, the size of its vocabulary"
    return ""


def _in_order(edges: Mapped, end: int) -> bool:
    pieces = range(0, len(edges), _PIECE // 8)
    ordered = all(np.all(np.diff(edges[at : at + _PIECE // 8 + 1]) >= 0) for at in pieces)
    return bool(ordered and edges[:1][0] == 0 and edges[-1:][0] == end)
