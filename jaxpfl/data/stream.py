"""Populations that come batch by batch, such as those that are larger than memory.

Rows in any order are grouped by client in bounded memory, by a sort on the disk (`grouped`). Each
row's client id is hashed to 64 bits. Rows are dealt to 256 files by the first bits of that hash,
and each file is sorted in memory, in about four times its size. Clients therefore come in the order
of their hashes, and a client's rows keep their order. All files are in one temporary folder,
together about as large as the rows that are kept.
"""

import contextlib
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import pyarrow as pa

from jaxpfl import checks
from jaxpfl.data.columns import Column, arrow, from_arrow
from jaxpfl.data.sequences import Sequences

_BITS = 8
# So many bytes of rows are dealt at once, because each file gets a batch of its share.
_DEALT_BYTES = 2**25
CLIENT, IS_EXAMPLE = "\0client", "\0is_example"
"""Columns of blocks: the client of each row, large_string; and False for a row that only says that
there is this client. Its other values do not count."""


class Batch(NamedTuple):
    """Examples of some clients, in the clients' order.

    Attributes:
      columns: the same names, types and example shapes in every batch of a stream.
      client_ids: the clients that this batch completes, with or without examples.
      sizes: how many examples each of these has, including those in earlier batches.
    """

    columns: Mapping[str, Column]
    client_ids: Sequence[str]
    sizes: Sequence[int]


@dataclass(frozen=True)
class Stream:
    """A population that comes in batches, once.

    Attributes:
      batches: at least one, so that the columns' types are known.
      examples: about how many there are in all, for a progress bar. PRIVATE.
      fingerprint: the population's, or None for the `content` of the columns.
      dropped: how many rows of a table lacked a value and were left out. PRIVATE.
    """

    batches: Iterator[Batch]
    examples: int
    name: str
    unit: str
    splitting: str = "words"
    fingerprint: str | None = None
    dropped: int = 0


class Encoder(Protocol):
    """Makes sequences of ids of texts."""

    def sequences(self, texts: pa.Array) -> Sequences:
        """The ids of each text of a large_string array."""
        ...

    def save(self, path: Path) -> None:
        """Writes the vocabulary, always the same bytes."""
        ...


def grouped(blocks: Iterator[pa.RecordBatch], folder: Path) -> Iterator[Batch]:
    """The rows of all blocks, client by client; all blocks are read before the first batch.

    Blocks have equal schemas, with `CLIENT` and `IS_EXAMPLE`, and no missing values; `folder` is
    empty, for temporary files. `InputError` if one of 256 files does not fit the memory four times.
    """
    for path in _deal(blocks, folder):
        largest = "the largest of 256 parts into which clients are dealt, sorted in memory,"
        checks.fits_memory(largest, 4 * path.stat().st_size)
        with pa.memory_map(str(path)) as mapped:
            yield _sorted(pa.ipc.open_file(mapped).read_all())
        path.unlink()


def _hashes(client_ids: pa.Array) -> np.ndarray:
    ids = (id_.encode() for id_ in client_ids.to_pylist())
    digests = [hashlib.blake2b(id_, digest_size=8).digest() for id_ in ids]
    return np.frombuffer(b"".join(digests), ">u8").astype(np.uint64)


def _deal(blocks: Iterator[pa.RecordBatch], folder: Path) -> list[Path]:
    """Deals rows to files by the first bits of their hashes; returns those that have rows."""
    writers: dict[Path, pa.RecordBatchFileWriter] = {}
    with contextlib.ExitStack() as stack:
        for rows in _merged(blocks):
            ids = rows[CLIENT].dictionary_encode()
            places = (_hashes(ids.dictionary) >> np.uint64(64 - _BITS)).astype(np.int64)
            place_R = places[ids.indices.to_numpy()]
            order = np.argsort(place_R, kind="stable")
            sorted_rows = rows.take(arrow(order))
            ends = np.searchsorted(place_R[order], np.arange(2**_BITS + 1))
            for number in np.flatnonzero(np.diff(ends)).tolist():
                path, begin = folder / f"{number:08}", int(ends[number])
                if path not in writers:
                    writers[path] = stack.enter_context(pa.ipc.new_file(str(path), rows.schema))
                writers[path].write_batch(sorted_rows.slice(begin, int(ends[number + 1]) - begin))
    return sorted(writers)


def _merged(blocks: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    pending: list[pa.RecordBatch] = []
    size = 0
    for rows in blocks:
        pending.append(rows)
        size += rows.nbytes
        if size >= _DEALT_BYTES:
            yield pa.concat_batches(pending)
            pending, size = [], 0
    if pending:
        yield pa.concat_batches(pending)


def _sorted(table: pa.Table) -> Batch:
    ids = table[CLIENT].combine_chunks().dictionary_encode()
    names, client_R = ids.dictionary.to_pylist(), ids.indices.to_numpy()
    # Names are sorted by hash, and those of one hash by name.
    hashes = _hashes(ids.dictionary).tolist()
    order = sorted(range(len(names)), key=lambda index: (hashes[index], names[index]))
    rank = np.empty(len(order), np.int64)
    rank[order] = np.arange(len(order))
    rows = np.argsort(rank[client_R], kind="stable")
    is_example_R = table[IS_EXAMPLE].to_numpy()
    sizes = np.bincount(rank[client_R[is_example_R]], minlength=len(order))
    examples = table.drop_columns([CLIENT, IS_EXAMPLE]).take(arrow(rows[is_example_R[rows]]))
    columns = {name: from_arrow(examples[name].combine_chunks()) for name in examples.column_names}
    return Batch(columns, [names[index] for index in order], sizes.tolist())
