"""The labels of `release.information_flow`: the possible dependences of a value in a program.

| label      | the value depends on                                                               |
|------------|------------------------------------------------------------------------------------|
| `PUBLIC`   | nothing but the broadcast, the clip norm and constants                             |
| `RELEASED` | public values and noisy sums                                                       |
| `SECRET`   | the secret keys, and on no client                                                  |
| `KEY`      | as `SECRET`: a key that noise may be drawn with, or its words; how it is derived   |
| `NOISE`    | as `SECRET`: Gaussian draws times a public scale, one for each coordinate          |
| `BOUNDED`  | clients, by sums of clipped contributions, or as a choice among public values      |
| `FACTOR`   | clients: the factor by which one contribution is multiplied to be clipped          |
| `PRIVATE`  | clients, in any way                                                                |
"""

import enum
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple


class Kind(enum.Enum):
    """A label; see the table above."""

    PUBLIC = "public"
    RELEASED = "released"
    SECRET = "secret"
    KEY = "key"
    NOISE = "noise"
    BOUNDED = "bounded"
    FACTOR = "factor"
    PRIVATE = "private"


OF_CLIENTS = {Kind.BOUNDED, Kind.FACTOR, Kind.PRIVATE}
OF_SECRETS = {Kind.SECRET, Kind.KEY, Kind.NOISE}


class Key(NamedTuple):
    """The derivation of a key.

    Attributes:
      path: the derivations, first to last; a key whose path begins with it can be derived from it.
      bound: the tokens of all values whose hash is in the key; None = of none.
    """

    path: tuple[Any, ...]
    bound: frozenset[int] | None = None


class Draws(NamedTuple):
    """Coordinates `start` to `stop` of the draws with one key."""

    key: tuple[Any, ...]
    start: int
    stop: int


class Noise(NamedTuple):
    """The draws that a vector consists of, one after the other.

    Attributes:
      bound: as of `Key`; None = the noise is shared by several rounds, and follows from no sum.
    """

    draws: tuple[Draws, ...]
    bound: frozenset[int] | None


class Use(NamedTuple):
    """Draws that were added to a sum.

    Attributes:
      addition: the place of its equation.
      offset: the place of the first of them in the noisy vector; -1 if it is not known.
    """

    addition: tuple[Any, ...]
    draws: Draws
    offset: int


class Cause(NamedTuple):
    """The equation that made a value private.

    Attributes:
      mixed: it combined the clients' data with something that could have been released.
    """

    equation: Any
    mixed: bool


class Value(NamedTuple):
    """A variable's label, and more.

    Attributes:
      detail: a `Key` for KEY, a `Noise` for NOISE, a frozenset of `Use` for RELEASED, the token of
        the contribution for FACTOR.
      token: equal tokens are equal values.
      cause: None for inputs.
    """

    kind: Kind
    detail: Any
    token: int
    cause: Cause | None = None

    @property
    def label(self) -> tuple[Kind, Any]:
        return self.kind, self.detail


def uses(values: Iterable[Value]) -> frozenset[Use]:
    """All draws in values that are public or released."""
    return frozenset().union(*(value.detail for value in values if value.kind is Kind.RELEASED))


def joined(values: Sequence[Value]) -> tuple[Kind, Any]:
    """The label of a value that is one of several."""
    first = values[0].label
    if all(value.label == first for value in values):
        return first
    kinds = {value.kind for value in values}
    if kinds <= {Kind.PUBLIC, Kind.RELEASED}:
        return Kind.RELEASED, uses(values)
    if kinds <= {Kind.PUBLIC, Kind.BOUNDED}:
        return Kind.BOUNDED, None
    return (Kind.PRIVATE if kinds & OF_CLIENTS else Kind.SECRET), None


def mixed(values: Sequence[Value]) -> tuple[Kind, Any]:
    """The label of any function of several values."""
    kinds = {value.kind for value in values}
    if kinds & OF_CLIENTS:
        return Kind.PRIVATE, None
    if kinds & OF_SECRETS:
        return Kind.SECRET, None
    return (Kind.RELEASED, uses(values)) if Kind.RELEASED in kinds else (Kind.PUBLIC, None)


def chosen(by: Value, cases: Sequence[Value], *, counted: bool = False) -> tuple[Kind, Any]:
    """The label of one of several values, which `by` chooses.

    A choice among public values and bounded sums is bounded by them.

    Args:
      counted: `by` decides how often a loop runs, so that a public value may become any number.
    """
    kind, detail = joined(cases)
    if by.kind is Kind.PUBLIC:
        return kind, detail
    if by.kind in OF_CLIENTS:
        bounded = kind is Kind.BOUNDED or (kind is Kind.PUBLIC and not counted)
        return (Kind.BOUNDED if bounded else Kind.PRIVATE), None
    if by.kind is Kind.RELEASED and kind in (Kind.PUBLIC, Kind.RELEASED):
        return Kind.RELEASED, uses([by, *cases])
    if by.kind is Kind.RELEASED and kind is Kind.BOUNDED:
        return Kind.BOUNDED, None
    return (Kind.PRIVATE if kind in OF_CLIENTS else Kind.SECRET), None


def part(draws: tuple[Draws, ...], start: int, stop: int) -> tuple[Draws, ...]:
    parts, offset = [], 0
    for drawn in draws:
        size = drawn.stop - drawn.start
        first, last = max(start - offset, 0), min(stop - offset, size)
        if first < last:
            parts.append(Draws(drawn.key, drawn.start + first, drawn.start + last))
        offset += size
    return tuple(parts)


def used(addition: tuple[Any, ...], draws: Iterable[Draws]) -> Iterator[Use]:
    offset = 0
    for drawn in draws:
        yield Use(addition, drawn, offset)
        offset += drawn.stop - drawn.start


def shared(uses: Iterable[Use]) -> Draws | None:
    """Draws that were added to two sums, if there are any."""
    last: Use | None = None
    for use in sorted(uses, key=lambda use: (repr(use.draws.key), use.draws.start)):
        same = last is not None and last.draws.key == use.draws.key
        overlaps = last is not None and same and use.draws.start < last.draws.stop
        if last is not None and overlaps and last.addition != use.addition:
            return use.draws
        if last is None or not same or use.draws.stop > last.draws.stop:
            last = use
    return None
