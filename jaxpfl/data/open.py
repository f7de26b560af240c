"""`open(source)`: from what a user writes to a population.

    docstrings:jax,scipy,pandas            documented classes and functions of Python packages
    digits?clients=100&alpha=0.5&seed=0    scikit-learn's digits, dealt to clients
    huggingface:OWNER/NAME?revision=HEX    any data set of the hub, a row = a client; with
                                           &part=train&config=NAME and the options of a table
    PATH.jsonl, .csv, .tsv, .parquet,      a table, a row = an example; with ?client=FIELD
      .jsonl.gz, .csv.gz, .tsv.gz, .xlsx   &text=FIELD&label=FIELD&features=FIELD,FIELD
                                           &columns=FIELD,FIELD&split=sentences&min_examples=5
                                           &encoding=latin-1&missing=drop, each optional, see
                                           `readers.examples.Layout`; ?client=* makes each row a
                                           client
    the same with ?client=FIELD|value      tables larger than memory, in one file, on the hub, or in
      or FIELD|domain, FOLDER?client=FIELD all such files of a folder, or that a path with * fits;
      or PATH/*.csv?client=FIELD           |domain is a URL's host
    FOLDER?client=FIELD                    what `datasets` saved to disk; with a table's options
    FOLDER of CLIENT/IMAGE.png             images by client, see `readers.image_folders`
    PATH.npz                               NumPy arrays of images, labels and client ids; with
                                           ?client=ARRAY&image=ARRAY&label=ARRAY&min_examples=5,
                                           each optional ("client", "images", "labels")
    PATH.txt, PATH.txt.gz                  plain text: one client, an example is a paragraph;
                                           with ?split=sentences or ?split=lines, &encoding=latin-1
    PATH.tar.gz, PATH.tar.xz               an archive of .txt files: a client is a file; with
                                           ?split=...&min_examples=5
    PATH.sqlite                            a data set of TensorFlow Federated; with ?dataset=emnist
                                           (emnist_36 without the case of letters,
                                           stackoverflow, shakespeare, cifar100), and
                                           &split=all_train&min_examples=5, both optional
                                           (see `readers.tff_sqlite`)
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
from typing import Any, get_type_hints
from urllib.parse import parse_qsl

from jaxpfl import checks, files
from jaxpfl.data import storage
from jaxpfl.data.catalogue import data_sets, holding
from jaxpfl.data.partitions import SCHEMES, Scheme, partition
from jaxpfl.data.population import Population, collect
from jaxpfl.data.readers import hugging_face, image_folders, plain_text, table, tff_sqlite
from jaxpfl.data.readers.arrays import IMAGE_COLUMNS, read_arrays
from jaxpfl.data.readers.embedded import read_digits, read_docstrings
from jaxpfl.data.readers.examples import EACH_ROW, Layout, Read, population_of, stream_of
from jaxpfl.data.readers.frames import read_frame
from jaxpfl.data.readers.prose import PIECES
from jaxpfl.data.readers.tff_schemas import SCHEMAS
from jaxpfl.data.stream import Stream
from jaxpfl.errors import InputError, NoDataFolder, named

# Usual names of the field of texts on the hub, tried in this order unless an option names it.
_HUB_TEXTS = ("text", "data", "abstract")


def _encoding(name: str) -> str:
    try:
        "".encode(name)
    except LookupError:
        raise InputError(
            f"a source's encoding must be one that Python knows, such as latin-1, found {name!r}"
        ) from None
    return name


def _names(value: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in value.split(","))


# Options of a kind of source, each with what converts its text, or the words that it may be.
_Options = Mapping[str, Callable | tuple[str, ...]]

_TEXT: _Options = {"split": PIECES, "min_examples": int}
_TABLE: _Options = {
    **dict.fromkeys(("client", "text", "label"), str),
    **dict.fromkeys(("features", "columns"), _names),
    "missing": ("drop",),
    **_TEXT,
}
_ON_HUB = ("revision", "part", "config")
_KINDS: dict[str, _Options] = {
    "docstrings": {},
    "digits": {"clients": int, "alpha": float, "seed": int},
    "huggingface": {**dict.fromkeys(_ON_HUB, str), **_TABLE},
    "table": {**_TABLE, "encoding": _encoding},
    "saved": _TABLE,
    "images": {"classes": _names, **dict.fromkeys(("size", "channels", "min_examples"), int)},
    "npz": {**dict.fromkeys(("client", *IMAGE_COLUMNS), str), "min_examples": int},
    "text": {**_TEXT, "encoding": _encoding},
    "tff": {"dataset": str, "split": str, "min_examples": int},
    "folder": {},
}
"""The kinds of sources, with their options."""

_WORDS = ("docstrings", "digits", "huggingface")
"""Kinds by the word before the colon."""

_ENDINGS = {
    **dict.fromkeys(table.ENDINGS, "table"),
    ".npz": "npz",
    **dict.fromkeys(plain_text.ENDINGS, "text"),
    ".sqlite": "tff",
}
"""Kinds of files by the ending of their names."""


class _Named:
    """A parsed source: a word of `_WORDS` and a name, or "" and a path; and the options."""

    def __init__(self, source: str | Path, public: bool = False) -> None:
        self.public = public
        self.source = self.head = str(source)
        self._literal, query = isinstance(source, Path), ""
        if not self._literal:
            self.head, _, query = self.source.partition("?")
        try:
            # A plus is itself and not a space.
            pairs = parse_qsl(query.replace("+", "%2B"), strict_parsing=True) if query else []
        except ValueError:
            problem = "options must be NAME=VALUE, joined by &"
            raise InputError(f"source {self.source!r}: {problem}") from None
        self.options = dict(pairs)
        if len(self.options) != len(pairs):
            raise InputError(f"source {self.source!r}: an option is given twice")
        word, _, self.name = self.head.partition(":")
        is_word = word in _WORDS and not (word == "digits" and self.name) and not self._literal
        self.word = word if is_word else ""

    @property
    def path(self) -> Path:
        """Raises `InputError` where a variable is not set."""
        return Path(self.head if self._literal else expanded(self.head))

    @property
    def place(self) -> Path:
        """The path as far as its variables are set."""
        return Path(os.path.expandvars(os.path.expanduser(self.head)))

    @property
    def grouped(self) -> bool:
        """Whether it is a table whose rows are grouped by client on the disk."""
        is_table = self.kind in ("table", "huggingface")
        several = self.place.is_dir() or ("*" in self.head and not self.place.is_file())
        return is_table and (several or "|" in self.options.get("client", ""))

    @property
    def exists(self) -> bool:
        """Whether there is such a file or folder, or files that a path with * fits."""
        return self.place.exists() or (self.kind == "table" and bool(table.files_of(self.place)))

    @property
    def kind(self) -> str:
        """One of `_KINDS`; "" for a path that none is known of."""
        if self.word:
            return self.word
        if any((self.place / f"dataset_{part}.json").is_file() for part in ("info", "dict")):
            return "saved"
        if storage.is_stored(self.place):  # which has no options
            return "folder"
        if image_folders.holds_images(self.place):
            return "images"
        if self.place.is_dir():
            return "table" if self.options else "folder"
        return next((kind for end, kind in _ENDINGS.items() if self.head.endswith(end)), "")

    def require_known(self) -> None:
        """Refuses a source that no reader reads."""
        if self.word:
            return
        path = self.path
        if self.kind == "folder" and not storage.is_stored(path):
            raise InputError(
                f"source {self.source!r}: a folder without a manifest, expected one made by "
                "Population.save or `jaxpfl convert`; of a folder of tables, name the field of "
                f"clients, as in {self.head}?client=FIELD; images are CLIENT/IMAGE.png in it"
            )
        if not self.kind and (path.exists() or not holding(self.source)):
            raise self.unknown(path)
        if not self.kind or not self.exists:
            data_set = holding(self.source)
            hint = f"; `jaxpfl data get {data_set}` fetches it, or says how to make it"
            what = f"source {self.source!r}: there is no such file"
            raise InputError(what + (hint if data_set else ""))

    def typed(self) -> dict[str, Any]:
        """The options as a reader's arguments, without those of a partition."""
        return _typed(self.source, self.options, _KINDS[self.kind])

    def scheme(self) -> Scheme | None:
        """The partition that the options name; its settings are taken out of them."""
        if "partition" not in self.options:
            return None
        what, options = f"source {self.source!r}: partition", self.options
        made = SCHEMES[checks.one_of(what, options.pop("partition"), tuple(SCHEMES))]
        fields = get_type_hints(made)
        given = {name: options.pop(name) for name in list(options) if name in fields}
        try:
            return made(**_typed(self.source, given, fields))
        except TypeError:
            raise InputError(f"{what} needs the option {next(iter(fields))!r}") from None

    def layout(self, options: Mapping[str, Any]) -> Layout:
        """Which fields of a table are what."""
        given = {name: options[name] for name in options if name not in (*_ON_HUB, "encoding")}
        if self.word or self.public:
            given.setdefault("client", EACH_ROW)
        with named(f"source {self.source!r}"):
            layout = Layout(**given)
        if self.grouped and layout.client == EACH_ROW and not self.public:
            raise InputError(f"source {self.source!r}: client=* is for one file, found several")
        return layout

    def title(self, options: Mapping[str, Any]) -> str:
        """The population's name, with the part of a data set that has several."""
        parts = {"huggingface": options.get("part", "train"), "tff": options.get("split")}
        part = parts.get(self.kind)
        return f"{self.head} [{part}]" if part else self.head

    def unknown(self, path: Path) -> InputError:
        endings = ", ".join(_ENDINGS)
        if path.exists():
            return InputError(f"source {self.source!r}: expected a name ending in {endings}")
        word = re.split(r"[:?]", self.source)[0]
        near = difflib.get_close_matches(word, _WORDS, 1, 0.5)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        return InputError(
            f"unknown source {self.source!r}{hint}: expected docstrings:PACKAGES, digits, "
            f"huggingface:OWNER/NAME, a path ending in {endings}, or a folder made by "
            "Population.save"
        )


def open(source: str | Path | Population, *, public: bool = False) -> Population:
    """The population of a source; a population is its own source.

    Args:
      public: it does not matter whose its examples are; no field of clients need be named.

    Raises:
      InputError: no such reader, package, file or option; or the content of the file is not valid.
      CorruptFile: the file is truncated or altered.
    """
    if isinstance(source, Population):
        return source
    if not isinstance(source, str | Path) or not source:
        actual = type(source).__name__ if source != "" else "an empty one"
        raise InputError(f"a source must be a path or a string, found {actual}")
    named = _Named(source, public)
    named.require_known()
    scheme, options = named.scheme(), named.typed()
    at_least = checks.positive_int("min_examples", options.pop("min_examples", 1))
    population = _read(named, options)
    if scheme is not None:
        return partition(population, scheme)
    return population.with_min_examples(at_least) if at_least > 1 else population


def _read(named: _Named, options: dict[str, Any]) -> Population:
    match named.kind:
        case "docstrings":
            return read_docstrings(_names(named.name))
        case "digits":
            return read_digits(**options)
        case "folder":
            return Population.load(named.path)
        case "images":
            return image_folders.read_images(named.path, name=named.head, **options)
        case "npz":
            client = options.pop("client", "client")
            columns = {**IMAGE_COLUMNS, **options}
            return read_arrays(named.path, client=client, columns=columns, name=named.head)
        case "text":
            return plain_text.read_plain_text(named.path, name=named.head, **options)
    if (opened := _stream(named, options)) is not None:
        if named.kind == "tff":
            tff_sqlite.require_memory(named.path)
        with opened(None) as stream:
            return collect(stream)
    layout, read = _table(named, options)
    return population_of(read, layout, named.title(options))


def _table(named: _Named, options: Mapping[str, Any]) -> tuple[Layout, Read]:
    """Which fields of a table are what, and what gives the rows with some fields."""
    layout = named.layout(options)
    if named.kind == "table":
        return layout, partial(table.read_table, named.path, encoding=options.get("encoding"))
    if named.kind == "saved":
        return layout, partial(read_frame, named.head, hugging_face.saved(named.path))
    which = {name: options[name] for name in _ON_HUB if name in options}
    frame = hugging_face.load_data_set(named.name, **which, streaming=named.grouped)
    if not {"text", "label", "features"} & options.keys():
        texts = [field for field in _HUB_TEXTS if field in (frame.column_names or ())]
        layout = dataclasses.replace(layout, text=next(iter(texts), "text"))
    return layout, partial(read_frame, named.name, frame)


# Opens a population batch by batch, given a folder for temporary files.
_Opens = Callable[[Path | None], AbstractContextManager[Stream]]


def streamed(source: str | Path) -> _Opens:
    """Returns a function that opens the source batch by batch, given a folder for temporary files.

    TensorFlow Federated's files and tables are not read into memory, and neither is a folder, which
    is mapped; other sources are. Errors are those of `open`, here or while the stream is read.
    """
    named = _Named(str(source))
    if not {"min_examples", "partition"} & named.options.keys():
        named.require_known()
        opened = _stream(named, named.typed())
        if opened is not None:
            return opened
    population = open(source)
    return lambda _: nullcontext(population.stream())


def _stream(named: _Named, options: Mapping[str, Any]) -> _Opens | None:
    """Returns a function that opens a source that is not read into memory; None if it is."""
    if named.kind == "tff":
        what = f"source {named.source!r}: dataset"
        schema = SCHEMAS[checks.one_of(what, options.get("dataset"), tuple(SCHEMAS))]
        described = named.path, schema, options.get("split"), named.title(options)
        return lambda _: tff_sqlite.stream_tff(*described)
    if not named.grouped:
        return None
    layout, read = _table(named, options)
    return partial(stream_of, read, layout, named.title(options))


def why_missing(source: str) -> str:
    """Why a source is not available, or "" if it is; reads no data and asks no hub."""
    named = _Named(source)
    named.scheme()
    here = bool(named.word) or named.exists
    if here:
        named.require_known()
    elif not named.kind and (named.place.suffix or not named.place.parent.name):
        raise named.unknown(named.place)
    # A folder that is absent is a stored population if it has no options.
    kind = named.kind or ("table" if named.options else "folder")
    options = _typed(named.source, named.options, _KINDS[kind])
    options.pop("min_examples", None)
    if kind in ("table", "saved", "huggingface"):
        named.layout(options)
    if named.word == "huggingface":
        return "it is on the Hugging Face hub, which was not asked"
    if here:
        return ""
    unset = [name for pair in files.VARIABLE.findall(str(named.place)) for name in pair if name]
    return f"the environment variable {unset[0]} is not set" if unset else "there is no such file"


def place(source: str) -> str:
    """The place of a source's data, however it is spelled: two sources of one place are equal.

    A path is resolved as far as its variables are set; options are left out.
    """
    named = _Named(source)
    return named.head if named.word else str(named.place.resolve())


def expanded(path: str) -> str:
    """A path with its ~ and its environment variables replaced."""

    def value(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        if not os.environ.get(name):
            what = f"source {path!r}: the environment variable {name} is not set"
            if name in {data_set.variable for data_set in data_sets().values()}:
                raise NoDataFolder(f"{what}; `jaxpfl data list` says what belongs there")
            raise InputError(what)
        return os.environ[name]

    return os.path.expanduser(files.VARIABLE.sub(value, path))


def _typed(source: str, options: dict[str, str], kinds: _Options) -> dict[str, Any]:
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
