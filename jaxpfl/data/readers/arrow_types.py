"""Types of Arrow: which of them the fields of a table may have, and what they are called."""

from typing import Any

import numpy as np
import pyarrow as pa


def name_of_type(type_: pa.DataType) -> str:
    """A type of Arrow in the words of Python, where it has them."""
    for kind, is_of in (
        ("bool", pa.types.is_boolean),
        ("int", pa.types.is_integer),
        ("float", pa.types.is_floating),
        ("str", is_text),
        ("no value", pa.types.is_null),
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
    known = types.is_list(type_) or types.is_large_list(type_)
    return known or types.is_fixed_size_list(type_)


def is_plain(type_: pa.DataType) -> bool:
    """Whether columns of a type can become what `Rows` holds.

    Dictionaries can where their values are texts, booleans or numbers, lists where they hold
    numbers or booleans in the end.
    """
    if isinstance(type_, pa.BaseExtensionType):
        return is_plain(type_.storage_type)
    value = type_.value_type if pa.types.is_dictionary(type_) else type_
    if pa.types.is_string_view(value):
        return value == type_
    return is_text(value) or pa.types.is_null(type_) or _of_numbers(type_)


def _of_numbers(type_: pa.DataType) -> bool:
    types = pa.types
    if isinstance(type_, pa.BaseExtensionType):
        return _of_numbers(type_.storage_type)
    if is_list(type_):
        return _of_numbers(type_.value_type)
    value = type_.value_type if types.is_dictionary(type_) else type_
    return types.is_boolean(value) or types.is_integer(value) or types.is_floating(value)


def list_type(value: Any) -> pa.DataType | None:
    """The type of a list of numbers, nested perhaps, in Python; None if it is none."""
    try:
        array = np.asarray(value)
    except ValueError:
        return None
    if array.dtype.kind not in "iuf" or not array.size:
        return None
    type_ = pa.float64() if array.dtype.kind == "f" else pa.int64()
    for size in reversed(array.shape):
        type_ = pa.list_(type_, size)
    return type_


def wider(first: pa.DataType, second: pa.DataType) -> pa.DataType | None:
    """The type that holds both, if only whole numbers become floats."""
    if {first, second} == {pa.int64(), pa.float64()}:
        return pa.float64()
    lists = pa.types.is_fixed_size_list(first) and pa.types.is_fixed_size_list(second)
    if not lists or first.list_size != second.list_size:
        return first if first == second else None
    inner = wider(first.value_type, second.value_type)
    return None if inner is None else pa.list_(inner, first.list_size)
