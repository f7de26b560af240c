"""Populations of foundation-model size: rows of any table, grouped by a client computed from them.

As Dataset Grouper (Charles et al. 2023, "Towards federated foundation models") makes FedC4,
FedWiki, FedBookCO and FedCCnews. Rows are read once, in bounded memory, and grouped on the disk
(`data.grouping`). The population's unit, and with it the manifest of a converted folder, says how
clients are made of rows.

Policy, beside that of `readers.shards` and `readers.client_key`:
- A text is a string; other columns hold only strings, only booleans or only numbers, of the first
  row's type. A missing value or one that a client's rule does not fit is refused with its row.
- Clients come in the order of a hash of their ids, a client's rows in the order of the table.
"""

import contextlib
import itertools
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from jaxpfl.data.columns import text_array
from jaxpfl.data.grouping import block, grouped
from jaxpfl.data.readers.client_key import ClientKey
from jaxpfl.data.readers.prose import pieces
from jaxpfl.data.readers.shards import Rows
from jaxpfl.data.stream import Stream
from jaxpfl.errors import InputError

_TYPES = {str: pa.large_string(), bool: pa.bool_(), int: pa.int64(), float: pa.float64()}
_CALLED = {str: "a string", bool: "a boolean", int: "a whole number", float: "a number"}


@contextlib.contextmanager
def stream_grouped(
    rows: Callable[[tuple[str, ...]], Iterator[Rows]],
    *,
    client: ClientKey,
    text: str = "text",
    columns: tuple[str, ...] = (),
    split: str | None = None,
    name: str,
    folder: str | Path | None = None,
) -> Iterator[Stream]:
    """A table as a stream of clients.

    Args:
      rows: reads the columns of these names.
      client: gives each row its client.
      text: the column of texts, which becomes the column "text".
      columns: further columns.
      split: "sentences", "paragraphs" or "lines" makes each of them in a text an example with the
        row's other columns; None makes each text one.
      name: of the population.
      folder: where temporary files go; None is the machine's temporary folder.

    Raises:
      InputError: here or while the stream is read: a column is missing, a value is of another kind
        or has no client, or there are no rows.
      CorruptFile: a file is damaged.
    """
    if text in columns or len(set(columns)) != len(columns):
        found = ", ".join(map(repr, (text, *columns)))
        raise InputError(f"{name}: the columns must be different, found {found}")
    wanted = tuple(dict.fromkeys((client.column, text, *columns)))
    converter = _Converter(client, text, columns, split)
    with tempfile.TemporaryDirectory(prefix="grouping-", dir=folder) as temporary:
        blocks = map(converter.block, rows(wanted))
        batches = grouped(blocks, Path(temporary))
        # All rows are read here, so that their number is known.
        first = next(batches, None)
        if first is None:
            raise InputError(f"{name} has no rows, expected at least one")
        batches = itertools.chain([first], batches)
        yield Stream(batches, converter.examples, name, client.unit)


class _Converter:
    """Checks rows and gives them their clients."""

    def __init__(
        self, client: ClientKey, text: str, columns: tuple[str, ...], split: str | None
    ) -> None:
        self._client, self._text, self._columns, self._split = client, text, columns, split
        self._kinds: dict[str, type] = {}
        self.examples = 0

    def block(self, rows: Rows) -> pa.RecordBatch:
        ids: list[str] = []
        texts: list[str] = []
        held: list[bool] = []
        copies: list[int] = []
        values = rows.values
        pairs = zip(values[self._client.column], values[self._text], strict=True)
        for index, (key, text) in enumerate(pairs):
            id_ = self._client(key)
            if id_ is None:
                raise _error(rows, index, self._client.column, self._client.expected, key)
            if type(text) is not str:
                raise _error(rows, index, self._text, "a string", text)
            parts = [text] if self._split is None else list(pieces(text.split("\n"), self._split))
            # A client whose texts have no parts remains, because how many have some is private.
            held += [True] * len(parts) or [False]
            texts += parts or [""]
            ids += [id_] * max(len(parts), 1)
            copies.append(max(len(parts), 1))
        self.examples += sum(held)
        found: dict[str, Any] = {"text": text_array(texts)}
        for name in self._columns:
            found[name] = self._column(rows, name, copies)
        return block(ids, found, held)

    def _column(self, rows: Rows, name: str, copies: list[int]) -> pa.Array:
        values = rows.values[name]
        kind = self._kinds.setdefault(name, type(values[0]))
        if kind not in _TYPES:
            expected = "a string, boolean or number"
            raise _error(rows, 0, name, expected, values[0])
        for index, value in enumerate(values):
            if type(value) is not kind and not (kind is float and type(value) is int):
                raise _error(rows, index, name, _CALLED[kind], value)
        try:
            array = text_array(values) if kind is str else pa.array(values, _TYPES[kind])
        except (pa.ArrowInvalid, OverflowError):
            expected = "numbers of at most 64 bits"
            raise InputError(f"{rows.source}: field {name!r} must hold {expected}") from None
        return array.take(pa.array(np.repeat(np.arange(len(values)), copies)))


def _error(rows: Rows, index: int, field: str, expected: str, value: Any) -> InputError:
    found = "an empty string" if value == "" else type(value).__name__
    if type(value) is str and value:
        found = "another string"
    if value is None:
        found = "no value"
    return InputError(
        f"{rows.source}, row {rows.numbers[index]}: field {field!r} must be {expected}, found "
        f"{found}"
    )
