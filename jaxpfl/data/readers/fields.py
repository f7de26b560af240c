"""The fields of a table's rows: what each must hold, checked column by column, named row by row.

Every reader of tables hands its columns to `Fields.rows`, the only place that checks them:

    "client"   a string, or a whole number, which means its decimal digits; not blank, and not as
               1.0, 1e+16 or nan, which libraries write for whole numbers beside missing ones
    "text"     a string; texts of several fields are joined by newlines to one, without those that a
               row lacks or leaves empty: it must have one of them
    "label"    a whole number from 0 to 2^31 - 1, or a boolean
    "number"   a number, a boolean, or a list of numbers, equally long in each row
    "value"    a string, boolean or number, or a list of numbers: of the first row's kind in all
               rows, but whole numbers become numbers where others follow

Numbers are finite, in float32 too.

Errors name the source, the row and the field, what was expected and which kind of value was found,
and never a value.
"""

import contextlib
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from jaxpfl.data.columns import from_arrow, not_finite, text_array
from jaxpfl.errors import InputError

_SCALARS = {str: pa.large_string(), bool: pa.bool_(), int: pa.int64(), float: pa.float64()}
_KINDS = {
    "client": (str, int),
    "text": (str,),
    "label": (int, bool),
    "number": (int, float, bool, list),
    "value": (str, bool, int, float, list),
}
_EXPECTED = {
    "client": "a non-empty string or a whole number",
    "text": "a string",
    "label": "a whole number from 0 to 2^31 - 1",
    "number": "a number, or a list of numbers",
    "value": "a string, boolean or number, or a list of numbers",
    # For a "value", by the kind of the first row.
    str: "a string",
    bool: "a boolean",
    int: "a number",
    float: "a number",
    list: "a list of numbers as long as the first row's",
}
_HINTS = {
    "client": "; client=FIELD names whose a row is, client=* makes each row a client",
    "text": "; text=FIELD names the texts",
}
# One person may have the id "1" in one file and "1.0" in another; "nan" is no person's.
_ROUNDED = r"^\s*([+-]?\d+\.0*|[+-]?\d+(\.\d*)?[eE]\+\d+|nan|NaN)\s*$"
_NAN = ("nan", "+nan", "-nan")
_AS_FLOAT = "a number such as 1.0, 1e+16 or nan; of pandas, frame.astype({FIELD: 'Int64'}) helps"
_BOOLEANS = {"true": True, "false": False}
INEXACT = "whole numbers of at most 64 bits, and of at most 2^53 where there are fractions, too"


class Rows(NamedTuple):
    """Some rows of one file.

    Attributes:
      numbers: the rows' numbers in the file, from 1.
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
      parts: the fields of texts, if there are several; () if not. `joined` names their text.
      drop: whether rows are left out that lack a value of one of them. In a file of text an empty
        field has no value, nor has NaN.
      dropped: how many rows were left out so far. PRIVATE.
      absent: those of `parts` that no row of JSON lines and no schema or header had so far.
    """

    def __init__(self, wanted: Iterable[tuple[str, str]], *, drop: bool = False) -> None:
        """Takes names with what each is for; a name may occur twice."""
        self.drop, self.dropped = drop, 0
        self._uses: dict[str, list[str]] = {}
        for name, use in wanted:
            self._uses.setdefault(name, []).append(use)
        self.names = tuple(self._uses)
        texts = tuple(name for name in self.names if "text" in self._uses[name])
        self.parts = texts if len(texts) > 1 else ()
        self.joined = ",".join(texts)
        if self.parts:
            self._uses[self.joined] = ["text"]
        self.absent = set(self.parts)
        # By field, once its first row was seen; whole numbers become float64 where others follow.
        self._types: dict[str, pa.DataType] = {}

    def require(self, source: str, names: Iterable[str]) -> None:
        """Refuses a table that lacks one of the fields, or has it twice."""
        names = list(names)
        for name in self.names:
            if names.count(name) != 1:
                listed = ", ".join(map(repr, names)) or "none"
                problem = "there is no field" if name not in names else "there are two fields"
                hint = _HINTS.get(self._uses[name][0], "")
                raise InputError(f"{source}: {problem} {name!r}, found {listed}{hint}")
        self.absent.clear()

    def require_schema(self, source: str, schema: pa.Schema) -> None:
        """Refuses a table with a field of a type that no field can hold, before any row is read."""
        self.require(source, schema.names)
        for name in self.names:
            if _plain(_whole(pa.nulls(0, type_ := schema.field(name).type))) is None:
                raise row_error(source, 1, name, self._expected(name), name_of_type(type_))

    def rows(
        self, source: str, numbers: Sequence[int], table: Mapping[str, Any], typed: bool = True
    ) -> Rows:
        """Checks some rows, and returns those that are kept; without columns where none is.

        Args:
          table: by field, an Arrow array or a list of Python values.
          typed: False where the values are strings that may stand for numbers or booleans.
        """
        columns, table = {}, {name: _whole(values) for name, values in table.items()}
        if self.parts:
            joined = self._joined(source, numbers, table)
            rest = (name for name in self.names if self._uses[name] != ["text"])
            table = {**{name: table[name] for name in rest}, self.joined: joined}
        if self.drop:
            rows = self._complete(len(numbers), table, typed)
            self.dropped += len(numbers) - len(rows)
            numbers = [numbers[row] for row in rows]
            taken = pa.array(rows, pa.int64())
            table = {
                name: [part[row] for row in rows] if isinstance(part, list) else part.take(taken)
                for name, part in table.items()
            }
        for name in table if len(numbers) else ():
            try:
                columns[name] = self._column(name, table[name], typed)
            except _FaultError as error:
                row, (expected, kind, *_) = self._first_fault(name, table[name], typed)
                unfit = [
                    f" (as in {count} of {len(numbers)} rows read)" for count in error.args[2:]
                ]
                more = "".join(unfit)
                raise row_error(source, numbers[row], name, expected, kind, more) from None
            self._types[name] = columns[name].type
        return Rows(source, numbers, columns)

    def _joined(
        self, source: str, numbers: Sequence[int], table: Mapping[str, Any]
    ) -> list[str | None]:
        """The texts of several fields, without missing and empty ones; None where all are missing.

        None is then treated as in a single field.
        """
        columns = []
        for name in self.parts:
            values = table[name] if isinstance(table[name], list) else table[name].to_pylist()
            values = [None if value != value else value for value in values]
            for number, value in zip(numbers, values, strict=True):
                if not isinstance(value, str | None):
                    raise row_error(source, number, name, _EXPECTED["text"], type(value).__name__)
            columns.append(values)
        rows = ([text for text in row if text is not None] for row in zip(*columns, strict=True))
        return ["\n".join(filter(str.strip, texts)) if texts else None for texts in rows]

    def _first_fault(self, name: str, values: Any, typed: bool) -> tuple[int, tuple[str, str]]:
        """The index of the first row that does not fit, and what was expected and found there."""

        def fault(rows: int) -> Any:
            try:
                self._column(name, values[:rows], typed)
            except _FaultError as error:
                return error.args
            return None

        # The shortest beginning that does not fit ends with it.
        sizes = range(1, len(values) + 1)
        row = bisect_left(sizes, True, key=lambda rows: fault(rows) is not None)
        if row:
            self._types[name] = self._column(name, values[:row], typed).type
        return row, fault(row + 1)

    def _complete(self, rows: int, table: Mapping[str, Any], typed: bool) -> list[int]:
        """The indices of the rows that have a value in each column."""
        complete = np.ones(rows, bool)
        for name, values in table.items():
            if not isinstance(values, list) and not _is_list(values.type):
                complete &= ~np.asarray(values.is_null(nan_is_null=True))
                continue
            unread = () if typed else ("", *_NAN) if self._are_numbers(name, values) else ("",)
            complete &= [not _lacks(value, unread) for value in values]
        return np.flatnonzero(complete).tolist()

    def _are_numbers(self, name: str, texts: list[str]) -> bool:
        """Whether texts stand for numbers: as earlier rows did, or else the first text decides."""
        if {"client", "text"} & {*self._uses[name]}:
            return False
        if name in self._types:
            return _kind_of(self._types[name]) in (int, float)
        given = (text for text in texts if not _lacks(text, ("", *_NAN)))
        return _parse(float, [next(given, "0")]) is not None

    def _expected(self, name: str) -> str:
        use, type_ = self._uses[name][-1], self._types.get(name)
        return _EXPECTED[use if use != "value" or type_ is None else _kind_of(type_)]

    def _of_python(self, name: str, values: list[Any], typed: bool) -> pa.Array:
        uses = set(self._uses[name])
        if not typed and not {"client", "text"} & uses:
            values = self._parsed(name, values)
        if uses == {"client"}:
            # Ids of both kinds may be mixed.
            values = [str(value) if type(value) is int else value for value in values]
        array = _array(values)
        if array is None:
            inexact = set(map(type, values)) <= {int, float}
            expected = INEXACT if inexact else self._expected(name)
            raise _FaultError(expected, type(values[-1]).__name__)
        return array

    def _parsed(self, name: str, texts: list[str]) -> list[Any]:
        type_ = self._types.get(name)
        first = (kind for kind in (bool, float, str) if _parse(kind, texts[:1]) is not None)
        values = _parse(next(first) if type_ is None else _kind_of(type_), texts)
        if values is None:
            what = "another string" if texts[-1].strip() else "an empty string"
            raise _FaultError(self._expected(name), what)
        return values

    def _column(self, name: str, values: Any, typed: bool) -> pa.Array:
        """The values in a type of `Rows`, the widest of all blocks so far."""
        column = values if isinstance(values, pa.Array) else self._of_python(name, values, typed)
        uses, expected = set(self._uses[name]), self._expected(name)
        if column.null_count:
            raise _FaultError(expected, "no value")
        type_name = name_of_type(column.type)
        if uses == {"client"} and pa.types.is_integer(column.type):
            return column.cast(pa.large_string())
        plain = _plain(column)
        if plain is None or any(_kind_of(plain.type) not in _KINDS[use] for use in uses):
            raise _FaultError(expected, type_name)
        kind = _kind_of(plain.type)
        if "client" in uses and kind is str and (fault := fault_of_ids(plain)):
            raise _FaultError(_EXPECTED["client"], fault)
        if uses == {"client"}:
            return plain
        numbers = from_arrow(plain)
        if unfit := not_finite(numbers):
            nan = np.isnan(numbers).any()
            what = "NaN" if nan else "an infinite number, or one beyond float32"
            raise _FaultError(expected, what, unfit)
        if "label" in uses and kind is int and ((numbers < 0) | (numbers >= 2**31)).any():
            raise _FaultError(expected, "another number")
        both = _wider(self._types.get(name, plain.type), plain.type)
        if both is None:
            raise _FaultError(expected, type_name)
        with contextlib.suppress(pa.ArrowInvalid):  # whose message quotes the value
            return plain.cast(both)
        raise _FaultError(INEXACT, "a larger one")


def fault_of_ids(ids: pa.Array) -> str:
    """The first fault in a column of clients' ids, in words; "" without any."""
    for pattern, fault in ((r"^\s*$", "an empty string"), (_ROUNDED, _AS_FLOAT)):
        options = pc.MatchSubstringOptions(pattern)
        if pc.call_function("match_substring_regex", [ids], options).true_count:
            return fault
    return ""


class _FaultError(Exception):
    """A row does not fit, the last one of a column if those before it do: expected and found."""


def _parse(kind: type, texts: list[str]) -> list[Any] | None:
    if kind is str:
        return texts
    if kind is bool:
        booleans = [_BOOLEANS.get(text.strip().lower()) for text in texts]
        return None if None in booleans else booleans
    if any("_" in text for text in texts):  # which Python takes for a separator of thousands
        return None
    for parse in (int, float):
        try:
            return list(map(parse, texts))
        except ValueError:
            continue
    return None


def row_error(
    source: str, number: int, name: str, expected: str, actual: str, more: str = ""
) -> InputError:
    """The error of a row, by its number, whose field holds another value than expected."""
    hint = "; FILE?missing=drop leaves such rows out, and dropna() in a frame"
    actual += more + (hint if actual in ("no value", "an empty string", "NaN") else "")
    return InputError(f"{source}, row {number}: field {name!r} must be {expected}, found {actual}")


def _lacks(value: Any, unread: Sequence[str]) -> bool:
    """Whether a value is missing: None, NaN, a list with one of them, or one of these texts."""
    if isinstance(value, pa.Scalar):
        value = value.as_py()
    if isinstance(value, list):
        return any(_lacks(element, ()) for element in value)
    if isinstance(value, str):
        return value.strip().lower() in unread
    return value is None or value != value


def _kind_of(type_: pa.DataType) -> type:
    return next((kind for kind, scalar in _SCALARS.items() if scalar == type_), list)


def _array(values: Sequence[Any]) -> pa.Array | None:
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


def _whole(values: Any) -> Any:
    """The values of chunks, or of a dictionary's numbers, as one array; a list as it is."""
    if isinstance(values, pa.ChunkedArray):
        values = values.combine_chunks()
    terms = values.dictionary if isinstance(values, pa.DictionaryArray) else pa.nulls(0)
    # Arrow cannot take strings of the type string_view.
    if is_text(terms.type):
        return terms.cast(pa.large_string()).take(values.indices)
    if pa.types.is_integer(terms.type):
        return terms.take(values.indices)
    is_view = isinstance(values, pa.Array) and pa.types.is_string_view(values.type)
    return values.cast(pa.large_string()) if is_view else values


def _plain(column: pa.Array) -> pa.Array | None:
    """The column in a type of `Rows`; None, before anything is unpacked, if its type is another."""
    types, type_ = pa.types, column.type
    if _is_list(type_):
        number = types.is_integer(type_.value_type) or types.is_floating(type_.value_type)
        return _plain_list(column) if number else None
    if is_text(type_):
        return column.cast(pa.large_string())
    if types.is_uint64(type_) and (column.to_numpy() >= 2**63).any():
        raise _FaultError(INEXACT, "a larger one")
    if types.is_integer(type_):
        return column.cast(pa.int64())
    if types.is_floating(type_):
        return column.cast(pa.float64())
    return column if types.is_boolean(type_) or types.is_null(type_) else None


def _plain_list(column: pa.Array) -> pa.Array | None:
    lengths = pc.call_function("list_value_length", [column]).to_numpy(zero_copy_only=False)
    if not len(lengths):
        return column
    if not lengths[0] or (lengths != lengths[0]).any():
        raise _FaultError(_EXPECTED[list], "a longer or shorter list")
    values = column.flatten()
    if values.null_count:
        return None
    return pa.FixedSizeListArray.from_arrays(_plain(values), int(lengths[0]))


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
    return types.is_list(type_) or types.is_large_list(type_) or types.is_fixed_size_list(type_)


def _wider(first: pa.DataType, second: pa.DataType) -> pa.DataType | None:
    """The type that holds both, if only whole numbers become floats."""
    if {first, second} == {pa.int64(), pa.float64()}:
        return pa.float64()
    lists = pa.types.is_fixed_size_list(first) and pa.types.is_fixed_size_list(second)
    if first == second or not lists or first.list_size != second.list_size:
        return first if first == second else None
    return pa.list_(pa.float64(), first.list_size)
