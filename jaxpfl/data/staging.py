"""Columns as plain files that grow, before they are copied into an Arrow file.

An Arrow buffer needs its size before its first byte, so columns are first staged as files of
values and of offsets. Every few seconds these are synced, and `journal.json` notes how long they
are: after a crash, whatever was written later is cut off, and staging goes on from there.

    .FOLDER.partial/staging/journal.json    what is staged, of what, and how far
    .FOLDER.partial/staging/N               the values of a column, the texts or the token ids
    .FOLDER.partial/staging/N.offsets       where each text or sequence ends
"""

import contextlib
import fcntl
import math
import mmap
import os
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa

from jaxpfl import files
from jaxpfl.data import storage
from jaxpfl.data.columns import Column, describe, text_buffers
from jaxpfl.data.content import Roots, hash_of, root
from jaxpfl.data.sequences import Sequences
from jaxpfl.errors import CorruptFile, InputError

_PIECE = 2**22
_SECONDS_BETWEEN_COMMITS = 5.0
_JOURNAL = "journal.json"
_FIELDS = {"request": dict, "examples": int, "columns": dict}
_STAGED = {"type": dict, "what": str, "examples": int, "size": int, "bytes": list}


@contextlib.contextmanager
def partial_folder(folder: Path) -> Iterator[Path]:
    """The folder `.NAME.partial` next to `folder`, which is renamed to it at the end.

    After bad input it is removed. After an interruption, or an error of the machine, it stays, with
    what was done in it; it is as private as the folder, and nobody but the owner can read it.
    """
    if folder.exists():
        raise InputError(f"{folder} exists already; choose another folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = folder.with_name(f".{folder.name}.partial")
    partial.mkdir(mode=0o700, exist_ok=True)
    descriptor = os.open(partial, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(
                f"{partial}: another process is writing here; wait for it, or choose another folder"
            ) from None
        try:
            yield partial
        except OtherWorkError:
            raise
        except InputError:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        os.rename(partial, folder)
    finally:
        os.close(descriptor)
    files.fsync_path(folder.parent)


class OtherWorkError(InputError):
    """A partial folder holds the beginning of something else, which must not be lost."""


class Staging:
    """The staged columns.

    Attributes:
      columns: by name, in the order of the first batch; empty before it.
      examples: how many are staged.
    """

    def __init__(self, folder: Path, request: Mapping[str, Any]) -> None:
        self.columns: dict[str, StagedColumn] = {}
        self.examples = 0
        self._folder, self._request = folder, request
        self._committed = time.monotonic()

    @classmethod
    @contextlib.contextmanager
    def opened(cls, folder: Path, request: Mapping[str, Any]) -> "Iterator[Staging]":
        """A new staging in `folder`, or the one that was begun there.

        Args:
          request: what is staged, in JSON's types.
        """
        staging = cls(folder, request)
        journal = folder / _JOURNAL
        try:
            if journal.exists():
                staging._restore(files.read_record(journal, _FIELDS), str(journal))
            else:
                files.empty_directory(folder.parent)
                folder.mkdir()
            yield staging
        finally:
            for column in staging.columns.values():
                column.close()

    def append(self, held: Mapping[str, Column]) -> None:
        """Adds the examples of a batch."""
        if not held:
            raise InputError("a population needs at least one column, found none")
        if not self.columns:
            for place, (name, column) in enumerate(held.items()):
                path, type_ = self._folder / str(place), storage.type_of(column)
                self.columns[name] = StagedColumn(path, type_, describe(column))
        if held.keys() != self.columns.keys():
            raise InputError("a batch has other columns than the first one")
        if len({len(column) for column in held.values()}) > 1:
            raise InputError("the columns of a batch must have one length")
        for name, column in held.items():
            self.columns[name].append(column)
        self.examples = next(iter(self.columns.values())).examples
        if time.monotonic() - self._committed >= _SECONDS_BETWEEN_COMMITS:
            self.commit()

    def commit(self) -> None:
        """Makes what is staged durable."""
        staged = {name: column.synced() for name, column in self.columns.items()}
        journal = {"request": self._request, "examples": self.examples, "columns": staged}
        files.write_json(self._folder / _JOURNAL, journal, mode=0o600)
        self._committed = time.monotonic()

    def write(self, path: Path, names: Iterable[str], offsets: np.ndarray) -> None:
        """Writes columns as an Arrow file of one batch."""
        if self.examples != int(offsets[-1]):
            raise InputError("the sizes of a stream's clients must sum to its examples")
        columns = {name: self.columns[name] for name in names}
        with path.open("wb") as file:
            _copy(columns, file)

    def content(self, names: Iterable[str], offsets: np.ndarray) -> str:
        """The `Population.content` of some columns, from the staged files."""
        return hash_of({name: self.columns[name].roots() for name in names}, offsets)

    def _restore(self, journal: dict[str, Any], where: str) -> None:
        if journal["request"] != files.jsonable(self._request):
            raise OtherWorkError(
                f"{self._folder.parent} holds the beginning of another conversion: of another "
                "source, of a file that has changed since, or with another vocabulary; give the "
                "command that began it, remove that folder, or choose another one to write"
            )
        self.examples = journal["examples"]
        if not journal["columns"] and self.examples:
            raise CorruptFile(f"{where}: there are examples, but no columns that hold them")
        for place, (name, staged) in enumerate(journal["columns"].items()):
            path = self._folder / str(place)
            self.columns[name] = StagedColumn.restored(path, staged, f"{where}: column {name!r}")
            if self.columns[name].examples != self.examples:
                raise CorruptFile(f"{where}: column {name!r} has another number of examples")


class StagedColumn:
    """A column in one file of values, or in one of offsets and one of what they divide.

    Attributes:
      type: as in the manifest.
      what: as `columns.describe` says it.
      examples: how many are staged.
    """

    def __init__(self, path: Path, type_: dict[str, Any], what: str) -> None:
        self.type, self.what = type_, what
        self.examples = self._size = 0
        self._divided = type_["dtype"] == "text" or type_["shape"] == [None]
        # In the order of a fingerprint and of Arrow's buffers.
        names = [f"{path.name}.offsets", path.name] if self._divided else [path.name]
        self._files: list[BinaryIO] = [path.with_name(name).open("ab") for name in names]
        if self._divided and not self._files[0].tell():
            self._files[0].write(bytes(8))

    @classmethod
    def restored(cls, path: Path, staged: Any, where: str) -> "StagedColumn":
        """The column as it was when `synced` returned `staged`."""
        files.record_of(staged, where, _STAGED)
        storage.check_type(staged["type"], where)
        column = cls(path, staged["type"], staged["what"])
        column.examples, column._size = staged["examples"], staged["size"]
        sizes = column._expected()
        countable = min(column.examples, column._size) >= 0 and staged["bytes"] == sizes
        if not countable or any(
            file.tell() < size for file, size in zip(column._files, sizes, strict=True)
        ):
            column.close()
            raise CorruptFile(f"{where}: what was staged is shorter or of another size")
        for file, size in zip(column._files, sizes, strict=True):
            file.truncate(size)
            file.seek(size)
        if column._divided and not _in_order(column._paths()[0], column._size):
            column.close()
            raise CorruptFile(f"{where}: what was staged does not end where its offsets say")
        return column

    def _expected(self) -> list[int]:
        """The bytes of the files."""
        shape = self.type["shape"]
        item = 1 if self.type["dtype"] == "text" else np.dtype(self.type["dtype"]).itemsize
        if not self._divided:
            return [self.examples * math.prod(shape) * item]
        return [8 * (self.examples + 1), self._size * item]

    def synced(self) -> dict[str, Any]:
        """Makes all that was appended durable, and returns what `restored` needs."""
        for file in self._files:
            files.sync(file)
        return {
            "type": self.type,
            "what": self.what,
            "examples": self.examples,
            "size": self._size,
            "bytes": [file.tell() for file in self._files],
        }

    def close(self) -> None:
        for file in self._files:
            file.close()

    def append(self, column: Column) -> None:
        if describe(column) != self.what:
            raise InputError(f"a batch holds {describe(column)}, the first one {self.what}")
        self.examples += len(column)
        if not len(column):
            return
        if not self._divided:
            self._files[0].write(np.ascontiguousarray(column).data.cast("B"))
            return
        if isinstance(column, Sequences):
            held = column.compact()
            offsets, content = np.asarray(held.edges), np.asarray(held.values).data
        else:
            offsets, content = text_buffers(column)
        self._files[0].write((offsets[1:] + (self._size - offsets[0])).data)
        self._files[1].write(content)
        self._size += len(content)

    def _paths(self) -> list[Path]:
        return [Path(file.name) for file in self._files]

    def roots(self) -> Roots:
        """The roots of its buffers, which are its files."""
        found = [root(_pieces(path)) for path in self._paths()] if self.examples else []
        return Roots(self.what, self.examples, found)

    def to_arrow(self, maps: list[mmap.mmap]) -> pa.Array:
        """The files as an Arrow array, mapped into memory; the maps are added to `maps`."""
        buffers = [_map(path, maps) for path in self._paths()]
        if self.type["dtype"] == "text":
            return pa.LargeStringArray.from_buffers(self.examples, *buffers)
        dtype = np.dtype(self.type["dtype"])
        if self._divided:
            edges = np.frombuffer(buffers[0], np.int64)
            return storage.to_arrow(Sequences(np.frombuffer(buffers[1], dtype), edges, {}))
        shape = (self.examples, *self.type["shape"])
        return storage.to_arrow(np.frombuffer(buffers[0], dtype).reshape(shape))


def _in_order(path: Path, size: int) -> bool:
    """Whether a file of offsets begins with 0, never decreases, and ends with `size`.

    Arrow takes values from wherever offsets say, also from beyond what is there.
    """
    last = 0
    for number, piece in enumerate(_pieces(path)):
        edges = np.frombuffer(piece, np.int64)
        if not number and edges[0] != 0:
            return False
        if edges[0] < last or np.any(edges[1:] < edges[:-1]):
            return False
        last = int(edges[-1])
    return last == size


def _pieces(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            yield piece


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


def _copy(columns: Mapping[str, StagedColumn], file: BinaryIO) -> None:
    """Writes the staged columns as an Arrow file of one batch, the form that `storage` reads."""
    maps: list[mmap.mmap] = []
    arrays = [column.to_arrow(maps) for column in columns.values()]
    batch = pa.RecordBatch.from_arrays(arrays, list(columns))
    sink = pa.PythonFile(_Sink(file, maps), mode="w")
    storage.write_batches(sink, batch.schema, [batch])
    files.sync(file)
