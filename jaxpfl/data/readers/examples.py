"""From the rows of a table to clients and their examples.

A `Layout` says which fields of a row are its client, text, label and features. In memory, clients
come in the order of first appearance (`population_of`); on the disk, in that of a hash
(`readers.grouped`). All rows of one client's id are one client, wherever they are.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from jaxpfl import checks
from jaxpfl.data.columns import from_arrow, text_array
from jaxpfl.data.population import Population, from_rows
from jaxpfl.data.readers.client_key import ClientKey
from jaxpfl.data.readers.fields import Fields, Rows, field_error
from jaxpfl.data.readers.prose import PIECES, pieces
from jaxpfl.errors import InputError

EACH_ROW = "*"

_TEXT, _LABEL, _FEATURES = "text", "label", "features"


@dataclass(frozen=True)
class Layout:
    """Which fields of a table are what.

    Attributes:
      client: the field of the client's id, or FIELD|RULE (`readers.client_key`), or "*", which
        makes each row a client, named by its number.
      text: the field of texts, the column "text". None: "text", but none where a label or features
        are named.
      label: the field of whole numbers that is the column "label", int32; or None.
      features: fields of numbers, or of lists of numbers, side by side in this order the column
        "features", float32 [examples, features]; or ().
      columns: further fields, which keep their names; each holds only strings, only booleans, only
        numbers or only lists of numbers.
      split: "sentences", "paragraphs" or "lines" makes each of them in a text an example (see
        `readers.prose`) with the row's other fields. A client whose texts have none has no
        examples. None makes each text one.
    """

    client: str = "client"
    text: str | None = None
    label: str | None = None
    features: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    split: str | None = None

    def __post_init__(self) -> None:
        if self.text is None and self.label is None and not self.features:
            object.__setattr__(self, "text", "text")
        for name in ("features", "columns"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if self.split is not None:
            checks.one_of("split", self.split, PIECES)
            if self.text is None:
                raise InputError("split divides texts: name the field of the text, too")
        used = [each for each in (self.text, self.label) if each is not None]
        used += [*self.features, *self.columns]
        if self.key is not None and self.key.rule == "value":
            used.insert(0, self.key.column)
        named = [*(name for name, given in self._own().items() if given), *self.columns]
        for names in (used, named):
            if len(set(names)) != len(names):
                found = ", ".join(map(repr, names))
                raise InputError(
                    f"client, text, label, features and columns must be different, found {found}"
                )

    @property
    def key(self) -> ClientKey | None:
        """The rule that gives a row its client; None makes each row one."""
        return None if self.client == EACH_ROW else ClientKey.parse(self.client, "client")

    @property
    def unit(self) -> str:
        """What a client is, in words."""
        return "one row" if self.key is None else self.key.unit

    @property
    def fields(self) -> Fields:
        """What the table must have."""
        wanted = [] if self.key is None else [(self.key.column, "client")]
        wanted += [] if self.text is None else [(self.text, "text")]
        wanted += [] if self.label is None else [(self.label, "label")]
        wanted += [(name, "number") for name in self.features]
        return Fields([*wanted, *((name, "value") for name in self.columns)])

    def _own(self) -> dict[str, object]:
        return {_TEXT: self.text, _LABEL: self.label, _FEATURES: self.features}


class Block(NamedTuple):
    """Examples of some rows.

    Attributes:
      ids: the client of each, large_string.
      columns: Arrow arrays without missing values.
      held: False for an entry that only says that there is this client; its values do not count.
    """

    ids: pa.Array
    columns: dict[str, pa.Array]
    held: np.ndarray


class Examples:
    """Makes examples of rows, and counts them.

    Attributes:
      examples: how many were made.
    """

    def __init__(self, layout: Layout) -> None:
        self.examples = 0
        self._layout, self._key = layout, layout.key

    def block(self, rows: Rows) -> Block:
        """The examples of some rows."""
        layout, columns = self._layout, {}
        ids = self._ids(rows)
        held = np.ones(len(ids), bool)
        if layout.text is not None:
            columns[_TEXT] = rows.columns[layout.text]
        if layout.label is not None:
            columns[_LABEL] = rows.columns[layout.label].cast(pa.int32())
        if layout.features:
            columns[_FEATURES] = _side_by_side([rows.columns[name] for name in layout.features])
        columns |= {name: rows.columns[name] for name in layout.columns}
        if layout.split is not None:
            texts, row_of_text, held = _divided(columns[_TEXT], layout.split)
            taken = pa.array(row_of_text)
            columns = {name: column.take(taken) for name, column in columns.items()}
            columns[_TEXT], ids = texts, ids.take(taken)
        self.examples += int(held.sum())
        return Block(ids, columns, held)

    def _ids(self, rows: Rows) -> pa.Array:
        if self._key is None:
            return pa.array(np.asarray(rows.numbers)).cast(pa.large_string())
        values = rows.columns[self._key.column]
        if self._key.rule == "value":
            return values.cast(pa.large_string())
        known = values.dictionary_encode()
        ids = [self._key(value) for value in known.dictionary.to_pylist()]
        if None in ids:
            first = known.indices.to_pylist().index(ids.index(None))
            raise field_error(rows, first, self._key.column, self._key.expected)
        return text_array([str(each) for each in ids]).take(known.indices)


def population_of(rows: Iterator[Rows], layout: Layout, *, name: str, unit: str) -> Population:
    """The population of a table, in memory."""
    made = Examples(layout)
    blocks: list[Block] = []
    size = 0
    for each in rows:
        blocks.append(made.block(each))
        size += sum(column.nbytes for column in blocks[-1].columns.values())
        # They are copied once, into columns of all blocks.
        checks.fits_memory(f"{name}: its rows, in memory,", 2 * size)
    if not made.examples:
        raise InputError(f"{name} has no examples")
    # One dictionary of all blocks, in the order of first appearance.
    ids = pa.chunked_array([block.ids for block in blocks]).dictionary_encode().combine_chunks()
    held = np.concatenate([block.held for block in blocks])
    columns = {}
    for column in blocks[0].columns:
        parts = pa.chunked_array(_one_type([block.columns[column] for block in blocks]))
        columns[column] = from_arrow(parts.combine_chunks().filter(pa.array(held)))
    client_of_example = ids.indices.to_numpy(zero_copy_only=False)[held]
    return from_rows(client_of_example, ids.dictionary, columns, name=name, unit=unit)


def _one_type(parts: list[pa.Array]) -> list[pa.Array]:
    """What came before the first float may be whole numbers."""
    return [part.cast(parts[-1].type) for part in parts]


def _side_by_side(columns: list[pa.Array]) -> pa.Array:
    """Numbers, and lists of them, as rows of a float32 matrix."""
    parts = [from_arrow(column) for column in columns]
    matrix = np.concatenate([part.reshape(len(part), -1) for part in parts], 1).astype(np.float32)
    return pa.FixedSizeListArray.from_arrays(pa.array(matrix.reshape(-1)), matrix.shape[1])


def _divided(texts: pa.Array, split: str) -> tuple[pa.Array, np.ndarray, np.ndarray]:
    """The parts of each text, which text each is of, and whether it is one."""
    parts: list[str] = []
    copies: list[int] = []
    held: list[bool] = []
    for text in texts.to_pylist():
        found = list(pieces(text.split("\n"), split))
        # A client whose texts have no parts remains, because how many have some is private.
        held += [True] * len(found) or [False]
        parts += found or [""]
        copies.append(max(len(found), 1))
    row_of_text = np.repeat(np.arange(len(copies)), copies)
    return text_array(parts), row_of_text, np.array(held, bool)
