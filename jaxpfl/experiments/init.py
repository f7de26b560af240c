"""`jaxpfl init FILE`: a config for a table of one's own, guessed from its columns.

Names of columns and the numbers of clients and classes go into the config; no other value does.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pyarrow as pa
import yaml

from jaxpfl.data.readers.fields import Fields
from jaxpfl.data.readers.table import first_rows, read_table
from jaxpfl.errors import InputError
from jaxpfl.experiments.init_config import config_text
from jaxpfl.experiments.registry import from_mapping

_SAMPLE = 2_000
_MOST_CLASSES = 200
_FEWEST = 20
_CLIENTS = (
    *("client", "user", "author", "customer", "patient", "person", "member", "subject"),
    *("speaker", "writer", "device", "account", "owner", "player", "student", "worker"),
    *("employee", "sender", "nick", "household", "hospital", "shop", "store"),
)
_TEXTS = (
    *("text", "message", "body", "content", "comment", "review", "sentence", "post", "tweet"),
    *("title", "abstract", "speech", "description", "utterance", "note", "question", "answer"),
)
_LABELS = ("label", "class", "target", "y", "category", "outcome", "rating", "stars", "score")
# No quantity that a class could follow from.
_NO_FEATURES = {"id", "index", "row", "number", "timestamp", "time", "date", "zip", "phone"}


@dataclass(frozen=True)
class Guess:
    """What a column is taken for, and why."""

    column: str
    why: str


def init(
    file: str,
    *,
    client: str | None = None,
    text: str | None = None,
    label: str | None = None,
) -> tuple[str, list[str]]:
    """A config for a table.

    Args:
      file: the table, as `data.open` takes it, without options.
      client, text, label: columns, in place of guesses; "*" makes each row a client.

    Returns:
      The config as YAML with comments, and what was guessed, a line each.

    Raises:
      InputError: the file cannot be read, has no such column, or has neither texts, nor labels and
        numbers that they could be predicted from.
    """
    path = Path(file).expanduser()
    if re.search(r"[?%]", file):
        raise InputError(f"{file}: a table whose name has ? or % must be renamed first")
    columns = {name: each for name, each in first_rows(path, _SAMPLE).items() if _usable(name)}
    for asked in (client, text, label):
        if asked is not None and asked != "*" and asked not in columns:
            known = ", ".join(map(repr, columns)) or "none"
            raise InputError(f"{file}: there is no column {asked!r}, found {known}")
    whose = _given(client) or _client(columns, {text, label})
    others = {name: each for name, each in columns.items() if name != whose.column}
    about = None if label and not text else _given(text) or _text(others)
    features: list[str] = []
    if about is None:
        target = _given(label) or _label(others)
        features = [name for name, each in others.items() if _is_feature(name, each, target)]
        if target is None or not features:
            kinds = ", ".join(f"{name!r} ({_kind(each)})" for name, each in columns.items())
            raise InputError(
                f"{file}: found no column of texts, and no whole-number label with columns of "
                f"numbers to predict it from; its columns are {kinds or 'none'}. Name them by "
                "--client, --text or --label"
            )
        guesses = {"client": whose, "label": target}
    else:
        guesses = {"client": whose, "text": about}
    named = [(guess.column, kind) for kind, guess in guesses.items() if guess.column != "*"]
    fields = Fields([*named, *((name, "number") for name in features)])
    clients, rows, classes = _count(path, fields, whose, guesses.get("label"))
    said = [f"{kind:<10}{guess.column!r}: {guess.why}" for kind, guess in guesses.items()]
    options = {kind: guess.column for kind, guess in guesses.items()}
    sizes = None
    if features:
        listed = ", ".join(map(repr, features))
        said.append(f"features  {listed}: the other columns of numbers without gaps")
        options["features"] = ",".join(features)
        sizes = sum(math.prod(_shape(fields.types[name])) for name in features), classes
    config = config_text(_source(file, options), clients, rows, said, sizes)
    # Nothing is written that `jaxpfl run` would refuse.
    from_mapping(yaml.safe_load(config), "the config for the table")
    return config, said


def _count(path: Path, fields: Fields, whose: Guess, target: Guess | None) -> tuple[int, int, int]:
    """The numbers of clients, rows and classes; reads the whole file, and so checks it."""
    ids: list[pa.Array] = []
    rows = classes = 0
    for each in read_table(path, fields):
        rows += len(each.numbers)
        if whose.column != "*":
            ids = [pa.concat_arrays([*ids, each.columns[whose.column].cast(pa.large_string())])]
            ids = [ids[0].unique()]
        if target is not None:
            labels = each.columns[target.column].cast(pa.int64()).to_numpy()
            classes = max(classes, int(np.max(labels)) + 1)
    if not rows:
        raise InputError(f"{path} has no rows")
    clients = len(ids[0]) if ids else rows
    if clients < _FEWEST:
        raise InputError(
            f"{path}: the column {whose.column!r} has fewer than {_FEWEST} clients, which cannot "
            "be divided into those that train and those that test; name another one by --client"
        )
    return clients, rows, max(classes, 2)


def _shape(type_: pa.DataType) -> list[int]:
    if not pa.types.is_fixed_size_list(type_):
        return []
    return [type_.list_size, *_shape(type_.value_type)]


def _source(file: str, options: Mapping[str, str]) -> str:
    """The source with the options that are not the default."""
    default = {"client": "client", "text": "text"}
    changed = {name: given for name, given in options.items() if default.get(name) != given}
    query = "&".join(f"{name}={quote(given, safe=', *')}" for name, given in changed.items())
    return f"{file}?{query}" if query else file


def _given(column: str | None) -> Guess | None:
    return None if column is None else Guess(column, "as given")


def _client(columns: Mapping[str, list[Any]], taken: set[str | None]) -> Guess:
    ids = {
        name: values
        for name, values in columns.items()
        if name not in taken and _kind(values) in ("text", "whole number")
    }
    named = _first(ids, _CLIENTS)
    if named is not None:
        return named
    for name, values in ids.items():
        different, words = len(set(values)), [len(str(value).split()) for value in values]
        is_id = _kind(values) == "text" or set(_words(name)) & {"id", "ids"}
        if is_id and 2 <= different <= len(values) / 2 and max(words, default=9) <= 3:
            return Guess(name, "its values repeat, and each is short")
    return Guess("*", "no column looks like whose a row is, so each row is a client of its own")


def _text(columns: Mapping[str, list[Any]]) -> Guess | None:
    texts = {name: values for name, values in columns.items() if _kind(values) == "text"}
    named = _first(texts, _TEXTS)
    if named is not None:
        return named
    length = {name: np.mean([len(str(v).split()) for v in each]) for name, each in texts.items()}
    longest = max(length, key=lambda name: length[name], default=None)
    if longest is not None and length[longest] >= 3:
        return Guess(longest, "the column of the longest texts")
    return None


def _label(columns: Mapping[str, list[Any]]) -> Guess | None:
    classes = {name: values for name, values in columns.items() if _could_be_classes(values)}
    named = _first(classes, _LABELS)
    if named is not None:
        return named
    last = next(reversed(classes), None)
    few = f"its few whole numbers could be classes (at most {_MOST_CLASSES})"
    return None if last is None else Guess(last, few)


def _first(columns: Mapping[str, list[Any]], known: Sequence[str]) -> Guess | None:
    """The first column that is named by one of these words, in the words' order."""
    for word in known:
        for name in columns:
            if {word, f"{word}s"} & set(_words(name)):
                return Guess(name, f"its name has the word {word!r}")
    return None


def _words(name: str) -> list[str]:
    """The words of a column's name: of userId and user_id, user and id."""
    parts = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name)
    return re.split(r"[\W_\d]+", parts.lower())


def _usable(name: str) -> bool:
    """Whether a source's options can name the column."""
    return bool(name.strip()) and not re.search(r"[,|]", name)


def _kind(values: Sequence[Any]) -> str:
    # One that is missing is refused with its row, when all rows are read.
    kinds = {type(value) for value in values} - {type(None)}
    for known, called in (
        ({bool}, "boolean"),
        ({int}, "whole number"),
        ({int, float}, "number"),
        ({str}, "text"),
        ({list}, "list"),
    ):
        if kinds and kinds <= known:
            return called
    return "other" if kinds else "without values"


def _could_be_classes(values: Sequence[Any]) -> bool:
    if _kind(values) == "boolean":
        return True
    numbers = [value for value in values if value is not None]
    return _kind(values) == "whole number" and min(numbers) >= 0 and max(numbers) < _MOST_CLASSES


def _is_feature(name: str, values: Sequence[Any], target: Guess | None) -> bool:
    if (target is not None and name == target.column) or set(_words(name)) & _NO_FEATURES:
        return False
    if None in values:
        return False
    if _kind(values) == "list":
        flat = [np.shape(value) for value in values]
        return len(set(flat)) == 1 and all(np.asarray(v).dtype.kind in "iuf" for v in values)
    return _kind(values) in ("boolean", "whole number", "number")
