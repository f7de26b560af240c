"""Populations larger than memory: read batch by batch, written batch by batch.

An Arrow buffer needs its size before its first byte. Columns are therefore first staged as plain
files in the folder, and then copied into its Arrow file. This takes room for twice the population
on the disk, and memory for one batch, whatever the population's size.
"""

import contextlib
import hashlib
import mmap
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import pyarrow as pa

from jaxpfl.data import storage
from jaxpfl.data.columns import Column, as_column, describe, text_array, text_buffers
from jaxpfl.data.population import Population, concatenated, offsets_of
from jaxpfl.errors import InputError
from jaxpfl.files import sync

_PIECE = 2**22


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
      name, unit: as in `Population`.
    """

    batches: Iterator[Batch]
    examples: int
    name: str
    unit: str


def collect(stream: Stream) -> Population:
    """The stream's population in memory."""
    pieces: dict[str, list[Column]] = {}
    client_ids: list[str] = []
    sizes: list[int] = []
    for batch in stream.batches:
        for name, column in batch.columns.items():
            pieces.setdefault(name, []).append(column)
        client_ids.extend(batch.client_ids)
        sizes.extend(batch.sizes)
    columns = {}
    for name, parts in pieces.items():
        columns[name] = concatenated(parts)
        parts.clear()
    ids = text_array(client_ids)
    return Population(columns, offsets_of(sizes), ids, stream.name, stream.unit)


def write(
    folder: str | Path, stream: Stream, progress: Callable[[int], None] | None = None
) -> tuple[int, int]:
    """Writes the stream's population to a new folder, with the same files as `Population.save`.

    Args:
      progress: called after each batch with the number of examples so far.

    Returns:
      The numbers of clients and of examples.

    Raises:
      InputError: the folder exists, or the stream's batches do not fit together.
    """
    with storage.new_folder(Path(folder)) as temporary:
        staging = temporary / "staging"
        staging.mkdir()
        columns: dict[str, _Staged] = {}
        ids: list[pa.Array] = []
        sizes: list[np.ndarray] = []
        with contextlib.ExitStack() as files:
            for batch in stream.batches:
                held = {name: as_column(f"column {name!r}", c) for name, c in batch.columns.items()}
                if not ids:
                    for place, (name, column) in enumerate(held.items()):
                        columns[name] = files.enter_context(_Staged(staging / str(place), column))
                if held.keys() != columns.keys():
                    raise InputError("a batch has other columns than the first one")
                for name, column in held.items():
                    columns[name].append(column)
                ids.append(text_array(list(batch.client_ids)))
                sizes.append(np.asarray(batch.sizes, np.int64))
                if progress:
                    progress(next(iter(columns.values())).examples)
        if not columns:
            raise InputError("a population needs at least one column, found none")
        client_ids, offsets = pa.concat_arrays(ids), offsets_of(np.concatenate(sizes))
        if len(client_ids) != len(offsets) - 1 or len(client_ids.unique()) != len(client_ids):
            raise InputError("the clients of a stream must have one size each and different ids")
        if {column.examples for column in columns.values()} != {int(offsets[-1])}:
            raise InputError("the sizes of a stream's clients must sum to its examples")
        with (temporary / storage.EXAMPLES).open("wb") as file:
            _copy(columns, file)
        digest = _fingerprint(columns, offsets)
        shutil.rmtree(staging)
        types = {name: column.type for name, column in columns.items()}
        parts = (types, offsets, client_ids, stream.name, stream.unit)
        storage.finish(temporary, storage.Stored(*parts, fingerprint=digest, content=digest))
    return len(client_ids), int(offsets[-1])


class _Staged:
    """A column in one file of values, or in one of offsets and one of UTF-8."""

    def __init__(self, path: Path, like: Column) -> None:
        self.type = storage.type_of(like)
        self.examples = 0
        self.what = describe(like)
        self._path = path
        self._values = path.open("wb")
        self._offsets: BinaryIO | None = None
        self._size = 0
        if not isinstance(like, np.ndarray):
            self._offsets = path.with_name(f"{path.name}.offsets").open("wb")
            self._offsets.write(bytes(8))

    def __enter__(self) -> "_Staged":
        return self

    def __exit__(self, *error: object) -> None:
        self._values.close()
        if self._offsets:
            self._offsets.close()

    def append(self, column: Column) -> None:
        if describe(column) != self.what:
            raise InputError(f"a batch holds {describe(column)}, the first one {self.what}")
        self.examples += len(column)
        if not len(column):
            return
        if isinstance(column, np.ndarray):
            self._values.write(column.data.cast("B"))
            return
        assert self._offsets is not None
        offsets, content = text_buffers(column)
        self._offsets.write((offsets[1:] + (self._size - offsets[0])).data)
        self._values.write(content)
        self._size += len(content)

    def paths(self) -> list[Path]:
        """The files in the order of a fingerprint and of Arrow's buffers."""
        return [*([Path(self._offsets.name)] if self._offsets else []), self._path]

    def to_arrow(self, maps: list[mmap.mmap]) -> pa.Array:
        """The files as an Arrow array, mapped into memory; the maps are added to `maps`."""
        buffers = [_map(path, maps) for path in self.paths()]
        if self._offsets:
            return pa.LargeStringArray.from_buffers(self.examples, *buffers)
        shape, dtype = (self.examples, *self.type["shape"]), np.dtype(self.type["dtype"])
        return storage.to_arrow(np.frombuffer(buffers[0], dtype).reshape(shape))


def _map(path: Path, maps: list[mmap.mmap]) -> pa.Buffer:
    if not path.stat().st_size:
        return pa.py_buffer(b"")
    with path.open("rb") as file:
        maps.append(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    return pa.py_buffer(maps[-1])


class _Sink:
    """A file for Arrow to write to; frees the memory of `maps` as their content is written."""

    closed = False

    def __init__(self, file: BinaryIO, maps: list[mmap.mmap]) -> None:
        self._file, self._maps = file, maps

    def write(self, content: Any) -> int:
        view = memoryview(content).cast("B")
        for at in range(0, len(view), _PIECE):
            self._file.write(view[at : at + _PIECE])
            for mapped in self._maps:
                if hasattr(mmap, "MADV_DONTNEED"):
                    mapped.madvise(mmap.MADV_DONTNEED)
        return len(view)

    def tell(self) -> int:
        return self._file.tell()

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self.closed = True


def _copy(columns: Mapping[str, _Staged], file: BinaryIO) -> None:
    """Writes the staged columns as an Arrow file of one batch, the form that `storage` reads."""
    maps: list[mmap.mmap] = []
    arrays = [column.to_arrow(maps) for column in columns.values()]
    batch = pa.RecordBatch.from_arrays(arrays, list(columns))
    sink = pa.PythonFile(_Sink(file, maps), mode="w")
    with pa.ipc.new_file(sink, batch.schema) as writer:
        writer.write_batch(batch)
    sync(file)


def _fingerprint(columns: Mapping[str, _Staged], offsets: np.ndarray) -> str:
    """`Population.content`, from the staged files."""
    digest = hashlib.sha256(b"jaxpfl population 1\0")
    digest.update(offsets.astype("<i8").data)
    for name in sorted(columns):
        # As in `columns.update_hash`.
        column = columns[name]
        digest.update(f"{name}\0{column.what} {column.examples}\0".encode())
        for path in column.paths() if column.examples else ():
            with path.open("rb") as file:
                while piece := file.read(_PIECE):
                    digest.update(piece)
    return digest.hexdigest()
