"""Rows in any order, grouped by client in bounded memory: a sort on the disk.

Each row's client id is hashed to 64 bits. Rows are dealt to files by the first bits of that hash, a
file that is still too large is dealt again by the next bits, and a file that fits is sorted in
memory. Clients therefore come in the order of their hashes, whatever the limits are, and a client's
rows keep their order. A client alone may be larger than memory: its file needs no sorting.

All files are in one temporary folder, together about as large as the rows that are kept.
"""

import contextlib
import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa

from jaxpfl.data.columns import Column, from_arrow
from jaxpfl.data.stream import Batch

LIMIT_BYTES = 2**26
"""A file of at most this size is sorted in memory, in about four times as much."""

_BITS = 6
# So many bytes of rows are dealt at once, because each file gets a batch of its share.
_DEALT_BYTES = 2**25
_CLIENT, _HASH, _HELD = "\0client", "\0hash", "\0held"


def block(client_ids: pa.Array, values: Mapping[str, pa.Array], held: np.ndarray) -> pa.RecordBatch:
    """Rows as `grouped` takes them.

    Args:
      client_ids: the client of each row, large_string.
      values: Arrow arrays without missing values, by column.
      held: False for a row that only says that there is this client; its values do not count.
    """
    known = client_ids.dictionary_encode()
    hashes = np.array([_hash(id_) for id_ in known.dictionary.to_pylist()], np.uint64)
    hash_R = hashes[known.indices.to_numpy()]
    own = {_CLIENT: client_ids, _HASH: pa.array(hash_R), _HELD: pa.array(held)}
    return pa.RecordBatch.from_pydict({**own, **values})


def grouped(blocks: Iterator[pa.RecordBatch], folder: Path) -> Iterator[Batch]:
    """The rows of all blocks, client by client; all blocks are read before the first batch.

    Args:
      blocks: of `block`, with equal schemas.
      folder: an empty folder for temporary files.
    """
    yield from _files(_deal(blocks, folder, 0), 0)


def _hash(client_id: str) -> int:
    digest = hashlib.blake2b(client_id.encode("utf-8", "replace"), digest_size=8).digest()
    return int.from_bytes(digest, "big")


class _File:
    """Rows on the disk whose hashes begin alike."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = self.rows = 0
        self.hashes: set[int] = set()
        self._writer: pa.RecordBatchFileWriter | None = None

    def append(self, rows: pa.RecordBatch) -> None:
        if self._writer is None:
            self._writer = pa.ipc.new_file(self.path, rows.schema)
        self._writer.write_batch(rows)
        self.size += rows.nbytes
        self.rows += len(rows)
        if len(self.hashes) < 2:
            self.hashes.update(np.unique(rows[_HASH].to_numpy()).tolist()[:2])

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def batches(self) -> Iterator[pa.RecordBatch]:
        with pa.memory_map(str(self.path)) as mapped, pa.ipc.open_file(mapped) as file:
            for index in range(file.num_record_batches):
                yield file.get_batch(index)


def _deal(blocks: Iterator[pa.RecordBatch], folder: Path, depth: int) -> list[_File]:
    """Deals rows to files by the next bits of their hashes."""
    files = [_File(folder / f"{number:02}") for number in range(2**_BITS)]
    with contextlib.ExitStack() as stack:
        for file in files:
            stack.callback(file.close)
        for rows in _merged(blocks):
            shift = np.uint64(64 - _BITS * (depth + 1))
            place_R = (rows[_HASH].to_numpy() >> shift).astype(np.int64) & (2**_BITS - 1)
            order = np.argsort(place_R, kind="stable")
            sorted_rows = rows.take(pa.array(order))
            ends = np.searchsorted(place_R[order], np.arange(2**_BITS + 1))
            for number, file in enumerate(files):
                begin, end = int(ends[number]), int(ends[number + 1])
                if begin < end:
                    file.append(sorted_rows.slice(begin, end - begin))
    return [file for file in files if file.hashes]


def _merged(blocks: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The same rows in fewer, larger blocks."""
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


def _files(files: list[_File], depth: int) -> Iterator[Batch]:
    for file in files:
        if file.size <= LIMIT_BYTES:
            yield _sorted(list(file.batches()))
        elif len(file.hashes) == 1 or _BITS * (depth + 2) > 64:
            # Equal hashes of different clients do not occur in practice, and are sorted here.
            yield from _in_order(file)
        else:
            below = file.path.with_name(f"{file.path.name}-dealt")
            below.mkdir()
            yield from _files(_deal(file.batches(), below, depth + 1), depth + 1)
            below.rmdir()
        file.path.unlink()


def _in_order(file: _File) -> Iterator[Batch]:
    """The rows of one client, in pieces; of several, sorted."""
    ids: set[str] = set()
    size = 0
    for rows in file.batches():
        ids.update(rows[_CLIENT].unique().to_pylist())
        size += int(rows[_HELD].to_numpy(zero_copy_only=False).sum())
    if len(ids) > 1:
        yield _sorted(list(file.batches()))
        return
    seen = 0
    for rows in file.batches():
        kept = rows.filter(rows[_HELD])
        seen += len(rows)
        done = seen == file.rows
        yield Batch(_columns(kept), sorted(ids) if done else [], [size] if done else [])


def _sorted(batches: list[pa.RecordBatch]) -> Batch:
    """Rows of several clients, client by client."""
    table = pa.Table.from_batches(batches)
    ids = table[_CLIENT].combine_chunks().dictionary_encode()
    names, client_R = ids.dictionary, ids.indices.to_numpy()
    hash_R = table[_HASH].combine_chunks().to_numpy()
    # The names by hash, and those of one hash by name.
    first = np.unique(client_R, return_index=True)[1]
    text = np.array(names.to_pylist(), dtype=object)
    order = np.lexsort((text.argsort(kind="stable").argsort(), hash_R[first]))
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    rows = np.argsort(rank[client_R], kind="stable")
    held_R = table[_HELD].combine_chunks().to_numpy(zero_copy_only=False)
    sizes = np.bincount(rank[client_R[held_R]], minlength=len(order))
    kept = table.take(pa.array(rows[held_R[rows]]))
    return Batch(_columns(kept), [str(text[index]) for index in order], sizes.tolist())


def _columns(rows: pa.Table | pa.RecordBatch) -> dict[str, Column]:
    """The columns of the rows, but for those of the grouping."""
    found: dict[str, Column] = {}
    for name in rows.schema.names:
        if name in (_CLIENT, _HASH, _HELD):
            continue
        column = rows[name]
        found[name] = from_arrow(
            column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
        )
    return found
