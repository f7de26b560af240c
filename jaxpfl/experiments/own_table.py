"""Configs for a user's own table: of training (`jaxpfl init`), of public texts (`synthesize`).

That of training holds names of columns, numbers of clients, features and classes, the words of a
column of labels, and how many words the part of a text that it declares public has; no other value.
"""

import json
import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import jax
import yaml

from jaxpfl import checks, files
from jaxpfl.data.columns import is_numeric
from jaxpfl.data.open import corpora_in
from jaxpfl.data.open import open as open_population
from jaxpfl.data.population import Population
from jaxpfl.errors import InputError
from jaxpfl.experiments import carry_out
from jaxpfl.experiments.choose_corpus import named
from jaxpfl.experiments.registry import from_mapping
from jaxpfl.models.checkpoints import hub
from jaxpfl.printable import template
from jaxpfl.text.tokenisers.vocabulary import Vocabulary

_FEWEST = 20
_MOST_CLASSES = 100
_PLAIN = {"texts": 1_000, "judge": None, "cut": "messages"}


def init(file: str, **columns: str | None) -> str:
    """A config, as YAML with comments, for a table, all of which is read.

    Args:
      file: the table, as `data.open` takes it, perhaps with options, such as its encoding.
      columns: "client", "text", "label" and "features" of `data.open`: a word language model needs
        a text, a classifier a label and features. None: the default.
    """
    source, words = source_of(file, columns), list[str]()
    try:
        population = open_population(source)
    except InputError:
        if not (words := _words(file, columns)):
            raise
        source += "&classes=" + ",".join(quote(word, safe=" ") for word in words)
        population = open_population(source)
    table_columns, classes, features = population.columns, 0, 0
    texts, labels, inputs = (name in table_columns for name in ("text", "label", "features"))
    if texts == inputs or labels != inputs:
        columns_here = f"{', '.join(table_columns)}; `jaxpfl configs digits_cnn` is for images"
        raise InputError(f"{source}: expected a text, or label and features, found {columns_here}")
    clients, examples = len(population), population.num_examples
    if clients < _FEWEST:
        raise InputError(f"{source}: has fewer than {_FEWEST} clients, too few to train and test")
    if labels:
        classes = max(2, len(words), int(table_columns["label"].max()) + 1)
        features = table_columns["features"].shape[1]
    # Few clients may leave a small part without any.
    scored = 0.1 if classes or clients < 200 else 0.05
    public = 0.0 if classes else 0.1
    train = round(1 - 2 * scored - public, 2)
    split = {"train": train, "valid": scored, "test": scored, "public": public}
    declared = None if classes else population.split(split, seed=0)["public"]
    return _checked(
        "init.yaml.jinja",
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


def _checked(name: str, **settings: Any) -> str:
    """The config that a template makes; refused if `jaxpfl run` would refuse it."""
    config = template(__package__ or "", name).render(settings)
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
        more = f"more than {_MOST_CLASSES} different texts; ?classes=A,B,... lists those meant"
        raise InputError(f"{file}: expected labels in the column {label!r}, found {more}")
    return words


def source_of(file: str, columns: Mapping[str, str | None]) -> str:
    """The source of a table, perhaps with options, whose columns have these names; None: as is."""
    table, *options = file.split("?", 1)
    options += [f"{name}={quote(x, safe=', *|')}" for name, x in columns.items() if x is not None]
    return f"{table}?{'&'.join(options)}" if options else file


def usual_delta(clients: int) -> float:
    """A power of ten, at most 0.1 / N."""
    return 10.0 ** -math.ceil(math.log10(10 * clients))


def config_of(
    clients: str,
    public: Sequence[str],
    *,
    epsilon: float = 4.0,
    delta: float | None = None,
    embedder: str | Sequence[str] | None = None,
    writer: str | None = None,
    ledger: str | Path | None = None,
    labels: tuple[str, Sequence[str]] | None = None,
    **plain: Any,
) -> str:
    """A config, as YAML with comments; arguments as of `synthesize`, also `texts`, `judge`, `cut`.

    Where no delta is given, all of the table is read, to count its clients.
    """
    if unknown := plain.keys() - _PLAIN.keys():
        raise TypeError(f"synthesize has no argument {min(unknown)!r}")
    sources = [source for given in public for source in corpora_in(given)]
    generator: dict[str, Any] | None = None
    if writer is not None:
        api, _, model = writer.partition("#")
        generator = {"path": writer, "chat": False}
        if "://" in api:
            generator = {"api": api, "model": model}
            if not model:
                form = "ADDRESS#MODEL, as in http://127.0.0.1:8000/v1#MODEL"
                raise InputError(f"writer must be {form}, found no #")
    number = len(open_population(clients)) if delta is None else None
    if number == 0:
        raise InputError(f"{clients}: has no clients")
    return _checked(
        "synthesize.yaml.jinja",
        # A string of JSON is one of YAML, too.
        clients=json.dumps(clients, ensure_ascii=False),
        number=number,
        corpora=json.dumps(named(sources), ensure_ascii=False, indent=2),
        epsilon=epsilon,
        delta=delta if number is None else usual_delta(number),
        ledger=json.dumps(None if ledger is None else str(ledger)),
        embedder=json.dumps(embedder or ("hashed" if hub.at_hand("minilm") is None else "minilm")),
        **{name: json.dumps(value) for name, value in (_PLAIN | plain).items()},
        writer=json.dumps(None if generator is None else {"generator": generator}),
        labels=labels and json.dumps({"column": labels[0], "names": list(labels[1])}),
    )


def synthesize(
    clients: str | Population,
    public: str | Sequence[str],
    *,
    epsilon: float,
    out: str | Path,
    progress: bool = True,
    **settings: Any,
) -> carry_out.Outcome:
    """Chooses public texts that are together like the clients', by one release of these.

    The new directory `out` gets corpus.jsonl, card.md, certificate.json, ledger.jsonl and
    report.html. `jaxpfl resume` goes on with an interrupted run, at no further cost.

    Args:
      clients: a source, or a population, as `data.from_dataframe` makes it, which is saved in
        `out`/private. Their number is public.
      public: sources, each SOURCE or NAME=SOURCE, or folders, each file of which is one.
      settings: these arguments of `config_of`:
      delta: None: the largest power of ten that is at most 0.1 / the number of clients.
      texts: how many are chosen.
      embedder: one or several, which share the release. None: minilm where its weights are at
        hand, else hashed.
      judge: a further one, with a tenth of the release, which decides nothing: how near the texts
        are by it is reported.
      cut: the rule by which the texts of clients and corpora are cut, see `text.cut`.
      writer: the language model that continues chosen texts, after which all are chosen anew:
        smollm2, a folder, a name on the Hugging Face hub, or ADDRESS#MODEL of an OpenAI-compatible
        server, whose owner sees these public texts. None: no text is written.
      ledger: the file to charge; None: `out`/ledger.jsonl.
      labels: a column of the clients, which a source must name (`?columns=`), and a PUBLIC list of
        its values: texts are chosen for each, by the one release. None: for all together.

    Raises:
      InputError: the config cannot be carried out; a public source holds the clients' data; there
        are too few public texts; or noise hides all of the clients' texts.
      BudgetExhausted: the release does not fit the ledger's budget; nothing was released.
    """
    checks.instance("clients", clients, (str, Population), "a source or a Population")
    directory, saved = files.user_path(out), None
    sources = [public] if isinstance(public, str) else public
    if isinstance(clients, Population):
        files.make_directory(directory)
        saved = files.private_directory(directory / "private") / "clients"
        clients.save(saved)
    try:
        text = config_of(str(saved or clients), sources, epsilon=epsilon, **settings)
        config = from_mapping(yaml.safe_load(text), "synthesize")
        # On other devices, `jaxpfl resume` would make another release.
        run = replace(config.run, devices=jax.device_count())
        return carry_out.run(replace(config, run=run), directory, progress=progress)
    except InputError:
        if saved is not None and not (directory / "config.yaml").exists():
            shutil.rmtree(saved)
        raise
