"""Reads a config, from YAML and from the command line, into the dataclass of its system.

A key that does not exist, a value of the wrong type, a duplicate key and a YAML alias or tag are
all refused with one `InputError` that names the file and the key and, for a misspelling, the
nearest valid key.
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

from jaxpfl import checks
from jaxpfl.errors import InputError
from jaxpfl.experiments.config.sections import OptimizerConfig

_MAX_CONFIG_BYTES = 1_000_000
# YAML 1.1 reads `1e-5` as text; a float field takes it for the number that it is.
_EXPONENT = re.compile(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+")
# A name is also the name of a folder in the run directory.
_NAME = re.compile(r"\w[\w .%+-]{0,59}")
_COMMAND_LINE = "command line"

_Config = TypeVar("_Config")


@dataclass(frozen=True)
class _Source:
    """Where a config comes from: what messages begin with.

    Attributes:
      file: its name.
      given: the keys whose values come from the command line.
    """

    file: str
    given: frozenset[str] = frozenset()

    def of(self, key: str) -> str:
        """Where the value of `key` was given; "" is the whole config."""
        if any(key == name or key.startswith(f"{name}.") for name in self.given):
            return _COMMAND_LINE
        inside = any(not key or name.startswith(f"{key}.") for name in self.given)
        return f"{self.file} with the command line" if inside else self.file


def load(path: str | Path, kind: type[_Config]) -> _Config:
    """Reads a YAML file as a config of type `kind`.

    Raises:
      InputError: the file cannot be read, or holds what `kind` does not have; names the key.
    """
    return from_mapping(read_mapping(path), str(path), kind)


def read_mapping(path: str | Path) -> Any:
    """What a YAML file holds, as plain data; no aliases, no key twice, at most 1 MB.

    Raises:
      InputError: it cannot be read, or is not YAML.
    """
    path = Path(path)
    try:
        size = path.stat().st_size
        if size > _MAX_CONFIG_BYTES:
            limit = _MAX_CONFIG_BYTES
            raise InputError(f"{path}: a config has at most {limit} bytes, found {size}")
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise InputError(f"{path}: the config cannot be read: {reason}") from error
    return _parse_yaml(text, str(path))


def from_mapping(
    mapping: Any, where: str, kind: type[_Config], overrides: Sequence[str] = ()
) -> _Config:
    """Builds a config of type `kind` from plain data and from the command line.

    Args:
      where: a file's name, which every message begins with.
      overrides: arguments such as `--training.rounds 5` or `--training.rounds=5`. A value is
        written as in the YAML file; they replace the file's before anything is checked.

    Raises:
      InputError: a key does not exist or is missing, or a value is refused.
    """
    given = parse_overrides(kind, overrides)
    for key, value in given.items():
        mapping = with_value(mapping, key, value, f"{_COMMAND_LINE}: --{key}")
    return _convert(kind, mapping, _Source(where, frozenset(given)), "")


def with_value(mapping: Any, key: str, value: Any, where: str) -> dict[str, Any]:
    """A copy of plain data in which `key`, such as "training.rounds", has this value.

    Raises:
      InputError: `key` leads into something that is no mapping; begins with `where`.
    """
    if mapping is not None and not isinstance(mapping, Mapping):
        raise InputError(f"{where} is in no section of the config, found {mapping!r} in its place")
    first, _, rest = key.partition(".")
    changed = dict(mapping or {})
    changed[first] = with_value(changed.get(first), rest, value, where) if rest else value
    return changed


def parse_overrides(kind: type, arguments: Sequence[str]) -> dict[str, Any]:
    """The values of `--section.key VALUE` arguments by key; of a key given twice, the last.

    Raises:
      InputError: an argument is no such option, or `kind` has no such key.
    """
    valid = dict(_keys(kind))
    found: dict[str, Any] = {}
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        if not argument.startswith("--"):
            raise InputError(f"{_COMMAND_LINE}: unexpected argument {argument!r}")
        name, has_value, text = argument[2:].partition("=")
        key = name.replace("-", "_")
        if key not in valid:
            raise InputError(
                f"{_COMMAND_LINE}: there is no option --{key}{_nearest(key, list(valid))}"
            )
        if not has_value:
            if not rest or rest[0].startswith("--"):
                raise InputError(f"{_COMMAND_LINE}: --{name} needs a value")
            text = rest.pop(0)
        if set(_members(valid[key])) <= {str, type(None)} and text != "null":
            # Text as it stands: the shell has taken away the quotes that YAML would need.
            found[key] = text
        else:
            found[key] = _parse_yaml(text, f"{_COMMAND_LINE}: --{name}")
    return found


def to_mapping(config: Any) -> dict[str, Any]:
    """The resolved config as plain data: `from_mapping(to_mapping(c), where, type(c)) == c`."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(inner) for key, inner in value.items()}
        return list(value) if isinstance(value, tuple) else value

    return plain(dataclasses.asdict(config))


def to_yaml(config: Any) -> str:
    """The resolved config as YAML, in the order of the dataclasses."""
    return yaml.safe_dump(to_mapping(config), sort_keys=False, allow_unicode=True)


def _parse_yaml(text: str, where: str) -> Any:
    """yaml.safe_load, after refusing aliases (they can explode) and duplicate keys."""
    try:
        for token in yaml.scan(text):
            if isinstance(token, (yaml.AliasToken, yaml.AnchorToken)):
                raise InputError(f"{where}: line {token.start_mark.line + 1}: no YAML aliases here")
        _refuse_duplicates(yaml.compose(text, Loader=yaml.SafeLoader), where)
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f"line {mark.line + 1}: " if mark is not None else ""
        problem = getattr(error, "problem", None) or "not valid YAML"
        raise InputError(f"{where}: {line}{problem}") from error
    except RecursionError as error:
        raise InputError(f"{where}: the YAML is nested too deeply") from error


def _refuse_duplicates(node: yaml.Node | None, where: str) -> None:
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            if str(key.value) in seen:
                line = key.start_mark.line + 1
                raise InputError(f"{where}: line {line}: key {key.value!r} is given twice")
            seen.add(str(key.value))
            _refuse_duplicates(value, where)
    elif isinstance(node, yaml.SequenceNode):
        for value in node.value:
            _refuse_duplicates(value, where)


def _keys(kind: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every key that a config of this type can have, and its type."""
    hints = typing.get_type_hints(kind)
    for each in dataclasses.fields(kind):
        hint, key = hints[each.name], f"{prefix}{each.name}"
        sections = [member for member in _members(hint) if dataclasses.is_dataclass(member)]
        for section in sections:
            yield from _keys(section, f"{key}.")
        if not sections:
            yield key, hint


def _members(kind: Any) -> tuple[Any, ...]:
    """The members of a union; of any other type, itself."""
    is_union = typing.get_origin(kind) in (typing.Union, types.UnionType)
    return typing.get_args(kind) if is_union else (kind,)


def _nearest(key: str, valid: Sequence[str]) -> str:
    last = key.rsplit(".", 1)[-1]
    same_end = [name for name in valid if name.rsplit(".", 1)[-1] == last]
    close = same_end or difflib.get_close_matches(key, valid, n=1, cutoff=0.5)
    return f"; the nearest valid name is {close[0]!r}" if close else f"; valid: {', '.join(valid)}"


def _convert(kind: Any, value: Any, where: _Source, key: str) -> Any:
    """`value` as `kind` (a dataclass, union, Literal, tuple or scalar type), or InputError."""
    members = _members(kind)
    if len(members) > 1:
        if value is None and type(None) in members:
            return None
        members = tuple(member for member in members if member is not type(None))
        if len(members) > 1 and str in members:
            # A source, or shares of sources: told apart by the value itself.
            (mapping,) = (member for member in members if member is not str)
            return _convert(mapping if isinstance(value, Mapping) else str, value, where, key)
        if len(members) > 1:
            return _convert(_choose(members, value, where, key), value, where, key)
        return _convert(next(iter(members)), value, where, key)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return _convert_dataclass(kind, value, where, key)
    if typing.get_origin(kind) is Literal:
        choices = typing.get_args(kind)
        if isinstance(value, str) and value in choices:
            return value
        allowed = ", ".join(map(repr, choices))
        raise InputError(f"{where.of(key)}: {key} must be one of {allowed}, found {value!r}")
    if typing.get_origin(kind) is tuple:
        inner: tuple[Any, ...] = typing.get_args(kind)
        if inner[1:] == (Ellipsis,):
            if not isinstance(value, Sequence) or isinstance(value, str) or not value:
                raise InputError(f"{where.of(key)}: {key} must be a list, found {value!r}")
            inner = inner[:1] * len(value)
        if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != len(inner):
            raise InputError(
                f"{where.of(key)}: {key} must be a list of {len(inner)}, found {value!r}"
            )
        return tuple(
            _convert(part, each, where, key) for part, each in zip(inner, value, strict=True)
        )
    if typing.get_origin(kind) is dict:
        return _convert_names(typing.get_args(kind)[1], value, where, key)
    return _convert_scalar(kind, value, where, key)


def _convert_names(kind: Any, value: Any, where: _Source, key: str) -> dict[str, Any]:
    """A mapping of names that the user chose."""
    if not isinstance(value, Mapping) or not value:
        raise InputError(f"{where.of(key)}: {key} must be a mapping of names, found {value!r}")
    for name in value:
        # YAML reads `on`, `3` and `null` as other things than names.
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise InputError(
                f"{where.of(key)}: {key} has the name {name!r}, expected up to 60 letters, digits, "
                'spaces or . _ % + -, in quotes where YAML reads something else ("70%")'
            )
    return {name: _convert(kind, each, where, f"{key}.{name}") for name, each in value.items()}


def _convert_scalar(kind: Any, value: Any, where: _Source, key: str) -> Any:
    if kind is float:
        if isinstance(value, str) and _EXPONENT.fullmatch(value):
            value = float(value)
        try:
            return checks.real(key, value)
        except InputError as error:
            raise InputError(f"{where.of(key)}: {error}") from error
    if isinstance(value, kind) and not (kind is int and isinstance(value, bool)):
        return value
    names = {int: "a whole number", bool: "true or false", str: "text"}
    raise InputError(f"{where.of(key)}: {key} must be {names[kind]}, found {value!r}")


def _choose(members: Sequence[Any], value: Any, where: _Source, key: str) -> Any:
    """The dataclass among `members` whose `name` field admits the `name` in `value`."""
    name = value.get("name") if isinstance(value, Mapping) else None
    known: list[str] = []
    for member in members:
        names = typing.get_args(typing.get_type_hints(member)["name"])
        if name in names:
            return member
        known.extend(names)
    raise InputError(
        f"{where.of(f'{key}.name')}: {key}.name must be one of {', '.join(map(repr, known))}, "
        f"found {name!r}"
    )


def _convert_dataclass(kind: type, value: Any, where: _Source, key: str) -> Any:
    if not isinstance(value, Mapping):
        found = "nothing" if value is None else type(value).__name__
        raise InputError(
            f"{where.of(key)}: {key or 'a config'} must be a mapping of keys, found {found}"
        )
    prefix = f"{key}." if key else ""
    hints = typing.get_type_hints(kind)
    valid = [f"{prefix}{name}" for name in hints]
    for name in value:
        if name not in hints:
            raise InputError(
                f"{where.of(prefix + str(name))}: there is no key {prefix + str(name)!r}"
                f"{_nearest(prefix + str(name), valid)}"
            )
    for each in dataclasses.fields(kind):
        required = (
            each.default is dataclasses.MISSING and each.default_factory is dataclasses.MISSING
        )
        if required and each.name not in value:
            raise InputError(f"{where.of(key)}: {prefix}{each.name} is required, found nothing")
    arguments = {
        name: _convert(hints[name], inner, where, f"{prefix}{name}")
        for name, inner in value.items()
    }
    try:
        return kind(**arguments)
    except InputError as error:
        message = str(error)
        # A settings class does not know in which section it stands.
        if kind is OptimizerConfig or message.partition(" ")[0] in hints:
            message = f"{prefix}{message}"
        raise InputError(f"{where.of(key)}: {message}") from error
