"""From the rows of a table to clients and their examples.

A `Layout` says which fields of a row are its client, text, label and features. All rows of one
client's id are one client, wherever they are. In memory, clients come in the order of first
appearance (`population_of`). For tables larger than memory, rows are read once, in bounded memory,
and grouped on the disk (`stream_of`, `data.stream`), as Dataset Grouper does (Charles et al.
2023, "Towards federated foundation models"): there clients come in the order of a hash of their
ids, a client's rows in the order of the table.
"""

import contextlib
import itertools
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pyarrow as pa

from jaxpfl import checks
from jaxpfl.data.clients import hashes, warn_of_alike
from jaxpfl.data.columns import arrow, from_arrow, text_array
from jaxpfl.data.population import Population, from_rows
from jaxpfl.data.readers.cells import INEXACT
from jaxpfl.data.readers.fields import Fields, Rows, row_error
from jaxpfl.data.readers.plain_text import PIECES, pieces
from jaxpfl.data.stream import CLIENT, IS_EXAMPLE, Batch, Stream, grouped
from jaxpfl.errors import InputError
from jaxpfl.progress import Messages

EACH_ROW = "*"
_RULES = ("value", "domain")
_TEXT, _LABEL, _FEATURES = "text", "label", "features"


@dataclass(frozen=True)
class Layout:
    """Which fields of a table are what.

    Attributes:
      client: the field of the client's id; or FIELD|value, the same, and FIELD|domain, the host of
        a URL (https://www.example.org/a?b and http://WWW.example.org are one client,
        www.example.org); or "*", which makes each row a client, named by its number.
      text: the field of texts, the column "text"; or several, whose texts in a row are joined by
        newlines, without those that it lacks. None: "text", but none where a label or features are
        named.
      label: the field of whole numbers that is the column "label", int32; or None.
      classes: the words that the label is one of, a PUBLIC list: the first becomes 0. Without any,
        labels are numbers.
      features: fields of numbers, or of lists of numbers, side by side in this order the column
        "features", float32 [examples, features]; or ().
      columns: further fields, which keep their names; each holds only strings, only booleans, only
        numbers, only lists of numbers, or only images or arrays of one form (`readers.cells`).
      split: "sentences", "paragraphs" or "lines" makes each of them in a text an example (see
        `readers.plain_text`) with the row's other fields. A client whose texts have none has no
        examples. None makes each text one.
      missing: "drop" leaves out the rows that lack a value of one of these fields; None: refused.
    """

    client: str = "client"
    text: str | Sequence[str] | None = None
    label: str | None = None
    features: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    split: str | None = None
    missing: str | None = None
    classes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.split is not None:
            checks.one_of("split", self.split, PIECES)
            if not self.texts:
                raise InputError("split divides texts: name the field of the text, too")
        if len(set(self.classes)) < len(self.classes) or "" in self.classes:
            raise InputError(f"classes must be different words, found {[*self.classes]}")
        if not self.field or self.rule not in _RULES:
            expected = "client must be FIELD, FIELD|domain, FIELD|value or *"
            raise InputError(f"{expected}, found {self.client!r}")
        used = [*self.texts, *([] if self.label is None else [self.label])]
        used += [*self.features, *self.columns]
        if self.client != EACH_ROW and self.rule == "value":
            used.insert(0, self.field)
        own = {_TEXT: self.texts, _LABEL: self.label, _FEATURES: self.features}
        named = [*(name for name, given in own.items() if given), *self.columns]
        for names in (used, named):
            if len(set(names)) != len(names):
                listed = ", ".join(map(repr, names))
                what = "client, text, label, features and columns"
                raise InputError(f"{what} must be different, found {listed}")

        others = {self.field, self.label, *self.features, *self.columns}
        if len(self.texts) > 1 and (joined := ",".join(self.texts)) in others:
            raise InputError(f"{joined!r} names the joined texts, and must be no other field, too")

    @property
    def texts(self) -> tuple[str, ...]:
        """The fields of texts."""
        if self.text is None:
            return (_TEXT,) if self.label is None and not self.features else ()
        return (self.text,) if isinstance(self.text, str) else tuple(self.text)

    @property
    def field(self) -> str:
        """The field that the client's id follows from."""
        return self.client.partition("|")[0]

    @property
    def rule(self) -> str:
        """How it follows: "value" or "domain"."""
        return self.client.partition("|")[2] or "value"

    @property
    def unit(self) -> str:
        """A client, in words."""
        if self.client == EACH_ROW:
            return "one row"
        of = "the domain of " if self.rule == "domain" else ""
        return f'all rows with one value of {of}"{self.field}"'

    @property
    def fields(self) -> Fields:
        """The fields that the table must have."""
        wanted = [] if self.client == EACH_ROW else [(self.field, "client")]
        wanted += [(name, "text") for name in self.texts]
        is_word = "class" if self.classes else "label"
        wanted += [] if self.label is None else [(self.label, is_word)]
        wanted += [(name, "number") for name in self.features]
        wanted += [(name, "value") for name in self.columns]
        return Fields(wanted, drop=self.missing == "drop", classes=self.classes)


# Reads the rows of a table, with some fields.
Read = Callable[[Fields], Iterator[Rows]]


def _blocks(read: Read, layout: Layout, fields: Fields) -> Iterator[tuple[Rows, pa.RecordBatch]]:
    source = ""
    for rows in read(fields):
        source = rows.source
        if rows.numbers:
            yield rows, _block(rows, layout)
    if source and fields.absent:
        raise InputError(f"{source}: no row has the field {min(fields.absent)!r}")
    # The owner's terminal alone may show it: other streams are stored, and read by others.
    if fields.dropped and (messages := Messages(sys.stderr)).isatty():
        messages.write(f"{fields.dropped} rows lack a value and are left out (PRIVATE)\n")


def _block(rows: Rows, layout: Layout) -> pa.RecordBatch:
    """Examples of some rows, as `stream.grouped` takes them."""
    columns, clients = {}, _ids(rows, layout)
    is_example = np.ones(len(clients), bool)
    if layout.texts:
        columns[_TEXT] = rows.columns[",".join(layout.texts)]
    if layout.label is not None:
        columns[_LABEL] = rows.columns[layout.label].cast(pa.int32())
    if layout.features:
        parts = [from_arrow(rows.columns[name]) for name in layout.features]
        matrix = np.concatenate([part.reshape(len(part), -1) for part in parts], 1)
        numbers = arrow(matrix.astype(np.float32).reshape(-1))
        columns[_FEATURES] = pa.FixedSizeListArray.from_arrays(numbers, matrix.shape[1])
    columns |= {name: rows.columns[name] for name in layout.columns}
    if layout.split is not None:
        texts, row_of_text, is_example = _divided(columns[_TEXT], layout.split)
        taken = pa.array(row_of_text)
        columns = {name: column.take(taken) for name, column in columns.items()}
        columns[_TEXT], clients = texts, clients.take(taken)
    own = {CLIENT: clients, IS_EXAMPLE: pa.array(is_example)}
    return pa.RecordBatch.from_pydict({**columns, **own})


def _ids(rows: Rows, layout: Layout) -> pa.Array:
    if layout.client == EACH_ROW:
        return pa.array(np.asarray(rows.numbers)).cast(pa.large_string())
    values = rows.columns[layout.field].cast(pa.large_string())
    if layout.rule == "value":
        return values
    urls = values.dictionary_encode()
    domains = list(map(_domain, urls.dictionary.to_pylist()))
    if None in domains:
        first = urls.indices.to_pylist().index(domains.index(None))
        expected = "a URL with a host, such as https://example.org/page"
        number = rows.numbers[first]
        raise row_error(rows.source, number, layout.field, expected, "another value")
    return text_array([str(domain) for domain in domains]).take(urls.indices)


def _domain(url: str) -> str | None:
    try:
        return urlsplit(url.strip()).hostname or None
    except ValueError:
        return None


def population_of(read: Read, layout: Layout, name: str) -> Population:
    """The population of a table, in memory."""
    blocks: list[pa.RecordBatch] = []
    size, fields = 0, layout.fields
    for _, block in _blocks(read, layout, fields):
        blocks.append(block)
        size += block.nbytes
        # They are copied once, into columns of all blocks.
        checks.fits_memory(f"{name}: its rows, in memory,", 2 * size)
    if not any(block[IS_EXAMPLE].true_count for block in blocks):
        raise InputError(f"{name} has no examples")
    parts = {column: [block[column] for block in blocks] for column in blocks[0].schema.names}
    columns = {column: _of_one_type(name, column, arrays) for column, arrays in parts.items()}
    is_example = columns.pop(IS_EXAMPLE)
    # One dictionary of all blocks, in the order of first appearance.
    clients = columns.pop(CLIENT).dictionary_encode()
    warn_of_alike(name, hashes(clients.dictionary.to_pylist()))
    examples = {column: from_arrow(parts.filter(is_example)) for column, parts in columns.items()}
    client_of_example = clients.indices.filter(is_example).to_numpy()
    described = {"name": name, "unit": layout.unit, "dropped": fields.dropped}
    return from_rows(client_of_example, clients.dictionary, examples, **described)


def _of_one_type(name: str, column: str, parts: list[pa.Array]) -> pa.Array:
    """Joins a column's blocks: those before the first fraction may hold whole numbers."""
    with contextlib.suppress(pa.ArrowInvalid):  # whose message quotes the value
        return pa.concat_arrays([part.cast(parts[-1].type) for part in parts])
    raise InputError(f"{name}: field {column!r} must be {INEXACT}, found a larger one")


@contextlib.contextmanager
def stream_of(read: Read, layout: Layout, name: str, folder: Path | None) -> Iterator[Stream]:
    """A table as a stream of clients.

    Args:
      read: gives the rows with these fields.
      layout: where each row is a client, rows of one number in several files are one.
      folder: where temporary files go; None is the machine's temporary folder.
    """
    examples, types, hashes_of_batches, fields = 0, {}, [], layout.fields

    def blocks() -> Iterator[pa.RecordBatch]:
        nonlocal examples
        for rows, block in _blocks(read, layout, fields):
            examples += block[IS_EXAMPLE].true_count
            for field in block.schema:
                # Rows that are on the disk already cannot become floats.
                if types.setdefault(field.name, field.type) != field.type:
                    where = f"rows {rows.numbers[0]} to {rows.numbers[-1]}: field {field.name!r}"
                    what = "must hold whole numbers, as in the rows before, found others"
                    raise InputError(f"{rows.source}, {where} {what}")
            yield block

    def watched(batches: Iterator[Batch]) -> Iterator[Batch]:
        for batch in batches:
            hashes_of_batches.append(hashes(batch.client_ids))
            yield batch
        warn_of_alike(name, np.concatenate(hashes_of_batches))

    with tempfile.TemporaryDirectory(prefix="grouping-", dir=folder) as temporary:
        batches = watched(grouped(blocks(), Path(temporary)))
        # All rows are read here, so that their number is known.
        first = next(batches, None)
        if first is None:
            raise InputError(f"{name} has no rows, expected at least one")
        described = name, layout.unit, "words", None, fields.dropped
        yield Stream(itertools.chain([first], batches), examples, *described)


def _divided(texts: pa.Array, split: str) -> tuple[pa.Array, np.ndarray, np.ndarray]:
    """The parts of each text, which text each is of, and whether it is one."""
    parts: list[str] = []
    copies: list[int] = []
    is_example: list[bool] = []
    for text in texts.to_pylist():
        parts_of_text = list(pieces(text.split("\n"), split))
        # A client whose texts have no parts remains, because how many have some is private.
        is_example += [True] * len(parts_of_text) or [False]
        parts += parts_of_text or [""]
        copies.append(max(len(parts_of_text), 1))
    row_of_text = np.repeat(np.arange(len(copies)), copies)
    return text_array(parts), row_of_text, np.array(is_example, bool)
