"""Client functions as keys of compiled programs: looked up by identity, not by their `==`."""

from collections.abc import Hashable
from dataclasses import MISSING, fields, is_dataclass
from functools import cached_property
from types import MethodType
from typing import Any

import numpy as np


class Static:
    """A client function, or a model, as a static argument of compiled functions.

    Functions whose holders are equal share one program. An object's own `==` is never asked: it may
    call different functions equal, as a dataclass's does with `field(compare=False)`. Equal are

    | the same object          | whatever it is                                                |
    | dataclasses of one class | that hold nothing but fields, all of which are equal in this  |
    |                          | sense, so that a sweep over equal settings compiles once      |
    | tuples, bound methods    | likewise: their items; their object, and the function         |
    | plain numbers and texts  | of one type, and equal in all bits                            |

    Attributes:
      function: the client function or model.
    """

    __slots__ = ("_content", "_hash", "function")

    def __init__(self, function: Any) -> None:
        self.function, self._content = function, _content(function)
        self._hash = hash(self._content)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Static) and self._content == other._content)

    def __hash__(self) -> int:
        return self._hash


class _Itself:
    """Equal for the same object alone, which lives as long as this."""

    __slots__ = ("_object",)

    def __init__(self, object_: Any) -> None:
        self._object = object_

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Itself) and self._object is other._object

    def __hash__(self) -> int:
        return id(self._object)


def _content(value: Any) -> Hashable:
    """Equal for values that are the same, see `Static`."""
    kind: Any = type(value)
    if kind in (bool, int, str, bytes):
        return kind, value
    if kind is float:
        return kind, value.hex()  # because -0.0 == 0.0
    if isinstance(value, np.generic):
        return kind, value.dtype.str, value.tobytes()
    if kind is MethodType:
        return kind, _Itself(value.__func__), _content(value.__self__)
    # None, a dictionary, or a pair of it and a dictionary of slots.
    attributes: Any = object.__getstate__(value)
    if isinstance(value, tuple) and attributes is None:
        return kind, *map(_content, value)
    # Another constructor, as of a class that is written in C, may put more into an object.
    if is_dataclass(value) and kind.__new__ is object.__new__:
        parts = attributes if isinstance(attributes, tuple) else (attributes,)
        names = {name for part in parts for name in part or ()} - _derived(kind)
        own = [field.name for field in fields(value)]
        if names <= {*own}:
            return kind, *[_content(getattr(value, name, MISSING)) for name in own]
    return _Itself(value)


def _derived(kind: type) -> set[str]:
    """The attributes that follow from the others, once they are first read."""
    attributes = [item for base in kind.__mro__ for item in vars(base).items()]
    return {name for name, value in attributes if isinstance(value, cached_property)}
