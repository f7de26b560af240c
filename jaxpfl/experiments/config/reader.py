"""Reads a config, from YAML and from the command line, into the dataclass of its system.

Unknown keys, values of the wrong type, duplicate keys, and YAML aliases and tags are refused with
an `InputError` that names the file and the key and, for a misspelling, the nearest valid key.
"""

import dataclasses
import difflib
import functools
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml

from jaxpfl import checks, files
from jaxpfl.errors import InputError

_MAX_CONFIG_BYTES = 1_000_000
_DEEPEST = 64
# YAML 1.1 reads `1e-5` as text, but a float field accepts it as a number.
_EXPONENT = re.compile(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+")
# A name also names a folder in the run directory.
_NAME = re.compile(r"\w[\w .%+-]{0,59}")
_COMMAND_LINE = "command line"

_Config = TypeVar("_Config")


class _Fault(Exception):
    """What is wrong at a key of a config; "" is the whole config."""

    def __init__(self, key: str, sentence: str) -> None:
        super().__init__(sentence)
        self.key = key


def read_mapping(path: str | Path) -> Any:
    """Reads a YAML file of at most 1 MB, without aliases and duplicate keys, as plain data."""
    path = files.user_path(path)
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_CONFIG_BYTES + 1)
    except (OSError, ValueError) as error:
        # A path that a sweep names may be none.
        reason = error.strerror if isinstance(error, OSError) else "no file has such a name"
        raise InputError(f"{path}: the config cannot be read: {reason}") from error
    if len(content) > _MAX_CONFIG_BYTES:
        raise InputError(f"{path}: a config must have at most {_MAX_CONFIG_BYTES} bytes")
    try:
        return _parse_yaml(content.decode(), str(path))
    except UnicodeDecodeError:
        raise InputError(f"{path}: the config cannot be read: it is not UTF-8 text") from None


def from_mapping(
    mapping: Any, where: str, kind: type[_Config], overrides: Sequence[str] = ()
) -> _Config:
    """Builds a config of type `kind` from plain data and from the command line.

    Messages begin with `where`, the file's name. `overrides`, such as `--training.rounds 5` or
    `--training.rounds=5`, as in YAML, replace the file's values before anything is checked.
    """
    given = parse_overrides(kind, overrides)
    for key, value in given.items():
        mapping = with_value(mapping, key, value, f"{_COMMAND_LINE}: --{key}")
    try:
        return _convert(kind, mapping, "")
    except _Fault as fault:
        key = fault.key
        if any(key == name or key.startswith(f"{name}.") for name in given):
            where = _COMMAND_LINE
        elif any(not key or name.startswith(f"{key}.") for name in given):
            where += f" with the {_COMMAND_LINE}"
        raise InputError(f"{where}: {fault}") from fault.__cause__


def with_value(mapping: Any, key: str, value: Any, where: str) -> dict[str, Any]:
    """Returns a copy of plain data in which `key`, such as "training.rounds", has this value."""
    if mapping is not None and not isinstance(mapping, Mapping):
        raise InputError(f"{where} is in no section of the config, found {mapping!r} instead")
    (first, _, rest), section = key.partition("."), dict(mapping or {})
    return {**section, first: with_value(section.get(first), rest, value, where) if rest else value}


def parse_overrides(kind: type, arguments: Sequence[str]) -> dict[str, Any]:
    """The values of `--section.key VALUE` arguments by key; the last one of a key counts."""
    for argument in arguments:  # values, too
        if argument != argument.encode("utf-8", "replace").decode():
            raise InputError(f"{_COMMAND_LINE}: {argument!r} is not valid UTF-8")
    valid, values, rest = dict(_keys(kind)), dict[str, Any](), list(arguments)
    while rest:
        argument = rest.pop(0)
        if not argument.startswith("--"):
            what = f"{_COMMAND_LINE}: unexpected argument {argument!r}"
            raise InputError(f"{what}; a setting is given as --section.key VALUE")
        name, has_value, text = argument[2:].partition("=")
        key = name.replace("-", "_")
        # Of an option such as fred.candidates.NAME, the user chooses the last part.
        section, own = key.rpartition(".")[0], name.rpartition(".")[2]
        for kind_of_section in _members(valid.get(section)):
            if typing.get_origin(kind_of_section) is dict:
                key = f"{section}.{own}"
                valid[key] = typing.get_args(kind_of_section)[1]
        if key not in valid:
            near = _nearest(key, [*valid, "dry-run"], "--")
            raise InputError(f"{_COMMAND_LINE}: there is no option --{name}{near}")
        if not has_value:
            if not rest or rest[0].startswith("--"):
                raise InputError(f"{_COMMAND_LINE}: --{name} needs a value")
            text = rest.pop(0)
        # Text is taken literally, because the shell removed the quotes that YAML would need.
        literal = set(_members(valid[key])) <= {str, type(None)} and text != "null"
        values[key] = text if literal else _parse_yaml(text, f"{_COMMAND_LINE}: --{name}")
    return values


def to_mapping(config: Any) -> dict[str, Any]:
    """Returns the config as plain data: `from_mapping(to_mapping(c), where, type(c)) == c`."""
    values = {name: getattr(config, name) for name in _settings(type(config))}
    sections = {name: to_mapping(x) for name, x in values.items() if dataclasses.is_dataclass(x)}
    return files.jsonable(values | sections)


def to_yaml(config: Any) -> str:
    """Returns the config as YAML, with keys in the order of the dataclasses."""
    return yaml.safe_dump(to_mapping(config), sort_keys=False, allow_unicode=True)


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader without tags, duplicate keys and aliases, which can grow endlessly."""

    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> Any:
        event: Any = self.peek_event()
        self._depth += 1
        if event.anchor is not None or getattr(event, "tag", None) is not None:
            raise _refused(event, "YAML aliases and tags are refused")
        # PyYAML takes hours for some hundred kilobytes of "[".
        if self._depth > _DEEPEST:
            raise _refused(event, "the YAML is nested too deeply")
        node = super().compose_node(parent, index)
        seen: set[str] = set()
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if str(key.value) in seen:
                raise _refused(key, f"key {key.value!r} is given twice")
            seen.add(str(key.value))
        self._depth -= 1
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            value = super().construct_object(node, deep)
            if isinstance(value, int) and value.bit_length() > 1_023:
                raise ValueError("a number that no float can hold")
            if isinstance(value, str):
                value.encode()
            return value
        except (ValueError, TypeError) as error:
            # A date such as 2020-13-45, a number of hundreds of digits, half of a surrogate pair.
            kind = node.tag.rpartition(":")[2]
            problem = f"a value is written as YAML's {kind} and is none; put text in quotes"
            raise _refused(node, problem) from error


def _refused(node: Any, problem: str) -> yaml.YAMLError:
    return yaml.constructor.ConstructorError(problem=problem, problem_mark=node.start_mark)


def _parse_yaml(text: str, where: str) -> Any:
    try:
        return _Loader(text).get_single_data()
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f"line {mark.line + 1}: " if mark is not None else ""
        problem = getattr(error, "problem", None) or "not valid YAML"
        raise InputError(f"{where}: {line}{problem}") from error


def _keys(kind: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields every key that a config of this type can have, with its type."""
    for name, hint in _settings(kind).items():
        sections = [member for member in _members(hint) if dataclasses.is_dataclass(member)]
        for section in sections:
            yield from _keys(section, f"{prefix}{name}.")
        if not sections:
            yield f"{prefix}{name}", hint


@functools.cache
def _settings(kind: Any) -> dict[str, Any]:
    """The types of the fields that are given to a dataclass; others are fixed (`init=False`)."""
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind) if field.init}


def _members(kind: Any) -> tuple[Any, ...]:
    is_union = typing.get_origin(kind) in (typing.Union, types.UnionType)
    return typing.get_args(kind) if is_union else (kind,)


def _nearest(key: str, valid: Sequence[str], dashes: str = "") -> str:
    same_end = [name for name in valid if name.rsplit(".", 1)[-1] == key.rsplit(".", 1)[-1]]
    close = same_end or difflib.get_close_matches(key, valid, n=1, cutoff=0.5)
    names = [dashes + name for name in close or valid]
    return f"; the nearest valid name is {names[0]!r}" if close else f"; valid: {', '.join(names)}"


def _must_be(expected: str, key: str, value: Any) -> _Fault:
    return _Fault(key, f"{key} must be {expected}, found {value!r}")


def _convert(kind: Any, value: Any, key: str) -> Any:
    """`value` as `kind` (a dataclass, union, Literal, tuple, dict or scalar), or `_Fault`."""
    members = [member for member in _members(kind) if member is not type(None)]
    if kind is Any or (value is None and len(members) < len(_members(kind))):
        return value
    kind = members[0] if len(members) == 1 else _choose(members, value, key)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return _convert_dataclass(kind, value, key)
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        if isinstance(value, str) and value in parts:
            return value
        raise _must_be(f"one of {', '.join(map(repr, parts))}", key, value)
    if origin is tuple:
        values = value if isinstance(value, Sequence) and not isinstance(value, str) else ()
        any_length = parts[-1] is Ellipsis
        if not values or not (any_length or len(values) == len(parts)):
            length = "one or more" if any_length else len(parts)
            raise _must_be(f"a list of {length}", key, value)
        kinds = parts[:1] * len(values) if any_length else parts
        return tuple(_convert(kind, part, key) for kind, part in zip(kinds, values, strict=True))
    if origin is dict:
        if not isinstance(value, Mapping) or not value:
            raise _must_be("a mapping of names", key, value)
        for name in value:
            # YAML reads `on`, `3` and `null` as other things than text.
            if not isinstance(name, str) or not _NAME.fullmatch(name):
                allowed = "up to 60 letters, digits, spaces or . _ % + -"
                quoted = 'in quotes where YAML reads something else ("70%")'
                raise _Fault(key, f"{key} has the name {name!r}, expected {allowed}, {quoted}")
        return {name: _convert(parts[1], part, f"{key}.{name}") for name, part in value.items()}
    if kind is float:
        if isinstance(value, str) and _EXPONENT.fullmatch(value):
            value = float(value)
        try:
            return checks.real(key, value)
        except InputError as error:
            raise _Fault(key, str(error)) from error
    if isinstance(value, kind) and not (kind is int and isinstance(value, bool)):
        return value
    raise _must_be({int: "a whole number", bool: "true or false", str: "text"}[kind], key, value)


def _choose(members: Sequence[Any], value: Any, key: str) -> Any:
    """The member of a union that `value` is of: by its type, its name, or the keys it needs."""
    given = value if isinstance(value, Mapping) else {}
    if str in members:
        # A source, or a mapping of sources to their shares; a name, or a list of names.
        several = isinstance(value, Mapping | list | tuple)
        return next(kind for kind in members if (kind is str) != several)
    if all("name" in _settings(member) for member in members):
        by_name = {n: kind for kind in members for n in typing.get_args(_settings(kind)["name"])}
        if (name := given.get("name")) in list(by_name):
            return by_name[name]
        raise _must_be(f"one of {', '.join(map(repr, by_name))}", f"{key}.name", name)
    fitting = [member for member in members if _required(member) <= set(given)]
    chosen = max(fitting or members, key=lambda member: len(_required(member)))
    for other in members:
        for name in [name for name in given if name not in _settings(chosen)]:
            if name in _settings(other):
                if _required(chosen):
                    because = f"must be absent where {key}.{min(_required(chosen))} is given"
                else:
                    because = f"needs {key}.{min(_required(other) - set(given))}, found none"
                raise _Fault(f"{key}.{name}", f"{key}.{name} {because}")
    return chosen


def _required(kind: Any) -> set[str]:
    fields, nothing = dataclasses.fields(kind), dataclasses.MISSING
    return {field.name for field in fields if field.default is field.default_factory is nothing}


def _convert_dataclass(kind: type, value: Any, key: str) -> Any:
    if not isinstance(value, Mapping):
        kind_of_value = "nothing" if value is None else type(value).__name__
        raise _Fault(key, f"{key or 'a config'} must be a mapping of keys, found {kind_of_value}")
    prefix, settings = f"{key}." if key else "", _settings(kind)
    for name in value:
        if name not in settings:
            wrong, valid = f"{prefix}{name}", [f"{prefix}{name}" for name in settings]
            raise _Fault(wrong, f"there is no key {wrong!r}{_nearest(wrong, valid)}")
    needed = _required(kind).difference(value)
    if missing := [f"{prefix}{name}" for name in settings if name in needed]:
        verb = "is" if len(missing) == 1 else "are"
        raise _Fault(key, f"{' and '.join(missing)} {verb} required, found nothing")
    arguments = {name: _convert(settings[name], value[name], f"{prefix}{name}") for name in value}
    try:
        return kind(**arguments)
    except InputError as error:
        # A field's own check does not know the name of its section.
        own = str(error).partition(" ")[0] in settings
        raise _Fault(key, f"{prefix if own else ''}{error}") from error
