"""Hashes of everything in which a function could remember a call, to find out whether it does.

Followed, in depth: its closure, defaults and attributes; in code that is not installed, the globals
that it names, its classes, modules and caches; in objects, all that copying them would copy. Not
seen: files, and values that installed packages keep for themselves, as by `cached_property`.
"""

import contextlib
import hashlib
import sys
import warnings
from collections import deque
from collections.abc import Iterator
from functools import cached_property, lru_cache
from types import FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any

import jax
import numpy as np

from jaxpfl.data.population import Population
from jaxpfl.federated.flow.captured import installed, of_function

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_BY_NAME, _IN_ORDER = (dict, MappingProxyType), (list, tuple, set, frozenset, deque)
_CACHED, _COMPILED = type(lru_cache(abs)), type(jax.jit(abs))
_PYTHONS = ("__dict__", "__weakref__", "__builtins__", "__spec__", "__loader__", "__cached__")


class Memory:
    """The state of all that a call of a function could leave behind, at the time this was made.

    Attributes:
      hashes: of each value that the function holds or reads, by its name there. PRIVATE.
    """

    def __init__(self, function: Any) -> None:
        self._alive: list[Any] = []  # so that no other object gets one's id
        with warnings.catch_warnings(action="ignore"):
            self.hashes = {str(name): self._hash(value) for name, value in _parts(function)}

    def _hash(self, root: Any) -> str:
        digest, waiting, numbers = hashlib.sha256(), [root], {}
        while waiting:
            value = waiting.pop()
            text, parts = "", []
            if type(value) in _PLAIN:
                text = repr(value)
            elif id(value) in numbers:
                text = str(numbers[id(value)])
            else:
                numbers[id(value)] = len(numbers)
                self._alive.append(value)
                if isinstance(value, np.ndarray) and not value.dtype.hasobject:
                    content = hashlib.sha256(value.tobytes()).hexdigest()
                    text = f"{value.dtype} {value.shape} {content}"
                else:
                    parts = [item for name_and_part in _parts(value) for item in name_and_part]
                    text = "" if parts else str(id(value))
            digest.update(f"{type(value).__name__} {len(parts)} {len(text)} {text}".encode())
            waiting += reversed(parts)
        return digest.hexdigest()


def _parts(value: Any) -> Iterator[tuple[Any, Any]]:
    """The parts that a value holds and reads, by name, without constant or unreadable ones."""
    if isinstance(value, FunctionType):
        yield from of_function(value)
        yield from vars(value).items()
    elif isinstance(value, MethodType):
        yield from _parts(value.__func__)
        yield from _parts(value.__self__)
    elif isinstance(value, _CACHED):
        code = getattr(value.__wrapped__, "__code__", None)
        if not installed(getattr(code, "co_filename", None)):
            _, *counts = value.cache_info()
            yield "what its cache holds", counts
            yield from _parts(value.__wrapped__)
    elif isinstance(value, _COMPILED):
        yield from _parts(getattr(value, "__wrapped__", None))
    elif isinstance(value, type | ModuleType):
        if not _is_installed(value):
            yield from [(name, v) for name, v in vars(value).items() if name not in _PYTHONS]
    elif isinstance(value, property | staticmethod | classmethod):
        yield "function", value.fget if isinstance(value, property) else value.__func__
    elif type(value) in _BY_NAME:
        yield from value.items()
    elif type(value) in _IN_ORDER:
        yield from enumerate(value)
    elif not isinstance(value, jax.Array | Population):
        yield from _of_object(value)


def _is_installed(value: Any) -> bool:
    """Whether a module is, or that of a class; one without a file is if Python has found it."""
    module = sys.modules.get(value.__module__) if isinstance(value, type) else value
    file = getattr(module, "__file__", None)
    return getattr(module, "__spec__", None) is not None if file is None else installed(file)


def _of_object(value: Any) -> Iterator[tuple[str, Any]]:
    kind, made_of = type(value), None
    own = not _is_installed(kind)
    with contextlib.suppress(Exception):
        made_of = value.__reduce_ex__(4)
    if not isinstance(made_of, tuple):
        if not own:
            return
        made_of = ()
    _, arguments, state, *items = (*made_of, None, None, None, None, None)[:5]
    # A class's own `__getstate__` may leave out values that it keeps for later.
    state = object.__getstate__(value) if own else state
    for part in state if isinstance(state, tuple) else (state,):
        for name, attribute in part.items() if isinstance(part, dict) else [("state", part)]:
            if own or not isinstance(getattr(kind, str(name), None), cached_property):
                yield str(name), attribute
    yield "class", kind
    yield "arguments", arguments
    yield "items", [iterator if iterator is None else list(iterator) for iterator in items]
