"""Types that say which values a field of a config section may have, and the base that checks them.

rounds: PositiveInt
chunk: PositiveInt | None = None
image_shape: tuple[PositiveInt, PositiveInt, PositiveInt]
"""

import typing
from functools import cache
from typing import Annotated, Any

from jaxpfl import checks

PositiveInt = Annotated[int, checks.positive_int]
NonNegativeInt = Annotated[int, checks.non_negative_int]
Positive = Annotated[float, checks.positive]
NonNegative = Annotated[float, checks.non_negative]
OpenFraction = Annotated[float, checks.open_fraction]


class Checked:
    """Base of frozen dataclasses: refuses, by its name, a field whose value its type excludes.

    `reader` puts the section's name in front.
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
    return tuple(
        (name, check)
        for name, hint in hints.items()
        for check in {
            check
            for part in (hint, *typing.get_args(hint))
            for check in getattr(part, "__metadata__", ())
        }
    )
