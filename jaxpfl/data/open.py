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

A path may begin with ~ or hold $NAME, an environment variable. With `split`, an example of a text
file is a sentence, paragraph or line (see `readers.prose`), and min_examples counts these; of
TensorFlow Federated's files it names the part to read. With `min_examples=5`, clients with fewer
examples hold none; they stay clients, so that their number does not follow from what they hold.
"""

import difflib
import os
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
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
from jaxpfl.data.readers.largefedbench import PARTS, read_largefedbench
from jaxpfl.data.readers.prose import PIECES
from jaxpfl.data.readers.tff_schemas import SCHEMAS
from jaxpfl.data.readers.tff_sqlite import ENDINGS as _TFF_ENDINGS
from jaxpfl.data.readers.tff_sqlite import read_tff, stream_tff
from jaxpfl.data.stream import Stream
from jaxpfl.errors import InputError

_READERS = ("docstrings", "digits", "largefedbench", "huggingface")
_ENDINGS = ", ".join((".jsonl", ".jsonl.gz", ".npz", *plain_text.ENDINGS, *_TFF_ENDINGS))
_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")


def open(source: str | Path | Population) -> Population:
    """The population of a source; a population is its own source.

    Raises:
      InputError: no such reader, package, file or option; or what is in the file is not valid.
      CorruptFile: the file is truncated or altered.
    """
    if isinstance(source, Population):
        return source
    if isinstance(source, Path):
        return _open_path(source, {}, str(source))
    if not isinstance(source, str) or not source:
        raise InputError(f"a source must be a path or a string, found {type(source).__name__}")
    reader, _, packages = source.partition(":")
    if reader == "docstrings":
        return read_docstrings([name.strip() for name in packages.split(",")])
    path, _, query = source.partition("?")
    options = _parse_query(source, query)
    if reader in ("largefedbench", "huggingface"):
        return _open_hub(reader, path.partition(":")[2], options, source)
    if path == "digits":
        return read_digits(**_typed(source, options, {"clients": int, "alpha": float, "seed": int}))
    return _open_path(Path(_expand(path)), options, source)


def stream(source: str, folder: Path) -> AbstractContextManager[Stream] | None:
    """The source's population batch by batch; None if only `open` can read such a source.

    Args:
      folder: where temporary files may go.

    Raises:
      InputError, CorruptFile: as `open`, here or while the stream is read.
    """
    path, _, query = source.partition("?")
    options = _parse_query(source, query)
    if not path.endswith(_TFF_ENDINGS) or "min_examples" in options:
        return None
    typed = _tff_options(options, source)
    return stream_tff(_expand(path), **typed, name=_name_of_split(source, typed), folder=folder)


def place(source: str) -> str:
    """Where a source's data is, however it is spelled: two sources of one place hold the same.

    A path is resolved as far as its variables are set; options are left out.
    """
    head = source.partition("?")[0]
    reader, _, name = head.partition(":")
    if reader == "largefedbench":
        return f"huggingface:{PARTS.get(name, name)}"
    if reader in _READERS:
        return head
    return str(Path(os.path.expanduser(os.path.expandvars(head))).resolve())


def _open_path(path: Path, options: dict[str, str], source: str) -> Population:
    if path.is_dir() and storage.is_stored(path):
        _typed(source, options, {})
        return Population.load(path)
    if path.is_dir():
        raise InputError(f"source {source!r} is a folder without a manifest.json of ours")
    plain = path.name.endswith(plain_text.ENDINGS)
    if not plain and not path.name.endswith((".jsonl", ".jsonl.gz", ".npz", *_TFF_ENDINGS)):
        raise _unknown(source, path)
    if not path.is_file():
        raise InputError(f"source {source!r}: there is no such file")
    if path.name.endswith(".npz"):
        return _open_arrays(path, options, source)
    if path.name.endswith(_TFF_ENDINGS):
        return _open_tff(path, options, source)
    kinds: dict[str, Callable] = {"split": str, "min_examples": int}
    if not plain:
        kinds = {"client": str, "text": str, "columns": _names, **kinds}
    typed = _typed(source, options, kinds)
    at_least = checks.positive_int("min_examples", typed.pop("min_examples", 1))
    if "split" in typed:
        checks.one_of(f"source {source!r}: split", typed["split"], PIECES)
    read = plain_text.read_plain_text if plain else read_jsonl
    population = read(path, name=source.partition("?")[0], **typed)
    return population.with_min_examples(at_least) if at_least > 1 else population


def _open_hub(reader: str, name: str, options: dict[str, str], source: str) -> Population:
    named = ("revision", "part", "text", "split")
    named += ("client", "config") if reader == "huggingface" else ()
    typed = _typed(source, options, {**dict.fromkeys(named, str), "min_examples": int})
    if "revision" not in typed:
        raise InputError(f"source {source!r}: needs an option revision, the commit to read")
    at_least = checks.positive_int("min_examples", typed.pop("min_examples", 1))
    if reader == "huggingface":
        population = read_hugging_face(name, **typed)
    else:
        population = read_largefedbench(name, part_split=typed.pop("part", "train"), **typed)
    return population.with_min_examples(at_least) if at_least > 1 else population


def _open_arrays(path: Path, options: dict[str, str], source: str) -> Population:
    kinds = {"client": str, **dict.fromkeys(IMAGE_COLUMNS, str), "min_examples": int}
    typed = _typed(source, options, kinds)
    at_least = checks.positive_int("min_examples", typed.pop("min_examples", 1))
    client = typed.pop("client", "client")
    columns = {**IMAGE_COLUMNS, **typed}
    population = read_arrays(path, client=client, columns=columns, name=source.partition("?")[0])
    return population.with_min_examples(at_least) if at_least > 1 else population


def _open_tff(path: Path, options: dict[str, str], source: str) -> Population:
    typed = _tff_options(options, source)
    at_least = checks.positive_int("min_examples", typed.pop("min_examples", 1))
    population = read_tff(path, **typed, name=_name_of_split(source, typed))
    return population.with_min_examples(at_least) if at_least > 1 else population


def _tff_options(options: dict[str, str], source: str) -> dict:
    kinds = {**dict.fromkeys(("dataset", "split", "form", "sha256"), str), "min_examples": int}
    typed = _typed(source, options, kinds)
    checks.one_of(f"source {source!r}: dataset", typed.get("dataset"), tuple(SCHEMAS))
    return typed


def _name_of_split(source: str, typed: dict) -> str:
    path = source.partition("?")[0]
    return f"{path} [{typed['split']}]" if "split" in typed else path


def _unknown(source: str, path: Path) -> InputError:
    if path.exists():
        return InputError(f"source {source!r}: expected a name ending in {_ENDINGS}")
    word = re.split(r"[:?]", source)[0]
    near = difflib.get_close_matches(word, _READERS, 1, 0.5)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    return InputError(
        f"unknown source {source!r}{hint}: expected docstrings:PACKAGES, digits, "
        f"largefedbench:congress, huggingface:OWNER/NAME, a path ending in {_ENDINGS}, or a folder "
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


def _typed(source: str, options: dict[str, str], kinds: dict[str, Callable]) -> dict:
    typed = {}
    for name, value in options.items():
        if name not in kinds:
            near = difflib.get_close_matches(name, kinds, 1, 0.5)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            expected = ", ".join(kinds) or "none"
            raise InputError(f"source {source!r}: no option {name!r}{hint}; expected {expected}")
        try:
            typed[name] = kinds[name](value)
        except ValueError:
            raise InputError(
                f"source {source!r}: {name} must be a number, found {value!r}"
            ) from None
    return typed


def _names(value: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in value.split(","))
