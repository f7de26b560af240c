"""`jaxpfl init FILE`: a config for a user's own table.

It holds the names of columns, the numbers of clients, features and classes, the words of a column
of labels, and the number of words of the part of a text that it declares public; no other value.
"""

import json
import math
from collections.abc import Mapping
from urllib.parse import quote

import yaml

from jaxpfl.data.columns import is_numeric
from jaxpfl.data.open import open as open_population
from jaxpfl.errors import InputError
from jaxpfl.experiments.registry import from_mapping
from jaxpfl.printable import template
from jaxpfl.text.tokenisers.vocabulary import Vocabulary

_FEWEST = 20
_MOST_CLASSES = 100


def init(file: str, **columns: str | None) -> str:
    """A config, as YAML with comments, for a table, all of which is read.

    Args:
      file: the table, as `data.open` takes it, perhaps with options, such as its encoding.
      columns: "client", "text", "label" and "features" of `data.open`: a word language model needs
        a text, a classifier a label and features. None: the default.
    """
    source = source_of(file, columns)
    words: list[str] = []
    try:
        population = open_population(source)
    except InputError:
        words = _words(file, columns)
        if not words:
            raise
        source += "&classes=" + ",".join(quote(word, safe=" ") for word in words)
        population = open_population(source)
    table_columns, classes, features = population.columns, 0, 0
    texts, labels, inputs = (name in table_columns for name in ("text", "label", "features"))
    if texts == inputs or labels != inputs:
        raise InputError(
            f"{source}: expected a text, or a label and features that it is predicted from, found "
            f"{', '.join(table_columns)}; of images, `jaxpfl configs digits_cnn` prints a config"
        )
    clients, examples = len(population), population.num_examples
    if clients < _FEWEST:
        raise InputError(
            f"{source}: has fewer than {_FEWEST} clients, which cannot be divided into those that "
            "train and those that test"
        )
    if labels:
        classes = max(2, len(words), int(table_columns["label"].max()) + 1)
        features = table_columns["features"].shape[1]
    # Few clients may leave a small part without any.
    scored = 0.1 if classes or clients < 200 else 0.05
    public = 0.0 if classes else 0.1
    train = round(1 - 2 * scored - public, 2)
    split = {"train": train, "valid": scored, "test": scored, "public": public}
    declared = None if classes else population.split(split, seed=0)["public"]
    config = template(__package__ or "", "init.yaml.jinja").render(
        # A string of JSON is one of YAML, too.
        source=json.dumps(source, ensure_ascii=False),
        clients=clients,
        classes=classes,
        words_of_labels=bool(words),
        features=features,
        words=len(Vocabulary.from_public(declared, 4_000)) if declared is not None else 0,
        split=yaml.safe_dump(split, default_flow_style=True, sort_keys=False).strip(),
        delta=usual_delta(clients),
        cohort=max(2, min(400, round(train * clients / 4))),
        # Above the mean, so that most clients keep all; a power of two.
        most=min(64, 2 ** math.ceil(math.log2(2 * examples / clients + 1))),
    )
    # Refuses a config that `jaxpfl run` would refuse.
    from_mapping(yaml.safe_load(config), "the config for the table")
    return config


def _words(file: str, columns: Mapping[str, str | None]) -> list[str]:
    """The words of a column of labels, in the order of the alphabet; [] where it holds others."""
    label, options = columns.get("label"), file.partition("?")[2]
    if label is None or "classes=" in options:
        return []
    table = open_population(source_of(file, {**columns, "label": None, "columns": label}))
    if is_numeric(values := table.columns[label]):
        return []
    words = sorted({word for value in values.unique().to_pylist() if (word := value.strip())})
    if len(words) > _MOST_CLASSES:
        raise InputError(
            f"{file}: expected labels in the column {label!r}, found more than {_MOST_CLASSES} "
            "different texts; ?classes=A,B,... lists those that are meant"
        )
    return words


def source_of(file: str, columns: Mapping[str, str | None]) -> str:
    """The source of a table, perhaps with options, whose columns have these names; None: as is."""
    table, *options = file.split("?", 1)
    given = {name: column for name, column in columns.items() if column is not None}
    options += [f"{name}={quote(column, safe=', *|')}" for name, column in given.items()]
    return f"{table}?{'&'.join(options)}" if options else file


def usual_delta(clients: int) -> float:
    """A power of ten, at most 0.1 / N."""
    return 10.0 ** -math.ceil(math.log10(10 * clients))
