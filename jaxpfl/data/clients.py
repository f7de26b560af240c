"""Populations from the columns or records of each client; and clients' ids, which are texts.

One person under two ids is protected half as well as stated, so the same id must be the same text
in every format and type:

    whole numbers, decimals         their decimal digits
    dates; timestamps               2024-01-31; 2024-01-31 10:20:30.5, as a date at midnight, and
                                    with Z, in UTC, where they have a time zone; texts of ISO
                                    8601 are timestamps, too
    UUIDs, and 16 bytes             01234567-89ab-cdef-0123-456789abcdef
    other bytes                     their hexadecimal digits

Refused are blank ids, and what libraries write for numbers and dates beside missing ones: floats,
texts such as 1.0, 1e+16, nan or <NA>.
"""

import contextlib
import re
import unicodedata
import uuid
import warnings
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from numbers import Integral
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from jaxpfl.data.columns import Column, as_column, concatenated, describe, text_array
from jaxpfl.data.population import Population, offsets_of
from jaxpfl.errors import InputError

# One person may have the id "1" in one file and "1.0" in another; "nan" is no person's.
_ROUNDED = r"^\s*([+-]?\d+[.,]0*|[+-]?\d+(\.\d*)?[eE]\+\d+|nan|NaN|NaT|<NA>)\s*$"
_AS_FLOAT = "a number such as 1.0, 1e+16 or nan; of pandas, frame.astype({FIELD: 'Int64'}) helps"
# White space, and characters that nobody sees.
_FAULTS = ((r"^[\s\pZ\pC]*$", "an empty string"), (_ROUNDED, _AS_FLOAT))
_UUID = re.compile("^" + "-".join(f"([0-9a-f]{{{n}}})" for n in (8, 4, 4, 4, 12)) + "$")
_MOMENT = r"^(\d{4}-\d\d-\d\d)[T ](\d\d:\d\d)(:\d\d)?([.,]\d+)?\s*(Z|UTC|[+-]\d\d(?::?\d\d)?)?$"
_BLANKS = " \t\r\n\u200b\u2060\ufeff"

_EXPECTED = "its id must be a non-empty string or a whole number"


def as_texts(ids: pa.Array) -> pa.Array:
    """Ids of any of these types as large_string; others, and what is no id, as they are."""
    types, type_ = pa.types, ids.type
    if types.is_string(type_) or types.is_large_string(type_):
        options = pc.MatchSubstringOptions(_MOMENT)
        if not pc.call_function("match_substring_regex", [ids], options).true_count:
            return ids
        rows = ids.dictionary_encode()
        pattern = re.compile(_MOMENT, re.ASCII)
        texts = [text and pattern.sub(_moment, text) for text in rows.dictionary.to_pylist()]
        return pa.array(texts, type_).take(rows.indices)
    if types.is_decimal(type_):
        with contextlib.suppress(pa.ArrowInvalid):  # a fraction, which the message quotes
            return ids.cast(pa.decimal256(76, 0)).cast(pa.large_string())
    if types.is_timestamp(type_):
        moments = ids if type_.tz is None else ids.cast(pa.timestamp(type_.unit, "UTC"))
        texts = moments.cast(pa.large_string())
        # Arrow writes one text for all that are beyond its calendar.
        beyond = pc.call_function("starts_with", [texts], pc.MatchSubstringOptions("<"))
        return ids if beyond.true_count else as_texts(texts)
    if types.is_binary(type_) or types.is_large_binary(type_) or types.is_fixed_size_binary(type_):
        written = [
            value and (str(uuid.UUID(bytes=value)) if len(value) == 16 else value.hex())
            for value in ids.to_pylist()
        ]
        return pa.array(written, pa.large_string())
    return ids.cast(pa.large_string()) if types.is_integer(type_) or types.is_date(type_) else ids


def _moment(match: re.Match[str]) -> str:
    """A timestamp of ISO 8601 as `as_texts` writes those of Arrow."""
    day, minute, seconds, fraction, zone = match.groups("")
    fraction = fraction.replace(",", ".").rstrip("0").rstrip(".")
    written = f"{day} {minute}{seconds or ':00'}"
    try:
        moment = datetime.fromisoformat(written + zone.replace("UTC", "Z"))
        if zone:
            return moment.astimezone(UTC).isoformat(" ")[:19] + fraction + "Z"
    except (ValueError, OverflowError):  # no such day or hour
        return match[0]
    return (written + fraction).removesuffix(" 00:00:00")


def fault_of(ids: pa.Array) -> tuple[int, str] | None:
    """The place of an id of a large_string array that is refused, and why; None without any."""
    for pattern, fault in _FAULTS:
        options = pc.MatchSubstringOptions(pattern)
        is_fault = pc.call_function("match_substring_regex", [ids], options)
        if is_fault.true_count:
            return is_fault.index(True).as_py(), fault
    return None


def hashes(ids: Sequence[str]) -> np.ndarray:
    """Hashes, int64 [ids], equal where case, outer blanks, normal form or UUID's dashes differ."""
    alike = (unicodedata.normalize("NFKC", id_).strip(_BLANKS).casefold() for id_ in ids)
    return np.fromiter((hash(_UUID.sub(r"\1\2\3\4\5", id_)) for id_ in alike), np.int64, len(ids))


def warn_of_alike(name: str, hashes_C: np.ndarray) -> None:
    """Warns where clients of a population may be one; its ids are all different."""
    if len(np.unique(hashes_C)) < len(hashes_C):
        warnings.warn(
            f"{name}: some clients' ids differ only by case, blanks around them, their Unicode "
            "normal form or a UUID's dashes; one person under several ids is protected less than "
            "is stated",
            stacklevel=3,
        )


def from_clients(
    clients: Mapping[Any, Any] | Iterable[tuple[Any, Any]],
    *,
    name: str = "in memory",
    unit: str = "client",
) -> Population:
    """A population from each client's data.

    All clients must have the same columns with the same type and example shape. For a client
    without examples, an empty list is a column of any type.

    Args:
      clients: the data by id, or pairs of an id and data. An id is a non-empty string or a whole
        number, which means its decimal digits. The data is {column: its examples} or a list of
        records.

    Raises:
      InputError: a client's columns differ from the first client's, or from each other in length,
        or an id occurs twice; the message names the client by its index.
    """
    ids: list[str] = []
    pieces: dict[str, list[Column]] = {}
    sizes = []
    pairs = clients.items() if isinstance(clients, Mapping) else clients
    for index, pair in enumerate(pairs):
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise InputError(f"from_clients takes {{id: columns}}, found {type(pair).__name__}")
        client, given = pair
        if isinstance(client, Integral) and not isinstance(client, bool):
            client = str(int(client))
        if not isinstance(client, str):
            raise InputError(f"client {index}: {_EXPECTED}, found {type(client).__name__}")
        ids.append(client)
        columns = _columns_of(f"client {index}", given)
        if not index:
            pieces = {column_name: [] for column_name in columns}
        # A client without records has no fields, either.
        if set(columns) != set(pieces) and (columns or len(given)):
            expected = sorted(pieces)
            raise InputError(f"client {index} has columns {sorted(columns)}, expected {expected}")
        lengths = set()
        for column_name, before in pieces.items():
            values = columns.get(column_name, ())
            if isinstance(values, list | tuple) and not values:
                lengths.add(0)
                continue
            what = f"client {index}, column {column_name!r}"
            column = as_column(what, values)
            lengths.add(len(column))
            if before and describe(column) != describe(before[0]):
                raise InputError(f"{what} holds {describe(column)}, expected {describe(before[0])}")
            before.append(column)
        if len(lengths) > 1:
            raise InputError(f"client {index} has columns of different lengths: {sorted(lengths)}")
        sizes.append(lengths.pop() if lengths else 0)
    if not ids:
        raise InputError("from_clients needs at least one client, found none")
    if fault := fault_of(text_array(ids)):
        raise InputError(f"client {fault[0]}: {_EXPECTED}, found {fault[1]}")
    whole = {column_name: concatenated(parts) for column_name, parts in pieces.items()}
    population = Population(whole, offsets_of(sizes), ids, name, unit)
    warn_of_alike(name, hashes(ids))
    return population


def _columns_of(what: str, given: Any) -> Mapping[str, Any]:
    if isinstance(given, Mapping):
        return given
    if isinstance(given, list | tuple) and all(isinstance(record, Mapping) for record in given):
        names = sorted(given[0]) if given else []
        for number, record in enumerate(given):
            if sorted(record) != names:
                where = f"{what}, record {number}"
                raise InputError(f"{where}: has the fields {sorted(record)}, expected {names}")
        return {name: [record[name] for record in given] for name in (given[0] if given else ())}
    hint = "`from_dataframe` takes a DataFrame with a column of clients"
    expected = f"{what} must hold a mapping of columns or a list of records"
    raise InputError(f"{expected}, found {type(given).__name__}; {hint}")
