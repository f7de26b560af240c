"""A population on disk: Arrow IPC files and a manifest, memory-mapped when read.

    FOLDER/manifest.json    format, columns, where their buffers lie and the SHA-256 of every block
                            of them (see `data.blocks`); hashes of the content, of the source and
                            of the manifest itself; size and SHA-256 of the other files
    FOLDER/examples.arrow   one row per example; a column of arrays is a list of fixed size, one of
                            token ids a list of any size
    FOLDER/clients.arrow    client_id, first (the client's first example)
    FOLDER/vocabulary.json  with token ids: the words that they stand for

Opening checks everything but the blocks: the manifest, all sizes, and what the other files hold. A
block is verified when it is first read, once while the folder is open, so that opening takes no
longer for larger examples; `data.check` verifies all at once. A file that is altered after that, in
place and while it is open, is not noticed.

The folder is written under a temporary name and then renamed, so that it is complete or absent.
All of it is private: it is made with mode 0700.
"""

import hashlib
import json
import math
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from jaxpfl import files
from jaxpfl.data import buffers
from jaxpfl.data.blocks import BLOCK
from jaxpfl.data.columns import Column, is_numeric, text_buffers
from jaxpfl.data.columns import read as read_column
from jaxpfl.data.content import Roots, hash_of
from jaxpfl.data.sequences import Padded, Sequences
from jaxpfl.errors import CorruptFile, InputError

_FORMAT = "jaxpfl population 4"
EXAMPLES, VOCABULARY = "examples.arrow", "vocabulary.json"
_MAKERS = "Population.save or `jaxpfl convert`"
_MANIFEST, _CLIENTS = "manifest.json", "clients.arrow"
_CLIENTS_SCHEMA = pa.schema([("client_id", pa.large_string()), ("first", pa.int64())])
_FIELDS = {
    "name": str,
    "unit": str,
    "splitting": str,
    "clients": int,
    "examples": int,
    "columns": dict,
    "block_bytes": int,
    "buffers": dict,
    "fingerprint": str,
    "content": str,
    "files": dict,
}
_IDS = ("uint16", "uint32")
_NUMBERS = (
    *("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"),
    *("float16", "float32", "float64"),
)


class Stored(NamedTuple):
    """What is stored of a `Population`, with its attributes.

    To be written, without a fingerprint it is a source of its own; the content is computed.
    """

    columns: Mapping[str, Any]
    offsets: np.ndarray
    client_ids: pa.Array
    name: str
    unit: str
    splitting: str
    fingerprint: str | None = None
    content: str = ""


def is_stored(folder: Path) -> bool:
    """Whether `folder` was written by `write`."""
    return (folder / _MANIFEST).is_file()


def write(folder: Path, stored: Stored) -> None:
    """Writes a new folder; it is complete or absent."""
    if folder.exists():
        raise InputError(f"{folder} exists already; choose another folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.with_name(f".{folder.name}.tmp-{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(mode=0o700)
    try:
        arrays = {name: to_arrow(column) for name, column in stored.columns.items()}
        _write_table(temporary / EXAMPLES, pa.table(arrays))
        types = {name: type_of(column) for name, column in stored.columns.items()}
        finish(temporary, stored._replace(columns=types))
        os.rename(temporary, folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    files.fsync_path(folder.parent)


def finish(temporary: Path, stored: Stored) -> None:
    """Writes the clients and the manifest to a folder that has the examples.

    Args:
      stored: with `type_of` each column in the column's place.
    """
    clients = {"client_id": stored.client_ids, "first": pa.array(stored.offsets[:-1])}
    _write_table(temporary / _CLIENTS, pa.table(clients))
    examples, types = temporary / EXAMPLES, stored.columns
    found = buffers.located(examples, types, int(stored.offsets[-1]))
    roots = {
        name: Roots(described(type_), int(stored.offsets[-1]), buffers.roots(found[name]))
        for name, type_ in types.items()
    }
    content = hash_of(roots, stored.offsets)
    manifest = {
        "format": _FORMAT,
        "name": stored.name,
        "unit": stored.unit,
        "splitting": stored.splitting,
        "clients": len(stored.client_ids),
        "examples": int(stored.offsets[-1]),
        "columns": dict(types),
        "block_bytes": BLOCK,
        "buffers": found,
        "fingerprint": stored.fingerprint or content,
        "content": content,
        "files": {
            file: {
                "bytes": (temporary / file).stat().st_size,
                "sha256": _sha256(temporary / file, found),
            }
            for file in (EXAMPLES, _CLIENTS, VOCABULARY)
            if (temporary / file).exists()
        },
    }
    manifest["sha256"] = _own_sha256(manifest)
    files.write_atomically(temporary / _MANIFEST, json.dumps(manifest, indent=1) + "\n")


def read(folder: Path) -> Stored:
    """Maps a stored population into memory, after checking all but the blocks of its columns."""
    if not is_stored(folder):
        raise InputError(f"{folder} holds no {_MANIFEST}: expected one that {_MAKERS} made")
    manifest = _read_manifest(folder / _MANIFEST)
    for name, expected in manifest["files"].items():
        path = folder / name
        if not path.is_file():
            raise CorruptFile(f"{path} is missing")
        size = path.stat().st_size
        if size != expected["bytes"]:
            raise CorruptFile(f"{path} has {size} bytes, its manifest says {expected['bytes']}")
        if _sha256(path, manifest["buffers"]) != expected["sha256"]:
            raise CorruptFile(f"{path} was altered: its SHA-256 is not the manifest's")
    first_C, client_ids = _read_clients(folder / _CLIENTS, manifest)
    offsets = np.append(first_C, np.int64(manifest["examples"]))
    columns = buffers.map_columns(folder / EXAMPLES, manifest)
    keys = ("name", "unit", "splitting", "fingerprint", "content")
    described = (manifest[key] for key in keys)
    return Stored(columns, offsets, client_ids, *described)


def _read_manifest(path: Path) -> dict[str, Any]:
    manifest = files.read_record(path, {"sha256": str})
    if manifest.pop("sha256") != _own_sha256(manifest):
        raise CorruptFile(f"{path} was altered: its SHA-256 is not the one it states")
    if manifest.get("format") != _FORMAT:
        raise InputError(
            f"{path} is of format {manifest.get('format')!r}, expected {_FORMAT!r}: convert its "
            "source anew"
        )
    # Whoever made the file could compute the hash: nothing in it is taken as it comes.
    files.record_of(manifest, str(path), _FIELDS)
    listed, columns, held = manifest["files"], manifest["columns"], manifest["buffers"]
    if not {EXAMPLES, _CLIENTS} <= listed.keys() <= {EXAMPLES, _CLIENTS, VOCABULARY}:
        raise CorruptFile(f"{path}: lists other files than a population has")
    for name, described_ in listed.items():
        files.record_of(described_, f"{path}: {name}", {"bytes": int, "sha256": str})
    sizes = [
        manifest["clients"],
        manifest["examples"],
        *(each["bytes"] for each in listed.values()),
    ]
    countable = min(sizes) >= 0 and max(sizes) < 2**63
    if not countable or manifest["block_bytes"] != BLOCK or held.keys() != columns.keys():
        raise CorruptFile(f"{path}: its sizes, columns and buffers do not fit together")
    for name, type_ in columns.items():
        where = f"{path}: column {name!r}"
        check_type(type_, where)
        if not isinstance(held[name], list):
            raise CorruptFile(f"{where}: must have a list of buffers")
        for each in held[name]:
            files.record_of(each, where, {"first": int, "bytes": int, "blocks": str})
            if not 0 <= each["first"] <= each["first"] + each["bytes"] <= listed[EXAMPLES]["bytes"]:
                raise CorruptFile(f"{where}: a buffer must lie within {EXAMPLES}")
    return manifest


def check_type(type_: Any, where: str) -> None:
    """Refuses what is not a type that `type_of` returns.

    Args:
      type_: read from JSON.
      where: begins messages.
    """
    files.record_of(type_, where, {"dtype": str, "shape": list})
    dtype, shape = type_["dtype"], type_["shape"]
    if shape == [None]:
        encoding = files.record_of(type_, where, {"encoding": dict})["encoding"]
        known = dtype in _IDS and type(encoding.get("vocabulary_size", 0)) is int
    else:
        whole = all(type(size) is int and size > 0 for size in shape)
        # No example is so large that its bytes cannot be counted.
        known = (dtype in _NUMBERS and whole and len(shape) < 32 and math.prod(shape) < 2**40) or (
            dtype == "text" and not shape
        )
    if not known:
        raise CorruptFile(f"{where}: its type is none that a population has")


def _read_clients(path: Path, manifest: Mapping[str, Any]) -> tuple[np.ndarray, pa.Array]:
    """Each client's first example and id, as their file has them."""
    try:
        table = _map_table(path)
        # Without it, an altered edge of an id is a read beyond the file, which ends the process.
        table.validate(full=True)
    except (pa.ArrowException, OSError, ValueError, KeyError) as error:
        raise CorruptFile(f"{path}: is not an Arrow file of clients") from error
    if table.schema != _CLIENTS_SCHEMA or len(table) != manifest["clients"]:
        raise CorruptFile(f"{path}: does not hold the clients that its manifest counts")
    first, client_ids = table["first"].combine_chunks(), table["client_id"].combine_chunks()
    if first.null_count or client_ids.null_count:
        raise CorruptFile(f"{path}: a client has no id or no first example")
    # Arrow's own way to numpy imports pandas, which takes longer than all the rest.
    held = np.frombuffer(first.buffers()[1] or b"", np.int64)
    return held[first.offset :][: len(first)], client_ids


def _sha256(path: Path, found: dict[str, list[dict]]) -> str:
    """Of a file, or of what is in the examples' file beside the blocks."""
    if path.name == EXAMPLES:
        return buffers.outside_sha256(path, found)
    return files.sha256_file(path)


def _own_sha256(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def type_of(column: Column) -> dict[str, Any]:
    """How the manifest describes a column."""
    if is_numeric(column):
        return {"dtype": column.dtype.name, "shape": list(column.shape[1:])}
    if isinstance(column, Sequences):
        return {"dtype": column.dtype.name, "shape": [None], "encoding": dict(column.encoding)}
    return {"dtype": "text", "shape": []}


def described(type_: Mapping[str, Any]) -> str:
    """A type of the manifest as `columns.describe` says it of the column."""
    if type_["dtype"] == "text":
        return "text"
    ids = type_["shape"] == [None]
    return f"token ids {type_['dtype']}" if ids else f"{type_['dtype']}{type_['shape']}"


def to_arrow(column: Column) -> pa.Array:
    """A column as it is stored."""
    if isinstance(column, Sequences):
        held = column.compact()
        return pa.LargeListArray.from_arrays(pa.array(held.edges), pa.array(held.values))
    column = np.asarray(column) if isinstance(column, Padded) else read_column(column)
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
