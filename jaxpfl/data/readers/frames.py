"""Tables in memory: pandas, polars, Arrow; and data sets of the library `datasets`, also streamed.

They are read through Arrow's interface (`__arrow_c_stream__`), so that none of these libraries is
needed here. Only data sets of the Hugging Face hub, or saved to disk, need `datasets`, which reads
data files, and never runs code that comes with a data set.
"""

import contextlib
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from jaxpfl.data.population import Population
from jaxpfl.data.readers.cells import ABSENT
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
    client: str | int = "client",
    text: str | int | Sequence[str | int] | None = None,
    label: str | int | None = None,
    classes: Sequence[str] = (),
    features: Sequence[str | int] = (),
    columns: Sequence[str | int] = (),
    split: str | None = None,
    name: str = "DataFrame",
) -> Population:
    """The population of a table in memory, with clients in order of first appearance.

    Args:
      frame: a DataFrame of pandas or polars, a data set of the library `datasets`, a pyarrow
        Table, anything else with `__arrow_c_stream__`, or a dictionary of columns. An index is not
        read: use `reset_index()`.
      client, text, label, classes, features, columns, split: which columns are what, see `Layout`.
        A whole number names the column whose name has its digits.
      name: the population's, in messages and reports: public.

    Raises:
      InputError: a column is missing, or a row has no value or one of another kind.
    """
    texts = text if text is None or isinstance(text, str) else _names(text)
    label = label if label is None else str(label)
    names = _names(features), _names(columns)
    layout = Layout(str(client), texts, label, *names, split, classes=tuple(classes))
    return population_of(partial(read_frame, name, frame), layout, name)


def read_frame(name: str, frame: Any, fields: Fields) -> Iterator[Rows]:
    """The rows of a table, numbered from 1, some thousand at a time."""
    first = 1
    for batch in _batches(name, frame, fields):
        numbers = range(first, first + len(batch))
        first += len(batch)
        if not len(batch):
            continue
        if isinstance(batch, list):
            for number, row in zip(numbers, batch, strict=True):
                if not isinstance(row, Mapping):
                    what = f"expected a mapping of columns, found {type(row).__name__}"
                    raise InputError(f"{name}, row {number}: {what}")
            # A column that a row lacks has no value in it.
            rows = [[None if x is ABSENT else x for x in fields.values(row)] for row in batch]
            columns = dict(zip(fields.names, map(list, zip(*rows, strict=True)), strict=True))
        else:
            fields.require(name, batch.schema.names, nested=True)
            columns = fields.columns(name, batch)
        yield fields.rows(name, numbers, columns)


def _names(columns: Any) -> tuple[str, ...]:
    return (str(columns),) if isinstance(columns, int) else tuple(map(str, columns))


# Rows as Arrow has them, or as Python has.
_Batch = pa.RecordBatch | pa.Table | list[Any]


def _batches(name: str, frame: Any, fields: Fields) -> Iterator[_Batch]:
    if isinstance(frame, dict):
        if any(hasattr(part, "column_names") for part in frame.values()):
            parts, where = ", ".join(map(repr, frame)), f"{name}/PART or ?part=PART on the disk"
            what = f"has the parts {parts}, expected one: {where}, [PART] in Python"
            raise InputError(f"{name}: {what}")
        columns = {str(column): values for column, values in frame.items()}
        holders = {n if n in columns else n.partition(".")[0] for n in fields.names}
        if not holders <= columns.keys():
            # The message leaves out what it has: its keys may be clients' ids.
            what = f"expected a dictionary with the columns {', '.join(map(repr, fields.names))}"
            raise InputError(f"{name}: {what}; `from_clients` takes one of clients")
        yield _rows_of(name, {holder: columns[holder] for holder in holders})
        return
    if hasattr(frame, "with_format"):
        # The rows that were selected, in their order: the whole table has others. The columns of a
        # streamed data set may be unknown.
        if frame.column_names is not None:
            frame = frame.select_columns(fields.require(name, frame.column_names, nested=True))
        yield from _of_data_set(name, frame)
        return
    if hasattr(frame, "loc") and hasattr(frame, "columns"):
        # Other columns of pandas are left out, because they may hold objects unknown to Arrow.
        names = list(map(str, frame.columns))
        holders = fields.require(name, names, nested=True)
        frame = frame.iloc[:, [names.index(holder) for holder in holders]].set_axis(holders, axis=1)
    if not hasattr(frame, "__arrow_c_stream__") or hasattr(frame, "to_frame"):  # one column
        expected = "a DataFrame of pandas or polars, a data set of the library datasets or a"
        raise InputError(f"{name}: expected {expected} pyarrow Table, found {type(frame).__name__}")
    if type(frame).__module__.startswith("polars"):
        # Which it would give as their addresses.
        for column in fields.require(name, frame.columns, nested=True):
            if str(frame.schema[column]) == "Object":
                raise InputError(f"{name}: field {column!r} has objects of Python: make it texts")
    reader = None
    # Arrow's error quotes a value.
    with contextlib.suppress(pa.ArrowException, TypeError, OverflowError):
        reader = pa.RecordBatchReader.from_stream(frame)
    if reader is not None:
        yield from reader
    # Values of several kinds, or of more than 64 bits, are looked at row by row.
    elif hasattr(frame, "to_dicts"):
        yield frame.to_dicts()
    elif hasattr(frame, "notna"):
        yield frame.astype(object).where(frame.notna(), None).to_dict("records")
    else:
        raise InputError(f"{name}: a column holds values of several kinds, expected one in each")


def _rows_of(name: str, columns: Mapping[str, Any]) -> list[Any]:
    """The rows of a dictionary of columns."""
    lists = []
    for column, values in columns.items():
        if isinstance(values, str) or not hasattr(values, "__len__"):
            what = f"expected a list of values, found {type(values).__name__}"
            raise InputError(f"{name}, column {column!r}: {what}")
        listed = getattr(values, "to_pylist", getattr(values, "tolist", values.__iter__))
        lists.append(list(listed()))
    if len(set(map(len, lists))) > 1:
        raise InputError(f"{name}: expected columns of one length, found several")
    return [dict(zip(columns, row, strict=True)) for row in zip(*lists, strict=True)]


def _of_data_set(name: str, frame: Any) -> Iterator[_Batch]:
    rows, fault = 0, None
    try:
        try:
            for batch in frame.with_format("arrow").iter(_ROWS):
                rows += len(batch)
                yield batch
        # The library cannot hand over a stream's rows that are not all of one type.
        except (pa.ArrowException, AttributeError):
            rest = iter(frame.skip(rows))
            while block := list(itertools.islice(rest, _ROWS)):
                yield block
    except Exception as error:
        fault = unread(name, error)
    if fault is not None:
        raise fault


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
        expected = "revision must be a commit of the data set, 40 hexadecimal digits"
        raise InputError(f"{name}: {expected}, found {revision!r}")
    if Path(name).exists():
        what = "a file or folder of that name is here, which the library datasets would read"
        raise InputError(f"{name}: {what} instead of the hub's data set: run from another folder")
    datasets = require("datasets", "datasets")
    which = {"name": config, "split": part, "revision": revision, "streaming": streaming}
    with _answered(f"{name} at {revision[:12]}..."):
        return datasets.load_dataset(name, **which)


def saved(folder: Path, part: str | None = None) -> Any:
    """The `datasets.Dataset` that `save_to_disk` wrote to a folder: the rows that were selected.

    `part` is one of a `DatasetDict`, such as "train"; None: the folder holds one data set alone.
    """
    datasets = require("datasets", "datasets")
    with named(folder, CorruptFile), _answered(str(folder)):
        frame = datasets.load_from_disk(str(folder))
    if part is None:
        return frame
    parts = list(frame) if isinstance(frame, dict) else []
    if part not in parts:
        listed = ", ".join(map(repr, parts)) or "no parts"
        raise InputError(f"{folder}: expected one of its parts, {listed}, found {part!r}")
    return frame[part]


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
