"""A population: what clients hold, as columns of examples and the clients' offsets into them.

    columns {"image": [examples, 28, 28, 1], "label": [examples]}
    offsets [clients + 1]: client i holds the rows offsets[i] : offsets[i + 1]

On disk it is a folder of Arrow IPC files and a manifest with their SHA-256; it is opened memory
mapped, so that a population may be larger than memory.
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.ipc

from jaxpfl import checks
from jaxpfl.errors import CorruptFile, InputError

Column = np.ndarray | pa.Array

_FORMAT = "jaxpfl population 1"


@dataclass(frozen=True, eq=False)
class Population:
    """Clients and their examples; immutable.

    Attributes:
      columns: {name: numpy array [examples, ...] or pyarrow large_string array [examples]}.
      offsets: int64 [clients + 1], from 0 to the number of examples, never falling.
      client_ids: pyarrow large_string array [clients], distinct. PRIVATE: not shown.
      name: public, the source as it was asked for.
      unit: public, what a client is.

    Raises:
      InputError: columns, offsets and ids do not fit together.
    """

    columns: Mapping[str, Column]
    offsets: np.ndarray
    client_ids: pa.Array = field(repr=False)
    name: str = "memory"
    unit: str = "client"

    def __post_init__(self):
        object.__setattr__(self, "columns", MappingProxyType(dict(self.columns)))
        offsets = np.ascontiguousarray(self.offsets, np.int64)
        object.__setattr__(self, "offsets", offsets)
        if offsets.ndim != 1 or len(offsets) < 1 or offsets[0] != 0 or np.any(np.diff(offsets) < 0):
            raise InputError(f"{self.name}: offsets must rise from 0")
        for name, column in self.columns.items():
            if len(column) != offsets[-1]:
                raise InputError(
                    f"{self.name}: column {name!r} has {len(column)} rows, expected {offsets[-1]}"
                )
        if len(self.client_ids) != len(offsets) - 1:
            raise InputError(
                f"{self.name}: {len(self.client_ids)} client ids for {len(offsets) - 1} clients"
            )
        distinct = pc.count_distinct(self.client_ids).as_py() if len(self.client_ids) else 0
        if distinct != len(self.client_ids):
            raise InputError(
                f"{self.name}: {len(self.client_ids) - distinct} client ids occur twice; "
                "a client's examples must stand together"
            )

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __repr__(self) -> str:
        columns = ", ".join(self.columns)
        return f"Population({self.name!r}, {len(self)} x {self.unit}, columns: {columns})"

    @property
    def num_examples(self) -> int:
        return int(self.offsets[-1])

    def sizes(self) -> np.ndarray:
        """Returns the number of examples of each client, int64 [clients]; PRIVATE."""
        return np.diff(self.offsets)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of names, types, ids, offsets and values, wherever they are stored."""
        digest = hashlib.sha256(_FORMAT.encode())
        digest.update(self.offsets.tobytes())
        for name, column in [("", self.client_ids), *sorted(self.columns.items())]:
            digest.update(f"|{name}|{_type_name(column)}|".encode())
            _hash_column(digest, column)
        return digest.hexdigest()

    def examples(self, client: int) -> dict[str, Column]:
        """Returns one client's rows; PRIVATE."""
        start, stop = self.offsets[client], self.offsets[client + 1]
        return {name: column[start:stop] for name, column in self.columns.items()}

    def select(self, clients: Sequence[int] | np.ndarray) -> Self:
        """Returns the population of the given clients (indices), in that order."""
        chosen = np.asarray(clients, np.int64)
        sizes = self.sizes()[chosen]
        offsets = np.concatenate([[0], np.cumsum(sizes)])
        starts = np.repeat(self.offsets[chosen] - offsets[:-1], sizes)
        rows = starts + np.arange(offsets[-1])
        columns = {name: _take(column, rows) for name, column in self.columns.items()}
        return type(self)(columns, offsets, _take(self.client_ids, chosen), self.name, self.unit)

    def with_min_examples(self, count: int) -> Self:
        """Returns the population of the clients that hold at least `count` examples."""
        checks.non_negative_int("min_examples", count)
        return self.select(np.flatnonzero(self.sizes() >= count))

    def split(self, fractions: Mapping[str, float], seed: int = 0) -> dict[str, Self]:
        """Splits by client into named parts.

        A client's part is a function of (seed, its id), so it stays where it is when others
        come or go; parts therefore have about, not exactly, their fraction of the clients.

        Args:
          fractions: {name: share of the clients}, adding up to 1.
          seed: of the split.
        """
        for name, share in fractions.items():
            checks.non_negative(f"split {name!r}", share)
        if not abs(sum(fractions.values()) - 1) < 1e-6:
            raise InputError(f"split fractions must add up to 1, found {sum(fractions.values())}")
        places = np.array(
            [_place(seed, identifier.as_py()) for identifier in self.client_ids], np.float64
        )
        edges = np.cumsum([0.0, *fractions.values()])
        edges[-1] = 1.0
        return {
            name: self.select(np.flatnonzero((places >= edges[i]) & (places < edges[i + 1])))
            for i, name in enumerate(fractions)
        }

    def with_columns(self, columns: Mapping[str, Column]) -> Self:
        """Returns the same clients holding other columns of as many examples."""
        return type(self)(columns, self.offsets, self.client_ids, self.name, self.unit)

    def save(self, folder: str | Path) -> None:
        """Writes the population to a new folder: complete, or not at all.

        Raises:
          InputError: the folder exists.
        """
        folder = Path(folder)
        if folder.exists():
            raise InputError(f"{folder}: exists already, expected a new folder")
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        try:
            shapes = {}
            arrays = {}
            for name, column in self.columns.items():
                arrays[name], shapes[name] = _to_arrow(column)
            _write(temporary / "examples.arrow", arrays)
            _write(
                temporary / "clients.arrow",
                {"client": self.client_ids, "stop": pa.array(self.offsets[1:])},
            )
            manifest = {
                "format": _FORMAT,
                "name": self.name,
                "unit": self.unit,
                "shapes": shapes,
                "fingerprint": self.fingerprint,
                "sha256": {
                    file.name: _file_sha256(file) for file in sorted(temporary.glob("*.arrow"))
                },
            }
            (temporary / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
            os.rename(temporary, folder)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise

    @classmethod
    def load(cls, folder: str | Path) -> Self:
        """Opens a saved population, memory mapped, after checking every file's SHA-256.

        Raises:
          CorruptFile: a file is missing, altered or not of this format; names it.
        """
        folder = Path(folder)
        path = folder / "manifest.json"
        try:
            manifest = json.loads(path.read_text(encoding="utf-8"))
            known = manifest["format"] == _FORMAT
            sums, shapes = manifest["sha256"], manifest["shapes"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CorruptFile(f"{path}: expected the manifest of a saved population") from error
        if not known:
            raise CorruptFile(f"{path}: format {manifest['format']!r}, expected {_FORMAT!r}")
        for file in ("examples.arrow", "clients.arrow"):
            if not (folder / file).is_file():
                raise CorruptFile(f"{folder / file}: is missing, expected by the manifest")
            if _file_sha256(folder / file) != sums.get(file):
                raise CorruptFile(f"{folder / file}: its SHA-256 is not the manifest's")
        clients = _read(folder / "clients.arrow")
        examples = _read(folder / "examples.arrow")
        offsets = np.concatenate([[0], clients["stop"].to_numpy()]).astype(np.int64)
        columns = {
            name: _from_arrow(array, shapes.get(name)) for name, array in examples.items()
        }
        population = cls(columns, offsets, clients["client"], manifest["name"], manifest["unit"])
        # Stored so that opening does not read all values again; the files were just checked.
        population.__dict__["fingerprint"] = manifest["fingerprint"]
        return population


def from_clients(
    clients: Mapping[str, Mapping[str, Any]], *, name: str = "memory", unit: str = "client"
) -> Population:
    """Builds a population in memory.

    Args:
      clients: {client id: {column: array [examples, ...] or list of str}}; all clients have the
        same columns, types and shapes. A client may hold no examples.
      name: public name of the source.
      unit: public name of what a client is.

    Raises:
      InputError: a client's columns differ; names the client's index, never its id.
    """
    parts: dict[str, list] = {}
    sizes = []
    for index, columns in enumerate(clients.values()):
        if index == 0:
            parts = {column: [] for column in columns}
        if set(columns) != set(parts):
            raise InputError(
                f"{name}: client {index} has columns {sorted(columns)}, expected {sorted(parts)}"
            )
        lengths = {len(values) for values in columns.values()}
        if len(lengths) > 1:
            raise InputError(f"{name}: client {index} has columns of different lengths")
        sizes.append(lengths.pop() if lengths else 0)
        for column, values in columns.items():
            parts[column].append(_as_column(values, f"{name}: client {index}, column {column!r}"))
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    joined = {column: _join(arrays, f"{name}: column {column!r}") for column, arrays in parts.items()}
    ids = pa.array(list(clients), pa.large_string())
    return Population(joined, offsets, ids, name, unit)


def _as_column(values: Any, where: str) -> Column:
    if isinstance(values, (pa.Array, pa.ChunkedArray)):
        return values.cast(pa.large_string())
    if isinstance(values, np.ndarray) and values.dtype.kind in "biuf":
        return values
    if isinstance(values, Sequence) and all(isinstance(value, str) for value in values):
        return pa.array(values, pa.large_string())
    raise InputError(f"{where}: expected a numeric array or a list of str")


def _join(arrays: list, where: str) -> Column:
    if isinstance(arrays[0], np.ndarray):
        # Without examples a client has no say in type and shape beyond its own empty array.
        kinds = {
            (array.dtype, array.shape[1:]) if isinstance(array, np.ndarray) else (None, ())
            for array in arrays
            if len(array)
        } or {(arrays[0].dtype, arrays[0].shape[1:])}
        if len(kinds) > 1:
            found = ", ".join(f"{dtype} {list(shape)}" for dtype, shape in sorted(kinds, key=str))
            raise InputError(f"{where}: clients differ in type or shape: {found}")
        dtype, shape = kinds.pop()
        if dtype is None:
            raise InputError(f"{where}: some clients hold text and some numbers")
        return np.concatenate([np.asarray(a, dtype).reshape((len(a), *shape)) for a in arrays])
    if not all(isinstance(array, pa.Array) for array in arrays):
        raise InputError(f"{where}: some clients hold text and some numbers")
    return pa.concat_arrays(arrays)


def _place(seed: int, identifier: str) -> float:
    """A client's place in [0, 1): a hash of the seed and its id."""
    digest = hashlib.sha256(f"jaxpfl split {int(seed)} ".encode() + identifier.encode()).digest()
    return int.from_bytes(digest[:7], "big") / 2**56


def _take(column: Column, rows: np.ndarray) -> Column:
    if isinstance(column, np.ndarray):
        return column[rows]
    return column.take(pa.array(rows))


def _type_name(column: Column) -> str:
    if isinstance(column, np.ndarray):
        return f"{column.dtype.str}{list(column.shape[1:])}"
    return "text"


def _hash_column(digest: Any, column: Column) -> None:
    rows = 65_536
    for start in range(0, len(column), rows):
        part = column[start : start + rows]
        if isinstance(part, np.ndarray):
            digest.update(np.ascontiguousarray(part).tobytes())
            continue
        lengths = pc.binary_length(part).to_numpy(zero_copy_only=False).astype(np.int64)
        digest.update(lengths.tobytes())
        digest.update(pc.binary_join(pa.array([part.to_pylist()]), "")[0].as_py().encode())


def _to_arrow(column: Column) -> tuple[pa.Array, list[int] | None]:
    if not isinstance(column, np.ndarray):
        return column, None
    shape = list(column.shape[1:])
    flat = pa.array(np.ascontiguousarray(column).reshape(-1))
    width = int(np.prod(shape, dtype=np.int64))
    return (pa.FixedSizeListArray.from_arrays(flat, width) if shape else flat), shape


def _from_arrow(array: pa.Array, shape: list[int] | None) -> Column:
    if shape is None:
        return array
    flat = array.flatten() if shape else array
    return flat.to_numpy(zero_copy_only=False).reshape((len(array), *shape))


def _write(path: Path, arrays: Mapping[str, pa.Array]) -> None:
    table = pa.table(dict(arrays))
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _read(path: Path) -> dict[str, pa.Array]:
    try:
        table = pa.ipc.open_file(pa.memory_map(str(path))).read_all()
    except pa.ArrowInvalid as error:
        raise CorruptFile(f"{path}: is not an Arrow IPC file") from error
    empty = {field.name: pa.array([], field.type) for field in table.schema}
    return {
        name: empty[name] if column.num_chunks == 0 else pa.concat_arrays(column.chunks)
        for name, column in zip(table.column_names, table.columns, strict=True)
    }


def _file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
