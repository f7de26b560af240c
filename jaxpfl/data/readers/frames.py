"""Tables in memory: pandas, polars, Arrow; and data sets of the library `datasets`, also streamed.

They are read through Arrow's interface (`__arrow_c_stream__`), so that none of these libraries is
needed here.
"""

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import pyarrow as pa

from jaxpfl.data.population import Population
from jaxpfl.data.readers import hugging_face
from jaxpfl.data.readers.examples import Layout, population_of
from jaxpfl.data.readers.fields import Fields, Rows
from jaxpfl.errors import InputError

_ROWS = 2**13


def from_dataframe(
    frame: Any,
    *,
    client: str = "client",
    text: str | None = None,
    label: str | None = None,
    features: Sequence[str] = (),
    columns: Sequence[str] = (),
    split: str | None = None,
    name: str = "DataFrame",
) -> Population:
    """The population of a table in memory.

    Args:
      frame: a DataFrame of pandas or polars, a data set of the library `datasets`, a pyarrow
        Table, or anything else with `__arrow_c_stream__`. An index is not read: use
        `reset_index()`.
      client, text, label, features, columns, split: which columns are what, see `Layout`.
      name: the population's, in messages and reports: public.

    Returns:
      Clients in order of first appearance.

    Raises:
      InputError: a column is missing, or a row has no value or one of another kind.
    """
    layout = Layout(client, text, label, tuple(features), tuple(columns), split)
    return population_of(partial(read_frame, name, frame), layout, name)


def read_frame(name: str, frame: Any, fields: Fields) -> Iterator[Rows]:
    """The rows of a table, numbered from 1, some thousand at a time."""
    first = 1
    for batch in _batches(name, frame, fields):
        fields.require(name, batch.schema.names)
        if len(batch):
            columns = {column: batch[column] for column in fields.names}
            yield fields.rows(name, range(first, first + len(batch)), columns)
        first += len(batch)


def _batches(name: str, frame: Any, fields: Fields) -> Iterator[pa.RecordBatch | pa.Table]:
    if isinstance(frame, dict):
        parts, where = ", ".join(map(repr, frame)), f"{name}/PART on the disk"
        raise InputError(f"{name}: has the parts {parts}, expected one: {where}, [PART] in Python")
    wanted, unread = list(fields.names), None
    if hasattr(frame, "with_format"):
        # The rows that were selected, in their order: the whole table has others. The columns of a
        # streamed data set may be unknown.
        if frame.column_names is not None:
            fields.require(name, frame.column_names)
            frame = frame.select_columns(wanted)
        try:
            yield from frame.with_format("arrow").iter(_ROWS)
        except Exception as error:
            unread = hugging_face.unread(name, error)
        if unread is not None:
            raise unread
        return
    if hasattr(frame, "loc") and hasattr(frame, "columns"):
        # Other columns of pandas are left out, because they may hold objects unknown to Arrow.
        fields.require(name, list(frame.columns))
        frame = frame.loc[:, wanted]
    if not hasattr(frame, "__arrow_c_stream__") or hasattr(frame, "to_frame"):  # one column
        raise InputError(
            f"{name}: expected a DataFrame of pandas or polars, a data set of the library "
            f"datasets or a pyarrow Table, found {type(frame).__name__}"
        )
    reader = None
    # Arrow's error quotes a value.
    with contextlib.suppress(pa.ArrowException, TypeError):
        reader = pa.RecordBatchReader.from_stream(frame)
    if reader is None:
        raise InputError(
            f"{name}: a column holds values of several kinds, expected one kind in each"
        )
    yield from reader
