"""The options of a source: what follows its question mark, by name."""

from collections.abc import Callable, Mapping
from typing import Any

from jaxpfl import checks
from jaxpfl.errors import InputError


def encoding(name: str) -> str:
    try:
        "".encode(name)
    except LookupError:
        expected = "encoding must be one that Python knows, such as latin-1"
        raise InputError(f"{expected}, found {name!r}") from None
    return name


# A comma inside a name, in an option that is not split yet.
COMMA = "\0"


def names(value: str) -> tuple[str, ...]:
    return tuple(name.strip().replace(COMMA, ",") for name in value.split(","))


# Options of a kind of source, each with what converts its text, or the words that it may be.
Options = Mapping[str, Callable | tuple[str, ...]]


def typed(what: str, options: dict[str, str], kinds: Options) -> dict[str, Any]:
    values = {}
    for name, value in options.items():
        if name not in kinds:
            hint = checks.nearest(name, kinds)
            expected = ", ".join(kinds) or "none"
            raise InputError(f"{what}: no option {name!r}{hint}; expected {expected}")
        kind, place = kinds[name], f"{what}: {name}"
        value = value if kind is names else value.replace(COMMA, ",")
        try:
            values[name] = kind(value) if callable(kind) else checks.one_of(place, value, kind)
        except InputError:
            raise
        except ValueError:
            raise InputError(f"{place} must be a number, found {value!r}") from None
    return values
