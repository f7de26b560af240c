"""Reads a `Config`, or a study's, from YAML and from the command line, and writes it back.

A key that does not exist, a value of the wrong type, a duplicate key and a YAML alias or tag are
all refused with one `InputError` that names the file and the key and, for a misspelling, the
nearest valid key.
"""

import contextlib
import dataclasses
import difflib
import io
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import yaml

from jaxpfl import checks
from jaxpfl.errors import InputError
from jaxpfl.experiments.config.sections import Config, OptimizerConfig
from jaxpfl.experiments.config.study_config import STUDIES, Study

_MAX_CONFIG_BYTES = 1_000_000
# YAML 1.1 reads `1e-5` as text; a float field takes it for the number that it is.
_EXPONENT = re.compile(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+")
# A name is also the name of a folder in the run directory.
_NAME = re.compile(r"\w[\w .%+-]{0,59}")


def load(path: str | Path, overrides: Sequence[str] = ()) -> Config | Study:
    """Reads a YAML file, then applies command-line overrides such as `--training.rounds 5`.

    Raises:
      InputError: on anything the dataclasses above do not have, naming file and key.
    """
    config = from_mapping(read_mapping(path), str(path))
    return override(config, overrides) if overrides else config


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


def from_mapping(mapping: Any, where: str) -> Config | Study:
    """Builds a `Config` from plain data; `where` (a file name) opens every message.

    A mapping with a key `study` is that study's config.
    """
    kind: type = Config
    if isinstance(mapping, Mapping) and "study" in mapping:
        name = mapping["study"]
        if not isinstance(name, str) or name not in STUDIES:
            known = ", ".join(map(repr, STUDIES))
            raise InputError(f"{where}: study must be one of {known}, found {name!r}")
        kind = STUDIES[name]
    return _convert(kind, mapping, where, "")


def to_mapping(config: Config | Study) -> dict[str, Any]:
    """The resolved config as plain data: `from_mapping(to_mapping(c), ...) == c`."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(inner) for key, inner in value.items()}
        return list(value) if isinstance(value, tuple) else value

    return plain(dataclasses.asdict(config))


def to_yaml(config: Config | Study) -> str:
    """The resolved config as YAML, in the order of the dataclasses."""
    return yaml.safe_dump(to_mapping(config), sort_keys=False, allow_unicode=True)


def override(config: Config | Study, arguments: Sequence[str]) -> Config | Study:
    """Applies `--section.key VALUE` arguments to `config` (tyro parses and type-checks them)."""
    import tyro

    where = "command line"
    valid = list(_key_names(config))
    for argument in arguments:
        if argument.startswith("--"):
            key = argument[2:].split("=", 1)[0].replace("-", "_")
            if key == "fred.candidates":
                raise InputError(f"{where}: fred.candidates can only be given in the config file")
            if key not in valid:
                raise InputError(f"{where}: there is no option --{key}{_nearest(key, valid)}")
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed), contextlib.redirect_stdout(printed):
            result, unknown = tyro.cli(
                type(config),
                args=list(arguments),
                default=config,
                return_unknown_args=True,
                add_help=False,
                config=(tyro.conf.AvoidSubcommands, tyro.conf.FlagConversionOff),
            )
    except SystemExit as error:
        words = re.sub(r"[^\x20-\x7e]+|-{5,}", " ", printed.getvalue())
        raise InputError(f"{where}: {' '.join(words.split())}") from error
    except InputError as error:
        raise InputError(f"{where}: {error}") from error
    if unknown:
        raise InputError(f"{where}: unexpected argument {unknown[0]!r}")
    # Once more through the same type checks as a file: tyro lets `nan` through, for one.
    return from_mapping(to_mapping(result), where)


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


def _key_names(value: Any, prefix: str = "") -> Iterator[str]:
    for each in dataclasses.fields(value):
        inner = getattr(value, each.name)
        if dataclasses.is_dataclass(inner):
            yield from _key_names(inner, f"{prefix}{each.name}.")
        else:
            yield f"{prefix}{each.name}"


def _nearest(key: str, valid: Sequence[str]) -> str:
    last = key.rsplit(".", 1)[-1]
    same_end = [name for name in valid if name.rsplit(".", 1)[-1] == last]
    close = same_end or difflib.get_close_matches(key, valid, n=1, cutoff=0.5)
    return f"; the nearest valid name is {close[0]!r}" if close else f"; valid: {', '.join(valid)}"


def _convert(kind: Any, value: Any, where: str, key: str) -> Any:
    """`value` as `kind` (a dataclass, union, Literal, tuple or scalar type), or InputError."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        members: tuple[Any, ...] = typing.get_args(kind)
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
        raise InputError(f"{where}: {key} must be one of {allowed}, found {value!r}")
    if typing.get_origin(kind) is tuple:
        inner: tuple[Any, ...] = typing.get_args(kind)
        if inner[1:] == (Ellipsis,):
            if not isinstance(value, Sequence) or isinstance(value, str) or not value:
                raise InputError(f"{where}: {key} must be a list, found {value!r}")
            inner = inner[:1] * len(value)
        if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != len(inner):
            raise InputError(f"{where}: {key} must be a list of {len(inner)}, found {value!r}")
        return tuple(
            _convert(part, each, where, key) for part, each in zip(inner, value, strict=True)
        )
    if typing.get_origin(kind) is dict:
        return _convert_names(typing.get_args(kind)[1], value, where, key)
    return _convert_scalar(kind, value, where, key)


def _convert_names(kind: Any, value: Any, where: str, key: str) -> dict[str, Any]:
    """A mapping of names that the user chose."""
    if not isinstance(value, Mapping) or not value:
        raise InputError(f"{where}: {key} must be a mapping of names, found {value!r}")
    for name in value:
        # YAML reads `on`, `3` and `null` as other things than names.
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise InputError(
                f"{where}: {key} has the name {name!r}, expected up to 60 letters, digits, spaces "
                'or . _ % + -, in quotes where YAML reads something else ("70%")'
            )
    return {name: _convert(kind, each, where, f"{key}.{name}") for name, each in value.items()}


def _convert_scalar(kind: Any, value: Any, where: str, key: str) -> Any:
    if kind is float:
        if isinstance(value, str) and _EXPONENT.fullmatch(value):
            value = float(value)
        try:
            return checks.real(key, value)
        except InputError as error:
            raise InputError(f"{where}: {error}") from error
    if isinstance(value, kind) and not (kind is int and isinstance(value, bool)):
        return value
    names = {int: "a whole number", bool: "true or false", str: "text"}
    raise InputError(f"{where}: {key} must be {names[kind]}, found {value!r}")


def _choose(members: Sequence[Any], value: Any, where: str, key: str) -> Any:
    """The dataclass among `members` whose `name` field admits the `name` in `value`."""
    name = value.get("name") if isinstance(value, Mapping) else None
    known: list[str] = []
    for member in members:
        names = typing.get_args(typing.get_type_hints(member)["name"])
        if name in names:
            return member
        known.extend(names)
    raise InputError(
        f"{where}: {key}.name must be one of {', '.join(map(repr, known))}, found {name!r}"
    )


def _convert_dataclass(kind: type, value: Any, where: str, key: str) -> Any:
    if not isinstance(value, Mapping):
        found = "nothing" if value is None else type(value).__name__
        raise InputError(f"{where}: {key or 'a config'} must be a mapping of keys, found {found}")
    prefix = f"{key}." if key else ""
    hints = typing.get_type_hints(kind)
    valid = [f"{prefix}{name}" for name in hints]
    for name in value:
        if name not in hints:
            raise InputError(
                f"{where}: there is no key {prefix + str(name)!r}"
                f"{_nearest(prefix + str(name), valid)}"
            )
    for each in dataclasses.fields(kind):
        required = (
            each.default is dataclasses.MISSING and each.default_factory is dataclasses.MISSING
        )
        if required and each.name not in value:
            raise InputError(f"{where}: {prefix}{each.name} is required, found nothing")
    arguments = {
        name: _convert(hints[name], inner, where, f"{prefix}{name}")
        for name, inner in value.items()
    }
    try:
        return kind(**arguments)
    except InputError as error:
        message = str(error)
        if message.startswith(f"{where}: "):
            raise
        # A settings class does not know in which section it stands.
        if kind is OptimizerConfig or message.partition(" ")[0] in hints:
            message = f"{prefix}{message}"
        raise InputError(f"{where}: {message}") from error
