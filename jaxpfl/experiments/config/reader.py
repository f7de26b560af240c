"""Reads a config, from YAML and from the command line, into the dataclass of its system.

Unknown keys, values of the wrong type, duplicate keys, and YAML aliases and tags are refused with
an `InputError` that names the file and the key and, for a misspelling, the nearest valid key.
"""

import dataclasses
import difflib
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml

from jaxpfl import checks, files
from jaxpfl.errors import InputError, named

_MAX_CONFIG_BYTES = 1_000_000
_DEEPEST = 64
# YAML 1.1 reads `1e-5` as text, but a float field accepts it as a number.
_EXPONENT = re.compile(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+")
# A name also names a folder in the run directory.
_NAME = re.compile(r"\w[\w .%+-]{0,59}")
_COMMAND_LINE = "command line"

_Config = TypeVar("_Config")


@dataclass(frozen=True)
class _Source:
    """The file of a config, and the keys whose values were `given` on the command line."""

    file: str
    given: frozenset[str] = frozenset()

    def of(self, key: str) -> str:
        """Says where the value of `key` was given, to begin a message; "" is the whole config."""
        if any(key == name or key.startswith(f"{name}.") for name in self.given):
            return _COMMAND_LINE
        inside = any(not key or name.startswith(f"{key}.") for name in self.given)
        return f"{self.file} with the command line" if inside else self.file

    def must_be(self, expected: str, key: str, value: Any) -> InputError:
        return InputError(f"{self.of(key)}: {key} must be {expected}, found {value!r}")


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

    Args:
      where: the file's name, with which messages begin.
      overrides: arguments such as `--training.rounds 5` or `--training.rounds=5`, with values
        written as in YAML. They replace the file's values before anything is checked.
    """
    given = parse_overrides(kind, overrides)
    for key, value in given.items():
        mapping = with_value(mapping, key, value, f"{_COMMAND_LINE}: --{key}")
    return _convert(kind, mapping, _Source(where, frozenset(given)), "")


def with_value(mapping: Any, key: str, value: Any, where: str) -> dict[str, Any]:
    """Returns a copy of plain data in which `key`, such as "training.rounds", has this value."""
    if mapping is not None and not isinstance(mapping, Mapping):
        raise InputError(f"{where} is in no section of the config, found {mapping!r} instead")
    first, _, rest = key.partition(".")
    section = dict(mapping or {})
    inner = with_value(section.get(first), rest, value, where) if rest else value
    return {**section, first: inner}


def parse_overrides(kind: type, arguments: Sequence[str]) -> dict[str, Any]:
    """The values of `--section.key VALUE` arguments by key; the last one of a key counts."""
    valid = dict(_keys(kind))
    for argument in arguments:
        if argument != argument.encode("utf-8", "replace").decode():
            raise InputError(f"{_COMMAND_LINE}: {argument!r} is not valid UTF-8")
    values: dict[str, Any] = {}
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        if not argument.startswith("--"):
            raise InputError(
                f"{_COMMAND_LINE}: unexpected argument {argument!r}; a setting is given as "
                "--section.key VALUE"
            )
        name, has_value, text = argument[2:].partition("=")
        key = name.replace("-", "_")
        if key not in valid and (named := _named_by_user(name, valid)) is not None:
            key, kind_of_value = named
            valid[key] = kind_of_value
        if key not in valid:
            raise InputError(
                f"{_COMMAND_LINE}: there is no option --{key}{_nearest(key, [*valid, 'dry-run'])}"
            )
        if not has_value:
            if not rest or rest[0].startswith("--"):
                raise InputError(f"{_COMMAND_LINE}: --{name} needs a value")
            text = rest.pop(0)
        if set(_members(valid[key])) <= {str, type(None)} and text != "null":
            # Text is taken literally, because the shell removed the quotes that YAML would need.
            values[key] = text
        else:
            values[key] = _parse_yaml(text, f"{_COMMAND_LINE}: --{name}")
    return values


def _named_by_user(name: str, valid: Mapping[str, Any]) -> tuple[str, Any] | None:
    """Key and type of an option such as fred.candidates.NAME, whose last part the user chooses."""
    parent, _, own = name.rpartition(".")
    section = parent.replace("-", "_")
    for kind in _members(valid.get(section)):
        if typing.get_origin(kind) is dict:
            return f"{section}.{own}", typing.get_args(kind)[1]
    return None


def to_mapping(config: Any) -> dict[str, Any]:
    """Returns the config as plain data: `from_mapping(to_mapping(c), where, type(c)) == c`."""
    settings = {name: getattr(config, name) for name in _settings(type(config))}
    return {
        name: to_mapping(value) if dataclasses.is_dataclass(value) else files.jsonable(value)
        for name, value in settings.items()
    }


def to_yaml(config: Any) -> str:
    """Returns the config as YAML, with keys in the order of the dataclasses."""
    return yaml.safe_dump(to_mapping(config), sort_keys=False, allow_unicode=True)


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader without aliases, which can expand exponentially, and duplicate keys."""

    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> Any:
        event: Any = self.peek_event()
        self._depth += 1
        problem = "YAML aliases are refused" if event.anchor is not None else ""
        # PyYAML takes hours for some hundred kilobytes of "[".
        if problem or self._depth > _DEEPEST:
            raise yaml.constructor.ConstructorError(
                problem=problem or "the YAML is nested too deeply", problem_mark=event.start_mark
            )
        node = super().compose_node(parent, index)
        seen: set[str] = set()
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if str(key.value) in seen:
                raise yaml.constructor.ConstructorError(
                    problem=f"key {key.value!r} is given twice", problem_mark=key.start_mark
                )
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
        except (ValueError, LookupError, ArithmeticError, AttributeError, TypeError) as error:
            # A date such as 2020-13-45, !!bool "x", a number of hundreds of digits, half of a
            # surrogate pair.
            kind = node.tag.rpartition(":")[2]
            raise yaml.constructor.ConstructorError(
                problem=f"a value is written as YAML's {kind} and is none; put text in quotes",
                problem_mark=node.start_mark,
            ) from error


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


def _settings(kind: Any) -> dict[str, Any]:
    """The types of the fields that are given to a dataclass; others are fixed (`init=False`)."""
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind) if field.init}


def _members(kind: Any) -> tuple[Any, ...]:
    is_union = typing.get_origin(kind) in (typing.Union, types.UnionType)
    return typing.get_args(kind) if is_union else (kind,)


def _nearest(key: str, valid: Sequence[str]) -> str:
    last = key.rsplit(".", 1)[-1]
    same_end = [name for name in valid if name.rsplit(".", 1)[-1] == last]
    close = same_end or difflib.get_close_matches(key, valid, n=1, cutoff=0.5)
    return f"; the nearest valid name is {close[0]!r}" if close else f"; valid: {', '.join(valid)}"


def _convert(kind: Any, value: Any, where: _Source, key: str) -> Any:
    """`value` as `kind` (a dataclass, union, Literal, tuple, dict or scalar), or InputError."""
    if kind is Any:
        return value
    members = [member for member in _members(kind) if member is not type(None)]
    if value is None and len(members) < len(_members(kind)):
        return None
    if len(members) == 1:
        (kind,) = members
    elif str in members:
        # A source, or a mapping of sources to their shares.
        kind = next(kind for kind in members if (kind is str) != isinstance(value, Mapping))
    else:
        kind = _choose(members, value, where, key)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return _convert_dataclass(kind, value, where, key)
    if typing.get_origin(kind) is Literal:
        choices = typing.get_args(kind)
        if isinstance(value, str) and value in choices:
            return value
        raise where.must_be(f"one of {', '.join(map(repr, choices))}", key, value)
    if typing.get_origin(kind) is tuple:
        inner: tuple[Any, ...] = typing.get_args(kind)
        parts = value if isinstance(value, Sequence) and not isinstance(value, str) else ()
        any_length = inner[1:] == (Ellipsis,)
        if any_length:
            inner = inner[:1] * len(parts)
        if not parts or len(parts) != len(inner):
            raise where.must_be(
                "a list of one or more" if any_length else f"a list of {len(inner)}", key, value
            )
        return tuple(
            _convert(kind, part, where, key) for kind, part in zip(inner, parts, strict=True)
        )
    if typing.get_origin(kind) is dict:
        return _convert_names(typing.get_args(kind)[1], value, where, key)
    return _convert_scalar(kind, value, where, key)


def _convert_names(kind: Any, value: Any, where: _Source, key: str) -> dict[str, Any]:
    if not isinstance(value, Mapping) or not value:
        raise where.must_be("a mapping of names", key, value)
    for name in value:
        # YAML reads `on`, `3` and `null` as other things than text.
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise InputError(
                f"{where.of(key)}: {key} has the name {name!r}, expected up to 60 letters, digits, "
                'spaces or . _ % + -, in quotes where YAML reads something else ("70%")'
            )
    return {name: _convert(kind, part, where, f"{key}.{name}") for name, part in value.items()}


def _convert_scalar(kind: Any, value: Any, where: _Source, key: str) -> Any:
    if kind is float:
        if isinstance(value, str) and _EXPONENT.fullmatch(value):
            value = float(value)
        with named(where.of(key)):
            return checks.real(key, value)
    if isinstance(value, kind) and not (kind is int and isinstance(value, bool)):
        return value
    names = {int: "a whole number", bool: "true or false", str: "text"}
    raise where.must_be(names[kind], key, value)


def _choose(members: Sequence[Any], value: Any, where: _Source, key: str) -> Any:
    """The dataclass among `members` whose field `name` accepts the name in `value`."""
    if not all("name" in _settings(member) for member in members):
        return _choose_by_keys(members, value, where, key)
    given = value.get("name") if isinstance(value, Mapping) else None
    named = {name: kind for kind in members for name in typing.get_args(_settings(kind)["name"])}
    if isinstance(given, str) and given in named:
        return named[given]
    raise where.must_be(f"one of {', '.join(map(repr, named))}", f"{key}.name", given)


def _choose_by_keys(members: Sequence[Any], value: Any, where: _Source, key: str) -> Any:
    """The dataclass among `members` that has the most required keys, all of them in `value`."""
    given = list(value) if isinstance(value, Mapping) else []
    required = {member: _required(member) for member in members}
    fitting = [member for member in members if required[member] <= set(given)]
    chosen = max(fitting or members, key=lambda member: len(required[member]))
    own = _settings(chosen)
    for other in members:
        for name in given:
            if name in own or name not in _settings(other):
                continue
            if required[chosen]:
                because = f"must be absent where {key}.{min(required[chosen])} is given"
            else:
                because = f"needs {key}.{min(required[other] - set(given))}, found none"
            raise InputError(f"{where.of(f'{key}.{name}')}: {key}.{name} {because}")
    return chosen


def _required(kind: Any) -> set[str]:
    return {
        field.name
        for field in dataclasses.fields(kind)
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    }


def _convert_dataclass(kind: type, value: Any, where: _Source, key: str) -> Any:
    if not isinstance(value, Mapping):
        kind_of_value = "nothing" if value is None else type(value).__name__
        what = f"{key or 'a config'} must be a mapping of keys, found {kind_of_value}"
        raise InputError(f"{where.of(key)}: {what}")
    prefix, settings = f"{key}." if key else "", _settings(kind)
    valid = [f"{prefix}{name}" for name in settings]
    for name in value:
        if name not in settings:
            wrong = f"{prefix}{name}"
            nearest = _nearest(wrong, valid)
            raise InputError(f"{where.of(wrong)}: there is no key {wrong!r}{nearest}")
    required = _required(kind)
    missing = [f"{prefix}{name}" for name in settings if name in required and name not in value]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        raise InputError(f"{where.of(key)}: {' and '.join(missing)} {verb} required, found nothing")
    arguments = {
        name: _convert(settings[name], inner, where, f"{prefix}{name}")
        for name, inner in value.items()
    }
    try:
        return kind(**arguments)
    except InputError as error:
        message = str(error)
        # A field's own check does not know the name of its section.
        if message.partition(" ")[0] in settings:
            message = f"{prefix}{message}"
        raise InputError(f"{where.of(key)}: {message}") from error
