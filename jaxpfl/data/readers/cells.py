"""What cells of a table hold, in few types, whatever the library that wrote them has for a type.

Arrow's dictionaries, runs and views become what they stand for, decimals numbers, and a list of
messages, {"role": ..., "content": ...}, one text: their contents in their order, joined by
newlines, without the roles.

An image is what the library `datasets` calls `Image`, a struct of bytes and path, or a column of
bytes: uint8 [height, width, channels]. An array is a list of lists of numbers, such as `Array2D`
and `Array3D` of `datasets`. All of a column have the form of the first.

Policy of images, also of a file: PNG, JPEG, WebP, BMP or TIFF, one page of it; of an animation, the
first image. They are turned as the camera was held. Pixels have 8 bits, of 16 the upper ones. What
is transparent is seen on white. Pixels of 32 bits have no range of their own, and are refused.
"""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from jaxpfl.checks import fits_memory
from jaxpfl.data.columns import arrow, text_array
from jaxpfl.errors import CorruptFile, InputError

FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "TIFF")
_GREY, _COLOUR = ("1", "L", "LA", "La"), ("P", "RGB", "RGBX", "CMYK", "YCbCr", "LAB")
_ALPHA = ("LA", "La", "PA", "RGBA", "RGBa")

_SCALARS = {str: pa.large_string(), bool: pa.bool_(), int: pa.int64(), float: pa.float64()}
INEXACT = "whole numbers of at most 64 bits, and of at most 2^53 where there are fractions, too"

A_LIST = "a list of numbers as long as the first row's"
ABSENT = object()
"""Stands for the value of a field that a row does not have."""


class FaultError(Exception):
    """A row does not fit, the last one of a column if those before it do: expected and found."""


def value_of(row: Mapping[str, Any], name: str) -> Any:
    """A field's value in a row, perhaps inside of another; `ABSENT` where there is none.

    Where the other is null, so is what would be inside of it.
    """
    head, _, rest = name.partition(".")
    if name in row or not rest or head not in row:
        return row.get(name, ABSENT)
    inner = row[head]
    if isinstance(inner, dict):
        return value_of(inner, rest)
    return None if inner is None else ABSENT


def kind_of(type_: pa.DataType) -> type:
    """What a type that `plain` gives holds: str, bool, int, float or list."""
    return next((kind for kind, scalar in _SCALARS.items() if scalar == type_), list)


def array_of(values: Sequence[Any]) -> pa.Array | None:
    """Python's values as an array; None if they are of several kinds, or too large."""
    kinds = set(map(type, values))
    # Arrow would take a boolean among numbers for one of them.
    if bool in kinds and len(kinds) > 1 and kinds != {bool, type(None)}:
        return None
    try:
        if kinds == {str}:
            return text_array(values)
        return pa.array(values, pa.large_string() if str in kinds else None)
    except (pa.ArrowException, TypeError, ValueError, OverflowError):
        return None


def whole(values: Any) -> Any:
    """The values of chunks, dictionaries, runs and views as one array; conversations as texts."""
    if isinstance(values, pa.ChunkedArray):
        values = values.combine_chunks()
    if isinstance(values, list):
        return [_contents(value) if _is_conversation(value) else value for value in values]
    if isinstance(values, pa.DictionaryArray) and not pa.types.is_nested(values.dictionary.type):
        return whole(values.dictionary).take(values.indices)
    if isinstance(values, pa.RunEndEncodedArray):
        rows = values.offset + np.arange(len(values))
        runs = np.searchsorted(values.run_ends.to_numpy(), rows, "right")
        return whole(values.values).take(arrow(runs))
    if isinstance(values, pa.UuidArray):
        return values.storage
    # Arrow cannot take those of views.
    if pa.types.is_string_view(values.type):
        return values.cast(pa.large_string())
    if pa.types.is_binary_view(values.type):
        return values.cast(pa.large_binary())
    element = values.type.value_type if is_list(values.type) else pa.null()
    index = element.get_field_index("content") if pa.types.is_struct(element) else -1
    if index >= 0 and is_text(element.field(index).type):
        texts = [value if value is None else _contents(value) for value in values.to_pylist()]
        return pa.array(texts, pa.large_string())
    return values


def _is_conversation(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_message, value))


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("content", 0), str | None)


def _contents(messages: Sequence[Mapping[str, Any] | None]) -> str:
    return "\n".join(message["content"] for message in messages if message and message["content"])


def plain(column: pa.Array) -> pa.Array | None:
    """The column in a type of `Rows`; None, before anything is unpacked, if its type is another."""
    types, type_ = pa.types, column.type
    if is_list(type_):
        number = types.is_integer(type_.value_type) or types.is_floating(type_.value_type)
        return _plain_list(column) if number else None
    if is_text(type_):
        return column.cast(pa.large_string())
    if types.is_uint64(type_) and (column.to_numpy() >= 2**63).any():
        raise FaultError(INEXACT, "a larger one")
    if types.is_integer(type_):
        return column.cast(pa.int64())
    if types.is_floating(type_) or types.is_decimal(type_):
        return column.cast(pa.float64())
    return column if types.is_boolean(type_) or types.is_null(type_) else None


def _plain_list(column: pa.Array) -> pa.Array | None:
    lengths = pc.call_function("list_value_length", [column]).to_numpy(zero_copy_only=False)
    if not len(lengths):
        return column
    if not lengths[0] or (lengths != lengths[0]).any():
        raise FaultError(A_LIST, "a longer or shorter list")
    values = column.flatten()
    if values.null_count:
        raise FaultError("a list of numbers", "a list with a missing value")
    return pa.FixedSizeListArray.from_arrays(plain(values), int(lengths[0]))


def name_of_type(type_: pa.DataType) -> str:
    """A type of Arrow in the words of Python, where it has them."""
    for kind, is_of in (
        ("bool", pa.types.is_boolean),
        ("int", pa.types.is_integer),
        ("float", pa.types.is_floating),
        ("str", is_text),
        ("no value", pa.types.is_null),
        ("dict", pa.types.is_struct),
        ("list", pa.types.is_nested),
    ):
        if is_of(type_):
            return kind
    return str(type_).partition("[")[0]


def is_text(type_: pa.DataType) -> bool:
    types = pa.types
    return types.is_string(type_) or types.is_large_string(type_) or types.is_string_view(type_)


def is_list(type_: pa.DataType) -> bool:
    types = pa.types
    return types.is_list(type_) or types.is_large_list(type_) or types.is_fixed_size_list(type_)


def wider(first: pa.DataType, second: pa.DataType) -> pa.DataType | None:
    """The type that holds both, if only whole numbers become floats."""
    if {first, second} == {pa.int64(), pa.float64()}:
        return pa.float64()
    lists = pa.types.is_fixed_size_list(first) and pa.types.is_fixed_size_list(second)
    if first == second or not lists or first.list_size != second.list_size:
        return first if first == second else None
    return pa.list_(pa.float64(), first.list_size)


def are_arrays(type_: pa.DataType) -> bool:
    """Whether a column of this type holds images, or lists of lists of numbers."""
    types = pa.types
    if isinstance(type_, pa.BaseExtensionType) and types.is_nested(type_.storage_type):
        type_ = type_.storage_type
    if types.is_struct(type_):
        return "bytes" in type_.names and are_arrays(type_.field("bytes").type)
    if is_list(type_):
        inner, depth = type_, 0
        while types.is_nested(inner) and not types.is_struct(inner):
            inner, depth = inner.value_type, depth + 1
        return depth > 1 and (types.is_integer(inner) or types.is_floating(inner))
    return types.is_binary(type_) or types.is_large_binary(type_)


def arrays(column: pa.Array) -> pa.Array:
    """A column for which `are_arrays`, without missing values, as fixed-size lists in each other.

    A row that does not fit is a `FaultError`.
    """
    if isinstance(column, pa.ExtensionArray):
        column = column.storage
    if pa.types.is_struct(column.type):
        column = column.field("bytes")
        if column.null_count:
            raise FaultError("an image in the table itself", "its path alone")
    if not pa.types.is_nested(column.type):
        return _as_lists(_images(column))
    shape = [len(column)]
    while pa.types.is_nested(column.type):
        lengths = pc.call_function("list_value_length", [column]).to_numpy(zero_copy_only=False)
        column = column.flatten()
        if not lengths[0] or (lengths != lengths[0]).any() or column.null_count:
            raise FaultError("an array of numbers as large as the first row's", "another list")
        shape.append(int(lengths[0]))
    return _as_lists(column.to_numpy(zero_copy_only=False).reshape(shape))


def _images(encoded: pa.Array) -> np.ndarray:
    images: list[np.ndarray] = []
    for cell in encoded.to_pylist():
        try:
            images.append(pixels_of("", io.BytesIO(cell)))
        except InputError:
            raise FaultError("an image of 8 or 16 bits", "damaged or other bytes") from None
        if images[-1].shape != images[0].shape:
            form = f"height, width and channels, {list(images[0].shape)}"
            raise FaultError(f"an image of the first's {form}", f"one of {list(images[-1].shape)}")
        if len(images) == 1:
            fits_memory("its images", 2 * len(encoded) * images[0].nbytes)
    return np.stack(images)


def _as_lists(values: np.ndarray) -> pa.Array:
    flat = arrow(values.reshape(-1))
    for size in values.shape[:0:-1]:
        flat = pa.FixedSizeListArray.from_arrays(flat, size)
    return flat


def pixels_of(where: str, file: Path | IO[bytes], size: int = 0, channels: int = 0) -> np.ndarray:
    """The pixels of an image, uint8 [height, width, channels].

    Args:
      where: begins the errors, which do not have the name of a file.
      size: height and width that it is scaled to; 0: its own.
      channels: 1 for grey, 3 for colour; 0: its own.
    """
    from PIL import Image, ImageOps

    try:
        with Image.open(file, formats=FORMATS) as opened:
            upright, kind = ImageOps.exif_transpose(opened), opened.format
            pages = getattr(opened, "n_frames", 1) if kind == "TIFF" else 1
    # Pillow raises errors of many kinds, which may quote what is in the file.
    except Exception:
        what = "truncated, damaged, too large or no image"
        raise CorruptFile(f"{where}: {what}, expected one of {', '.join(FORMATS)}") from None
    if pages > 1:
        raise InputError(f"{where}: expected a TIFF of one page, found {pages}: store each alone")
    # Pillow would set what is above 255 to 255. Old ones call 16 bits of a PNG file I.
    if upright.mode.startswith("I;16") or (upright.mode == "I" and kind == "PNG"):
        upright = Image.fromarray((np.asarray(upright) >> 8).astype(np.uint8))
    if upright.mode not in _GREY + _COLOUR + _ALPHA:
        raise InputError(f"{where}: expected pixels of 8 or 16 bits, found mode {upright.mode}")
    grey = channels == 1 or (not channels and upright.mode in _GREY)
    made: Any = upright
    if upright.mode in _ALPHA or "transparency" in upright.info:
        white = Image.new("RGBA", upright.size, "white")
        made = Image.alpha_composite(white, upright.convert("RGBA"))
    made = made.convert("L" if grey else "RGB")
    pixels = np.asarray(made.resize((size, size)) if size else made, np.uint8)
    return pixels.reshape(*pixels.shape[:2], -1)
