"""`open(source)`: from what a user writes to a population.

    docstrings:jax,scipy,pandas            documented classes and functions of Python packages
    largefedbench:congress?revision=HEX    POPri's speeches (or biorxiv: abstracts) from the hub, a
                                           client each; with &text=FIELD&part=train
                                           &split=sentences&min_examples=5, each optional
    huggingface:OWNER/NAME?revision=HEX    any data set of the hub, a row = a client; with
                                           &text=COLUMN&client=COLUMN&part=train&config=NAME
                                           &split=sentences&min_examples=5, each optional
                                           with client=COLUMN|RULE it is read as a table
    digits?clients=100&alpha=0.5&seed=0    scikit-learn's digits, dealt to clients
    PATH.jsonl, .json, .csv, .parquet,     a table, a row = an example; with ?client=FIELD
      .arrow, .jsonl.gz, .json.gz,         &text=FIELD&label=FIELD&features=FIELD,FIELD
      .csv.gz                              &columns=FIELD,FIELD&split=sentences&min_examples=5, each
                                           optional, see `readers.examples.Layout`; ?client=* makes
                                           each row a client
    the same with ?client=FIELD|RULE,      tables larger than memory, in one file or in all such
      FOLDER?client=FIELD                  files of a folder. A rule is domain, re:PATTERN,
                                           mod:NUMBER or value, see `readers.client_key`
    PATH.npz                               NumPy arrays of images, labels and client ids; with
                                           ?client=ARRAY&image=ARRAY&label=ARRAY&min_examples=5,
                                           each optional ("client", "images", "labels")
    PATH.txt, PATH.txt.gz                  plain text: one client, an example is a paragraph;
                                           with ?split=sentences or ?split=lines
    PATH.tar.gz, PATH.tar.xz               an archive of .txt files: a client is a file; with
                                           ?split=...&min_examples=5
    PATH.sqlite, PATH.sqlite.lzma          a data set of TensorFlow Federated; with ?dataset=emnist
                                           (emnist_36 without the case of letters,
                                           stackoverflow, shakespeare, cifar100, celeba), and
                                           &split=all_train&form=raw&sha256=HEX&min_examples=5,
                                           each optional (see `readers.tff_sqlite`)
    FOLDER                                 what Population.save or `jaxpfl convert` wrote

A path may begin with ~ or contain $NAME, an environment variable. With `split`, an example of a
text file is a sentence, paragraph or line (see `readers.prose`), and min_examples counts these; for
TensorFlow Federated's files it names the part to read. With `min_examples=5`, clients with fewer
examples become empty but remain clients, because how many they are follows from private data.

Data without clients is dealt to made-up ones: PATH.npz?client=*&partition=dirichlet&clients=100
&by=label&alpha=0.3&seed=0, see `data.partitions` for the other schemes and their settings.
"""

import dataclasses
import difflib
import os
import re
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qsl

from jaxpfl import checks
from jaxpfl.data import storage
from jaxpfl.data.catalogue import data_sets, holding
from jaxpfl.data.partitions import SCHEMES, Scheme, partition
from jaxpfl.data.population import Population, collect
from jaxpfl.data.readers import plain_text, table, tff_sqlite
from jaxpfl.data.readers.arrays import IMAGE_COLUMNS, read_arrays
from jaxpfl.data.readers.digits import read_digits
from jaxpfl.data.readers.docstrings import read_docstrings
from jaxpfl.data.readers.examples import EACH_ROW, Layout, population_of
from jaxpfl.data.readers.grouped import stream_grouped
from jaxpfl.data.readers.hugging_face import (
    CORPORA,
    read_hugging_face,
    read_largefedbench,
    rows_of_hub,
)
from jaxpfl.data.readers.prose import PIECES
from jaxpfl.data.readers.tff_schemas import SCHEMAS
from jaxpfl.data.stream import Stream
from jaxpfl.errors import InputError, NoDataFolder

_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")


def _names(value: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in value.split(","))


# Options of a kind of source, each with what converts its text, or the words that it may be.
_Options = Mapping[str, Callable | tuple[str, ...]]


class _Kind(NamedTuple):
    """A kind of source: its options, and what reads one with the given options."""

    options: _Options
    read: Callable[..., Population]


def _read_npz(named: "_Named", client: str = "client", **columns: str) -> Population:
    wanted = {**IMAGE_COLUMNS, **columns}
    return read_arrays(named.path, client=client, columns=wanted, name=named.head)


def _read_tff(named: "_Named", **options: str) -> Population:
    return tff_sqlite.read_tff(named.path, name=named.of_split(options), **options)


def _read_text(named: "_Named", **options: str) -> Population:
    return plain_text.read_plain_text(named.path, name=named.head, **options)


def _read_table(named: "_Named", **options: Any) -> Population:
    layout = named.layout(options)
    rows = table.read_table(named.path, layout.fields)
    return population_of(rows, layout, name=named.head, unit=layout.unit)


def _read_grouped(named: "_Named", **options: Any) -> Population:
    """Reads a table into memory, by way of files on the disk."""
    with _stream_grouped(named, options) as found:
        return collect(found)


def _hub(read: Callable[..., Population]) -> Callable[..., Population]:
    return lambda named, **options: read(named.name, **{"revision": "", **options})


_TEXT: _Options = {"split": PIECES, "min_examples": int}
_TABLE: _Options = {
    **dict.fromkeys(("client", "text", "label"), str),
    **dict.fromkeys(("features", "columns"), _names),
    **_TEXT,
}
_OF_HUB = ("revision", "part", "config")
_ON_HUB: _Options = {**_TEXT, **dict.fromkeys(("revision", "part", "text"), str)}
_TFF: _Options = {
    "dataset": tuple(SCHEMAS),
    **dict.fromkeys(("split", "form", "sha256"), str),
    "min_examples": int,
}
_NPZ: _Options = {**dict.fromkeys(("client", *IMAGE_COLUMNS), str), "min_examples": int}

_NAMED: dict[str, _Kind] = {
    "docstrings": _Kind({}, lambda named: read_docstrings(_names(named.name))),
    "digits": _Kind(
        {"clients": int, "alpha": float, "seed": int}, lambda _, **options: read_digits(**options)
    ),
    "largefedbench": _Kind(_ON_HUB, _hub(read_largefedbench)),
    "huggingface": _Kind({**_ON_HUB, "client": str, "config": str}, _hub(read_hugging_face)),
}
"""Kinds of sources by the word before the colon."""

_FILES: dict[str, _Kind] = {
    **dict.fromkeys(table.ENDINGS, _Kind(_TABLE, _read_table)),
    ".npz": _Kind(_NPZ, _read_npz),
    **dict.fromkeys(plain_text.ENDINGS, _Kind(_TEXT, _read_text)),
    **dict.fromkeys(tff_sqlite.ENDINGS, _Kind(_TFF, _read_tff)),
}
"""Kinds of files by the ending of their names."""

_STORED = _Kind({}, lambda named: Population.load(named.path))


class _Named:
    """What a user wrote: a name or a path, and options.

    Attributes:
      source: all of it, for messages.
      head: what is before the options.
      options: as they were written.
      reader: one of `_NAMED`, or "" for a path.
      name: what follows the reader's colon.
    """

    def __init__(self, source: str | Path) -> None:
        self.source = self.head = str(source)
        self._literal, query = isinstance(source, Path), ""
        if not self._literal:
            self.head, _, query = self.source.partition("?")
        self.options = _parse_query(self.source, query)
        reader, _, self.name = self.head.partition(":")
        known = reader in _NAMED and not (reader == "digits" and self.name) and not self._literal
        self.reader = reader if known else ""

    @property
    def path(self) -> Path:
        """Raises `InputError` where a variable is not set."""
        return Path(self.head if self._literal else expanded(self.head))

    @property
    def place(self) -> Path:
        """The path as far as its variables are set."""
        return Path(os.path.expandvars(os.path.expanduser(self.head)))

    @property
    def on_hub(self) -> bool:
        return self.reader in ("largefedbench", "huggingface")

    @property
    def grouped(self) -> bool:
        """Whether it is a table whose rows are grouped by client on the disk."""
        if self.reader == "huggingface" or self.head.endswith(table.ENDINGS):
            return "|" in self.options.get("client", "")
        return bool(self.options) and self.place.is_dir() and not storage.is_stored(self.place)

    @property
    def grouped_options(self) -> _Options:
        hub = {**_ON_HUB, "config": str} if self.reader else {}
        return {**hub, **_TABLE}

    def kind(self) -> _Kind:
        """How it is read.

        Raises:
          InputError: no such reader, file or ending.
        """
        if self.grouped:
            return _Kind(self.grouped_options, _read_grouped)
        if self.reader:
            return _NAMED[self.reader]
        path = self.path
        if path.is_dir():
            if not storage.is_stored(path):
                made = "expected one made by Population.save or `jaxpfl convert`"
                raise InputError(f"source {self.source!r}: a folder without a manifest, {made}")
            return _STORED
        kind = self.of_ending()
        if kind is None and (path.exists() or not holding(self.source)):
            raise self.unknown(path)
        if kind is None or not path.is_file():
            raise self.missing()
        return kind

    def of_ending(self) -> _Kind | None:
        found = (kind for ending, kind in _FILES.items() if self.place.name.endswith(ending))
        return next(found, None)

    def typed(self, kinds: _Options) -> dict[str, Any]:
        """The options as a reader's arguments."""
        return _typed(self.source, self.options, kinds)

    def scheme(self) -> Scheme | None:
        """The partition that the options name; its settings are taken out of them."""
        if "partition" not in self.options:
            return None
        what, options = f"source {self.source!r}: partition", self.options
        made = SCHEMES[checks.one_of(what, options.pop("partition"), tuple(SCHEMES))]
        fields = {field.name: field.type for field in dataclasses.fields(made)}
        given = {name: options.pop(name) for name in list(options) if name in fields}
        kinds = {name: kind if kind in (int, float) else str for name, kind in fields.items()}
        try:
            return made(**_typed(self.source, given, kinds))
        except TypeError:
            raise InputError(f"{what} needs the option {next(iter(fields))!r}") from None

    def layout(self, options: Mapping[str, Any]) -> Layout:
        try:
            return Layout(**{name: each for name, each in options.items() if name not in _OF_HUB})
        except InputError as error:
            raise InputError(f"source {self.source!r}: {error}") from None

    def of_split(self, options: Mapping[str, str]) -> str:
        """The population's name, of a file that has several."""
        return f"{self.head} [{options['split']}]" if "split" in options else self.head

    def missing(self) -> InputError:
        known = holding(self.source)
        hint = f"; `jaxpfl data get {known}` fetches it, or says how to make it" if known else ""
        return InputError(f"source {self.source!r}: there is no such file{hint}")

    def unknown(self, path: Path) -> InputError:
        endings = ", ".join(_FILES)
        if path.exists():
            return InputError(f"source {self.source!r}: expected a name ending in {endings}")
        word = re.split(r"[:?]", self.source)[0]
        near = difflib.get_close_matches(word, _NAMED, 1, 0.5)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        return InputError(
            f"unknown source {self.source!r}{hint}: expected docstrings:PACKAGES, digits, "
            f"largefedbench:congress, huggingface:OWNER/NAME, a path ending in {endings}, or a "
            "folder made by Population.save"
        )


def open(source: str | Path | Population) -> Population:
    """The population of a source; a population is its own source.

    Raises:
      InputError: no such reader, package, file or option; or the content of the file is not valid.
      CorruptFile: the file is truncated or altered.
    """
    if isinstance(source, Population):
        return source
    if not isinstance(source, str | Path) or not source:
        raise InputError(f"a source must be a path or a string, found {type(source).__name__}")
    named = _Named(source)
    kind, scheme = named.kind(), named.scheme()
    options = named.typed(kind.options)
    at_least = checks.positive_int("min_examples", options.pop("min_examples", 1))
    population = kind.read(named, **options)
    if scheme is not None:
        return partition(population, scheme)
    return population.with_min_examples(at_least) if at_least > 1 else population


def streamed(source: str | Path) -> Callable[[Path], AbstractContextManager[Stream]]:
    """What opens the source's population batch by batch, given a folder for temporary files.

    TensorFlow Federated's files and tables are not read into memory, and neither is a folder, which
    is mapped; other sources are. Errors are those of `open`, here or while the stream is read.
    """
    named = _Named(str(source))
    whole = bool({"min_examples", "partition"} & named.options.keys())
    if named.grouped and not whole:
        return partial(_stream_grouped, named, named.typed(named.grouped_options))
    if whole or not named.head.endswith(tff_sqlite.ENDINGS):
        population = open(source)
        return lambda _: nullcontext(population.stream())
    options, path = named.typed(_TFF), named.path
    title = named.of_split(options)
    return lambda folder: tff_sqlite.stream_tff(path, name=title, folder=folder, **options)


def why_missing(source: str) -> str:
    """Why a source is not at hand, or "" if it is; reads no data and asks no hub.

    Raises:
      InputError: no such reader, file ending or option, so `open` would refuse it everywhere.
    """
    named = _Named(source)
    named.scheme()
    path = named.place
    if named.grouped:
        named.layout(named.typed(named.grouped_options))
    elif named.reader or path.exists():
        named.typed(named.kind().options)
    if named.on_hub:
        return "it is on the Hugging Face hub, which was not asked"
    if named.reader or path.exists():
        return ""
    kind = named.of_ending()
    if kind is not None:
        named.typed(kind.options)
    elif path.suffix or not path.parent.name:
        raise named.unknown(path)
    elif named.options:
        # Of a stored population, a folder that is not there would have none.
        named.typed(_TABLE)
    unset = [name for pair in _VARIABLE.findall(str(path)) for name in pair if name]
    return f"the environment variable {unset[0]} is not set" if unset else "there is no such file"


def place(source: str) -> str:
    """Where a source's data is, however it is spelled: two sources of one place hold the same.

    A path is resolved as far as its variables are set; options are left out.
    """
    named = _Named(source)
    if named.reader == "largefedbench":
        return f"huggingface:{CORPORA.get(named.name, named.name)}"
    return named.head if named.reader else str(named.place.resolve())


def _stream_grouped(
    named: _Named, options: Mapping[str, Any], folder: Path | None = None
) -> AbstractContextManager[Stream]:
    layout = named.layout(options)
    if layout.client == EACH_ROW:
        raise InputError(f"source {named.source!r}: client=* is for one file, found a folder")
    if named.reader:
        given = {key: options[key] for key in _OF_HUB if key in options}
        which = {"revision": "", "part": "train"} | given
        rows, title = rows_of_hub(named.name, which), f"{named.head} [{which['part']}]"
        read = partial(table.read_mappings, named.name, rows)
    else:
        if not named.path.exists():
            raise named.missing()
        read, title = partial(table.read_table, named.path), named.head
    return stream_grouped(read, layout, name=title, folder=folder)


def expanded(path: str) -> str:
    """A path with its ~ and its environment variables replaced.

    Raises:
      InputError: a variable is not set.
    """

    def value(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        if not os.environ.get(name):
            what = f"source {path!r}: the environment variable {name} is not set"
            if name in {each.variable for each in data_sets().values()}:
                raise NoDataFolder(f"{what}; `jaxpfl data list` says what belongs there")
            raise InputError(what)
        return os.environ[name]

    return os.path.expanduser(_VARIABLE.sub(value, path))


def _parse_query(source: str, query: str) -> dict[str, str]:
    if not query:
        return {}
    try:
        # A plus is itself, as regular expressions need it, and not a space.
        plain = query.replace("+", "%2B")
        pairs = parse_qsl(plain, strict_parsing=True, keep_blank_values=False)
    except ValueError:
        raise InputError(f"source {source!r}: options must be NAME=VALUE, joined by &") from None
    options = dict(pairs)
    if len(options) != len(pairs):
        raise InputError(f"source {source!r}: an option is given twice")
    return options


def _typed(source: str, options: dict[str, str], kinds: _Options) -> dict[str, Any]:
    """The options as a reader's arguments."""
    typed = {}
    for name, value in options.items():
        if name not in kinds:
            near = difflib.get_close_matches(name, kinds, 1, 0.5)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            expected = ", ".join(kinds) or "none"
            raise InputError(f"source {source!r}: no option {name!r}{hint}; expected {expected}")
        kind, what = kinds[name], f"source {source!r}: {name}"
        try:
            typed[name] = kind(value) if callable(kind) else checks.one_of(what, value, kind)
        except InputError:
            raise
        except ValueError:
            raise InputError(f"{what} must be a number, found {value!r}") from None
    return typed
