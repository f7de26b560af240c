"""Files of models: JSON objects and tensors, and the checks of parameters.

Tensors are in a folder's model.safetensors, or in shards with model.safetensors.index.json. Files
are memory-mapped, and tensors are written one after the other, to a single file, so that only one
is in memory. A file is complete before it gets its name. config.json, without which `load` refuses
a folder, is removed first and written last: a crash leaves the old model, the new one, or a folder
that is refused.
"""

import contextlib
import json
import math
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import safetensors

from jaxpfl import files
from jaxpfl.errors import CorruptFile, InputError
from jaxpfl.files import fsync_path, read_json, sync, write_atomically
from jaxpfl.lazy import require as require
from jaxpfl.models.base import Model, Params, named_leaves

DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
"""The dtypes of parameters in files and in memory."""

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"

# From our names of dtypes to those of the format.
_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


def expect_file(path: Path) -> Path:
    """Returns `path`; raises `InputError` unless it is a file."""
    if not path.is_file():
        raise InputError(f"there is no file {path}{files.where(path)}")
    return path


def read_object(path: Path, *, optional: bool = False) -> dict[str, Any]:
    """The object in a JSON file; with `optional`, a missing file gives an empty one."""
    if optional and not path.is_file():
        return {}
    return files.read_record(expect_file(path))


def finite(what: str, values: np.ndarray) -> np.ndarray:
    """Returns `values`; refuses NaN and infinities in them, which the message says `what` has."""
    if not np.isfinite(values).all():
        raise InputError(f"{what} holds values that are not finite")
    return values


def check_parameters(model: Model, params: Params, dtypes: tuple[str, ...]) -> dict[str, Any]:
    """The leaves of a model's parameters, by name."""
    leaves = named_leaves(params)
    shapes = named_leaves(jax.eval_shape(lambda: model.init(jax.random.key(0))))
    for name in sorted(leaves.keys() ^ shapes.keys()):
        what = "is missing" if name in shapes else "is not part of the model"
        raise InputError(f"parameter {name} {what}")
    for name, leaf in leaves.items():
        if leaf.shape != shapes[name].shape or leaf.dtype.name not in dtypes:
            expected = f"{' or '.join(dtypes)} {list(shapes[name].shape)}"
            actual = f"{leaf.dtype} {list(leaf.shape)}"
            raise InputError(f"parameter {name} must be {expected}, found {actual}")
    return leaves


def check_sizes(settings: Mapping[str, Any], *, layers: int) -> None:
    """Refuses sizes, and more `layers`, far above any model's, before one is built."""
    for name, value in settings.items():
        most = layers if name in ("layers", "stages") else 2**24
        for number in jax.tree.leaves(value):
            if isinstance(number, int) and number > most:
                raise InputError(f"{name} must be at most {most}, found a larger number")


class Tensors(dict[str, tuple[Path, Any]]):
    """By name, the tensors of a folder: their file and its handle; `path` is named in errors."""

    def __init__(self, path: Path, files: dict[str, tuple[Path, Any]]):
        super().__init__(files)
        self.path = path

    def file(self, name: str) -> Path:
        return self[name][0]

    def require(self, name: str, shape: tuple[int, ...]) -> None:
        """Refuses a tensor that is missing, not floating point or of another shape."""
        if name not in self:
            raise InputError(f"{self.path}: tensor {name!r} is missing")
        what = f"{self.file(name)}: tensor {name!r}"
        kind = self._slice(name).get_dtype()
        if kind not in _DTYPES.values():
            raise InputError(f"{what} must be floating point, found {kind}")
        actual = self.shape(name)
        if actual != shape:
            raise InputError(f"{what} must have shape {list(shape)}, found {list(actual)}")

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def finite(self, name: str, where: tuple[slice, ...] = ()) -> np.ndarray:
        """A new array of the slice, in the dtype of the file; all values must be finite."""
        what = f"{self.file(name)}: tensor {name!r}"
        try:
            return finite(what, np.asarray(self._slice(name)[where or ...]))
        except safetensors.SafetensorError as error:
            raise CorruptFile(f"{what} cannot be read: {error}") from error

    def _slice(self, name: str) -> Any:
        return self[name][1].get_slice(name)


def weight_files(folder: str | Path) -> list[Path]:
    """The safetensors files of a folder, in the order of their names."""
    folder = files.user_path(folder)
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if not (folder / INDEX).is_file():
        what = f"there is no file {folder / WEIGHTS} (or {INDEX}){files.where(folder)}"
        raise InputError(f"{what}; weights are read from safetensors files only")
    return [folder / name for name in sorted(set(_weight_map(folder / INDEX).values()))]


@contextlib.contextmanager
def open_tensors(folder: str | Path) -> Iterator[Tensors]:
    """The tensors of a folder, readable until the block ends."""
    folder, paths = files.user_path(folder), weight_files(folder)
    with contextlib.ExitStack() as stack:
        opened = {path.name: stack.enter_context(open_file(path)) for path in paths}
        if paths == [folder / WEIGHTS]:
            yield opened[WEIGHTS]
            return
        stated = _weight_map(folder / INDEX).items()
        there = {(tensor, name) for name, tensors in opened.items() for tensor in tensors}
        for tensor, name in sorted(stated ^ there):
            problem = f"not in {INDEX}"
            if (tensor, name) in stated:
                problem = f"missing, which {INDEX} says is there"
            raise InputError(f"{folder / name}: tensor {tensor!r} is {problem}")
        yield Tensors(folder / INDEX, {tensor: opened[name][tensor] for tensor, name in stated})


@contextlib.contextmanager
def open_file(path: Path) -> Iterator[Tensors]:
    """The tensors of a safetensors file, which is memory-mapped."""
    if not path.is_file():
        what = f"there is no file {path}{files.where(path)}"
        raise InputError(f"{what}; weights are read from safetensors files only")
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
            expected = "must be the name of a safetensors file of this folder"
            raise InputError(f"{index}: weight_map[{tensor!r}] {expected}, found {name!r}")
    return mapped


def write_folder(
    folder: str | Path,
    config: Mapping[str, Any],
    shapes: Mapping[str, Any],
    read: Callable[[str], np.ndarray],
    names: tuple[str, str] = (WEIGHTS, "config.json"),
) -> None:
    """Writes tensors and a config to two files, in place of those that the folder may have.

    Both new files are complete, under other names, before the first old one is removed. The old
    config is removed first, and the new one is put in place last.

    Args:
      folder: created if necessary; files that are not part of a model (a tokenizer's) stay.
      shapes: the shape and dtype of each tensor, in the order in which they are written.
      read: from a tensor's name to its values, a numpy array of this shape and dtype.
    """
    folder = files.user_path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    weights, settings = (folder / name for name in names)
    temporary = [folder / f".{name}.part" for name in names]
    # The leftovers of an interrupted save may be as large as a model.
    for path in (*folder.glob(".*.safetensors.part"), *folder.glob(".*.json.part")):
        path.unlink()
    try:
        _write_tensors(temporary[0], shapes, read)
        write_atomically(temporary[1], json.dumps(config, indent=2, sort_keys=True) + "\n")
        settings.unlink(missing_ok=True)
        fsync_path(folder)
        if weights.name == WEIGHTS:
            for old in (*folder.glob("model-*-of-*.safetensors"), folder / INDEX):
                old.unlink(missing_ok=True)
        temporary[0].rename(weights)
        fsync_path(folder)
        temporary[1].rename(settings)
        fsync_path(folder)
    finally:
        for path in temporary:
            path.unlink(missing_ok=True)


def _write_tensors(
    path: Path, shapes: Mapping[str, Any], read: Callable[[str], np.ndarray]
) -> None:
    """Writes one safetensors file: the length of a JSON header, the header, the tensors' bytes."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in shapes.items():
        start, end = end, end + math.prod(tensor.shape) * tensor.dtype.itemsize
        kind = _DTYPES[tensor.dtype.name]
        header[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name in shapes:
            file.write(np.ascontiguousarray(read(name)).reshape(-1).view(np.uint8).data)
        sync(file)
