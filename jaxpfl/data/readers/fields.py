"""The fields of a table's rows: what each must hold, checked column by column, named row by row.

Every reader of tables hands its columns to `Fields.rows`, the only place that checks them:

    "client"   a string, a whole number, a date or bytes, see `data.clients`
    "text"     a string; texts of several fields are joined by newlines to one, without those that a
               row lacks or leaves empty: it must have one of them
    "label"    a whole number from 0 to 2^31 - 1, perhaps as 1.0, or a boolean
    "class"    one of a PUBLIC list of words, and means its place in the list
    "number"   a number, a boolean, or a list of numbers, equally long in each row; no whole number
               that float32 makes another one
    "value"    a string, boolean or number, a list of numbers, an image or an array (`cells`): of
               the first row's kind in all, but whole numbers become numbers where others follow

Numbers are finite, in float32 too. A name such as "meta.text" is a field, or else the part "text"
of the field "meta". `cells` says which types of values there are.

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

from jaxpfl.data.clients import as_texts, fault_of
from jaxpfl.data.columns import changed_by_float32, from_arrow, not_finite, text_array
from jaxpfl.data.readers import cells
from jaxpfl.data.readers.cells import A_LIST, ABSENT, INEXACT, FaultError, kind_of, name_of_type
from jaxpfl.errors import InputError, named

_KINDS = {
    "client": (str, int),
    "text": (str,),
    "label": (int, float, bool),
    "class": (str, int, float, bool),
    "number": (int, float, bool, list),
    "value": (str, bool, int, float, list),
}
_EXPECTED = {
    "client": "a non-empty string, a whole number, a date or bytes",
    "text": "a string",
    "label": "a whole number from 0 to 2^31 - 1, or a word of those that classes=A,B,... lists",
    "class": "one of the words that classes=A,B,... lists",
    "number": "a number, or a list of numbers",
    "value": "a string, boolean or number, or a list of numbers",
    # For a "value", by the kind of the first row.
    str: "a string",
    bool: "a boolean",
    int: "a number",
    float: "a number",
    list: A_LIST,
}
_HINTS = {
    "client": "; client=FIELD names whose a row is, client=* makes each row a client",
    "text": "; text=FIELD names the texts",
}
_NAN = ("nan", "+nan", "-nan")
_MISSING = ("no value", "an empty string", "NaN", "a list with a missing value")
_BOOLEANS = {"true": True, "false": False}


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
      names: those to be read of a file, in the order in which they were asked for.
      given: the values of the others, which the file's folders state: "u=ann/x.parquet".
      parts: the fields of texts, if there are several; () if not. `joined` names their text.
      drop: whether rows are left out that lack a value of one of them. In a file of text an empty
        field has no value, nor has NaN.
      dropped: how many rows were left out so far. PRIVATE.
      absent: those of `parts` that no row of JSON lines and no schema or header had so far.
    """

    def __init__(
        self,
        wanted: Iterable[tuple[str, str]],
        *,
        drop: bool = False,
        classes: Sequence[str] = (),
    ) -> None:
        """Takes names with what each is for; a name may occur twice. `classes`: of a "class"."""
        self.drop, self.dropped, self.classes = drop, 0, classes
        self.given: Mapping[str, str] = {}
        self._uses: dict[str, list[str]] = {}
        for name, use in wanted:
            self._uses.setdefault(name, []).append(use)
        self._wanted = self.names = tuple(self._uses)
        texts = tuple(name for name in self.names if "text" in self._uses[name])
        self.parts = texts if len(texts) > 1 else ()
        self.joined = ",".join(texts)
        if self.parts:
            self._uses[self.joined] = ["text"]
        self.absent = set(self.parts)
        # By field, once its first row was seen; whole numbers become float64 where others follow.
        self._types: dict[str, pa.DataType] = {}

    def begin(self, given: Mapping[str, str]) -> None:
        """Begins a file whose folders state these fields of all of its rows."""
        self.given = {name: given[name] for name in self._wanted if name in given}
        self.names = tuple(name for name in self._wanted if name not in given)

    def require(self, source: str, names: Iterable[str], nested: bool = False) -> list[str]:
        """Refuses a table that lacks one of the fields, or has it twice.

        Returns the columns that they are read from: with `nested`, "meta" for "meta.text".
        """
        names, holders = list(names), {}
        self.require_unstated(source, names)
        for name in self.names:
            holder = name.partition(".")[0] if nested and name not in names else name
            if names.count(holder) != 1:
                listed = ", ".join(map(repr, names)) or "none"
                problem = "there are two fields" if holder in names else "there is no field"
                hint = _HINTS.get(self._uses[name][0], "")
                raise InputError(f"{source}: {problem} {name!r}, found {listed}{hint}")
            holders[holder] = None
        self.absent.clear()
        return list(holders)

    def require_unstated(self, source: str, names: Iterable[str]) -> None:
        """Refuses a file that has a field which its folders state of all of its rows."""
        if self.given and (both := [name for name in names if name in self.given]):
            raise InputError(f"{source}: field {both[0]!r} is a column and in the folder's name")

    def require_schema(self, source: str, schema: pa.Schema) -> None:
        """Refuses a table with a field of a type that no field can hold, before any row is read."""
        holders = self.require(source, schema.names, nested=True)
        empty = pa.table({name: pa.nulls(0, schema.field(name).type) for name in holders})
        for name, column in self.columns(source, empty).items():
            if self._uses[name] == ["value"] and cells.are_arrays(column.type):
                continue
            if self._plain(name, cells.whole(column)) is None:
                raise row_error(source, 1, name, self._expected(name), name_of_type(column.type))

    def columns(self, source: str, table: pa.RecordBatch | pa.Table) -> dict[str, Any]:
        """The fields' columns of a table that has them, or columns that they are inside of."""
        columns = {}
        for name in self.names:
            holder, *path = [name] if name in table.schema.names else name.split(".")
            columns[name] = table[holder]
            with contextlib.suppress(pa.ArrowInvalid, NotImplementedError):
                if path:
                    options = pc.StructFieldOptions(path)
                    columns[name] = pc.call_function("struct_field", [table[holder]], options)
                continue
            raise InputError(f"{source}: there is no field {name!r}, found {holder!r}")
        return columns

    def values(self, row: Mapping[str, Any]) -> list[Any]:
        """The fields' values in a row, `ABSENT` where it has none."""
        values = [row.get(name, ABSENT) for name in self.names]
        if ABSENT in values:
            values = [cells.value_of(row, name) for name in self.names]
        if self.absent:
            self.absent -= {n for n, x in zip(self.names, values, strict=True) if x is not ABSENT}
        return values

    def rows(
        self, source: str, numbers: Sequence[int], table: Mapping[str, Any], typed: bool = True
    ) -> Rows:
        """Checks some rows, and returns those that are kept; without columns where none is.

        Args:
          table: by field, an Arrow array or a list of Python values.
          typed: False where the values are strings that may stand for numbers or booleans.
        """
        stated = {name: [value] * len(numbers) for name, value in self.given.items()}
        columns, table = {}, {**stated, **{name: cells.whole(table[name]) for name in self.names}}
        if self.parts:
            joined = self._joined(source, numbers, table)
            rest = (name for name in self._wanted if self._uses[name] != ["text"])
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
            except FaultError as error:
                row, (expected, kind, *_) = self._first_fault(name, table[name], typed)
                unfit = (
                    f" (as in {count} of {len(numbers)} rows read)" for count in error.args[2:]
                )
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
            except FaultError as error:
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
            if not isinstance(values, list) and not cells.is_list(values.type):
                complete &= ~np.asarray(values.is_null(nan_is_null=True))
                continue
            unread: tuple[str, ...] = ()
            if not typed or name in self.given:
                unread = ("", *_NAN) if self._are_numbers(name, values) else ("",)
            complete &= [not _lacks(value, unread) for value in values]
        return np.flatnonzero(complete).tolist()

    def _are_numbers(self, name: str, texts: list[str]) -> bool:
        """Whether texts stand for numbers: as earlier rows did, or else the first text decides."""
        if {"client", "text", "class"} & {*self._uses[name]}:
            return False
        if name in self._types:
            return kind_of(self._types[name]) in (int, float)
        given = (text for text in texts if not _lacks(text, ("", *_NAN)))
        return _parse(float, [next(given, "0")]) is not None

    def _expected(self, name: str) -> str:
        use, type_ = self._uses[name][-1], self._types.get(name)
        return _EXPECTED[use if use != "value" or type_ is None else kind_of(type_)]

    def _of_python(self, name: str, values: list[Any], typed: bool) -> pa.Array:
        uses = set(self._uses[name])
        untyped = not typed or name in self.given
        if untyped and not {"client", "text", "class"} & uses:
            first = (kind for kind in (bool, float, str) if _parse(kind, values[:1]) is not None)
            type_ = self._types.get(name)
            parsed = _parse(next(first) if type_ is None else kind_of(type_), values)
            if parsed is None:
                what = "another string" if values[-1].strip() else "an empty string"
                raise FaultError(self._expected(name), what)
            values = parsed
        if uses == {"client"}:
            # Ids of both kinds may be mixed.
            values = [str(value) if type(value) is int else value for value in values]
        array = cells.array_of(values)
        if array is None:
            inexact = set(map(type, values)) <= {int, float}
            expected = INEXACT if inexact else self._expected(name)
            raise FaultError(expected, type(values[-1]).__name__)
        return cells.whole(array)

    def _plain(self, name: str, column: pa.Array) -> pa.Array | None:
        return cells.plain(as_texts(column) if self._uses[name] == ["client"] else column)

    def _column(self, name: str, values: Any, typed: bool) -> pa.Array:
        """The values in a type of `Rows`, the widest of all blocks so far."""
        column = values if isinstance(values, pa.Array) else self._of_python(name, values, typed)
        uses, expected = set(self._uses[name]), self._expected(name)
        if column.null_count:
            raise FaultError(expected, "no value")
        type_name = name_of_type(column.type)
        if uses == {"value"} and cells.are_arrays(column.type):
            with named(f"field {name!r}"):
                plain = cells.arrays(column)
            if self._types.get(name, plain.type) != plain.type:
                raise FaultError("an image or array of the first row's form", "another")
        else:
            plain = self._plain(name, column)
        if plain is None or any(kind_of(plain.type) not in _KINDS[use] for use in uses):
            raise FaultError(expected, type_name)
        kind = kind_of(plain.type)
        if "client" in uses and kind is str and (fault := fault_of(plain)):
            raise FaultError(_EXPECTED["client"], fault[1])
        if uses == {"client"}:
            return plain
        numbers = from_arrow(plain)
        if unfit := not_finite(numbers):
            nan = np.isnan(numbers).any()
            what = "NaN" if nan else "an infinite number, or one beyond float32"
            raise FaultError(expected, what, unfit)
        if "label" in uses and kind is not bool:
            if ((numbers < 0) | (numbers >= 2**31) | (numbers != np.floor(numbers))).any():
                raise FaultError(expected, "another number")
            plain = plain.cast(pa.int64())
        if "class" in uses:
            words = pc.call_function("utf8_trim_whitespace", [plain.cast(pa.large_string())])
            options = pc.SetLookupOptions(text_array(self.classes))
            plain = pc.call_function("index_in", [words], options).cast(pa.int64())
            if plain.null_count:
                raise FaultError(expected, "another word")
        if "number" in uses and changed_by_float32(numbers):
            raise FaultError(expected, "a whole number beyond 2^24 that float32 cannot hold")
        both = cells.wider(self._types.get(name, plain.type), plain.type)
        if both is None:
            raise FaultError(expected, type_name)
        with contextlib.suppress(pa.ArrowInvalid):  # whose message quotes the value
            return plain.cast(both)
        raise FaultError(INEXACT, "a larger one")


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
    actual += more + (hint if actual in _MISSING else "")
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
