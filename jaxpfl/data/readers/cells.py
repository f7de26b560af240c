"""Images and arrays in the cells of a table, and the pixels of an image, also of a file.

An image is what the library `datasets` calls `Image`, a struct of bytes and path, or a column of
bytes: uint8 [height, width, channels]. An array is a list of lists of numbers, such as `Array2D`
and `Array3D` of `datasets`. All of a column have the form of the first.

Policy of images: PNG, JPEG, WebP, BMP or TIFF, one page of it; of an animation, the first image.
They are turned as the camera was held. Pixels have 8 bits, of 16 the upper ones. What is
transparent is seen on white. Pixels of 32 bits have no range of their own, and are refused.
"""

import io
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from jaxpfl.checks import fits_memory
from jaxpfl.data.columns import arrow
from jaxpfl.errors import CorruptFile, InputError

FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "TIFF")
_GREY, _COLOUR = ("1", "L", "LA", "La"), ("P", "RGB", "RGBX", "CMYK", "YCbCr", "LAB")
_ALPHA = ("LA", "La", "PA", "RGBA", "RGBa")


class UnfitError(Exception):
    """A cell that does not fit: what was expected, and what was found."""


def are_arrays(type_: pa.DataType) -> bool:
    """Whether a column of this type holds images, or lists of lists of numbers."""
    types = pa.types
    if isinstance(type_, pa.BaseExtensionType) and types.is_nested(type_.storage_type):
        type_ = type_.storage_type
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


def _images(encoded: pa.Array) -> np.ndarray:
    images: list[np.ndarray] = []
    for cell in encoded.to_pylist():
        try:
            images.append(pixels_of("", io.BytesIO(cell)))
        except InputError:
            raise UnfitError("an image of 8 or 16 bits", "damaged or other bytes") from None
        if images[-1].shape != images[0].shape:
            form = f"height, width and channels, {list(images[0].shape)}"
            raise UnfitError(f"an image of the first's {form}", f"one of {list(images[-1].shape)}")
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
        mode = f"Pillow's mode {upright.mode}"
        raise InputError(f"{where}: expected pixels of 8 or 16 bits, found {mode}")
    grey = channels == 1 or (not channels and upright.mode in _GREY)
    made: Any = upright
    if upright.mode in _ALPHA or "transparency" in upright.info:
        white = Image.new("RGBA", upright.size, "white")
        made = Image.alpha_composite(white, upright.convert("RGBA"))
    made = made.convert("L" if grey else "RGB")
    pixels = np.asarray(made.resize((size, size)) if size else made, np.uint8)
    return pixels.reshape(*pixels.shape[:2], -1)
