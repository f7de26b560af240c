"""Tables in memory: pandas, polars, Arrow; and data sets of the library `datasets`, also streamed.

They are read through Arrow's interface (`__arrow_c_stream__`), so that none of these libraries is
needed here. Only data sets of the Hugging Face hub, or saved to disk, need `datasets`, which reads
data files, and never runs code that comes with a data set.
"""

import contextlib
import re
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from jaxpfl.data.population import Population
from jaxpfl.data.readers.examples import Layout, population_of
from jaxpfl.data.readers.fields import Fields, Rows
from jaxpfl.errors import CorruptFile, InputError, named
from jaxpfl.lazy import require

_ROWS = 2**13
_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_COMMIT = re.compile(r"[0-9a-f]{40}")


def from_dataframe(
    frame: Any,
    *,
    client: str = "client",
    text: str | Sequence[str] | None = None,
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
    wanted, fault = list(fields.names), None
    if hasattr(frame, "with_format"):
        # The rows that were selected, in their order: the whole table has others. The columns of a
        # streamed data set may be unknown.
        if frame.column_names is not None:
            fields.require(name, frame.column_names)
            frame = frame.select_columns(wanted)
        try:
            yield from frame.with_format("arrow").iter(_ROWS)
        except Exception as error:
            fault = unread(name, error)
        if fault is not None:
            raise fault
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


def load_data_set(
    name: str,
    revision: str = "",
    part: str = "train",
    config: str | None = None,
    streaming: bool = False,
) -> Any:
    """A data set OWNER/NAME as a `datasets.Dataset`, or an `IterableDataset` if streaming.

    Args:
      revision: the commit to read, 40 hexadecimal digits. A branch is refused, because its data,
        and with it the population's fingerprint and ledger, could change.
      part: such as "train", "validation" or "test".
      config: which configuration of the data set, where it has several.
    """
    if not _NAME.fullmatch(name):
        raise InputError(f"huggingface: a data set is OWNER/NAME on the hub, found {name!r}")
    if not _COMMIT.fullmatch(revision):
        raise InputError(
            f"{name}: revision must be a commit of the data set, 40 hexadecimal digits, found "
            f"{revision!r}"
        )
    if Path(name).exists():
        raise InputError(
            f"{name}: a file or folder of that name is here, and the library datasets would read "
            "it instead of the hub's data set: run from another folder"
        )
    datasets = require("datasets", "datasets")
    which = {"name": config, "split": part, "revision": revision, "streaming": streaming}
    with _answered(f"{name} at {revision[:12]}..."):
        return datasets.load_dataset(name, **which)


def saved(folder: Path) -> Any:
    """The `datasets.Dataset` that `save_to_disk` wrote to a folder: the rows that were selected."""
    datasets = require("datasets", "datasets")
    with named(folder, CorruptFile), _answered(str(folder)):
        return datasets.load_from_disk(str(folder))


def newest_commit(name: str) -> str:
    """The commit that a data set on the hub has now."""
    hub = require("huggingface_hub", "datasets")
    with _answered(name):
        return str(hub.HfApi().dataset_info(name).sha)


@contextlib.contextmanager
def _answered(what: str) -> Iterator[None]:
    try:
        yield
    # The libraries raise errors of many kinds; all mean that they did not give it.
    except Exception as error:
        raise unread(what, error) from None


def unread(what: str, error: Exception) -> InputError:
    """The error that says why the libraries of Hugging Face did not give a data set or its rows."""
    # Only errors of network and disk are quoted: the message of another may contain a row.
    lines = str(error).strip().splitlines() if isinstance(error, OSError) else []
    reason = ": ".join([type(error).__name__, *lines[:1]])
    return InputError(f"{what}: the libraries of Hugging Face did not give it ({reason})")
