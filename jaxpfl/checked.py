"""Types that say which values a setting may have, and the base of dataclasses that checks them.

Such as `chunk: PositiveInt | None`, `image_shape: tuple[PositiveInt, PositiveInt, PositiveInt]`.
"""

import types
import typing
from collections.abc import Iterator
from functools import cache, partial
from typing import Annotated, Any, Literal

from jaxpfl import checks

PositiveInt = Annotated[int, checks.positive_int]
NonNegativeInt = Annotated[int, checks.non_negative_int]
Positive = Annotated[float, checks.positive]
PositiveFloat32 = Annotated[float, checks.positive_float32]
NonNegative = Annotated[float, checks.non_negative]
Fraction = Annotated[float, checks.fraction]
OpenFraction = Annotated[float, checks.open_fraction]
PositiveFraction = Annotated[float, checks.positive_fraction]


class Checked:
    """Base of frozen dataclasses: `InputError` names a field whose value its type excludes.

    For a section of a config, `experiments.config.reader` puts the section's name in front. Numbers
    become Python's own: those of NumPy could not be written as JSON, and narrow ones overflow.
    """

    def __post_init__(self) -> None:
        for name, check, of_each, optional in _checks(type(self)):
            value = getattr(self, name)
            if of_each and isinstance(value, tuple | list):
                for element in value:
                    check(name, element)
            elif not (value is None and optional):
                object.__setattr__(self, name, check(name, value))
        self.check_fields()

    def check_fields(self) -> None:
        """Refuses values that do not go together; each is one that its type allows."""


@cache
def _checks(kind: type) -> tuple[tuple[str, Any, bool, bool], ...]:
    """For each field its checks, whether these are of a tuple's elements, and allow None."""
    hints = typing.get_type_hints(kind, include_extras=True).items()
    optional = {name: type(None) in typing.get_args(hint) for name, hint in hints}
    checks_of = ((name, *check, optional[name]) for name, hint in hints for check in _of_hint(hint))
    return tuple(dict.fromkeys(checks_of))


def _of_hint(hint: Any, of_each: bool = False) -> Iterator[tuple[Any, bool]]:
    origin = typing.get_origin(hint)
    if origin is Literal:
        yield partial(checks.one_of, allowed=typing.get_args(hint)), of_each
    for check in getattr(hint, "__metadata__", ()):
        yield check, of_each
    if origin in (typing.Union, types.UnionType, tuple):
        for part in typing.get_args(hint):
            yield from _of_hint(part, of_each or origin is tuple)
