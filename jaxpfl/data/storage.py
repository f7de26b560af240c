"""A population on disk: a file for each buffer of its columns, and a manifest; mapped when read.

    FOLDER/manifest.json                format, columns, the size of each buffer and the SHA-256 of
                                        every block of it (see `data.mapped`); hashes of the
                                        content, of the source and of the manifest itself
    FOLDER/0.values, 1.values, ...      the values of each column, the bytes of its texts (UTF-8),
                                        or its token ids, one after the other, little-endian
    FOLDER/0.edges, ...                 where each text or sequence begins, and the end: int64
    FOLDER/offsets.values               where each client's examples begin, and the end: int64
    FOLDER/client_ids.edges, .values    the ids, as texts
    FOLDER/vocabulary.json              with token ids: the words that they stand for

Opening checks the manifest, all sizes and the clients. A block of a column is verified when it is
first read, once while the folder is open; `folders.check_folder` verifies all at once. The folder
is written under a temporary name and then renamed, so that it is complete or absent, and has mode
0700.
"""

import contextlib
import fcntl
import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa

from jaxpfl import files
from jaxpfl.data import mapped
from jaxpfl.data.columns import Column, as_column, text_array
from jaxpfl.data.content import Growing, buffer_names, hash_of, type_of
from jaxpfl.data.mapped import Blocks, Mapped, MappedText
from jaxpfl.data.sequences import Sequences
from jaxpfl.data.stream import Encoder, Stream
from jaxpfl.errors import CorruptFile, InputError

if TYPE_CHECKING:
    from jaxpfl.progress import Progress

VOCABULARY = "vocabulary.json"
_FORMAT = "jaxpfl population 5"
_MANIFEST, _OFFSETS, _IDS = "manifest.json", "offsets", "client_ids"
_FIELDS = {
    "name": str, "unit": str, "splitting": str, "clients": int, "examples": int, "columns": dict,
    _OFFSETS: list, _IDS: list, "block_bytes": int, "fingerprint": str, "content": str,
}  # fmt: skip
_ID_TYPES = ("uint16", "uint32")
_NUMBERS = (
    *("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"),
    *("float16", "float32", "float64"),
)
_NO_IDS, _NO_OFFSETS = text_array([]), np.zeros(0, np.int64)
# No source has a column of texts of this name, because readers name their columns themselves.
_TOKENS = "tokens"
_HEX = 64


class Stored(NamedTuple):
    """A stored `Population`: its attributes, without what is computed from them."""

    columns: Mapping[str, Column]
    offsets: np.ndarray
    client_ids: pa.Array
    name: str
    unit: str
    splitting: str
    fingerprint: str
    content: str


def is_stored(folder: Path) -> bool:
    """Whether `folder` was written by `write`."""
    return (folder / _MANIFEST).is_file()


def write(
    folder: Path,
    opened: Callable[[Path], AbstractContextManager[Stream]],
    encoder: Encoder | None = None,
    progress: "Progress | None" = None,
) -> tuple[int, int]:
    """Writes a stream's population to a new folder; returns the numbers of clients and examples.

    Args:
      encoder: writes only a column "tokens", which it makes of the column "text".

    Raises:
      InputError: the folder exists, another process is writing it, or a batch has columns of
        another kind than the first. Nothing stays behind.
    """
    with _new(folder) as partial, contextlib.ExitStack() as stack:
        # Next to the folder, where there must be room for the data anyway; /tmp may have less.
        temporary = partial / "unpacked"
        temporary.mkdir()
        stack.callback(shutil.rmtree, temporary)
        stream = stack.enter_context(opened(temporary))
        if progress:
            progress.begin(0, stream.examples)

        def growing(stem: Path, like: Column) -> Growing:
            paths = [f"{stem}.{name}" for name in buffer_names(type_of(like))]
            return Growing(like, [stack.enter_context(open(path, "wb")) for path in paths])

        columns: dict[str, Growing] = {}
        # Texts are not written beside tokens, but the fingerprint is a hash of them.
        texts: dict[str, Growing] = {}
        ids: list[pa.Array] = []
        sizes, examples = [np.zeros(1, np.int64)], 0
        for batch in stream.batches:
            parts = {name: as_column(f"column {name!r}", c) for name, c in batch.columns.items()}
            examples += len(next(iter(parts.values())))
            if encoder is not None:
                if stream.fingerprint is None:
                    texts = texts or {name: Growing(column) for name, column in parts.items()}
                    _append(texts, parts)
                if not isinstance(parts.get("text"), pa.Array):
                    raise InputError(f"{stream.name} must have a column 'text', found {[*parts]}")
                parts = {_TOKENS: encoder.sequences(parts["text"])}
            columns = columns or {
                name: growing(partial / str(place), column)
                for place, (name, column) in enumerate(parts.items())
            }
            _append(columns, parts)
            ids.append(text_array(list(batch.client_ids)))
            sizes.append(np.asarray(batch.sizes, np.int64))
            if progress:
                progress.update(examples)
        offsets = np.concatenate(sizes).cumsum()
        client_ids = pa.concat_arrays(ids)
        clients = {_OFFSETS: offsets, _IDS: client_ids}
        of_clients = {name: growing(partial / name, column) for name, column in clients.items()}
        for name, column in clients.items():
            of_clients[name].append(column)
        content = _hash(columns, offsets)
        manifest = {
            "format": _FORMAT,
            "name": stream.name,
            "unit": stream.unit,
            "splitting": stream.splitting,
            "clients": len(client_ids),
            "examples": examples,
            "columns": {
                name: {**column.type, "buffers": column.synced()}
                for name, column in columns.items()
            },
            **{name: column.synced() for name, column in of_clients.items()},
            "block_bytes": mapped.BLOCK,
            # The text's fingerprint, so that texts and tokens are charged to the same ledger.
            "fingerprint": stream.fingerprint or (_hash(texts, offsets) if encoder else content),
            "content": content,
        }
        manifest["sha256"] = _own_sha256(manifest)
        if encoder is not None:
            encoder.save(partial / VOCABULARY)
        files.write_atomically(partial / _MANIFEST, json.dumps(manifest, indent=1) + "\n")
    return len(client_ids), examples


@contextlib.contextmanager
def _new(folder: Path) -> Iterator[Path]:
    """The folder `.NAME.partial` next to `folder`, which is renamed to it at the end.

    After an exception it is removed. The next process removes the files that a killed one left.
    """
    if folder.exists():
        raise InputError(f"{folder} exists already; choose another folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = files.private_directory(folder.with_name(f".{folder.name}.partial"))
    descriptor = os.open(partial, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(f"{partial}: another process is writing here: wait for it") from None
        try:
            for left in partial.iterdir():
                if left.is_dir():
                    shutil.rmtree(left)
                else:
                    left.unlink()
            yield partial
            os.rename(partial, folder)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    finally:
        os.close(descriptor)
    files.fsync_path(folder.parent)


def _append(columns: Mapping[str, Growing], batch: Mapping[str, Column]) -> None:
    if batch.keys() != columns.keys():
        raise InputError("a batch has other columns than the first one")
    for name, column in batch.items():
        columns[name].append(column)


def _hash(columns: Mapping[str, Growing], offsets: np.ndarray) -> str:
    return hash_of({name: column.roots() for name, column in columns.items()}, offsets)


def read(folder: Path) -> Stored:
    """Maps a stored population into memory, after checking all but the blocks of its columns."""
    if not is_stored(folder):
        raise InputError(f"{folder} holds no {_MANIFEST} of Population.save or `jaxpfl convert`")
    manifest = _read_manifest(folder / _MANIFEST)
    clients, examples = manifest["clients"], manifest["examples"]

    def column(stem: str, what: str, stored: Mapping[str, Any], number: int) -> Column:
        try:
            return _column(folder / stem, what, stored, number)
        except CorruptFile:
            raise
        except InputError as error:
            raise CorruptFile(f"{folder}: {what}: {error}") from None

    columns = {
        name: column(str(place), f"column {name!r}", stored, examples)
        for place, (name, stored) in enumerate(manifest["columns"].items())
    }
    stored = {**type_of(_NO_OFFSETS), "buffers": manifest[_OFFSETS]}
    offsets = column(_OFFSETS, "the clients' offsets", stored, clients + 1)
    ids = column(_IDS, "the clients' ids", {**type_of(_NO_IDS), "buffers": manifest[_IDS]}, clients)
    described = (manifest[key] for key in ("name", "unit", "splitting", "fingerprint", "content"))
    return Stored(columns, offsets.whole, ids.whole if clients else ids, *described)


def _column(stem: Path, what: str, stored: Mapping[str, Any], examples: int) -> Column:
    """A column whose files begin with `stem`; nothing of them is read but the ends of sequences."""
    dtype, shape, names = stored["dtype"], stored["shape"], buffer_names(stored)
    texts, encoding = dtype == "text", stored.get("encoding", {})
    if len(stored["buffers"]) != (len(names) if examples else 0):
        raise InputError("its manifest states another number of buffers than it has")
    if not examples:
        if texts:
            return _NO_IDS
        if shape == [None]:
            return Sequences(np.zeros(0, dtype), np.zeros(1, np.int64), encoding)
        return np.zeros((0, *shape), dtype)
    buffers = [
        _mapped(stem.with_name(f"{stem.name}.{name}"), f"{name} of {what}", buffer)
        for name, buffer in zip(names, stored["buffers"], strict=True)
    ]
    divided = len(buffers) == 2
    first = _numbers(buffers[0], "int64") if divided else _numbers(buffers[0], dtype, tuple(shape))
    if len(first) - divided != examples:
        raise buffers[0].unfit(f"it is not of {examples} examples")
    if not divided:
        return first
    values = _numbers(buffers[1], "uint8" if texts else dtype)
    return MappedText(first, values) if texts else Sequences(values, first, encoding)


def _mapped(path: Path, what: str, stored: Mapping[str, Any]) -> Blocks:
    if not path.is_file():
        raise CorruptFile(f"{path} is missing")
    size = path.stat().st_size
    if size != stored["bytes"]:
        raise CorruptFile(f"{path} has {size} bytes, its manifest says {stored['bytes']}")
    text = stored["blocks"]
    try:
        sums = [bytes.fromhex(text[at : at + _HEX]) for at in range(0, len(text), _HEX)]
    except ValueError:
        sums = []
    if len(sums) != -(-size // mapped.BLOCK):
        raise CorruptFile(f"{path}: its manifest states no SHA-256 of each of its blocks")
    # An empty file cannot be mapped.
    content = np.asarray(np.memmap(path, np.uint8, "r")) if size else np.zeros(0, np.uint8)
    return Blocks(path, what, content, sums)


def _numbers(buffer: Blocks, dtype: str, example: tuple[int, ...] = ()) -> Mapped:
    size, row_bytes = len(buffer.unverified), np.dtype(dtype).itemsize * math.prod(example)
    if size % row_bytes:
        raise buffer.unfit("its size is not that of whole examples")
    return Mapped(buffer, np.dtype(dtype), example, range(size // row_bytes))


def _read_manifest(path: Path) -> dict[str, Any]:
    manifest = files.read_record(path, {"sha256": str})
    if manifest.pop("sha256") != _own_sha256(manifest):
        raise CorruptFile(f"{path} was altered: its SHA-256 is not the one it states")
    if (actual := manifest.get("format")) != _FORMAT:
        expected = f"expected {_FORMAT!r}: convert its source anew"
        raise InputError(f"{path} is of format {actual!r}, {expected}")
    # The hash protects against accidents alone: its maker can compute it, so all is checked.
    files.record_of(manifest, str(path), _FIELDS)
    sizes = manifest["clients"], manifest["examples"]
    if not (0 <= min(sizes) <= max(sizes) < 2**62) or manifest["block_bytes"] != mapped.BLOCK:
        raise CorruptFile(f"{path}: states numbers that no population has")
    buffers = {_OFFSETS: manifest[_OFFSETS], _IDS: manifest[_IDS]}
    for name, stored in manifest["columns"].items():
        where = f"{path}: column {name!r}"
        _check_type(stored, where)
        buffers[where] = files.record_of(stored, where, {"buffers": list})["buffers"]
    for where, stored_buffers in buffers.items():
        for buffer in stored_buffers:
            files.record_of(buffer, f"{path}: {where}", {"bytes": int, "blocks": str})
    return manifest


def _check_type(type_: Any, where: str) -> None:
    files.record_of(type_, where, {"dtype": str, "shape": list})
    dtype, shape = type_["dtype"], type_["shape"]
    if shape == [None]:
        encoding = files.record_of(type_, where, {"encoding": dict})["encoding"]
        valid = dtype in _ID_TYPES and type(encoding.get("vocabulary_size", 0)) is int
    else:
        whole = all(type(size) is int and size > 0 for size in shape)
        # No example is so large that its bytes cannot be counted.
        small = whole and len(shape) < 32 and math.prod(shape) < 2**40
        valid = (dtype in _NUMBERS and small) or (dtype == "text" and not shape)
    if not valid:
        raise CorruptFile(f"{where}: its type is none that a population has")


def _own_sha256(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
