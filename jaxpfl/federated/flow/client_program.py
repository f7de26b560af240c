"""Reads the program of one client, as JAX traces it: its operations and the numbers that it holds.

Nothing can tell whether a number was computed from the clients. So a run's record lists where each
one enters the program, with its kind and never its value:

- every array, whatever line it enters at;
- a single number, if a line of the user's makes it enter that does not say it itself: `x - mean`,
  `x - np.load(file)[0]` and `x - 1 / 3`, but not `x - 0.5`. 0, 1, -1, infinity, NaN and the sizes
  of axes are left out.

A number of an installed package that a line of the user's calls, such as the step of an optimizer
with a rate that was read from a file, enters at that line.
"""

import itertools
import linecache
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.extend.source_info_util as sources
import numpy as np
from jax.extend import core

from jaxpfl.errors import InformationLeak
from jaxpfl.federated.flow import lanes
from jaxpfl.federated.flow.captured import installed

_NUMBER = re.compile(r"(?<![\w.])(?:\d[\d_]*\.?[\d_]*|\.\d+)(?:[eE][+-]?\d+)?")
_JAX = str(Path(jax.__file__).parent)
# The function by which the engine calls client functions: `clients.client.compiled_part`.
_CALLED = ("compiled_part", str(Path(__file__).parents[1] / "clients" / "client.py"))


class ClientProgram(NamedTuple):
    """A client function's program, as it was read.

    Attributes:
      alone: operations that were not tried side by side, with their lines; the first of each.
      constants: kinds of the numbers that it holds, and the lines where they enter.
    """

    alone: tuple[str, ...]
    constants: frozenset[str]


def read(jaxpr: Any, rules: Sequence[Any], platform: str) -> ClientProgram:
    """Refuses a client function that does anything but compute from its operands.

    Args:
      jaxpr: its program for one client, in which a function with a rule of its own for several
        clients is not yet replaced by the rule's result.
      rules: see `analysis.Steps`.
      platform: of the devices that run it.

    Raises:
      InformationLeak: an operation that is not JAX's own, has an effect, asks others or draws by a
        state; or a type or a key that is not JAX's own. It is named with its line.
    """
    alone: dict[str, str] = {}
    constants: set[str] = set()
    for closed, function, caller in _all_programs(jaxpr):
        program = require_computing(closed, rules, caller)
        constants |= entering(closed)
        for eqn in program.eqns:
            if lanes.unlisted(eqn, platform):
                alone.setdefault(str(lanes.name_of(eqn)), named(eqn, caller))
            constants |= _literals(eqn, function)
    return ClientProgram(tuple(alone.values()), frozenset(constants))


def needs_alone(jaxpr: Any, platform: str) -> bool:
    """Whether clients with this program must be computed one after the other; see `flow.lanes`."""
    programs = (getattr(closed, "jaxpr", closed) for closed, *_ in _all_programs(jaxpr))
    return any(lanes.unlisted(eqn, platform) for program in programs for eqn in program.eqns)


def require_all_computing(jaxpr: Any, rules: Sequence[Any]) -> None:
    """Refuses the programs that `read` refuses, and reads no more."""
    for closed, _, caller in _all_programs(jaxpr):
        require_computing(closed, rules, caller)


def _all_programs(jaxpr: Any) -> Iterator[tuple[Any, tuple[str, str], str | None]]:
    """A program and all within, each once; its compiled function, and the line that calls it.

    The line is told within JAX's own functions: they are traced once, for whoever was the first.
    """
    left, seen = [(jaxpr, _CALLED, None)], set()
    while left:
        closed, function, caller = left.pop()
        if id(closed) in seen:
            continue
        seen.add(id(closed))
        yield closed, function, caller
        for eqn in getattr(closed, "jaxpr", closed).eqns:
            inner = list(programs(list(eqn.params.values())))
            within, called = function, caller
            if inner and eqn.primitive.name == "jit":
                info = getattr(inner[0], "jaxpr", inner[0]).debug_info.func_src_info or ""
                name, _, place = info.partition(" at ")
                within = name, place.rpartition(":")[0]
                called = (caller or _place(eqn)) if within[1].startswith(_JAX) else None
            left += [(program, within, called) for program in inner]


def require_computing(closed: Any, rules: Sequence[Any], caller: str | None) -> Any:
    """A program without the ones within it, if it does nothing but compute."""
    program = getattr(closed, "jaxpr", closed)
    for operand in (*program.constvars, *program.invars):
        _require_plain(operand.aval, lambda: "an operand of a program")
    for eqn in program.eqns:
        for result in eqn.outvars:
            _require_plain(result.aval, partial(named, eqn, caller))
        name = lanes.name_of(eqn)
        # The effects of programs within are read there.
        computes = name in lanes.COMPUTES and (name in lanes.PROGRAMS or not effects(eqn))
        if name == "custom_vmap_call":
            computes &= not lanes.own_rule(eqn, tuple(rules))
        if not computes:
            raise InformationLeak(f"{eqn.primitive.name} cannot be followed: {named(eqn, caller)}")
    return program


def _require_plain(aval: Any, place: Callable[[], str]) -> None:
    strange = lanes.strange_type(aval)
    if strange is not None:
        raise InformationLeak(f"a value of type {strange} cannot be followed: {place()}")


def effects(eqn: Any) -> list[Any]:
    """The effects of an equation besides its results."""
    return [effect for effect in eqn.effects if type(effect).__name__ != "NamedAxisEffect"]


def programs(values: Sequence[Any]) -> Iterator[Any]:
    """The programs among an equation's settings, however they are nested."""
    for value in values:
        # A Jaxpr, closed or not: where their types live differs between versions of JAX.
        if hasattr(value, "eqns"):
            yield value
        elif isinstance(value, list | tuple):
            yield from programs(value)
        elif isinstance(value, Mapping):
            yield from programs(list(value.values()))


def named(eqn: Any, place: str | None = None) -> str:
    """An equation and its line, or that of the call that it belongs to, without any value."""
    out = ", ".join(str(result.aval) for result in eqn.outvars)
    operands = " ".join(str(operand.aval) for operand in eqn.invars)
    name = eqn.params.get("name", eqn.primitive.name)
    return f"{out} = {name} {operands} ({place or _place(eqn)})"


def _place(eqn: Any) -> str:
    return sources.summarize(eqn.source_info)


def entering(closed: Any) -> set[str]:
    """Kinds of the arrays that a program holds, and the lines where they enter it."""
    program, constants = getattr(closed, "jaxpr", closed), getattr(closed, "consts", ())
    return {
        described(constant, _first_line(program, variable))
        for variable, constant in zip(program.constvars, constants, strict=False)
    }


def described(constant: Any, line: str | None) -> str:
    """The kind of a number or an array that a program holds, and its line."""
    return f"{constant.dtype}{list(np.shape(constant))}{f' ({line})' if line else ''}"


def _first_line(program: Any, variable: Any) -> str | None:
    """The first line of the user's that reads a variable, here or in a program within."""
    for eqn in program.eqns:
        places = [index for index, operand in enumerate(eqn.invars) if operand is variable]
        if not places:
            continue
        for inner in programs(list(eqn.params.values())):
            within = getattr(inner, "jaxpr", inner)
            # Operands of a call are the last ones of its equation; before them, branches' numbers.
            place = places[0] - len(eqn.invars) + len(within.invars)
            line = _first_line(within, within.invars[place]) if place >= 0 else None
            if line is not None:
                return line
        if (line_and_text := _line(eqn, _CALLED)) is not None:
            return line_and_text[0]
    return None


def _literals(eqn: Any, function: tuple[str, str]) -> set[str]:
    """Kinds and lines of the numbers that an equation holds, see the module."""
    literals = [operand.val for operand in eqn.invars if isinstance(operand, core.Literal)]
    arrays = [value for value in literals if np.size(value) > 1]
    shapes = [variable.aval.shape for variable in (*eqn.invars, *eqn.outvars)]
    plain = {0, 1, *itertools.chain(*shapes)}
    # By their type: NumPy's comparisons of keys and of half precision are not needed here.
    single = [
        value
        for value in literals
        if np.size(value) == 1 and _tells(np.asarray(value).item(), plain)
    ]
    if not arrays and not single:
        return set()
    line, text = _line(eqn, function) or (None, "")
    kinds = {described(array, line) for array in arrays}
    if line is None:
        return kinds
    written = [float(number.replace("_", "")) for number in _NUMBER.findall(text)]
    hidden = [
        value
        for value in single
        if not any(np.asarray(number).astype(value.dtype) == abs(value) for number in written)
    ]
    return kinds | {described(value, line) for value in hidden}


def _tells(number: Any, plain: set[int]) -> bool:
    if isinstance(number, bool | bytes | str):
        return False
    return not (abs(number) in plain or (isinstance(number, float) and not math.isfinite(number)))


def _line(eqn: Any, function: tuple[str, str]) -> tuple[str, str] | None:
    """The innermost line of the user's that an equation was made for, as FILE:LINE, and its text.

    None if there is none within `function`, the innermost compiled one that holds the equation: as
    it is traced once for all who call it, the lines outside are of whoever was the first.
    """
    for frame in getattr(eqn.source_info.traceback, "frames", ()):
        if not installed(frame.file_name):
            text = linecache.getline(frame.file_name, frame.line_num)
            return f"{Path(frame.file_name).name}:{frame.line_num}", text
        place = frame.function_name.rpartition(".")[2], frame.file_name
        if place in (function, _CALLED):
            return None
    return None
