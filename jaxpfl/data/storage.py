"""A population on disk: Arrow IPC files and a manifest, memory-mapped when read.

    FOLDER/manifest.json    format, columns, SHA-256 of the content, of the source and of the
                            manifest itself; size and SHA-256 of the other files
    FOLDER/examples.arrow   one row per example; a column of arrays is a list of fixed size, one of
                            token ids a list of any size
    FOLDER/clients.arrow    client_id, first (the client's first example)
    FOLDER/vocabulary.json  with token ids: the words that they stand for

The folder is written under a temporary name and then renamed, so that it is complete or absent.
All of it is private: it is made with mode 0700.
"""

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from jaxpfl import files
from jaxpfl.data.columns import Column, is_numeric, text_buffers
from jaxpfl.data.sequences import Padded, Sequences
from jaxpfl.errors import CorruptFile, InputError

_FORMAT = "jaxpfl population 3"
EXAMPLES, VOCABULARY = "examples.arrow", "vocabulary.json"
_MANIFEST, _CLIENTS = "manifest.json", "clients.arrow"


class Stored(NamedTuple):
    """What is stored of a `Population`, with its attributes."""

    columns: Mapping[str, Any]
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


def write(folder: Path, stored: Stored) -> None:
    """Writes a new folder; see `new_folder`."""
    with new_folder(folder) as temporary:
        arrays = {name: to_arrow(column) for name, column in stored.columns.items()}
        _write_table(temporary / EXAMPLES, pa.table(arrays))
        types = {name: type_of(column) for name, column in stored.columns.items()}
        finish(temporary, stored._replace(columns=types))


@contextlib.contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A folder under a temporary name, which is renamed at the end, or removed after an error.

    Raises:
      InputError: `folder` exists.
    """
    if folder.exists():
        raise InputError(f"{folder} exists already; choose another folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.with_name(f".{folder.name}.tmp-{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(mode=0o700)
    try:
        yield temporary
        os.rename(temporary, folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    files.fsync_path(folder.parent)


def finish(temporary: Path, stored: Stored) -> None:
    """Writes the clients and the manifest to a folder from `new_folder` that has the examples.

    Args:
      stored: with `type_of` each column in the column's place.
    """
    clients = {"client_id": stored.client_ids, "first": pa.array(stored.offsets[:-1])}
    _write_table(temporary / _CLIENTS, pa.table(clients))
    manifest = {
        "format": _FORMAT,
        "name": stored.name,
        "unit": stored.unit,
        "splitting": stored.splitting,
        "clients": len(stored.client_ids),
        "examples": int(stored.offsets[-1]),
        "columns": dict(stored.columns),
        "fingerprint": stored.fingerprint,
        "content": stored.content,
        "files": {
            file: {
                "bytes": (temporary / file).stat().st_size,
                "sha256": files.sha256_file(temporary / file),
            }
            for file in (EXAMPLES, _CLIENTS, VOCABULARY)
            if (temporary / file).exists()
        },
    }
    manifest["sha256"] = _own_sha256(manifest)
    files.write_atomically(temporary / _MANIFEST, json.dumps(manifest, indent=1) + "\n")


def read(folder: Path) -> Stored:
    """Maps a stored population into memory, after checking the SHA-256 of every file.

    Raises:
      InputError: `folder` holds no population.
      CorruptFile: a file is missing, truncated or altered.
    """
    if not is_stored(folder):
        raise InputError(f"{folder} holds no {_MANIFEST}: expected a folder made by save()")
    manifest = _read_manifest(folder / _MANIFEST)
    for name, expected in manifest["files"].items():
        path = folder / name
        if not path.is_file():
            raise CorruptFile(f"{path} is missing")
        size = path.stat().st_size
        if size != expected["bytes"]:
            raise CorruptFile(f"{path} has {size} bytes, its manifest says {expected['bytes']}")
        if files.sha256_file(path) != expected["sha256"]:
            raise CorruptFile(f"{path} was altered: its SHA-256 is not the manifest's")
    examples, clients = _map_table(folder / EXAMPLES), _map_table(folder / _CLIENTS)
    offsets = np.append(clients["first"].to_numpy(), np.int64(manifest["examples"]))
    columns = {
        name: _from_arrow(examples[name], type_, manifest["examples"])
        for name, type_ in manifest["columns"].items()
    }
    client_ids = clients["client_id"].combine_chunks()
    keys = ("name", "unit", "splitting", "fingerprint", "content")
    described = (manifest[key] for key in keys)
    return Stored(columns, offsets, client_ids, *described)


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        manifest = json.loads(path.read_text(encoding="ascii"))
        stated = manifest.pop("sha256")
    except (ValueError, KeyError, TypeError, AttributeError):
        raise CorruptFile(f"{path} is not a complete manifest: truncated or altered") from None
    if stated != _own_sha256(manifest):
        raise CorruptFile(f"{path} was altered: its SHA-256 is not the one it states")
    if manifest["format"] != _FORMAT:
        raise InputError(f"{path} is of format {manifest['format']!r}, expected {_FORMAT!r}")
    return manifest


def _own_sha256(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def type_of(column: Column) -> dict[str, Any]:
    """How the manifest describes a column."""
    if is_numeric(column):
        return {"dtype": column.dtype.name, "shape": list(column.shape[1:])}
    if isinstance(column, Sequences):
        return {"dtype": column.dtype.name, "shape": [None], "encoding": dict(column.encoding)}
    return {"dtype": "text", "shape": []}


def to_arrow(column: Column) -> pa.Array:
    """A column as it is stored."""
    if isinstance(column, Sequences):
        held = column.compact()
        return pa.LargeListArray.from_arrays(pa.array(held.edges), pa.array(held.values))
    if isinstance(column, Padded):
        column = np.asarray(column)
    if not isinstance(column, np.ndarray):
        if not len(column):
            return column
        # A slice of a longer column: Arrow would pad its last bytes with its neighbour's.
        offsets, content = text_buffers(column)
        buffers = pa.py_buffer(offsets - offsets[0]), pa.py_buffer(content)
        return pa.LargeStringArray.from_buffers(len(column), *buffers)
    # Arrow packs booleans into bits, which numpy cannot map.
    flat = column.reshape(-1).view(np.uint8) if column.dtype == bool else column.reshape(-1)
    array = pa.array(flat)
    if column.ndim == 1:
        return array
    return pa.FixedSizeListArray.from_arrays(array, int(np.prod(column.shape[1:])))


def _from_arrow(chunks: pa.ChunkedArray, type_: dict[str, Any], examples: int) -> Column:
    # One batch was written, so this copies nothing.
    array = chunks.combine_chunks() if chunks.num_chunks != 1 else chunks.chunk(0)
    if type_["dtype"] == "text":
        return array
    if type_["shape"] == [None]:
        edges, ids = (part.to_numpy(zero_copy_only=True) for part in (array.offsets, array.values))
        return Sequences(ids, edges, type_["encoding"])
    flat = array.flatten() if pa.types.is_fixed_size_list(array.type) else array
    values = flat.to_numpy(zero_copy_only=True)
    return values.view(np.dtype(type_["dtype"])).reshape(examples, *type_["shape"])


def _write_table(path: Path, table: pa.Table) -> None:
    with path.open("wb") as file:
        batches = table.combine_chunks().to_batches()
        write_batches(file, table.schema, batches)
        files.sync(file)


def write_batches(file: Any, schema: pa.Schema, batches: Sequence[pa.RecordBatch]) -> None:
    """Writes an Arrow file. One batch makes a file whose columns can be mapped as they are."""
    # A column may have more than 2^31 values, which Arrow refuses by default, after all the work,
    # because some of its implementations could not read them.
    options = pa.ipc.IpcWriteOptions(allow_64bit=True)
    with pa.ipc.new_file(file, schema, options=options) as writer:
        for batch in batches:
            writer.write_batch(batch)


def _map_table(path: Path) -> pa.Table:
    return pa.ipc.open_file(pa.memory_map(str(path))).read_all()
