"""Tensors in a folder: model.safetensors, or shards with model.safetensors.index.json.

Files are memory-mapped, and tensors are written one after the other, so that only one is in memory.
A file is complete before it gets its name. config.json, without which `load` refuses a folder, is
removed first and written last: a crash leaves the old model, the new one, or a folder that is
refused.
"""

import contextlib
import json
import math
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxpfl.errors import CorruptFile, InputError
from jaxpfl.files import fsync_path, read_json, sync, write_atomically
from jaxpfl.models.checkpoints.model_files import finite, require

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"

# From our names of dtypes to those of the format.
_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


class Tensors(dict[str, tuple[Path, Any]]):
    """By name, the tensors of a folder: their file and its handle; see `open_tensors`.

    `path`, the single file or the index, is named when a tensor is missing.
    """

    def __init__(self, path: Path, files: dict[str, tuple[Path, Any]]):
        super().__init__(files)
        self.path = path

    def file(self, name: str) -> Path:
        """The file that holds a tensor."""
        return self[name][0]

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """Refuses a tensor that is missing, not floating point or of another shape."""
        if name not in self:
            raise InputError(f"{self.path}: tensor {name!r} is missing")
        what = f"{self.file(name)}: tensor {name!r}"
        kind = self._slice(name).get_dtype()
        if kind not in _DTYPES.values():
            raise InputError(f"{what} must be floating point, found {kind}")
        found = self.shape(name)
        if found != shape:
            raise InputError(f"{what} must have shape {list(shape)}, found {list(found)}")

    def finite(self, name: str, where: tuple[slice, ...] = ()) -> np.ndarray:
        """`read`, with an InputError when a value is not finite."""
        return finite(f"{self.file(name)}: tensor {name!r}", self.read(name, where))

    def read(self, name: str, where: tuple[slice, ...] = ()) -> np.ndarray:
        """A new array of the slice, in the dtype of the file."""
        safetensors = require("safetensors", "text")
        try:
            return np.asarray(self._slice(name)[where or ...])
        except safetensors.SafetensorError as error:
            raise CorruptFile(
                f"{self.file(name)}: tensor {name!r} cannot be read: {error}"
            ) from error

    def _slice(self, name: str) -> Any:
        return self[name][1].get_slice(name)


def weight_files(folder: str | Path) -> list[Path]:
    """The safetensors files of a folder, in the order of their names."""
    folder = Path(folder)
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if not (folder / INDEX).is_file():
        raise InputError(
            f"there is no file {folder / WEIGHTS} (or {INDEX}); weights are read from "
            "safetensors files only"
        )
    return [folder / name for name in sorted(set(_weight_map(folder / INDEX).values()))]


@contextlib.contextmanager
def open_tensors(folder: str | Path) -> Iterator[Tensors]:
    """The tensors of a folder, readable until the block ends."""
    folder, paths = Path(folder), weight_files(folder)
    with contextlib.ExitStack() as stack:
        opened = {path.name: stack.enter_context(open_file(path)) for path in paths}
        if paths == [folder / WEIGHTS]:
            yield opened[WEIGHTS]
            return
        found = {}
        mapped = _weight_map(folder / INDEX)
        for tensor, name in mapped.items():
            if tensor not in opened[name]:
                raise InputError(
                    f"{folder / name}: tensor {tensor!r} is missing, which {INDEX} says is there"
                )
            found[tensor] = opened[name][tensor]
        for name, tensors in opened.items():
            for tensor in sorted(tensors):
                if mapped.get(tensor) != name:
                    raise InputError(f"{folder / name}: tensor {tensor!r} is not in {INDEX}")
        yield Tensors(folder / INDEX, found)


@contextlib.contextmanager
def open_file(path: Path) -> Iterator[Tensors]:
    """The tensors of a safetensors file, which is memory-mapped."""
    if not path.is_file():
        raise InputError(f"there is no file {path}; weights are read from safetensors files only")
    safetensors = require("safetensors", "text")
    try:
        file = safetensors.safe_open(path, framework="numpy")
    except safetensors.SafetensorError as error:
        raise CorruptFile(f"{path} is not a whole safetensors file: {error}") from error
    with file:
        yield Tensors(path, {name: (path, file) for name in file.keys()})  # noqa: SIM118


def _weight_map(index: Path) -> dict[str, str]:
    values = read_json(index)
    mapped = values.get("weight_map") if isinstance(values, dict) else None
    if not isinstance(mapped, dict) or not mapped:
        raise CorruptFile(f"{index} must have a weight_map of tensor names to file names")
    for tensor, name in mapped.items():
        # The name comes from a file, so it must not lead outside the folder.
        plain = isinstance(name, str) and Path(name).name == name and name not in (".", "..")
        if not plain or len(name) > 255 or "\0" in name or not name.endswith(".safetensors"):
            raise InputError(
                f"{index}: weight_map[{tensor!r}] must be the name of a safetensors file of this "
                f"folder, found {name!r}"
            )
    return mapped


def write_folder(
    folder: str | Path,
    config: Mapping[str, Any],
    described: Mapping[str, Any],
    read: Callable[[str], np.ndarray],
    shard_bytes: int,
) -> None:
    """Writes config.json and the weights, in place of those that the folder may have.

    Args:
      folder: created if necessary; files that are not part of a model (a tokenizer's) stay.
      described: the shape and dtype of each tensor, in the order in which they are written.
      read: from a tensor's name to its values, a numpy array as described.
      shard_bytes: a file is closed when the next tensor would make it larger than this; a tensor is
        never split.
    """
    folder = Path(folder)
    sizes = {name: math.prod(each.shape) * each.dtype.itemsize for name, each in described.items()}
    shards: list[list[str]] = [[]]
    for name, size in sizes.items():
        if shards[-1] and sum(map(sizes.__getitem__, shards[-1])) + size > shard_bytes:
            shards.append([])
        shards[-1].append(name)
    count = len(shards)
    names = [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
    named = dict(zip([WEIGHTS] if count == 1 else names, shards, strict=True))

    def writer(tensors: list[str]) -> Callable[[Path], None]:
        return lambda path: write_file(path, {key: described[key] for key in tensors}, read)

    files = {name: writer(tensors) for name, tensors in named.items()}
    if count > 1:
        index = {
            "metadata": {"total_size": sum(sizes.values())},
            "weight_map": {key: name for name, tensors in named.items() for key in tensors},
        }
        files[INDEX] = lambda path: write_json(path, index)
    files["config.json"] = lambda path: write_json(path, config)
    replace_files(folder, files, stale=("model-*-of-*.safetensors", WEIGHTS, INDEX))


def replace_files(
    folder: Path, files: Mapping[str, Callable[[Path], None]], *, stale: tuple[str, ...] = ()
) -> None:
    """Replaces files of a folder by new ones, of which the last marks the set as complete.

    All new files are complete, under other names, before the first old one is removed. The last
    file's old version is removed first, and its new one is put in place last.

    Args:
      folder: created if necessary.
      files: from a file's name to the function that writes it.
      stale: patterns of old files; those that have no new version are removed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    temporary = {name: folder / f".{name}.part" for name in files}
    # The leftovers of an interrupted save may be as large as a model.
    for path in (*folder.glob(".*.safetensors.part"), *folder.glob(".*.json.part")):
        path.unlink()
    try:
        for name, write in files.items():
            write(temporary[name])
        *others, last = temporary
        (folder / last).unlink(missing_ok=True)
        fsync_path(folder)
        for old in [path for pattern in stale for path in folder.glob(pattern)]:
            if old.name not in temporary:
                old.unlink(missing_ok=True)
        for name in others:
            temporary[name].rename(folder / name)
        fsync_path(folder)
        temporary[last].rename(folder / last)
        fsync_path(folder)
    finally:
        for path in temporary.values():
            path.unlink(missing_ok=True)


def write_file(path: Path, described: Mapping[str, Any], read: Callable[[str], np.ndarray]) -> None:
    """Writes one safetensors file: the length of a JSON header, the header, the tensors' bytes."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in described.items():
        start, end = end, end + math.prod(tensor.shape) * tensor.dtype.itemsize
        kind = _DTYPES[tensor.dtype.name]
        header[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name in described:
            file.write(np.ascontiguousarray(read(name)).reshape(-1).view(np.uint8).data)
        sync(file)


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    write_atomically(path, json.dumps(values, indent=2, sort_keys=True) + "\n")
