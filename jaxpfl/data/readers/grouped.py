"""Populations larger than memory: rows of any table, grouped by client on the disk.

As Dataset Grouper (Charles et al. 2023, "Towards federated foundation models") makes FedC4,
FedWiki, FedBookCO and FedCCnews. Rows are read once, in bounded memory, and grouped on the disk
(`data.grouping`). The population's unit, and with it the manifest of a converted folder, says how
clients are made of rows. Clients come in the order of a hash of their ids, a client's rows in the
order of the table.
"""

import contextlib
import itertools
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa

from jaxpfl.data.grouping import block, grouped
from jaxpfl.data.readers.examples import Examples, Layout
from jaxpfl.data.readers.fields import Fields, Rows
from jaxpfl.data.stream import Stream
from jaxpfl.errors import InputError


@contextlib.contextmanager
def stream_grouped(
    rows: Callable[[Fields], Iterator[Rows]],
    layout: Layout,
    *,
    name: str,
    folder: str | Path | None = None,
) -> Iterator[Stream]:
    """A table as a stream of clients.

    Args:
      rows: reads the rows with these fields.
      layout: which fields are what; not each row a client.
      name: of the population.
      folder: where temporary files go; None is the machine's temporary folder.
    """
    made = Examples(layout)
    with tempfile.TemporaryDirectory(prefix="grouping-", dir=folder) as temporary:
        blocks = _blocks(rows(layout.fields), made)
        batches = grouped(blocks, Path(temporary))
        # All rows are read here, so that their number is known.
        first = next(batches, None)
        if first is None:
            raise InputError(f"{name} has no rows, expected at least one")
        batches = itertools.chain([first], batches)
        yield Stream(batches, made.examples, name, layout.unit)


def _blocks(rows: Iterator[Rows], made: Examples) -> Iterator[pa.RecordBatch]:
    types: dict[str, pa.DataType] = {}
    for each in rows:
        found = made.block(each)
        for name, column in found.columns.items():
            # What is on the disk already cannot become floats.
            if types.setdefault(name, column.type) != column.type:
                raise InputError(
                    f"{each.source}, rows {each.numbers[0]} to {each.numbers[-1]}: field {name!r} "
                    "must hold whole numbers, as in the rows before, found others"
                )
        yield block(found.ids, found.columns, found.held)
