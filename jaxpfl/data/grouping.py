"""Rows in any order, grouped by client in bounded memory: a sort on the disk.

Each row's client id is hashed to 64 bits. Rows are dealt to 256 files by the first bits of that
hash, and each file is sorted in memory, in about four times its size. Clients therefore come in the
order of their hashes, and a client's rows keep their order. All files are in one temporary folder,
together about as large as the rows that are kept.
"""

import contextlib
import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa

from jaxpfl import checks
from jaxpfl.data.columns import from_arrow
from jaxpfl.data.stream import Batch

_BITS = 8
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

    Raises:
      InputError: one of the 256 files does not fit the memory four times over.
    """
    for path in _deal(blocks, folder):
        largest = "the largest of 256 parts into which clients are dealt, sorted in memory,"
        checks.fits_memory(largest, 4 * path.stat().st_size)
        with pa.memory_map(str(path)) as mapped:
            yield _sorted(pa.ipc.open_file(mapped).read_all())
        path.unlink()


def _hash(client_id: str) -> int:
    digest = hashlib.blake2b(client_id.encode("utf-8", "replace"), digest_size=8).digest()
    return int.from_bytes(digest, "big")


def _deal(blocks: Iterator[pa.RecordBatch], folder: Path) -> list[Path]:
    """Deals rows to files by the first bits of their hashes; returns those that have rows."""
    writers: dict[Path, pa.RecordBatchFileWriter] = {}
    with contextlib.ExitStack() as stack:
        for rows in _merged(blocks):
            place_R = (rows[_HASH].to_numpy() >> np.uint64(64 - _BITS)).astype(np.int64)
            order = np.argsort(place_R, kind="stable")
            sorted_rows = rows.take(pa.array(order))
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
    columns = {
        name: from_arrow(kept[name].combine_chunks())
        for name in kept.column_names
        if name not in (_CLIENT, _HASH, _HELD)
    }
    return Batch(columns, [str(text[index]) for index in order], sizes.tolist())
