"""Images and arrays in the cells of a table.

An image is what the library `datasets` calls `Image`, a struct of bytes and path, or a column of
bytes (`readers.pixels`): uint8 [height, width, channels]. An array is a list of lists of numbers,
such as `Array2D` and `Array3D` of `datasets`. All of a column have the form of the first.
"""

import io

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from jaxpfl.checks import fits_memory
from jaxpfl.data.columns import arrow
from jaxpfl.data.readers.pixels import pixels_of
from jaxpfl.errors import InputError


class UnfitError(Exception):
    """A cell that does not fit: what was expected, and what was found."""


def are_arrays(type_: pa.DataType) -> bool:
    """Whether a column of this type holds images, or lists of lists of numbers."""
    types, type_ = pa.types, _storage(type_)
    if types.is_struct(type_):
        return "bytes" in type_.names and are_arrays(type_.field("bytes").type)
    if types.is_list(type_) or types.is_large_list(type_) or types.is_fixed_size_list(type_):
        inner, depth = type_, 0
        while types.is_nested(inner) and not types.is_struct(inner):
            inner, depth = inner.value_type, depth + 1
        return depth > 1 and (types.is_integer(inner) or types.is_floating(inner))
    return types.is_binary(type_) or types.is_large_binary(type_)


def arrays(column: pa.Array) -> pa.Array:
    """A column for which `are_arrays`, without missing values, as fixed-size lists in each other.

    Raises:
      UnfitError: the last row does not fit, if those before it do.
    """
    if isinstance(column, pa.ExtensionArray):
        column = column.storage
    if pa.types.is_struct(column.type):
        column = column.field("bytes")
        if column.null_count:
            raise UnfitError("an image in the table itself", "its path alone")
    if not pa.types.is_nested(column.type):
        return _as_lists(_images(column))
    shape = [len(column)]
    while pa.types.is_nested(column.type):
        lengths = pc.call_function("list_value_length", [column]).to_numpy(zero_copy_only=False)
        column = column.flatten()
        if not lengths[0] or (lengths != lengths[0]).any() or column.null_count:
            raise UnfitError("an array of numbers as large as the first row's", "another list")
        shape.append(int(lengths[0]))
    return _as_lists(column.to_numpy(zero_copy_only=False).reshape(shape))


def _storage(type_: pa.DataType) -> pa.DataType:
    nested = isinstance(type_, pa.BaseExtensionType) and pa.types.is_nested(type_.storage_type)
    return type_.storage_type if nested else type_


def _images(encoded: pa.Array) -> np.ndarray:
    images: list[np.ndarray] = []
    for cell in encoded.to_pylist():
        try:
            images.append(pixels_of("", io.BytesIO(cell)))
        except InputError:
            raise UnfitError("an image of 8 or 16 bits", "damaged or other bytes") from None
        if images[-1].shape != images[0].shape:
            raise UnfitError(
                f"an image of the first's height, width and channels, {list(images[0].shape)}",
                f"one of {list(images[-1].shape)}",
            )
        if len(images) == 1:
            fits_memory("its images", 2 * len(encoded) * images[0].nbytes)
    return np.stack(images)


def _as_lists(values: np.ndarray) -> pa.Array:
    flat = arrow(values.reshape(-1))
    for size in values.shape[:0:-1]:
        flat = pa.FixedSizeListArray.from_arrays(flat, size)
    return flat
