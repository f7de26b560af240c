"""Columns: one value per example.

Numbers are numpy arrays, or `Padded` rows of token ids; texts are Arrow strings; token ids as they
are stored are `Sequences`. `Mapped` and `MappedText` are those of a file, verified as it is read.

Policy for text (the same on every platform): Unicode, kept as it came, without normalisation. A
lone surrogate, which no encoding of Unicode text can hold, becomes U+FFFD. NUL is a character like
any other. An empty string is an example without words.
"""

import re
import warnings
from collections import UserDict
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from jaxpfl.data.mapped import Mapped, MappedText
from jaxpfl.data.sequences import Padded, Sequences
from jaxpfl.errors import InputError

Column: TypeAlias = Any
"""A numpy array [examples, ...] of numbers or booleans, a pyarrow large_string array, or one of
`data.sequences`."""

WORD_SEPARATOR = "\x1f"
"""Separates the words of a text that was split into words; a control character is in no word."""

_FLOAT32 = float(np.finfo(np.float32).max)
_SURROGATE = re.compile("[\ud800-\udfff]")


def without_surrogates(text: str) -> str:
    """The text with U+FFFD in place of lone surrogates, which UTF-8 cannot encode."""
    return _SURROGATE.sub("\ufffd", text)


def text_array(texts: Sequence[str]) -> pa.Array:
    """A large_string array of `texts`; lone surrogates become U+FFFD."""
    try:
        encoded = [text.encode() for text in texts]
    except UnicodeEncodeError:
        encoded = [without_surrogates(text).encode() for text in texts]
    ends = np.cumsum([0, *map(len, encoded)], dtype=np.int64)
    content = (pa.py_buffer(ends), pa.py_buffer(b"".join(encoded)))
    return pa.LargeStringArray.from_buffers(len(encoded), *content)


def arrow(values_N: np.ndarray) -> pa.Array:
    """The numbers, without a copy. (`pa.array` imports pandas where it is installed: 40 MB.)"""
    values_N = np.ascontiguousarray(values_N)
    kind = pa.from_numpy_dtype(values_N.dtype)
    return pa.Array.from_buffers(kind, len(values_N), [None, pa.py_buffer(values_N)])


def as_column(what: str, values: Any) -> Column:
    """Numbers, booleans, texts or token ids as a read-only column, which errors call `what`."""
    if isinstance(values, Sequences | Padded | Mapped | MappedText):
        return values
    if isinstance(values, pa.ChunkedArray):
        values = values.combine_chunks()
    if isinstance(values, pa.Array):
        if not (pa.types.is_string(values.type) or pa.types.is_large_string(values.type)):
            raise InputError(f"{what} must be Arrow strings or a numpy array, found {values.type}")
        if values.null_count:
            raise InputError(f"{what} has {values.null_count} missing values, expected none")
        return values.cast(pa.large_string())
    if isinstance(values, np.ma.MaskedArray) and values.mask.any():
        raise InputError(f"{what} has masked values, expected none")
    if isinstance(values, np.ndarray) and values.dtype.kind in "OU":
        values = values.tolist()
    if isinstance(values, list | tuple) and values and isinstance(values[0], str):
        for row, value in enumerate(values):
            if not isinstance(value, str):
                type_ = type(value).__name__
                raise InputError(f"{what}, row {row}: expected a string, found {type_}")
        return text_array(values)
    try:
        array = np.asarray(values)
    except (ValueError, TypeError):
        raise InputError(f"{what}: the examples have different shapes, expected one") from None
    if array.ndim == 0:
        raise InputError(f"{what} must have an examples axis, found a single value")
    if array.dtype.kind not in "biuf" or array.dtype.itemsize > 8:
        raise InputError(f"{what} must hold numbers, booleans or text, found {array.dtype}")
    if 0 in array.shape[1:]:
        raise InputError(f"{what}: the example shape {array.shape[1:]} must not contain a zero")
    array = np.ascontiguousarray(array, array.dtype.newbyteorder("<")).view()
    array.flags.writeable = False
    return array


def from_arrow(array: pa.Array) -> Any:
    """A column, [examples, ...], of strings, numbers, booleans or lists of one size, all there."""
    if pa.types.is_large_string(array.type):
        return array
    shape = []
    type_ = array.type
    while pa.types.is_fixed_size_list(type_):
        shape.append(type_.list_size)
        array, type_ = array.flatten(), type_.value_type
    values = array.to_numpy(zero_copy_only=False)
    return values.reshape(-1, *shape) if shape else values


def not_finite(column: Column) -> int:
    """How many examples hold NaN, an infinite number or one that float32 cannot hold. PRIVATE.

    Numbers of a mapped file are not read for it: they were checked when the file was written.
    """
    if not isinstance(column, np.ndarray) or column.dtype.kind != "f" or not column.size:
        return 0
    # The least and the largest number are NaN where one is.
    if float(column.min()) >= -_FLOAT32 and float(column.max()) <= _FLOAT32:
        return 0
    small = column.dtype.itemsize <= 4
    fits = np.isfinite(column) if small else np.abs(column) <= _FLOAT32
    return len(column) - int(fits.reshape(len(column), -1).all(1).sum())


def changed_by_float32(numbers: np.ndarray) -> bool:
    """Whether a whole number is among them that float32 makes another one, such as 16777217.

    Floats from 2^53 on are all whole, and count as rounded already.
    """
    if numbers.dtype.kind not in "if" or not numbers.size:
        return False
    is_float = numbers.dtype.kind == "f"
    with np.errstate(invalid="ignore"):
        changed = numbers.astype(np.float32).astype(numbers.dtype) != numbers
    if is_float:
        changed &= (numbers == np.floor(numbers)) & (np.abs(numbers) < 2**53)
    return bool(changed.any())


def warn_of_numbers(columns: Mapping[str, Column]) -> None:
    """Warns of columns with numbers that are not finite, before they cost any privacy."""
    for name, column in columns.items():
        if rows := not_finite(column):
            # Their number is private, and a run's output is stored.
            examples = "all examples" if rows == len(column) else "some examples"
            warnings.warn(
                f"column {name!r}: {examples} hold NaN, an infinite number or one beyond float32; "
                "a client whose contribution is not finite counts as zero, and costs as much",
                stacklevel=3,
            )


def take(column: Column, rows: slice | np.ndarray) -> Column:
    """The rows of a column, in the given order; those of a slice without copying them."""
    if isinstance(column, MappedText) and isinstance(rows, slice):
        return column.select(rows)
    if isinstance(column, Padded | Mapped):
        return column.select(rows)
    column = read(column)
    if isinstance(column, pa.Array) and not isinstance(rows, slice):
        return column.take(arrow(np.asarray(rows, np.int64)))
    return column[rows]


def read(column: Column) -> Column:
    """A mapped column of numbers or texts as an array, verified whole; any other as it is."""
    return column.whole if isinstance(column, Mapped | MappedText) else column


def rows_of(column: Column, rows: slice) -> Column:
    """Neighbouring rows of a column, as an array where they can be one."""
    part = take(column, rows)
    return np.asarray(part) if isinstance(part, Padded) else read(part)


def concatenated(parts: list[Column]) -> Column:
    """The examples of several columns of one type; without any, a float32 column of none."""
    if not parts:
        return np.zeros(0, np.float32)
    if isinstance(parts[0], np.ndarray):
        return np.concatenate(parts)
    return pa.concat_arrays(parts)


class ReadColumns(UserDict[str, Column]):
    """Columns by name; those of a file are verified when they are looked up, see `read`."""

    def __getitem__(self, name: str) -> Column:
        return read(self.data[name])


def describe(column: Column) -> str:
    """Type and shape of one example, e.g. "float32[28, 28, 1]": public."""
    if is_numeric(column):
        return f"{column.dtype}{list(column.shape[1:])}"
    return f"token ids {column.dtype}" if isinstance(column, Sequences) else "text"


def is_numeric(column: Column) -> bool:
    """Whether a model can read the column: numbers, all examples of one shape."""
    return isinstance(column, np.ndarray | Padded | Mapped)


def text_buffers(column: pa.Array) -> tuple[np.ndarray, memoryview]:
    """The offsets, int64 [examples + 1], and the bytes of a large_string or large_binary column.

    The column must not be empty. Its first offset need not be 0, but belongs to the first byte.
    """
    _, offsets_buffer, content = column.buffers()
    offsets = np.frombuffer(offsets_buffer, np.int64)[column.offset :][: len(column) + 1]
    return offsets, memoryview(content or b"")[int(offsets[0]) : int(offsets[-1])]
