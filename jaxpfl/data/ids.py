"""Clients' ids: texts, of whatever type a table holds them in.

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
from collections.abc import Sequence
from datetime import UTC, datetime

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

# One person may have the id "1" in one file and "1.0" in another; "nan" is no person's.
_ROUNDED = r"^\s*([+-]?\d+[.,]0*|[+-]?\d+(\.\d*)?[eE]\+\d+|nan|NaN|NaT|<NA>)\s*$"
_AS_FLOAT = "a number such as 1.0, 1e+16 or nan; of pandas, frame.astype({FIELD: 'Int64'}) helps"
# White space, and characters that nobody sees.
_FAULTS = ((r"^[\s\pZ\pC]*$", "an empty string"), (_ROUNDED, _AS_FLOAT))
_UUID = re.compile("^" + "-".join(f"([0-9a-f]{{{n}}})" for n in (8, 4, 4, 4, 12)) + "$")
_MOMENT = r"^(\d{4}-\d\d-\d\d)[T ](\d\d:\d\d)(:\d\d)?([.,]\d+)?\s*(Z|UTC|[+-]\d\d(?::?\d\d)?)?$"
_BLANKS = " \t\r\n\u200b\u2060\ufeff"


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
    """Hashes, int64 [ids], that are equal where ids differ by case, blanks around them, their
    Unicode normal form or a UUID's dashes alone."""
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
