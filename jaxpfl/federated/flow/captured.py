"""Lists the values that a client function captures besides its arguments: public by declaration.

Nothing can tell whether a number in a closure was computed from the clients. So a run's record
lists each one by name, with its kind and never its value.
"""

import dataclasses
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import jax
import numpy as np

_PLAIN = {bool: "a truth value", int: "a whole number", float: "a number", complex: "a number"}
_PLAIN |= {str: "text", bytes: "bytes"}
_DEEPEST, _LONGEST = 8, 32
_OWN = Path(__file__).parents[2]
_INSTALLED = [Path(sysconfig.get_path(name)) for name in ("purelib", "platlib", "stdlib")]


def captured(function: Any) -> tuple[str, ...]:
    """Names and kinds of the values that a function, or an object with methods, reads.

    From its closure, defaults, fields and bound arguments, in depth; and, if it is not from an
    installed package, from the globals that its code names, and names of the user's own modules
    (`module.NAME`). Only the length of a container of more than 32 values is listed; its values
    that enter the program are among the program's constants (`client_program`).
    """
    listed: dict[str, None] = {}
    seen: set[int] = set()

    def read(name: str, value: Any, depth: int) -> None:
        kind = _PLAIN.get(type(value))
        if value is None or isinstance(value, ModuleType | BuiltinFunctionType):
            return
        if kind is not None:
            listed[f"{name}: {kind}"] = None
        elif isinstance(value, jax.Array | np.ndarray | np.generic):
            listed[f"{name}: {value.dtype}{list(np.shape(value))}"] = None
        elif id(value) not in seen:
            seen.add(id(value))
            many = isinstance(value, Mapping | tuple | list | set | frozenset) and len(value)
            parts = [] if many > _LONGEST or depth == _DEEPEST else list(_parts(value))
            for part_name, part in parts:
                read(f"{name}.{part_name}" if name else part_name, part, depth + 1)
            if not parts and not callable(value):
                listed[f"{name}: {type(value).__name__}{f' of {many}' if many else ''}"] = None

    read("", function, 0)
    return tuple(listed)


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, type):
        yield from _of_class(value)
        return
    if isinstance(value, MethodType):
        yield "", value.__self__
        value = value.__func__
    value = getattr(value, "__wrapped__", value)
    if isinstance(value, FunctionType):
        yield from of_function(value)
    elif isinstance(value, partial):
        yield "function", value.func
        yield from [(str(place), argument) for place, argument in enumerate(value.args)]
        yield from value.keywords.items()
    elif isinstance(value, Mapping):
        yield from [(str(key), item) for key, item in value.items()]
    elif isinstance(value, tuple | list | set | frozenset):
        yield from [(str(place), item) for place, item in enumerate(value)]
    elif dataclasses.is_dataclass(value):
        yield from [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
    if not isinstance(value, FunctionType | partial | Mapping | tuple | list | set | frozenset):
        yield from _of_class(type(value))
        if not dataclasses.is_dataclass(value):
            yield from getattr(value, "__dict__", {}).items()


def _of_class(kind: type) -> Iterator[tuple[str, Any]]:
    """The values and methods of a class that is not from an installed package."""
    if not installed(getattr(sys.modules.get(kind.__module__), "__file__", None)):
        kinds = (FunctionType, jax.Array, np.ndarray, np.generic, *_PLAIN)
        for name, value in list(vars(kind).items()):
            if isinstance(value, kinds) and not name.startswith("__"):
                yield name, value


def of_function(function: Callable[..., Any]) -> Iterator[tuple[str, Any]]:
    """The values that a function reads besides its arguments, by name."""
    code = function.__code__
    cells = function.__closure__ or ()
    names = set() if installed(code.co_filename) else _names(code)
    for name, cell in zip(code.co_freevars, cells, strict=True):
        try:
            yield from _with_modules(name, cell.cell_contents, names)
        except ValueError:  # not yet assigned
            continue
    for place, default in enumerate(function.__defaults__ or ()):
        yield f"default {place}", default
    yield from (function.__kwdefaults__ or {}).items()
    for name in sorted(names):
        # Modules that it imports itself are among the names, too.
        value = function.__globals__.get(name, sys.modules.get(name))
        yield from _with_modules(name, value, names)


def _with_modules(name: str, value: Any, names: set[str]) -> Iterator[tuple[str, Any]]:
    """A value; if it is a module of the user's, also its values with one of these names."""
    yield name, value
    if isinstance(value, ModuleType) and not installed(getattr(value, "__file__", None)):
        for part in sorted(names & vars(value).keys()):
            yield from _with_modules(f"{name}.{part}", vars(value)[part], names - {part})


def _names(code: CodeType) -> set[str]:
    """The names of globals that code may read, and that functions within it may read."""
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return set(code.co_names).union(*map(_names, inner))


def installed(file: str | None) -> bool:
    """Whether a file belongs to Python, to an installed package or to this one."""
    if file is None:
        return True
    path = Path(file)
    return any(path.is_relative_to(folder) for folder in (_OWN, *_INSTALLED))
