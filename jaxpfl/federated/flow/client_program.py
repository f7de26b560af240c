"""Reads a client function: the values that it captures, and its program, as JAX traces it.

Nothing can tell whether a number was computed from the clients. So values that are captured are
public by declaration, and a run's record lists each one by name (`captured`), and where each number
enters the program, with its kind and never its value:

- every array, whatever line it enters at;
- a single number, if a line of the user's makes it enter that does not say it itself: `x - mean`,
  `x - np.load(file)[0]` and `x - 1 / 3`, but not `x - 0.5`. 0, 1, -1, infinity, NaN and the sizes
  of axes are left out.

A number of an installed package that a line of the user's calls, such as the step of an optimizer
with a rate that was read from a file, enters at that line.
"""

import dataclasses
import itertools
import linecache
import math
import re
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import jax
import jax.extend.source_info_util as sources
import numpy as np
from jax.extend import core

from jaxpfl.errors import InformationLeak
from jaxpfl.federated.flow import lanes

_PLAIN = {bool: "a truth value", int: "a whole number", float: "a number", complex: "a number"}
_PLAIN |= {str: "text", bytes: "bytes"}
_DEEPEST, _LONGEST = 8, 32
_OWN = Path(__file__).parents[2]
_INSTALLED = [Path(sysconfig.get_path(name)) for name in ("purelib", "platlib", "stdlib")]
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
    numbers = [value for value in literals if np.size(value) == 1]
    single = [value for value in numbers if _tells(np.asarray(value).item(), plain)]
    if not arrays and not single:
        return set()
    line, text = _line(eqn, function) or (None, "")
    kinds = {described(array, line) for array in arrays}
    if line is None:
        return kinds
    written = [float(number.replace("_", "")) for number in _NUMBER.findall(text)]
    for value in single:
        if not any(np.asarray(number).astype(value.dtype) == abs(value) for number in written):
            kinds.add(described(value, line))
    return kinds


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


def captured(function: Any) -> tuple[str, ...]:
    """Names and kinds of the values that a function, or an object with methods, reads.

    From its closure, defaults, fields and bound arguments, in depth; and, if it is not from an
    installed package, from the globals that its code names, and names of the user's own modules
    (`module.NAME`). Only the length of a container of more than 32 values is listed; its values
    that enter the program are among the program's constants.
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
