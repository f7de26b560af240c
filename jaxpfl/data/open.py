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

import contextlib
import dataclasses
import difflib
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from jaxpfl import checks
from jaxpfl.data import storage
from jaxpfl.data.catalogue import data_sets, holding
from jaxpfl.data.partitions import SCHEMES, Scheme, partition
from jaxpfl.data.population import Population
from jaxpfl.data.readers import plain_text, table
from jaxpfl.data.readers.arrays import IMAGE_COLUMNS, read_arrays
from jaxpfl.data.readers.digits import read_digits
from jaxpfl.data.readers.docstrings import read_docstrings
from jaxpfl.data.readers.examples import EACH_ROW, Layout, population_of
from jaxpfl.data.readers.fields import Fields, Rows
from jaxpfl.data.readers.grouped import stream_grouped
from jaxpfl.data.readers.hugging_face import read_hugging_face, rows_of_hub
from jaxpfl.data.readers.largefedbench import CORPORA, read_largefedbench
from jaxpfl.data.readers.prose import PIECES
from jaxpfl.data.readers.tff_schemas import SCHEMAS
from jaxpfl.data.readers.tff_sqlite import ENDINGS as _TFF_ENDINGS
from jaxpfl.data.readers.tff_sqlite import read_tff, stream_tff
from jaxpfl.data.stream import Source, Stream, behind, collect, of_population
from jaxpfl.errors import InputError, NoDataFolder

_ON_HUB = ("largefedbench", "huggingface")
_READERS = ("docstrings", "digits", *_ON_HUB)
_ENDINGS = (*table.ENDINGS, ".npz", *plain_text.ENDINGS, *_TFF_ENDINGS)
_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")

# How a kind of source is read: a function and its options, each with what converts its text, or
# the words that it may be.
_Kinds = Mapping[str, Callable | tuple[str, ...]]
_Reader = tuple[Callable[..., Population], _Kinds]


def _names(value: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in value.split(","))


_TEXT_OPTIONS: dict[str, Any] = {"split": PIECES, "min_examples": int}
_FIELDS = ("client", "text", "label")
_TABLE_OPTIONS = {**dict.fromkeys(_FIELDS, str), **dict.fromkeys(("features", "columns"), _names)}
_TABLE_OPTIONS |= _TEXT_OPTIONS
_HUB_OPTIONS = {**_TEXT_OPTIONS, **dict.fromkeys(("revision", "part", "text"), str)}
_OF_HUB = ("revision", "part", "config")
_TFF_OPTIONS = {"dataset": tuple(SCHEMAS), **dict.fromkeys(("split", "form", "sha256"), str)}
_TFF_OPTIONS["min_examples"] = int


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
    if isinstance(source, Path):
        source, options = str(source), {}
        read, kinds = _reader_of_path(source, Path(source))
    else:
        head, _, query = source.partition("?")
        options = _parse_query(source, query)
        grouped = _is_grouped(head, options)
        read, kinds = _grouped(source, head) if grouped else _reader(source, head)
    scheme = _scheme(source, options)
    typed = _typed(source, options, kinds)
    at_least = checks.positive_int("min_examples", typed.pop("min_examples", 1))
    population = read(**typed)
    if scheme is not None:
        return partition(population, scheme)
    return population.with_min_examples(at_least) if at_least > 1 else population


def streamed(source: str | Path) -> Source:
    """The source's population batch by batch, from any example on.

    TensorFlow Federated's files and tables are not read into memory, and neither is a folder, which
    is mapped; other sources are. Errors are those of `open`, here or while the stream is read.
    """
    source = str(source)
    path, _, query = source.partition("?")
    options = _parse_query(source, query)
    if {"min_examples", "partition"} & options.keys():
        return of_population(open(source))
    if _is_grouped(path, options):
        typed = _typed(source, options, _table_kinds(path))
        return Source(_identity(source, path), partial(_grouped_from, source, path, typed))
    if not path.endswith(_TFF_ENDINGS):
        return of_population(open(source))
    typed = _typed(source, options, _TFF_OPTIONS)
    name, file = _name_of_split(source, typed.get("split")), expanded(path)

    def stream(begin: int, folder: Path) -> AbstractContextManager[Stream]:
        return stream_tff(file, name=name, folder=folder, begin=begin, **typed)

    return Source(_identity(source, path), stream)


def why_missing(source: str) -> str:
    """Why a source is not at hand, or "" if it is; reads no data and asks no hub.

    Raises:
      InputError: no such reader, file ending or option, so `open` would refuse it everywhere.
    """
    head, _, query = source.partition("?")
    options, expanded = _parse_query(source, query), os.path.expandvars(os.path.expanduser(head))
    kind = head.partition(":")[0]
    path = Path(expanded)
    _scheme(source, options)
    if _is_grouped(head, options):
        _layout(source, _typed(source, options, _table_kinds(head)))
        if kind not in _ON_HUB and path.exists():
            return ""
    elif kind in _READERS or path.exists():
        _typed(source, options, _reader(source, head)[1])
        if kind not in _ON_HUB:
            return ""
    if kind in _ON_HUB:
        return "it is on the Hugging Face hub, which was not asked"
    unset = [name for pair in _VARIABLE.findall(expanded) for name in pair if name]
    why = f"the environment variable {unset[0]} is not set" if unset else "there is no such file"
    kinds = _kinds_of_path(path)
    if kinds is not None:
        _typed(source, options, kinds)
    elif path.suffix or not path.parent.name:
        raise _unknown(source, path)
    elif options:
        # Of a stored population, a folder that is not there would have none.
        _typed(source, options, _table_kinds(head))
    return why


def place(source: str) -> str:
    """Where a source's data is, however it is spelled: two sources of one place hold the same.

    A path is resolved as far as its variables are set; options are left out.
    """
    head = source.partition("?")[0]
    reader, _, name = head.partition(":")
    if reader == "largefedbench":
        return f"huggingface:{CORPORA.get(name, name)}"
    if reader in _READERS:
        return head
    return str(Path(os.path.expanduser(os.path.expandvars(head))).resolve())


def _reader(source: str, head: str) -> _Reader:
    """The reader of a source whose part before the options is `head`."""
    kind, _, name = head.partition(":")
    if kind == "docstrings":
        return partial(read_docstrings, [package.strip() for package in name.split(",")]), {}
    if kind == "largefedbench":
        return partial(read_largefedbench, name, revision=""), _HUB_OPTIONS
    if kind == "huggingface":
        read = partial(read_hugging_face, name, revision="")
        return read, {**_HUB_OPTIONS, "client": str, "config": str}
    if head == "digits":
        return read_digits, {"clients": int, "alpha": float, "seed": int}
    return _reader_of_path(source, Path(expanded(head)))


def _reader_of_path(source: str, path: Path) -> _Reader:
    name = source.partition("?")[0]
    if path.is_dir():
        if not storage.is_stored(path):
            made = "expected one made by Population.save or `jaxpfl convert`"
            raise InputError(f"source {source!r}: a folder without a manifest, {made}")
        return partial(Population.load, path), {}
    if not path.name.endswith(_ENDINGS):
        raise _unknown(source, path) if path.exists() or not holding(source) else _missing(source)
    if not path.is_file():
        raise _missing(source)
    kinds = _kinds_of_path(path)
    assert kinds is not None
    if path.name.endswith(".npz"):

        def read(client: str = "client", **columns: str) -> Population:
            return read_arrays(path, client=client, columns={**IMAGE_COLUMNS, **columns}, name=name)

        return read, kinds
    if path.name.endswith(_TFF_ENDINGS):

        def read_split(split: str | None = None, **options: str) -> Population:
            return read_tff(path, split=split, name=_name_of_split(source, split), **options)

        return read_split, kinds
    if path.name.endswith(plain_text.ENDINGS):
        return partial(plain_text.read_plain_text, path, name=name), kinds

    def read_one(**options: Any) -> Population:
        layout = _layout(source, options)
        rows = table.read_table(path, layout.fields)
        return population_of(rows, layout, name=name, unit=layout.unit)

    return read_one, kinds


def _kinds_of_path(path: Path) -> _Kinds | None:
    """The options of a file, by its ending; None for another ending."""
    if path.name.endswith(".npz"):
        return {**dict.fromkeys(("client", *IMAGE_COLUMNS), str), "min_examples": int}
    if path.name.endswith(_TFF_ENDINGS):
        return _TFF_OPTIONS
    if path.name.endswith(plain_text.ENDINGS):
        return _TEXT_OPTIONS
    return _TABLE_OPTIONS if path.name.endswith(table.ENDINGS) else None


def _is_grouped(head: str, options: Mapping[str, str]) -> bool:
    """Whether a source is a table whose rows are grouped by client on the disk."""
    if head.startswith("huggingface:") or head.endswith(table.ENDINGS):
        return "|" in options.get("client", "")
    path = Path(os.path.expandvars(os.path.expanduser(head)))
    return path.is_dir() and not storage.is_stored(path) and bool(options)


def _table_kinds(head: str) -> _Kinds:
    hub = {**_HUB_OPTIONS, "config": str} if head.startswith("huggingface:") else {}
    return {**hub, **_TABLE_OPTIONS}


def _layout(source: str, options: Mapping[str, Any]) -> Layout:
    try:
        return Layout(**{name: each for name, each in options.items() if name not in _OF_HUB})
    except InputError as error:
        raise InputError(f"source {source!r}: {error}") from None


def _grouped(source: str, head: str) -> _Reader:
    """Reads a table into memory, by way of files on the disk."""

    def read(**options: Any) -> Population:
        with _stream_grouped(source, head, None, **options) as found:
            return collect(found)

    return read, _table_kinds(head)


def _stream_grouped(
    source: str, head: str, folder: Path | None, **options: Any
) -> AbstractContextManager[Stream]:
    kind, _, name = head.partition(":")
    which = {key: options[key] for key in _OF_HUB if key in options}
    layout = _layout(source, options)
    if layout.client == EACH_ROW:
        raise InputError(f"source {source!r}: client=* is for one file, found a folder")
    if kind == "huggingface":
        which = {"revision": "", "part": "train"} | which

        def rows(fields: Fields) -> Iterator[Rows]:
            return table.read_mappings(name, rows_of_hub(name, which), fields)

        head = f"{head} [{which['part']}]"
    else:
        path = Path(expanded(head))
        if not path.exists():
            raise _missing(source)
        rows = partial(table.read_table, path)
    return stream_grouped(rows, layout, name=head, folder=folder)


@contextlib.contextmanager
def _grouped_from(
    source: str, head: str, options: dict[str, Any], begin: int, folder: Path
) -> Iterator[Stream]:
    with _stream_grouped(source, head, folder, **options) as found:
        yield behind(found, begin)


def _identity(source: str, head: str) -> dict[str, Any]:
    """The source, and the sizes and times of its files; those of the hub have a revision."""
    path = None if head.startswith("huggingface:") else Path(expanded(head))
    files = table.files_of(path) if path is not None and path.exists() else []
    stats = [(str(file), file.stat()) for file in files]
    return {"source": source, "files": [[n, s.st_size, s.st_mtime_ns] for n, s in stats]}


def _name_of_split(source: str, split: str | None) -> str:
    path = source.partition("?")[0]
    return path if split is None else f"{path} [{split}]"


def _missing(source: str) -> InputError:
    known = holding(source)
    hint = f"; `jaxpfl data get {known}` fetches it, or says how to make it" if known else ""
    return InputError(f"source {source!r}: there is no such file{hint}")


def _unknown(source: str, path: Path) -> InputError:
    endings = ", ".join(_ENDINGS)
    if path.exists():
        return InputError(f"source {source!r}: expected a name ending in {endings}")
    word = re.split(r"[:?]", source)[0]
    near = difflib.get_close_matches(word, _READERS, 1, 0.5)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    return InputError(
        f"unknown source {source!r}{hint}: expected docstrings:PACKAGES, digits, "
        f"largefedbench:congress, huggingface:OWNER/NAME, a path ending in {endings}, or a folder "
        "made by Population.save"
    )


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


def _scheme(source: str, options: dict[str, str]) -> Scheme | None:
    """The partition that the options name; its settings are taken out of them."""
    if "partition" not in options:
        return None
    what = f"source {source!r}: partition"
    made = SCHEMES[checks.one_of(what, options.pop("partition"), tuple(SCHEMES))]
    fields = {field.name: field.type for field in dataclasses.fields(made)}
    given = {name: options.pop(name) for name in list(options) if name in fields}
    kinds = {name: kind if kind in (int, float) else str for name, kind in fields.items()}
    try:
        return made(**_typed(source, given, kinds))
    except TypeError:
        raise InputError(f"{what} needs the option {next(iter(fields))!r}") from None


def _typed(source: str, options: dict[str, str], kinds: _Kinds) -> dict:
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
