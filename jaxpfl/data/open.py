"""`open(source)`: from what a user writes to a population.

    docstrings:jax,scipy,pandas            documented classes and functions of Python packages
    largefedbench:congress?revision=HEX    POPri's speeches (or biorxiv: abstracts) from the hub, a
                                           client each; with &text=FIELD&part=train
                                           &split=sentences&min_examples=5, each optional
    huggingface:OWNER/NAME?revision=HEX    any data set of the hub, a row = a client; with
                                           &text=COLUMN&client=COLUMN&part=train&config=NAME
                                           &split=sentences&min_examples=5, each optional
    digits?clients=100&alpha=0.5&seed=0    scikit-learn's digits, dealt to clients
    PATH.jsonl, PATH.jsonl.gz              one example a line; with ?client=FIELD&text=FIELD
                                           &columns=FIELD,FIELD&split=sentences&min_examples=5,
                                           each optional; ?client=* makes each line a client
    PATH.npz                               NumPy arrays of images, labels and client ids; with
                                           ?client=ARRAY&image=ARRAY&label=ARRAY&min_examples=5,
                                           each optional ("client", "images", "labels")
    PATH.txt, PATH.txt.gz                  plain text: one client, an example is a paragraph;
                                           with ?split=sentences or ?split=lines
    PATH.tar.gz, PATH.tar.xz               an archive of .txt files: a client is a file; with
                                           ?split=...&min_examples=5
    PATH.sqlite, PATH.sqlite.lzma          a data set of TensorFlow Federated; with ?dataset=emnist
                                           (stackoverflow, shakespeare, cifar100, celeba), and
                                           &split=all_train&form=raw&sha256=HEX&min_examples=5,
                                           each optional (see `readers.tff_sqlite`)
    FOLDER                                 what Population.save or `jaxpfl convert` wrote

A path may begin with ~ or contain $NAME, an environment variable. With `split`, an example of a
text file is a sentence, paragraph or line (see `readers.prose`), and min_examples counts these; for
TensorFlow Federated's files it names the part to read. With `min_examples=5`, clients with fewer
examples become empty but remain clients, because how many they are follows from private data.
"""

import difflib
import os
import re
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from urllib.parse import parse_qsl

from jaxpfl import checks
from jaxpfl.data import storage
from jaxpfl.data.population import Population
from jaxpfl.data.readers import plain_text
from jaxpfl.data.readers.arrays import IMAGE_COLUMNS, read_arrays
from jaxpfl.data.readers.digits import read_digits
from jaxpfl.data.readers.docstrings import read_docstrings
from jaxpfl.data.readers.hugging_face import read_hugging_face
from jaxpfl.data.readers.jsonl import read_jsonl
from jaxpfl.data.readers.largefedbench import CORPORA, read_largefedbench
from jaxpfl.data.readers.prose import PIECES
from jaxpfl.data.readers.tff_schemas import SCHEMAS
from jaxpfl.data.readers.tff_sqlite import ENDINGS as _TFF_ENDINGS
from jaxpfl.data.readers.tff_sqlite import read_tff, stream_tff
from jaxpfl.data.stream import Stream
from jaxpfl.errors import InputError

_READERS = ("docstrings", "digits", "largefedbench", "huggingface")
_ENDINGS = (".jsonl", ".jsonl.gz", ".npz", *plain_text.ENDINGS, *_TFF_ENDINGS)
_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")

# How a kind of source is read: a function and its options, each with what converts its text, or
# the words that it may be.
_Kinds = Mapping[str, Callable | tuple[str, ...]]
_Reader = tuple[Callable[..., Population], _Kinds]

_TEXT_OPTIONS = {"split": PIECES, "min_examples": int}
_HUB_OPTIONS = {**_TEXT_OPTIONS, **dict.fromkeys(("revision", "part", "text"), str)}
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
        read, kinds = _reader(source, head)
    typed = _typed(source, options, kinds)
    at_least = checks.positive_int("min_examples", typed.pop("min_examples", 1))
    population = read(**typed)
    return population.with_min_examples(at_least) if at_least > 1 else population


def stream(source: str, folder: Path) -> AbstractContextManager[Stream] | None:
    """The source's population batch by batch; None if only `open` can read such a source.

    Temporary files go to `folder`. Errors are those of `open`, here or while the stream is read.
    """
    path, _, query = source.partition("?")
    options = _parse_query(source, query)
    if not path.endswith(_TFF_ENDINGS) or "min_examples" in options:
        return None
    typed = _typed(source, options, _TFF_OPTIONS)
    name = _name_of_split(source, typed.get("split"))
    return stream_tff(_expand(path), name=name, folder=folder, **typed)


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
    return _reader_of_path(source, Path(_expand(head)))


def _reader_of_path(source: str, path: Path) -> _Reader:
    name = source.partition("?")[0]
    if path.is_dir():
        if not storage.is_stored(path):
            made = "expected one made by Population.save or `jaxpfl convert`"
            raise InputError(f"source {source!r}: a folder without a manifest, {made}")
        return partial(Population.load, path), {}
    if not path.name.endswith(_ENDINGS):
        raise _unknown(source, path)
    if not path.is_file():
        raise InputError(f"source {source!r}: there is no such file")
    if path.name.endswith(".npz"):

        def read(client: str = "client", **columns: str) -> Population:
            return read_arrays(path, client=client, columns={**IMAGE_COLUMNS, **columns}, name=name)

        return read, {**dict.fromkeys(("client", *IMAGE_COLUMNS), str), "min_examples": int}
    if path.name.endswith(_TFF_ENDINGS):

        def read_split(split: str | None = None, **options: str) -> Population:
            return read_tff(path, split=split, name=_name_of_split(source, split), **options)

        return read_split, _TFF_OPTIONS
    if path.name.endswith(plain_text.ENDINGS):
        return partial(plain_text.read_plain_text, path, name=name), _TEXT_OPTIONS
    kinds = {"client": str, "text": str, "columns": _names, **_TEXT_OPTIONS}
    return partial(read_jsonl, path, name=name), kinds


def _name_of_split(source: str, split: str | None) -> str:
    path = source.partition("?")[0]
    return path if split is None else f"{path} [{split}]"


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


def _expand(path: str) -> str:
    def value(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        if not os.environ.get(name):
            raise InputError(f"source {path!r}: the environment variable {name} is not set")
        return os.environ[name]

    return os.path.expanduser(_VARIABLE.sub(value, path))


def _parse_query(source: str, query: str) -> dict[str, str]:
    if not query:
        return {}
    try:
        pairs = parse_qsl(query, strict_parsing=True, keep_blank_values=False)
    except ValueError:
        raise InputError(f"source {source!r}: options must be NAME=VALUE, joined by &") from None
    options = dict(pairs)
    if len(options) != len(pairs):
        raise InputError(f"source {source!r}: an option is given twice")
    return options


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


def _names(value: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in value.split(","))
