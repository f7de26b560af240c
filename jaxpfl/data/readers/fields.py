"""The fields of a table's rows: what each must hold, checked column by column, named row by row.

A reader gives rows as `Rows`: columns as Arrow arrays of one of these types, without missing
values. `Fields` says which fields are wanted and what for, and is the only place that checks them:

    "client"   a string, or a whole number, which means its decimal digits
    "text"     a string
    "label"    a whole number from 0 to 2^31 - 1, or a boolean
    "number"   a number, a boolean, or a list of numbers, equally long in each row
    "value"    a string, boolean or number, or a list of numbers: of the first row's kind in all
               rows, but whole numbers become numbers where others follow

Errors name the source, the row and the field, what was expected and which kind of value was found,
and never a value.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from jaxpfl.data.columns import text_array
from jaxpfl.errors import InputError

_ABSENT = object()
_SCALARS = {str: pa.large_string(), bool: pa.bool_(), int: pa.int64(), float: pa.float64()}
_EXPECTED = {
    "client": "a non-empty string or a whole number",
    "text": "a string",
    "label": "a whole number from 0 to 2^31 - 1",
    "number": "a number, or a list of numbers",
    "value": "a string, boolean or number, or a list of numbers",
}
_KINDS = {
    "client": (str, int),
    "text": (str,),
    "label": (int, bool),
    "number": (int, float, bool, list),
    "value": (str, bool, int, float, list),
}
_CALLED = {str: "a string", bool: "a boolean", int: "a number", float: "a number"}
_AS_LONG = "a list of numbers as long as the first row's"
_WIDE = "a number of at most 64 bits"
_EXACT = ("a number of at most 2^53 in a field with fractions", "a larger one")


class Rows(NamedTuple):
    """Some rows of one file.

    Attributes:
      source: the file or data set.
      numbers: of the rows in it, from 1.
      columns: Arrow arrays [rows] of type large_string, bool, int64, float64, or fixed-size lists
        of the last two, without missing values.
    """

    source: str
    numbers: Sequence[int]
    columns: Mapping[str, pa.Array]


class Fields:
    """The fields that are wanted of a table, in all of its files.

    Attributes:
      names: in the order in which they were asked for.
      types: the Arrow type of each field whose first row was seen; a whole number becomes a float.
    """

    def __init__(self, wanted: Iterable[tuple[str, str]]) -> None:
        """Takes names with what each is for; a name may occur twice."""
        self._uses: dict[str, list[str]] = {}
        for name, use in wanted:
            self._uses.setdefault(name, []).append(use)
        self.names = tuple(self._uses)
        self.types: dict[str, pa.DataType] = {}
        # Where the first whole number of each field is that a float may not hold.
        self._large: dict[str, tuple[str, int]] = {}

    def require(self, source: str, known: Iterable[str]) -> None:
        """Refuses a table that lacks one of the fields, or has it twice."""
        known = list(known)
        for name in self.names:
            if known.count(name) != 1:
                found = ", ".join(map(repr, known)) or "none"
                problem = "there is no field" if name not in known else "there are two fields"
                raise InputError(f"{source}: {problem} {name!r}, found {found}")

    def require_types(self, source: str, schema: pa.Schema) -> None:
        """Refuses a table with a field of a type that no field can hold, before any row is read."""
        for name in self.names:
            if not _is_plain(type_ := schema.field(name).type):
                raise _error(source, 1, name, self._expected(name), name_of_type(type_))

    def of_strings(
        self, source: str, numbers: Sequence[int], found: Mapping[str, pa.Array]
    ) -> Rows:
        """Rows of a file without types: non-empty columns of strings."""
        columns = {}
        for name, uses in self._uses.items():
            columns[name] = found[name]
            if {"client", "text"} & set(uses):
                continue
            columns[name] = _numbers(found[name], self.types.get(name))
            if columns[name].null_count:
                index = _first(columns[name].is_null())
                text = found[name][index].as_py().strip()
                self.types.setdefault(name, columns[name].type)
                what = "another string" if text else "an empty string"
                raise _error(source, numbers[index], name, self._expected(name), what)
        return self.conformed(source, numbers, columns)

    def conformed(self, source: str, numbers: Sequence[int], found: Mapping[str, Any]) -> Rows:
        """Rows of Arrow columns of any type."""
        columns = {name: self._checked(source, numbers, name, found[name]) for name in self.names}
        return Rows(source, numbers, columns)

    def of_mappings(
        self, source: str, numbers: Sequence[int], rows: Sequence[Mapping[str, Any]]
    ) -> Rows:
        """Rows of mappings with Python values."""
        columns = {}
        for name, uses in self._uses.items():
            values = [row.get(name, _ABSENT) for row in rows]
            if _ABSENT in values:
                number = numbers[values.index(_ABSENT)]
                raise _error(source, number, name, self._expected(name), "no such field")
            if set(uses) == {"client"}:
                # Ids of both kinds may be mixed.
                values = [str(each) if type(each) is int else each for each in values]
            columns[name] = _of_python(values)
            if columns[name] is None:
                # The shortest beginning that has no type ends with the first value that is wrong.
                sizes = range(len(values) + 1)
                bad = bisect_left(sizes, True, key=lambda n: _of_python(values[:n]) is None) - 1
                if bad:
                    self._checked(source, numbers, name, _of_python(values[:bad]))
                if (first := _large_beside_fraction(values[: bad + 1])) >= 0:
                    raise _error(source, numbers[first], name, *_EXACT)
                large = type(values[bad]) is int and not -(2**63) <= values[bad] < 2**63
                expected = _WIDE if large else self._expected(name)
                raise _error(source, numbers[bad], name, expected, type(values[bad]).__name__)
        return self.conformed(source, numbers, columns)

    def _expected(self, name: str) -> str:
        use, known = self._uses[name][-1], self.types.get(name)
        if use != "value" or known is None:
            return _EXPECTED[use]
        if pa.types.is_fixed_size_list(known):
            return _AS_LONG
        return _CALLED[_kind_of(known)]

    def _checked(
        self, source: str, numbers: Sequence[int], name: str, column: pa.Array | pa.ChunkedArray
    ) -> pa.Array:
        if isinstance(column, pa.ChunkedArray):
            column = column.combine_chunks()
        try:
            plain, both = self._conformed(name, column)
        except _FaultError as fault:
            raise _error(source, numbers[fault.index], name, fault.expected, fault.found) from None
        # Here, because Arrow's error quotes the value; and in whichever order they come.
        if (large := _first_large(plain)) >= 0:
            self._large.setdefault(name, (source, numbers[large]))
        if name in self._large and _innermost(both) == pa.float64():
            raise _error(*self._large[name], name, *_EXACT)
        return plain.cast(both)

    def _conformed(self, name: str, column: pa.Array) -> tuple[pa.Array, pa.DataType]:
        """The column in a type of `Rows`, and the one of all blocks so far."""
        uses, expected = self._uses[name], self._expected(name)
        if column.null_count:
            raise _FaultError(_first(column.is_null()), expected, "no value")
        plain = _plain(column)
        found = name_of_type(column.type)
        if plain is None:
            raise _FaultError(0, expected, found)
        kind = _kind_of(plain.type)
        if not all(kind in _KINDS[use] for use in uses):
            raise _FaultError(0, expected, found)
        if "client" in uses and kind is str:
            empty = pc.call_function("equal", [plain, pa.scalar("", plain.type)])
            if (first := _first(empty)) >= 0:
                raise _FaultError(first, _EXPECTED["client"], "an empty string")
        if set(uses) == {"client"}:
            return plain, pa.large_string()
        if "label" in uses and kind is int:
            values = plain.to_numpy()
            if (first := _first((values < 0) | (values >= 2**31))) >= 0:
                raise _FaultError(first, expected, "another number")
        both = _wider(self.types.get(name, plain.type), plain.type)
        if both is None:
            raise _FaultError(0, expected, found)
        # What came first may have been whole numbers.
        self.types[name] = both
        return plain, both


class _FaultError(Exception):
    """The first row of a column that does not fit: its index, what was expected and found."""

    def __init__(self, index: int, expected: str, found: str) -> None:
        self.index, self.expected, self.found = index, expected, found


def _first(flags: Any) -> int:
    """The index of the first true flag, of Arrow or numpy; -1 if there is none."""
    if isinstance(flags, pa.Array):
        flags = flags.to_numpy(zero_copy_only=False)
    return int(np.argmax(flags)) if flags.any() else -1


def _innermost(type_: pa.DataType) -> pa.DataType:
    while pa.types.is_fixed_size_list(type_):
        type_ = type_.value_type
    return type_


def _first_large(column: pa.Array) -> int:
    """The index of the first row with a whole number beyond 2^53; -1 if there is none."""
    rows = len(column)
    if not rows or _innermost(column.type) != pa.int64():
        return -1
    while pa.types.is_fixed_size_list(column.type):
        column = column.flatten()
    values = column.to_numpy().reshape(rows, -1)
    return _first(((values < -(2**53)) | (values > 2**53)).any(axis=1))


def _large_beside_fraction(values: Sequence[Any]) -> int:
    """The index of the first whole number beyond 2^53, if there are fractions, too; else -1."""
    leaves = [(index, leaf) for index, value in enumerate(values) for leaf in _leaves(value)]
    if {type(leaf) for _, leaf in leaves} != {int, float}:
        return -1
    return next((k for k, leaf in leaves if type(leaf) is int and abs(leaf) > 2**53), -1)


def _leaves(value: Any) -> Iterator[Any]:
    if type(value) is not list:
        yield value
        return
    for each in value:
        yield from _leaves(each)


def _numbers(column: pa.Array, known: pa.DataType | None) -> pa.Array:
    """Strings as numbers or booleans, if the first row's is one; missing where one is not."""
    stripped = pc.call_function("utf8_trim_whitespace", [column])
    if known is None:
        first = stripped[0].as_py()
        if first.lower() in ("true", "false"):
            known = pa.bool_()
        else:
            known = pa.large_string() if _cast(stripped[:1], pa.float64()).null_count else None
    if known == pa.large_string():
        return column
    if known == pa.bool_():
        return _cast(stripped, pa.bool_())
    try:
        return stripped.cast(pa.int64())
    except pa.ArrowInvalid:
        return _cast(stripped, pa.float64())


def _cast(strings: pa.Array, type_: pa.DataType) -> pa.Array:
    """The strings in a type, missing where they cannot be."""
    try:
        return strings.cast(type_)
    except pa.ArrowInvalid:
        return pa.array([_scalar(each, type_) for each in strings], type_)


def _scalar(string: pa.Scalar, type_: pa.DataType) -> Any:
    try:
        return string.cast(type_).as_py()
    except pa.ArrowInvalid:
        return None


def _error(source: str, number: int, name: str, expected: str, found: str) -> InputError:
    return InputError(f"{source}, row {number}: field {name!r} must be {expected}, found {found}")


def field_error(rows: Rows, index: int, name: str, expected: str) -> InputError:
    """The error of a row whose value has the right kind, but does not fit a rule."""
    value = rows.columns[name][index].as_py()
    found = {"": "an empty string"}.get(value, "another string" if type(value) is str else "int")
    return _error(rows.source, rows.numbers[index], name, expected, found)


def _kind_of(type_: pa.DataType) -> type:
    if pa.types.is_fixed_size_list(type_):
        return list
    return next(kind for kind, known in _SCALARS.items() if known == type_)


def _plain(column: pa.Array) -> pa.Array | None:
    """The column in a type of `Rows`; None if it has no such type."""
    if isinstance(column, pa.ExtensionArray):
        return _plain(column.storage)
    type_ = column.type
    # Before anything is unpacked: what is held once may stand in many rows.
    if not _is_plain(type_):
        return None
    if pa.types.is_dictionary(type_):
        return _plain(column.cast(type_.value_type))
    if is_text(type_):
        return column.cast(pa.large_string())
    if pa.types.is_boolean(type_):
        return column
    if pa.types.is_uint64(type_) and len(column) and np.any(column.to_numpy() >= 2**63):
        return None
    if pa.types.is_integer(type_):
        return column.cast(pa.int64())
    if pa.types.is_floating(type_):
        return column.cast(pa.float64())
    return _plain_list(column) if _is_list(type_) else None


def _plain_list(column: pa.Array) -> pa.Array | None:
    lengths = pc.call_function("list_value_length", [column]).to_numpy(zero_copy_only=False)
    if not len(lengths):
        return None
    if (other := _first(lengths != lengths[0])) >= 0 or not lengths[0]:
        raise _FaultError(max(other, 0), _AS_LONG, "a longer or shorter list")
    values = column.flatten()
    inner = None if values.null_count else _plain(values)
    if inner is None or _kind_of(inner.type) in (str, bool):
        return None
    return pa.FixedSizeListArray.from_arrays(inner, int(lengths[0]))


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


def _is_list(type_: pa.DataType) -> bool:
    types = pa.types
    known = types.is_list(type_) or types.is_large_list(type_)
    return known or types.is_fixed_size_list(type_)


def _is_plain(type_: pa.DataType, listed: bool = False) -> bool:
    """Whether columns of a type can become what `Rows` holds.

    Dictionaries can where their values are texts, booleans or numbers, lists where they hold
    numbers or booleans in the end.
    """
    types = pa.types
    if isinstance(type_, pa.BaseExtensionType):
        return _is_plain(type_.storage_type, listed)
    if _is_list(type_):
        return _is_plain(type_.value_type, True)
    value = type_.value_type if types.is_dictionary(type_) else type_
    if types.is_boolean(value) or types.is_integer(value) or types.is_floating(value):
        return True
    if listed:
        return False
    if types.is_string_view(value):
        return value == type_
    return is_text(value) or types.is_null(type_)


def _of_python(values: Sequence[Any]) -> pa.Array | None:
    """The array of values of one kind; None if they are not."""
    kinds = set(map(type, values))
    # Arrow would take a boolean among numbers for one of them.
    if bool in kinds and len(kinds) > 1:
        return None
    try:
        if values and type(values[0]) is str:
            return text_array(values)
        return pa.array(values)
    except (pa.ArrowException, TypeError, ValueError, OverflowError):
        return None


def _wider(first: pa.DataType, second: pa.DataType) -> pa.DataType | None:
    """The type that holds both, if only whole numbers become floats."""
    if {first, second} == {pa.int64(), pa.float64()}:
        return pa.float64()
    lists = pa.types.is_fixed_size_list(first) and pa.types.is_fixed_size_list(second)
    if not lists or first.list_size != second.list_size:
        return first if first == second else None
    inner = _wider(first.value_type, second.value_type)
    return None if inner is None else pa.list_(inner, first.list_size)
