"""Tensors in a folder: model.safetensors, or shards with model.safetensors.index.json.

Files are memory-mapped, so that reading a slice reads no other bytes. Tensors are written one after
the other, so that only one is in memory. A file is complete before it gets its name. config.json,
without which `load` refuses a folder, is removed first and written last: a crash leaves the old
model, the new one, or a folder that is refused.
"""

import contextlib
import json
import math
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
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


class Tensors:
    """The tensors of a folder, by name; see `open_tensors`."""

    def __init__(self, path: Path, files: dict[str, tuple[Path, Any]]):
        """`path`, the single file or the index, is named when a tensor is missing."""
        self.path = path
        self._files = files

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def file(self, name: str) -> Path:
        """The file that holds a tensor."""
        return self._files[name][0]

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
        """A new array of the slice, in the dtype of the file.

        Raises:
          CorruptFile: the file ends early.
        """
        safetensors = require("safetensors", "text")
        try:
            return np.asarray(self._slice(name)[where or ...])
        except safetensors.SafetensorError as error:
            raise CorruptFile(
                f"{self.file(name)}: tensor {name!r} cannot be read: {error}"
            ) from error

    def _slice(self, name: str) -> Any:
        return self._files[name][1].get_slice(name)


def weight_files(folder: str | Path) -> list[Path]:
    """The safetensors files of a folder, in the order of their names.

    Raises:
      InputError: there are none, or the index names a file that is missing or elsewhere.
      CorruptFile: the index is broken.
    """
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
    """The tensors of a folder, readable until the block ends.

    Raises:
      InputError: as `weight_files`; or a shard lacks a tensor that the index says it has.
      CorruptFile: a file is not a whole safetensors file.
    """
    folder, paths = Path(folder), weight_files(folder)
    with contextlib.ExitStack() as stack:
        opened = {path.name: stack.enter_context(open_file(path)) for path in paths}
        if paths[0].name == WEIGHTS:
            file = opened[WEIGHTS]
            yield Tensors(paths[0], {name: (paths[0], file) for name in file.keys()})  # noqa: SIM118
            return
        held = {name: set(file.keys()) for name, file in opened.items()}
        files = {}
        for tensor, name in _weight_map(folder / INDEX).items():
            if tensor not in held[name]:
                raise InputError(
                    f"{folder / name}: tensor {tensor!r} is missing, which {INDEX} says is there"
                )
            files[tensor] = (folder / name, opened[name])
            held[name].discard(tensor)
        for name, rest in held.items():
            if rest:
                raise InputError(f"{folder / name}: tensor {min(rest)!r} is not in {INDEX}")
        yield Tensors(folder / INDEX, files)


@contextlib.contextmanager
def open_file(path: Path) -> Iterator[Any]:
    """A safetensors file, memory-mapped."""
    if not path.is_file():
        raise InputError(f"there is no file {path}; weights are read from safetensors files only")
    safetensors = require("safetensors", "text")
    try:
        file = safetensors.safe_open(path, framework="numpy")
    except safetensors.SafetensorError as error:
        raise CorruptFile(f"{path} is not a whole safetensors file: {error}") from error
    with file:
        yield file


def _weight_map(index: Path) -> dict[str, str]:
    values = read_json(index)
    mapped = values.get("weight_map") if isinstance(values, dict) else None
    if not isinstance(mapped, dict) or not mapped:
        raise CorruptFile(f"{index} must have a weight_map of tensor names to file names")
    for tensor, name in mapped.items():
        # The name comes from a file, so it must not lead outside the folder.
        plain = isinstance(name, str) and Path(name).name == name and name not in (".", "..")
        if not plain or len(name) > 255 or "\0" in name:
            raise InputError(
                f"{index}: weight_map[{tensor!r}] must be a plain file name, found {name!r}"
            )
        if not name.endswith(".safetensors"):
            raise InputError(
                f"{index}: weight_map[{tensor!r}] must name a safetensors file, found {name!r}"
            )
    return mapped


@dataclass(frozen=True)
class Described:
    """A tensor to be written: its shape and dtype are known before its values."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * (4 if self.dtype == "float32" else 2)


def write_folder(
    folder: str | Path,
    config: Mapping[str, Any],
    described: Mapping[str, Described],
    read: Callable[[str], np.ndarray],
    shard_bytes: int,
) -> None:
    """Writes config.json and the weights, in place of those that the folder may have.

    Args:
      folder: created if necessary; files that are not part of a model (a tokenizer's) stay.
      described: the tensors, in the order in which they are written.
      read: from a tensor's name to its values, a numpy array as described.
      shard_bytes: a file is closed when the next tensor would make it larger than this; a tensor is
        never split.
    """
    folder = Path(folder)
    shards: list[list[str]] = [[]]
    size = 0
    for name, tensor in described.items():
        if shards[-1] and size + tensor.bytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += tensor.bytes
    count = len(shards)
    names = [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
    named = dict(zip([WEIGHTS] if count == 1 else names, shards, strict=True))

    def writer(tensors: list[str]) -> Callable[[Path], None]:
        return lambda path: write_file(path, {key: described[key] for key in tensors}, read)

    files = {name: writer(tensors) for name, tensors in named.items()}
    if count > 1:
        index = {
            "metadata": {"total_size": sum(tensor.bytes for tensor in described.values())},
            "weight_map": {key: name for name, tensors in named.items() for key in tensors},
        }
        files[INDEX] = lambda path: write_json(path, index)
    replace_files(
        folder,
        files | {"config.json": lambda path: write_json(path, config)},
        lambda: [*folder.glob("model-*-of-*.safetensors"), folder / WEIGHTS, folder / INDEX],
    )


def replace_files(
    folder: Path,
    files: Mapping[str, Callable[[Path], None]],
    stale: Callable[[], Iterable[Path]] = tuple,
) -> None:
    """Replaces files of a folder by new ones, of which the last marks the set as complete.

    All new files are complete, under other names, before the first old one is removed. The last
    file's old version is removed first, and its new one is put in place last.

    Args:
      folder: created if necessary.
      files: from a file's name to the function that writes it.
      stale: the files of an old model; those that have no new version are removed.
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
        for old in stale():
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


def write_file(
    path: Path, described: Mapping[str, Described], read: Callable[[str], np.ndarray]
) -> None:
    """Writes one safetensors file: the length of a JSON header, the header, the tensors' bytes."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in described.items():
        header[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [end, end + tensor.bytes],
        }
        end += tensor.bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name, tensor in described.items():
            values = np.ascontiguousarray(read(name))
            if values.shape != tensor.shape or values.dtype.name != tensor.dtype:
                raise InputError(
                    f"tensor {name!r} must be {tensor.dtype} {list(tensor.shape)}, found "
                    f"{values.dtype} {list(values.shape)}"
                )
            file.write(values.reshape(-1).view(np.uint8).data)
        sync(file)


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    write_atomically(path, json.dumps(values, indent=2, sort_keys=True) + "\n")
