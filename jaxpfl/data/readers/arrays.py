"""NumPy archives: an .npz file with one array of client ids and one array for each column.

Policy:
- Row i of every array belongs to example i, and the arrays have equal lengths. Arrays that are not
  asked for are not read. All rows of one id are one client, wherever they are in the file.
- A client's id is a whole number, which means its decimal digits, or a non-empty string.
- The column "image" holds images [H, W] or [H, W, C], uint8 in 0 .. 255 or floats in 0 .. 1, which
  become float32. Booleans become 0 and 255, and [H, W] becomes [H, W, 1]. The column "label" holds
  whole numbers and becomes int32. Other columns do not change.
- Nothing is unpickled, and what would not fit the memory is not read (`files.read_npz`). The
  archive's checksums are verified. Errors name the file, and never a value.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa

from jaxpfl import checks, files
from jaxpfl.data.clients import fault_of, hashes, warn_of_alike
from jaxpfl.data.columns import arrow, describe, not_finite, text_array
from jaxpfl.data.population import Population, from_rows
from jaxpfl.errors import InputError

# A row that is a client takes so much beside its values: an id, its place, the check of all ids.
_ROW_BYTES = 256

IMAGE_COLUMNS: Mapping[str, str] = {"image": "images", "label": "labels"}


def read_arrays(
    path: Path,
    *,
    client: str = "client",
    columns: Mapping[str, str] = IMAGE_COLUMNS,
    name: str | None = None,
) -> Population:
    """Reads an .npz file: clients in order of first appearance, their examples in the file's.

    Args:
      client: name of the array of client ids, [examples]; "*" makes each row a client.
      columns: name of a column -> name of its array, [examples, ...].
    """
    alone = client == "*"
    # The first array says how many rows all of them have.
    first = next(iter(columns.values())) if alone else client
    arrays = files.read_npz(path, [first, *columns.values()])
    total = len(arrays[first]) if arrays[first].ndim else 0
    for name_, array in arrays.items():
        if array.ndim == 0 or len(array) != total:
            actual = "a single value" if array.ndim == 0 else f"{len(array)} rows"
            expected = f"expected {total} rows, as many as {first!r} has"
            raise InputError(f"{path}, array {name_!r}: {expected}, found {actual}")
    if not total:
        raise InputError(f"{path} has no examples")
    # Rows of no bytes may be of any number.
    checks.fits_memory(f"{path}: {total} rows", _ROW_BYTES * total)
    if alone:
        client_of_row = np.arange(total)
        ids = arrow(client_of_row + 1).cast(pa.large_string())
    else:
        client_of_row, ids = _clients(f"{path}, array {client!r}", arrays[client])
    converters = {"image": _images, "label": _labels}
    ready = {
        column: converters.get(column, _other)(f"{path}, array {source!r}", arrays[source])
        for column, source in columns.items()
    }
    unit = "row" if alone else f'all rows with one "{client}"'
    return from_rows(client_of_row, ids, ready, name=name or str(path), unit=unit)


def _clients(what: str, ids: np.ndarray) -> tuple[np.ndarray, pa.Array]:
    """The index of each row's client and the clients' ids, in order of first appearance."""
    if ids.ndim != 1:
        raise InputError(f"{what}: expected one client id per example, found {describe(ids)}")
    if ids.dtype.kind not in "iuU":
        raise InputError(f"{what}: client ids must be whole numbers or text, found {ids.dtype}")
    names = text_array(ids.tolist()) if ids.dtype.kind == "U" else arrow(ids)
    clients = names.cast(pa.large_string()).dictionary_encode()
    if fault := fault_of(clients.dictionary):
        raise InputError(f"{what}: expected text or whole numbers as client ids, found {fault[1]}")
    warn_of_alike(what, hashes(clients.dictionary.to_pylist()))
    return clients.indices.to_numpy(), clients.dictionary


def _images(what: str, images: np.ndarray) -> np.ndarray:
    if images.ndim not in (3, 4) or (images.dtype.kind not in "bf" and images.dtype != np.uint8):
        expected = "images must be [H, W] or [H, W, C], uint8, float or boolean"
        raise InputError(f"{what}: {expected}, found {describe(images)}")
    if images.dtype.kind == "b":
        images = images.astype(np.uint8) * np.uint8(255)
    elif images.dtype.kind == "f":
        if images.size and not (images.min() >= 0 and images.max() <= 1):
            raise InputError(f"{what}: float images must lie in 0 .. 1, found other values")
        images = images.astype(np.float32)
    return images[..., None] if images.ndim == 3 else images


def _labels(what: str, labels: np.ndarray) -> np.ndarray:
    # Floats may be whole, as libraries write them beside missing ones; NaN equals nothing.
    is_whole = labels.dtype.kind in "iubf" and bool((labels == labels // 1).all())
    if not is_whole or labels.ndim != 1:
        raise InputError(f"{what}: labels must be whole numbers, found {describe(labels)}")
    if labels.min() < -(2**31) or labels.max() >= 2**31:
        raise InputError(f"{what}: labels must fit 32 bits, found larger ones")
    return labels.astype(np.int32)


def _other(what: str, values: np.ndarray) -> np.ndarray:
    if values.dtype.kind not in "biufU":
        raise InputError(f"{what}: expected numbers, booleans or text, found {values.dtype}")
    if rows := not_finite(values):
        unfit = f"{rows} of {len(values)} rows with NaN, infinite or larger ones"
        raise InputError(f"{what}: expected numbers that float32 can hold, found {unfit}")
    return values
