"""A query's `prepare`: clients compute it from their own data before the first round.

It is called on blocks of whole clients that are dealt here, each time as it was given:

    deal 1    clients in their order, in blocks of b = min(97, sqrt(clients)): these rows are used
    deal 2    every b-th client, again in blocks of at most 97: these must be equal, in all bits

No two clients are together in both deals. So what a client holds cannot change another one's rows:
the two meet in one deal at most, and in the other deal the same rows were computed without it. (A
client that is gone moves later ones to other blocks. That no rows change then is most likely after
two deals, and not proven.)

This holds for every function of a block. What is called could be more than that: it could remember.
Therefore each call is made on a copy of what was never called, and what no copy has for itself,
such as globals and closures, must be as it was before (`Memory`). What is fitted when it is first
called, as scikit-learn's scalers are, is then fitted on each block alone: the deals differ.
"""

import contextlib
import copy
import hashlib
import math
import sys
import warnings
from collections import deque
from collections.abc import Iterator
from functools import cached_property, lru_cache
from types import FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any

import jax
import numpy as np

from jaxpfl.data.columns import Column, concatenated, describe
from jaxpfl.data.content import content_hash
from jaxpfl.data.population import Population, offsets_of
from jaxpfl.data.sequences import Sequences
from jaxpfl.errors import InputError
from jaxpfl.federated.flow.client_program import installed, of_function
from jaxpfl.federated.release.query import Query

_BLOCK = 97
_LEFT: set[tuple[str, str]] = set()
"""Whatever a refused `prepare` remembered, by name and hash, so that it stays refused. PRIVATE."""

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_BY_NAME, _IN_ORDER = (dict, MappingProxyType), (list, tuple, set, frozenset, deque)
_CACHED, _COMPILED = type(lru_cache(abs)), type(jax.jit(abs))
_PYTHONS = ("__dict__", "__weakref__", "__builtins__", "__spec__", "__loader__", "__cached__")


def prepared(query: Query, population: Population) -> Population:
    """The clients as the query reads them: what `prepare` makes of each, or as they are.

    Where the unit of privacy is the example, each is handed over as a client of its own.

    Raises:
      InputError: `prepare` keeps another number of clients, makes another thing of clients in other
        company, in any bit, remembers something, or cannot be copied.
    """
    if query.prepare is None:
        return population
    unit = query.plan.unit
    units, count = population, population.num_examples
    if unit == "example":
        ids: Any = [str(example) for example in range(count)]
        units = Population(population.rows(slice(0, count)), np.arange(count + 1), ids)
    unused = _copied(query, query.prepare)

    def rows_of(block: np.ndarray) -> Population | None:
        # As a source of their own: a fingerprint of theirs follows from all.
        some = units.select(block)
        columns = some.rows(slice(0, some.num_examples))
        about = some.name, some.unit, some.splitting
        clients = Population(columns, some.offsets, some.client_ids, *about)
        rows = _copied(query, unused)(clients)
        same = isinstance(rows, Population) and len(rows) == len(clients)
        # An example stays one: one that became two would count twice, and one that vanished would
        # leave its place in the draw to another.
        if same and (unit == "client" or np.array_equal(rows.offsets, clients.offsets)):
            return rows
        return None

    in_order, apart = _deals(len(units))
    with _nothing_remembered(query):
        made = _joined(units, [rows_of(block) for block in in_order])
        if made is None or not all(_equal(rows_of(block), made.select(block)) for block in apart):
            raise InputError(
                f"query {query.label!r}: prepare must keep every {unit} as one and compute it from "
                f"its own data alone, found another number of {unit}s, or a result that depends on "
                "which others are asked with it"
            )
    return made


@contextlib.contextmanager
def _nothing_remembered(query: Query) -> Iterator[None]:
    """Refuses a `prepare` that remembers a call, this one's or an earlier one's."""

    def refuse(changed: set[tuple[str, str]]) -> None:
        if changed:
            names = ", ".join(sorted({repr(name) for name, _ in changed})[:3])
            raise InputError(
                f"query {query.label!r}: prepare must not remember what it was called with, but "
                f"this is in {names}: compute that beforehand from public data, or keep it in an "
                "object with __call__, of which each call gets a copy"
            )

    before = {*Memory(query.prepare).hashes.items()}
    refuse(before & _LEFT)
    try:
        yield
    finally:
        changed = {*Memory(query.prepare).hashes.items()} - before
        _LEFT.update(changed)
    refuse(changed)


def _deals(count: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Blocks of all indices below `count`, in two ways; no two indices share a block in both."""
    size = max(1, min(_BLOCK, math.isqrt(max(count - 1, 0)) + 1))
    every = np.arange(count)
    in_order = [every[start : start + size] for start in range(0, max(count, 1), size)]
    apart = [
        column[start : start + _BLOCK]
        for column in (every[first::size] for first in range(size))
        for start in range(0, len(column), _BLOCK)
    ]
    return in_order, apart


def _copied(query: Query, function: Any) -> Any:
    try:
        return copy.deepcopy(function)
    except Exception as error:
        raise InputError(
            f"query {query.label!r}: prepare must be an object that copy.deepcopy copies, because "
            f"each call gets a copy, found {type(function).__name__}: {type(error).__name__}"
        ) from error


def _columns(rows: Population) -> dict[str, Column]:
    """The columns that can be read whole; those of token ids as they are cannot, by no query."""
    columns = rows.rows(slice(0, rows.num_examples)).items()
    return {name: column for name, column in columns if not isinstance(column, Sequences)}


def _joined(units: Population, parts: list[Population | None]) -> Population | None:
    """The rows of all blocks as those of the units; None if they do not fit together."""
    fitting = [part for part in parts if part is not None]
    columns = [_columns(part) for part in fitting]
    kinds = [{name: describe(column) for name, column in part.items()} for part in columns]
    if len(fitting) < len(parts) or any(kind != kinds[0] for kind in kinds):
        return None
    joined = {name: concatenated([part[name] for part in columns]) for name in kinds[0]}
    sizes = np.concatenate([part.sizes() for part in fitting])
    return units.with_examples(joined, offsets_of(sizes))


def _equal(rows: Population | None, expected: Population) -> bool:
    """Whether two have the same bits."""
    parts = (rows, expected) if rows is not None else ()
    return len({content_hash(_columns(part), part.offsets) for part in parts}) == 1


class Memory:
    """The state of all that a call of a function could leave behind, at the time this was made.

    Followed, in depth: its closure, defaults and attributes; in code that is not installed, the
    globals that it names, its classes, modules and caches; in objects, all that copying them would
    copy. Not seen: files, and values that installed packages keep for themselves, as by
    `cached_property`.

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
