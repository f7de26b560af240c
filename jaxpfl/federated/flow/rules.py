"""The labels of an equation's results, from its operands' labels. See `federated.flow.labels`."""

import math
from collections.abc import Sequence
from typing import Any

from jaxpfl.federated.flow.labels import (
    OF_CLIENTS,
    OF_SECRETS,
    Cause,
    Draws,
    Key,
    Kind,
    Noise,
    Use,
    Value,
    chosen,
    mixed,
    part,
    shared,
    used,
)

# The same numbers in the same order.
_SAME = {
    "broadcast_in_dim", "copy", "copy_p", "device_put", "optimization_barrier", "pbroadcast",
    "pvary", "reshape", "sharding_constraint", "squeeze", "stop_gradient",
}  # fmt: skip
# These compute each coordinate by itself.
_EACH = {"add", "sub", "mul", "div", "neg", "max", "min", "round"}
_EACH |= {"convert_element_type", "integer_pow"}
# The same numbers elsewhere; operands after the first are places.
_MOVED = _SAME | {
    "all_gather", "all_gather_invariant", "all_to_all", "convert_element_type", "dynamic_slice",
    "gather", "ppermute", "rev", "slice", "split", "transpose", "unstack",
}  # fmt: skip
_ADDED = {
    "add", "add_any", "concatenate", "cumsum", "dynamic_update_slice", "neg", "pad", "psum",
    "psum_invariant", "reduce_sum", "stack", "sub",
}  # fmt: skip
# These make fixed-point numbers.
_ROUNDED = {"ceil", "floor", "round"}
_BITS = {"and", "or", "shift_left", "shift_right_arithmetic", "shift_right_logical"}


class TransferFunctions:
    """Labels of equations without a program of their own."""

    def __init__(self) -> None:
        self._tokens: dict[Any, int] = {}
        self._made: dict[int, tuple[Kind, tuple[int, ...]]] = {}
        # The tokens of 0, 1, 2 and so on: of vectors in which no number occurs twice.
        self._counted: set[int] = set()
        self._literals: set[int] = set()  # tokens of numbers in the program's text
        # How keys are derived from a key, by its path.
        self._derivations: dict[Any, Any] = {}

    def token(self, *description: Any) -> int:
        """The same number for equal descriptions."""
        return self._tokens.setdefault(description, len(self._tokens))

    def value(
        self, label: tuple[Kind, Any], *description: Any, cause: Cause | None = None
    ) -> Value:
        return Value(*label, self.token(*description), cause)

    def public(self, *description: Any) -> Value:
        """A public value that no equation made."""
        value = self.value((Kind.PUBLIC, None), *description)
        self._made[value.token] = Kind.PUBLIC, ()
        if description[0] == "literal":
            self._literals.add(value.token)
        return value

    def follows(self, value: Value, bound: frozenset[int]) -> bool:
        """Whether a value is a function of the values with these tokens and of public ones."""
        left, seen = [value.token], set()
        while left:
            token = left.pop()
            if token in bound or token in seen:
                continue
            seen.add(token)
            kind, operands = self._made.get(token, (Kind.PRIVATE, ()))
            if kind is Kind.PUBLIC:
                continue
            if not operands:
                return False
            left += operands
        return True

    def equation(self, eqn: Any, given: Sequence[Value], place: tuple[Any, ...]) -> list[Value]:
        (kind, detail), cause = self._label(eqn, given, place)
        if kind is Kind.PRIVATE and cause is None:
            cause = self._cause(eqn, given)
        results = []
        for index, out in enumerate(eqn.outvars):
            token = self._described(eqn, given, place, index, out, kind)
            # Another pass through a loop may have raised labels.
            self._made[token] = kind, tuple(operand.token for operand in given)
            if eqn.primitive.name == "unstack" and given[0].kind is Kind.KEY:
                # As JAX 0.12 takes the keys of a row.
                key, (kind, detail) = given[0].detail, (Kind.SECRET, None)
                if len(eqn.invars[0].aval.shape) == 1 and _differ(key):
                    step = ("of several", (index,))
                    kind, detail = Kind.KEY, Key((*key.path, step), key.bound)
            results.append(Value(kind, detail, token, cause))
        return results

    def _label(self, eqn, given, place) -> tuple[tuple[Kind, Any], Cause | None]:
        name, kinds = eqn.primitive.name, {operand.kind for operand in given}
        if name == "select_n" and kinds & OF_CLIENTS:
            return chosen(given[0], given[1:]), None
        if len(given) == 1 and name in _SAME and _aligned(eqn):
            return given[0].label, given[0].cause
        if given and given[0].kind is Kind.FACTOR and name in ("slice", "dynamic_slice"):
            rows = self._rows(eqn, given, given[0].detail)
            return ((Kind.PRIVATE, None) if rows is None else (Kind.FACTOR, rows)), None
        if kinds == {Kind.BOUNDED, Kind.NOISE} and name == "add":
            first, second = sorted(given, key=lambda operand: operand.kind is Kind.NOISE)
            if eqn.invars[0].aval.shape == eqn.invars[1].aval.shape:
                return self.noised([first], second, place), None
        if Kind.PRIVATE not in kinds and Kind.FACTOR not in kinds and Kind.BOUNDED in kinds:
            return ((Kind.BOUNDED if _bounds(name, given) else Kind.PRIVATE), None), None
        if kinds & OF_SECRETS and not kinds & OF_CLIENTS:
            return self._secret(eqn, given), None
        if kinds == {Kind.RELEASED} and name == "slice":
            return (Kind.RELEASED, _narrowed(eqn, given[0].detail)), None
        kind, detail = mixed(given)
        if kind is Kind.RELEASED and not _in_place(eqn):
            # Its draws may be at other places, so that a slice has all of them.
            detail = frozenset(use._replace(offset=-1) for use in detail)
        return (kind, detail), None

    def noised(
        self, sums: Sequence[Value], noise: Value, place: tuple[Any, ...]
    ) -> tuple[Kind, Any]:
        """The label of a sum of clipped contributions, in several parts, plus noise.

        It is private if the noise's key is not bound to each of the parts.
        """
        drawn: Noise = noise.detail
        if drawn.bound is not None and not all(self.follows(part, drawn.bound) for part in sums):
            return Kind.PRIVATE, None
        return Kind.RELEASED, frozenset(used(place, drawn.draws))

    def _secret(self, eqn, given: Sequence[Value]) -> tuple[Kind, Any]:
        """The label of a result whose operands are partly secret, and not of clients."""
        name, first, kinds = eqn.primitive.name, given[0], [operand.kind for operand in given]
        if Kind.NOISE in kinds:
            label = _still_noise(eqn, given)
            return mixed(given) if label is None else label
        if first.kind is not Kind.KEY or set(kinds[1:]) - {Kind.PUBLIC}:
            return mixed(given)
        key: Key = first.detail
        if name in ("random_fold_in", "random_split"):
            # Each of a row of keys gets another number.
            by_row = name == "random_fold_in" and given[1].token in self._counted
            tokens = (other.token for other in given[1:])
            step = ("each" if by_row else name, *tokens, str(eqn.params.get("shape")))
            # The first key of a split, that of a longer one and the key folded with 0 are one key.
            # So keys are derived from a key in one way alone. Folded with different literals, they
            # differ; numbers that are computed may be equal.
            numbered = name == "random_fold_in" and given[1].token in self._literals
            way = "literal numbers" if numbered else step
            if self._derivations.setdefault(key.path, way) != way:
                return mixed(given)
        elif name == "slice" and _differ(key) and eqn.outvars[0].aval.shape == (1,):
            # One of a row of keys that all differ; slices that begin elsewhere have none in common.
            step = ("of several", eqn.params["start_indices"])
        elif name in _SAME and eqn.invars[0].aval.size != eqn.outvars[0].aval.size:
            step = ("repeated",)
        elif name in _SAME or name in ("random_unwrap", "random_wrap"):
            return Kind.KEY, key
        else:
            return mixed(given)
        return Kind.KEY, Key((*key.path, step), key.bound)

    def _rows(self, eqn, given: Sequence[Value], source: int) -> int | None:
        """The token of some rows of a value, if whole rows are taken."""
        before, after = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
        if any(start.kind is not Kind.PUBLIC for start in given[1:]):
            return None
        if not before or before[1:] != after[1:]:
            return None
        zero = self.token("literal", "0")
        if eqn.primitive.name == "dynamic_slice":
            if any(start.token != zero for start in given[2:]):
                return None
            return self.token("rows", source, before[0], given[1].token, after[0])
        params = eqn.params
        if params["strides"] is not None and set(params["strides"]) != {1}:
            return None
        first = params["start_indices"][0]
        return self.token("rows", source, before[0], ("from", first), after[0])

    def _described(self, eqn, given, place, index, out, kind) -> int:
        """The token of one of an equation's results."""
        name = eqn.primitive.name
        if len(given) == 1 and name in _SAME and _aligned(eqn):
            return given[0].token
        if given and name in ("slice", "dynamic_slice"):
            rows = self._rows(eqn, given, given[0].token)
            if rows is not None:
                return rows
        if kind is Kind.PRIVATE:
            return self.token(place, index)
        operands = tuple(operand.token for operand in given)
        params = {key: p for key, p in eqn.params.items() if not key.endswith("sharding")}
        token = self.token(name, operands, str(params), index, str(out.aval))
        counts = name == "convert_element_type" and operands[0] in self._counted
        if counts or (name == "iota" and len(out.aval.shape) == 1):
            self._counted.add(token)
        return token

    def _cause(self, eqn, given: Sequence[Value]) -> Cause:
        """The equation to name for a private result."""
        private = [operand for operand in given if operand.kind is Kind.PRIVATE]
        causes = [operand.cause for operand in private if operand.cause is not None]
        for cause in causes:
            if cause.mixed:
                return cause
        others = {operand.kind for operand in given} - {Kind.PUBLIC, Kind.PRIVATE}
        if not others and causes and eqn.primitive.name in _MOVED | _ADDED | {"select_n"}:
            return causes[0]
        return Cause(eqn, bool(others))


def _aligned(eqn: Any) -> bool:
    """Whether the result has the operand's rows, up to axes of one in front."""
    before, after = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    return before == after or (1, *before) == after or before == (1, *after)


def _bounds(name: str, given: Sequence[Value]) -> bool:
    """Whether the result is a sum of clipped contributions, at a public scale."""
    kinds = [operand.kind for operand in given]
    if name in _MOVED:
        return set(kinds[1:]) <= {Kind.PUBLIC}
    if name == "dynamic_update_slice":
        return set(kinds) <= {Kind.PUBLIC, Kind.BOUNDED} and set(kinds[2:]) <= {Kind.PUBLIC}
    if name in _ADDED or name in _BITS:
        return set(kinds) <= {Kind.PUBLIC, Kind.BOUNDED}
    if name == "mul":
        return sorted(kind.value for kind in kinds) == ["bounded", "public"]
    if name == "div":
        return kinds == [Kind.BOUNDED, Kind.PUBLIC]
    return name in _ROUNDED


def _still_noise(eqn: Any, given: Sequence[Value]) -> tuple[Kind, Any] | None:
    """The label of a result that is noise in each of its coordinates, else None."""
    name, kinds = eqn.primitive.name, [operand.kind for operand in given]
    shape, size = eqn.outvars[0].aval.shape, math.prod(eqn.outvars[0].aval.shape)
    if name == "mul" and sorted(kind.value for kind in kinds) == ["noise", "public"]:
        place = kinds.index(Kind.NOISE)
        # A scalar: among the numbers of a vector there might be zeros.
        if eqn.invars[place].aval.shape == shape and not eqn.invars[1 - place].aval.shape:
            return given[place].label
        return None
    if name == "concatenate" and set(kinds) == {Kind.NOISE} and len(shape) == 1:
        noises = [operand.detail for operand in given]
        draws = tuple(drawn for noise in noises for drawn in noise.draws)
        alone = shared(Use((place,), drawn, 0) for place, drawn in enumerate(draws)) is None
        bounds = {noise.bound for noise in noises if noise.bound is not None}
        if alone and len(bounds) <= 1:
            return Kind.NOISE, Noise(draws, next(iter(bounds), None))
        return None
    first = given[0]
    if first.kind is not Kind.NOISE or set(kinds[1:]) - {Kind.PUBLIC}:
        return None
    noise: Noise = first.detail
    if name == "slice":
        return Kind.NOISE, Noise(_sliced(eqn, noise.draws), noise.bound)
    if name in _SAME and size == math.prod(eqn.invars[0].aval.shape):
        return first.label
    return None


def _differ(keys: Key) -> bool:
    """Whether no key occurs twice in a row of keys."""
    return bool(keys.path) and keys.path[-1][0] in ("random_split", "each")


def _in_place(eqn: Any) -> bool:
    """Whether each coordinate of the result follows from the same one of vectors, and scalars."""
    if eqn.primitive.name == "all_gather":
        # The devices' shares of a vector, joined in the order in which they were dealt.
        return eqn.params["tiled"] and len(eqn.outvars[0].aval.shape) == 1
    shapes = {operand.aval.shape for operand in eqn.invars} - {()}
    return eqn.primitive.name in _EACH and shapes <= {eqn.outvars[0].aval.shape}


def _sliced(eqn: Any, draws: tuple[Draws, ...]) -> tuple[Draws, ...]:
    """The draws in a slice of a vector; all of them where it is no vector, or a share of one."""
    params, shape = eqn.params, eqn.invars[0].aval.shape
    length = sum(drawn.stop - drawn.start for drawn in draws)
    if len(shape) != 1 or shape[0] != length or params["strides"] is not None:
        return draws
    return part(draws, params["start_indices"][0], params["limit_indices"][0])


def _narrowed(eqn: Any, uses: frozenset[Use]) -> frozenset[Use]:
    """The uses in a slice of a noisy sum."""
    additions = {use.addition for use in uses}
    if len(additions) != 1 or any(use.offset < 0 for use in uses):
        return uses
    draws = tuple(use.draws for use in sorted(uses, key=lambda use: use.offset))
    sliced = _sliced(eqn, draws)
    return uses if sliced == draws else frozenset(used(additions.pop(), sliced))
