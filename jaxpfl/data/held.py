"""What one client holds, in whichever form it came, as columns."""

from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from jaxpfl.data.columns import from_arrow
from jaxpfl.errors import InputError


def held_columns(what: str, held: Any) -> Mapping[str, Any]:
    """Columns by name.

    Args:
      what: names the client in errors, e.g. "client 3".
      held: columns by name, or a list of records, or a DataFrame of pandas or polars, or anything
        else with Arrow's interface `__arrow_c_stream__`.

    Raises:
      InputError: it is none of these, a record has other fields than the first one, or a value of
        a DataFrame is missing.
    """
    if isinstance(held, Mapping):
        return held
    if isinstance(held, list | tuple) and all(isinstance(each, Mapping) for each in held):
        names = list(held[0]) if held else []
        for number, record in enumerate(held):
            if set(record) != set(names):
                raise InputError(
                    f"{what}, record {number}: has the fields {sorted(record)}, expected "
                    f"{sorted(names)}"
                )
        return {name: [record[name] for record in held] for name in names}
    if not hasattr(held, "__arrow_c_stream__"):
        raise InputError(
            f"{what} must hold a mapping of columns, a list of records or a DataFrame, found "
            f"{type(held).__name__}"
        )
    try:
        table = pa.RecordBatchReader.from_stream(held).read_all()
    except (pa.ArrowException, TypeError):
        raise InputError(f"{what}: a column holds values of several kinds") from None
    # pandas also gives its index.
    known = getattr(held, "columns", None) if hasattr(held, "loc") else None
    names = table.column_names if known is None else list(known)
    return {name: _column(f"{what}, column {name!r}", table[name]) for name in names}


def _column(what: str, values: pa.ChunkedArray) -> Any:
    if values.null_count:
        raise InputError(f"{what} has missing values, expected none")
    array = values.combine_chunks()
    types = pa.types
    if types.is_dictionary(array.type):
        array = array.cast(array.type.value_type)
    if types.is_string(array.type) or types.is_string_view(array.type):
        array = array.cast(pa.large_string())
    plain = types.is_integer(array.type) or types.is_floating(array.type)
    if not (plain or types.is_boolean(array.type) or types.is_large_string(array.type)):
        raise InputError(f"{what} must hold numbers, booleans or text, found {array.type}")
    return from_arrow(array)
