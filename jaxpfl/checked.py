"""Types that say which values a setting may have, and the base of dataclasses that checks them.

rounds: PositiveInt
chunk: PositiveInt | None = None
image_shape: tuple[PositiveInt, PositiveInt, PositiveInt]
schedule: Literal["cosine", "constant"] = "cosine"
"""

import typing
from collections.abc import Iterator
from functools import cache, partial
from typing import Annotated, Any, Literal

from jaxpfl import checks

PositiveInt = Annotated[int, checks.positive_int]
NonNegativeInt = Annotated[int, checks.non_negative_int]
Positive = Annotated[float, checks.positive]
NonNegative = Annotated[float, checks.non_negative]
OpenFraction = Annotated[float, checks.open_fraction]
PositiveFraction = Annotated[float, checks.positive_fraction]


class Checked:
    """Base of frozen dataclasses: `InputError` names a field whose value its type excludes.

    For a section of a config, `experiments.config.reader` puts the section's name in front.
    """

    def __post_init__(self) -> None:
        for name, check in _checks(type(self)):
            value = getattr(self, name)
            for each in value if isinstance(value, tuple) else (value,):
                if each is not None:
                    check(name, each)


@cache
def _checks(kind: type) -> tuple[tuple[str, Any], ...]:
    hints = typing.get_type_hints(kind, include_extras=True)
    return tuple((name, check) for name, hint in hints.items() for check in _of_hint(hint))


def _of_hint(hint: Any) -> Iterator[Any]:
    """The checks of a type, of the members of a union and of the elements of a tuple."""
    found = []
    for part in (hint, *typing.get_args(hint)):
        if typing.get_origin(part) is Literal:
            yield partial(checks.one_of, allowed=typing.get_args(part))
        found += [each for each in getattr(part, "__metadata__", ()) if each not in found]
    yield from found
