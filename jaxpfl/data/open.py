"""`open(source)`: from what a user writes to a population.

    docstrings:jax,scipy,pandas            documented classes and functions of Python packages
    digits?clients=100&alpha=0.5&seed=0    scikit-learn's digits, dealt to clients
    huggingface:OWNER/NAME?revision=HEX    any data set of the hub, a row = a client; with
                                           &part=train&config=NAME and the options of a table
    PATH.jsonl, .csv, .tsv, .parquet,      a table, a row = an example; with ?client=FIELD
      .ndjson, .json, .xlsx; .jsonl.gz,    &text=FIELD,FIELD&label=FIELD&features=FIELD,FIELD
      .csv.gz, ...                         &columns=FIELD,FIELD&split=sentences&min_examples=5
                                           &classes=WORD,WORD&encoding=latin-1&missing=drop, each
                                           optional, see `readers.examples.Layout`; ?client=* makes
                                           each row a client
    the same with ?client=FIELD|value      tables larger than memory, in one file, on the hub, or in
      or FIELD|domain, FOLDER?client=FIELD all such files of a folder, or that a path with * fits;
      or PATH/*.csv?client=FIELD           |domain is a URL's host
    FOLDER?client=FIELD&part=train         what `datasets` saved to disk; with a table's options
    FOLDER of CLIENT/IMAGE.png             images by client, see `readers.image_folders`
    PATH.json, FOLDER of them              LEAF's data, see `readers.leaf`
    PATH.npz                               NumPy arrays of images, labels and client ids; with
                                           ?client=ARRAY&image=ARRAY&label=ARRAY&min_examples=5,
                                           each optional ("client", "images", "labels"), and
                                           &columns=ARRAY,ARRAY for others
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
text file is a sentence, paragraph or line (see `readers.plain_text`), and min_examples counts
these; for TensorFlow Federated's files it names the part to read. With `min_examples=5`, clients
with fewer examples become empty but remain clients, because how many they are follows from private
data. A comma inside the name of a field is %2C.

Data without clients is dealt to made-up ones: PATH.npz?client=*&partition=dirichlet&clients=100
&by=label&alpha=0.3&seed=0, see `data.partitions` for the other schemes and their settings.
"""

import dataclasses
import os
import re
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints
from urllib.parse import parse_qsl

from jaxpfl import checks, files
from jaxpfl.data import storage
from jaxpfl.data.catalogue import expanded, holding
from jaxpfl.data.options import COMMA, Options, encoding, names, typed
from jaxpfl.data.partitions import SCHEMES, Scheme, partition
from jaxpfl.data.population import Population, collect
from jaxpfl.data.readers import frames, image_folders, leaf, plain_text, table, tff_sqlite
from jaxpfl.data.readers.arrays import IMAGE_COLUMNS, read_arrays
from jaxpfl.data.readers.compressed import PACKED
from jaxpfl.data.readers.embedded import read_digits, read_docstrings
from jaxpfl.data.readers.examples import EACH_ROW, Layout, Read, population_of, stream_of
from jaxpfl.data.readers.plain_text import PIECES
from jaxpfl.data.readers.tff_examples import SCHEMAS
from jaxpfl.data.stream import Stream
from jaxpfl.errors import InputError, named

# Usual names of the field of texts on the hub, tried in this order unless an option names it.
_HUB_TEXTS = ("text", "data", "abstract")
_TEXT: Options = {"split": PIECES, "min_examples": int}
_TABLE: Options = {
    **dict.fromkeys(("client", "label"), str),
    **dict.fromkeys(("text", "features", "columns", "classes"), names),
    "missing": ("drop",),
    **_TEXT,
}
_READ = ("text", "features")
_ON_HUB = ("revision", "part", "config")
_KINDS: dict[str, Options] = {
    "docstrings": {},
    "digits": {"clients": int, "alpha": float, "seed": int},
    "huggingface": {**dict.fromkeys(_ON_HUB, str), **_TABLE},
    "table": {**_TABLE, "encoding": encoding},
    "saved": {"part": str, **_TABLE},
    "images": {"classes": names, **dict.fromkeys(("size", "channels", "min_examples"), int)},
    "leaf": {"min_examples": int},
    "npz": dict.fromkeys(("client", *IMAGE_COLUMNS), str) | {"columns": names, "min_examples": int},
    "text": {**_TEXT, "encoding": encoding},
    "tff": {"dataset": str, "split": str, "min_examples": int},
    "folder": {},
}
"""The kinds of sources, with their options."""

_DIVIDED = {
    "docstrings": "sentences",
    "text": "paragraphs",
    **dict.fromkeys(("table", "huggingface", "saved"), "whole texts"),
}
"""What an example is, by the kinds that hold texts, unless the option `split` says otherwise."""

_WORDS = ("docstrings", "digits", "huggingface")  # kinds by the word before the colon

_ENDINGS = {
    **dict.fromkeys(table.ENDINGS, "table"),
    ".npz": "npz",
    **dict.fromkeys(plain_text.ENDINGS, "text"),
    ".sqlite": "tff",
}
"""Kinds of files by the ending of their names."""


class _Source(NamedTuple):
    """A parsed source.

    Attributes:
      given: as its user wrote it; a `Path` has no options and no variables.
      what: names it in messages.
      word, name: one of `_WORDS` and what follows its colon; "" for a path.
      place: the path as far as its variables are set.
      options: those of the reader; `scheme` is the partition that the others name.
      kind: one of `_KINDS`; "" for a path that none is known of.
    """

    given: str | Path
    what: str
    head: str
    word: str
    name: str
    place: Path
    options: dict[str, str]
    scheme: Scheme | None
    kind: str

    @property
    def grouped(self) -> bool:
        """Whether it is a table whose rows are grouped by client on the disk."""
        several = self.place.is_dir() or ("*" in self.head and not self.place.is_file())
        by_rule = "|" in self.options.get("client", "")
        return self.kind in ("table", "huggingface") and (several or by_rule)

    @property
    def exists(self) -> bool:
        """Whether there is such a file or folder, or files that a path with * fits."""
        return self.place.exists() or (self.kind == "table" and bool(table.files_of(self.place)))


def _parsed(given: str | Path) -> _Source:
    what = f"source {str(given)!r}"
    head, _, query = (str(given), "", "") if isinstance(given, Path) else given.partition("?")
    try:
        # A plus is itself and not a space; %2C is a comma in a name, and not between two.
        query = re.sub("%2C", COMMA, query, flags=re.IGNORECASE)
        pairs = parse_qsl(query.replace("+", "%2B"), strict_parsing=True) if query else []
    except ValueError:
        raise InputError(f"{what}: options must be NAME=VALUE, joined by &") from None
    options = dict(pairs)
    if len(options) != len(pairs):
        raise InputError(f"{what}: an option is given twice")
    scheme = None
    if "partition" in options:
        made = SCHEMES[checks.one_of(f"{what}: partition", options.pop("partition"), (*SCHEMES,))]
        fields = get_type_hints(made)
        settings = {name: options.pop(name) for name in list(options) if name in fields}
        try:
            scheme = made(**typed(what, settings, fields))
        except TypeError:
            raise InputError(f"{what}: partition needs the option {next(iter(fields))!r}") from None
    word, _, name = head.partition(":")
    if isinstance(given, Path) or word not in _WORDS or (word == "digits" and name):
        word = ""
    place = Path(os.path.expandvars(os.path.expanduser(head)))
    place = given if isinstance(given, Path) else place
    kind = word or _kind_of(place, bool(options))
    return _Source(given, what, head, word, name, place, options, scheme, kind)


def _kind_of(place: Path, has_options: bool) -> str:
    if any((place / f"dataset_{part}.json").is_file() for part in ("info", "dict")):
        return "saved"
    if storage.is_stored(place):  # which has no options
        return "folder"
    if image_folders.holds_images(place):
        return "images"
    if leaf.files_of(place):
        return "leaf"
    if place.is_dir():
        return "table" if has_options else "folder"
    return next((kind for end, kind in _ENDINGS.items() if place.name.lower().endswith(end)), "")


def _options(source: _Source) -> dict[str, Any]:
    """The options as the reader's arguments; a source that no reader reads is refused."""
    if source.word:
        return typed(source.what, source.options, _KINDS[source.kind])
    if isinstance(source.given, str):
        expanded(source.head)  # refuses variables that are not set
    if source.kind == "folder" and not storage.is_stored(source.place):
        what = (
            "a folder without a manifest, expected one made by Population.save or `jaxpfl convert`"
        )
        hint = f"of a folder of tables, name the field of clients, as in {source.head}?client=FIELD"
        raise InputError(f"{source.what}: {what}; {hint}; images are CLIENT/IMAGE.png in it")
    data_set = holding(str(source.given))
    if not source.kind and (source.place.exists() or not data_set):
        raise _unknown(source)
    if not source.exists:
        hint = f"; `jaxpfl data get {data_set}` fetches it, or says how to make it"
        raise InputError(f"{source.what}: {files.missing(source.place)}{hint if data_set else ''}")
    return typed(source.what, source.options, _KINDS[source.kind])


def _unknown(source: _Source) -> InputError:
    others = ", ".join(ending for ending in _ENDINGS if ending not in table.ENDINGS)
    endings = f"{table.PLAIN}, {others}"
    if source.place.exists():
        packed = ", ".join(f".csv{ending}" for ending in PACKED)
        hint = f"; packed tables, one in a file, end in {packed}"
        return InputError(f"{source.what}: expected a name ending in {endings}{hint}")
    hint = checks.nearest(re.split(r"[:?]", str(source.given))[0], _WORDS)
    return InputError(
        f"unknown {source.what}{hint}: expected docstrings:PACKAGES, digits, "
        f"huggingface:OWNER/NAME, a path ending in {endings}, or a folder made by Population.save"
    )


def _layout(source: _Source, options: Mapping[str, Any], public: bool = False) -> Layout:
    """Which fields of a table are what."""
    fields = {name: options[name] for name in options if name not in (*_ON_HUB, "encoding")}
    if source.word or public:
        fields.setdefault("client", EACH_ROW)
    with named(source.what):
        layout = Layout(**fields)
    if source.grouped and layout.client == EACH_ROW and not public:
        raise InputError(f"{source.what}: client=* is for one file, found several")
    return layout


def _title(source: _Source, options: Mapping[str, Any]) -> str:
    """The population's name, with the part of a data set that has several."""
    part = options.get("split" if source.kind == "tff" else "part")
    part = part or ("train" if source.kind == "huggingface" else None)
    return f"{source.head} [{part}]" if part else source.head


def fields_of(source: str) -> dict[str, list[str]]:
    """The fields that a source's options name, among "text", "features", "label", "classes"."""
    parsed = _parsed(source)
    options = typed(parsed.what, parsed.options, _KINDS.get(parsed.kind, {}))
    wanted = {name: options.get(name, ()) for name in (*_READ, "label", "classes")}
    return {n: [names] if isinstance(names, str) else [*names] for n, names in wanted.items()}


def open(
    source: str | Path | Population,
    *,
    public: bool = False,
    rows: Mapping[str, Any] | None = None,
) -> Population:
    """The population of a source; a population is its own source.

    Args:
      public: it does not matter whose its examples are; no field of clients need be named.
      rows: of a table, reads rows without labels. These fields, see `fields_of`, are read unless
        its options name others; a "client" is read in place of theirs.

    Raises:
      InputError: no such reader, package, file or option; or the content of the file is not valid.
      CorruptFile: the file is truncated or altered.
    """
    if isinstance(source, Population):
        return source
    if not isinstance(source, str | Path) or not source:
        actual = type(source).__name__ if source != "" else "an empty one"
        raise InputError(f"a source must be a path or a string, found {actual}")
    parsed = _parsed(source)
    options = _options(parsed)
    if rows is not None and parsed.kind in ("table", "saved", "huggingface", "npz"):
        if not {*_READ} & {*options}:
            options |= {name: tuple(rows[name]) for name in _READ if rows.get(name)}
        options |= {"label": None} | ({"client": rows["client"]} if "client" in rows else {})
    at_least = checks.positive_int("min_examples", options.pop("min_examples", 1))
    population = _read(parsed, options, public)
    if parsed.scheme is not None:
        return partition(population, parsed.scheme)
    return population.with_min_examples(at_least) if at_least > 1 else population


def _read(source: _Source, options: dict[str, Any], public: bool) -> Population:
    path, name = source.place, source.head
    match source.kind:
        case "docstrings":
            return read_docstrings(names(source.name))
        case "digits":
            return read_digits(**options)
        case "folder":
            return Population.load(path)
        case "images":
            return image_folders.read_images(path, name=name, **options)
        case "leaf":
            return leaf.read_leaf(path, name=name)
        case "npz":
            client = options.pop("client", "client")
            others = {array: array for array in options.pop("columns", ())}
            arrays = {**IMAGE_COLUMNS, **options, **others}
            columns = {column: array for column, array in arrays.items() if array}
            return read_arrays(path, client=client, columns=columns, name=name)
        case "text":
            return plain_text.read_plain_text(path, name=name, **options)
    if (opened := _stream(source, options, public)) is not None:
        if source.kind == "tff":
            hint = "which `jaxpfl convert SOURCE FOLDER` streams,"
            checks.fits_memory(f"{path}, {hint} in memory", path.stat().st_size)
        with opened(None) as stream:
            return collect(stream)
    return population_of(*_table(source, options, public), _title(source, options))


def _table(source: _Source, options: Mapping[str, Any], public: bool) -> tuple[Read, Layout]:
    """What gives the rows of a table with some fields, and which fields are what."""
    layout = _layout(source, options, public)
    if source.kind == "table":
        return partial(table.read_table, source.place, encoding=options.get("encoding")), layout
    if source.kind == "saved":
        saved = frames.saved(source.place, options.get("part"))
        return partial(frames.read_frame, source.head, saved), layout
    which = {name: options[name] for name in _ON_HUB if name in options}
    frame = frames.load_data_set(source.name, **which, streaming=source.grouped)
    if not {"text", "label", "features"} & options.keys():
        texts = [field for field in _HUB_TEXTS if field in (frame.column_names or ())]
        layout = dataclasses.replace(layout, text=next(iter(texts), "text"))
    return partial(frames.read_frame, source.name, frame), layout


_Opens = Callable[[Path | None], AbstractContextManager[Stream]]


def streamed(source: str | Path) -> _Opens:
    """Returns a function that opens the source batch by batch, given a folder for temporary files.

    TensorFlow Federated's files and tables are not read into memory, and neither is a folder, which
    is mapped; other sources are. Errors are those of `open`, here or while the stream is read.
    """
    parsed = _parsed(str(source))
    plain = parsed.scheme is None and "min_examples" not in parsed.options
    if plain and (opened := _stream(parsed, _options(parsed), public=False)) is not None:
        return opened
    population = open(source)
    return lambda _: nullcontext(population.stream())


def _stream(source: _Source, options: Mapping[str, Any], public: bool) -> _Opens | None:
    """Returns a function that opens a source that is not read into memory; None if it is."""
    if source.kind == "tff":
        what = f"{source.what}: dataset"
        schema = SCHEMAS[checks.one_of(what, options.get("dataset"), tuple(SCHEMAS))]
        described = source.place, schema, options.get("split"), _title(source, options)
        return lambda _: tff_sqlite.stream_tff(*described)
    if not source.grouped:
        return None
    return partial(stream_of, *_table(source, options, public), _title(source, options))


def why_missing(source: str) -> str:
    """Why a source is not available, or "" if it is; reads no data and asks no hub."""
    parsed = _parsed(source)
    here = bool(parsed.word) or parsed.exists
    if not here and not parsed.kind:
        if parsed.place.suffix or not parsed.place.parent.name:
            raise _unknown(parsed)
        # A folder that is absent is a stored population if it has no options.
        parsed = parsed._replace(kind="table" if parsed.options else "folder")
    kind = parsed.kind
    options = _options(parsed) if here else typed(parsed.what, parsed.options, _KINDS[kind])
    options.pop("min_examples", None)
    if kind in ("table", "saved", "huggingface"):
        _layout(parsed, options)
    if parsed.word == "huggingface":
        return "it is on the Hugging Face hub, which was not asked"
    if here:
        return ""
    unset = [name for pair in files.VARIABLE.findall(str(parsed.place)) for name in pair if name]
    reason = f"the environment variable {unset[0]} is not set" if unset else ""
    return reason or files.missing(parsed.place)


def place(source: str) -> str:
    """The place of a source's data, however it is spelled: two sources of one place are equal.

    A path is resolved as far as its variables are set; options are left out.
    """
    parsed = _parsed(source)
    return parsed.head if parsed.word else str(parsed.place.resolve())


def corpora_in(source: str) -> list[str]:
    """The tables and texts in a folder, each a source, by name; any other source alone."""
    parsed = _parsed(source)
    if parsed.kind != "folder" or storage.is_stored(parsed.place):
        return [source]
    endings = (*table.SHARDS, *plain_text.ENDINGS)
    paths = (path for path in sorted(parsed.place.iterdir()) if not path.is_dir())
    if sources := [str(path) for path in paths if path.name.lower().endswith(endings)]:
        return sources
    raise InputError(f"{parsed.what}: a folder without a table or a text, such as corpus.jsonl")


def divided_into(source: str | Path | Population) -> str:
    """What an example is by the source's options: "sentences", ... or "whole texts".

    "" where no option says it: of a population, of one that was stored, and of no text.
    """
    if isinstance(source, Population) or (parsed := _parsed(source)).kind not in _DIVIDED:
        return ""
    return parsed.options.get("split", _DIVIDED[parsed.kind])
