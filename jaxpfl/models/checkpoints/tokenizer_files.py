"""Reads a tokenizer.json that anybody may have written, by Hugging Face's library `tokenizers`.

The library reads JSON alone, so that no file can run code. But a short file can describe a
tokenizer that makes a long text of a short one (steps that each double it, padding to a billion
tokens), or that has an id for which a list of all ids would not fit the memory. Such files are
refused before a text is encoded.

Where a folder has a tokenizer's other files alone, `with_tokenizer` makes a tokenizer.json of them
by the library transformers, in a process of its own.
"""

import hashlib
import importlib.metadata
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jaxpfl import compilation_cache, files
from jaxpfl.errors import CorruptFile, InputError
from jaxpfl.models.checkpoints.model_files import expect_file, read_object, require

# Far above any published tokenizer's.
_MOST_BYTES, _MOST_IDS, _MOST_GROWTH = 2**28, 2**22, 2**10
_PARTS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")

TOKENIZER, SETTINGS = "tokenizer.json", "tokenizer_config.json"
_SOURCES = (
    "added_tokens.json merges.txt sentencepiece.bpe.model spiece.model tokenizer.model vocab.json "
    "vocab.txt"
)
# Objects of settings; of the first, transformers takes any for one of the second, too.
_SETTINGS = ("special_tokens_map.json", SETTINGS)
# What the process of `with_tokenizer` runs; the limits are 120 s of computing and 16 GiB.
_CONVERSION = """
import contextlib, resource, sys
hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
seconds = 120 if hard < 0 else min(120, hard)  # -1: no limit
resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
with contextlib.suppress(OSError, ValueError):  # macOS refuses this limit
    resource.setrlimit(resource.RLIMIT_AS, (2**34, 2**34))
from transformers import AutoTokenizer
made = AutoTokenizer.from_pretrained(sys.argv[1], trust_remote_code=False, local_files_only=True)
made.save_pretrained(sys.argv[2])
"""


def with_tokenizer(folder: Path) -> Path:
    """The folder if it has a tokenizer.json; else one in the user's cache, made of its other files.

    transformers, an optional library, makes tokenizer.json and tokenizer_config.json once. It sees
    copies of the files and of the settings that name neither code nor other files. `InputError` if
    it cannot make them, `CorruptFile` if a file is broken.
    """
    sources = [folder / name for name in _SOURCES.split() if (folder / name).is_file()]
    if (folder / TOKENIZER).is_file() or not sources:
        return folder
    model_type = read_object(folder / "config.json", optional=True).get("model_type")
    settings: dict[str, Any] = {"config.json": {"model_type": model_type}}
    for name in _SETTINGS:
        given = read_object(folder / name, optional=True)
        settings[name] = {key: value for key, value in given.items() if not _refers(key, value)}
    for path in sources:
        _check_size(path)
    cache = compilation_cache.caches() / "tokenizers"
    try:
        made = cache / _identity(settings, sources)
        if made.is_dir():
            return made
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as place:
            given, written = Path(place) / "given", Path(place) / "written"
            given.mkdir()
            copies = [Path(shutil.copyfile(path, given / path.name)) for path in sources]
            # The files may have changed since.
            made = cache / _identity(settings, copies)
            for name, values in settings.items():
                files.write_json(given / name, values)
            if reason := _convert(given, written):
                library = "transformers (pip install 'jaxpfl[transformers]')"
                names = ", ".join(path.name for path in sources)
                what = f"{folder} has no {TOKENIZER}, and {library} makes none of {names}"
                raise InputError(f"{what}: {reason}")
            try:
                written.rename(made)
            except OSError:
                # Another process may have made the same.
                if not made.is_dir():
                    raise
    except OSError as error:
        raise InputError(f"{folder}: cache {cache} cannot hold a {TOKENIZER}: {error}") from error
    return made


def _refers(key: str, value: Any) -> bool:
    """Whether a setting names code or a file; tokens, such as "</s>", do not."""
    if "file" in key or key.endswith("_spm") or key in ("auto_map", "chat_template"):
        return True
    if key.endswith(("_token", "_tokens", "_tokens_decoder")):
        return False
    if isinstance(value, dict):
        return any(_refers(name, part) for name, part in value.items())
    if isinstance(value, list):
        return any(_refers(key, part) for part in value)
    return isinstance(value, str) and ("/" in value or "\\" in value)


def _identity(settings: dict[str, Any], sources: list[Path]) -> str:
    """The name of what this version of transformers makes of these files."""
    try:
        version = importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        version = None
    contents = {path.name: files.sha256_file(path) for path in sources}
    identity = json.dumps([version, settings, contents], sort_keys=True)
    return hashlib.sha256(identity.encode()).hexdigest()[:20]


def _convert(given: Path, written: Path) -> str:
    """Runs transformers; returns why it has made no tokenizer.json, "" if it has."""
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", _CONVERSION, given, written],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "RAYON_NUM_THREADS": "1"},
            check=False,
            timeout=600,
        )
    except subprocess.TimeoutExpired:
        return "it took more than 600 s"
    if done.returncode == 0 and (written / TOKENIZER).is_file():
        return ""
    lines = done.stderr.decode("utf-8", "replace").split("\n")
    reason = next((line for line in reversed(lines) if line.strip()), "")[:300]
    return f"it ended with status {done.returncode} {reason}"


def _check_size(path: Path) -> None:
    size = expect_file(path).stat().st_size
    if size > _MOST_BYTES:
        raise CorruptFile(f"{path} must have at most {_MOST_BYTES} bytes, found {size}")


def read_tokenizer(path: Path) -> Any:
    """Reads a tokenizer.json; the tokenizer neither pads nor cuts."""
    tokenizers = require("tokenizers", "text")
    _check_size(path)
    with faults(f"{path} is not a tokenizer file"):
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
        tokenizer.no_padding()
        tokenizer.no_truncation()
        parts = [getattr(tokenizer, name) for name in _PARTS]
        settings = [files.parse_json(part.__getstate__()) for part in parts if part is not None]
        largest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
    if largest >= _MOST_IDS:
        raise CorruptFile(f"{path}: token ids must be below {_MOST_IDS}, found {largest}")
    steps = [step for part in settings for step in _steps(part)]
    if any(added > largest for step in steps for added in _added(step)):
        raise CorruptFile(f"{path}: post_processor adds an id that no token has")
    if math.prod(map(_growth, steps)) > _MOST_GROWTH:
        what = f"the steps of the tokenizer may make a text more than {_MOST_GROWTH} times as long"
        raise CorruptFile(f"{path}: {what}, which no published one does")
    return tokenizer


def framed(tokenizer: Any, path: Path) -> tuple[list[int], list[int]]:
    """The ids of the text "a", alone and with the tokens that the tokenizer puts around a text."""
    with faults(f"{path}: the tokenizer cannot encode the text 'a'"):
        plain = tokenizer.encode("a", add_special_tokens=False).ids
        return plain, tokenizer.encode("a", add_special_tokens=True).ids


@contextmanager
def faults(sentence: str, *, private: bool = False) -> Iterator[None]:
    """Reports the library's errors as `CorruptFile`, with this sentence.

    The library has no exception class of its own, and a panic of its Rust code is no `Exception`.
    If `private`, its own message, which may quote a text, is left out.
    """
    try:
        yield
    except InputError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        if private:
            raise CorruptFile(sentence) from None
        raise CorruptFile(f"{sentence}: {error}") from error


def _steps(settings: Any) -> Iterator[dict[str, Any]]:
    """The steps that a part of a tokenizer consists of, however they are nested."""
    if isinstance(settings, dict):
        if isinstance(settings.get("type"), str):
            yield settings
        settings = list(settings.values())
    if isinstance(settings, list):
        for element in settings:
            yield from _steps(element)


def _growth(step: dict[str, Any]) -> int:
    """How many times as long a text a step may make, at most and in the order of magnitude."""
    match step["type"]:
        case "ByteLevel":
            return 2
        case "Precompiled":
            return 32
        case "Replace":
            return max(1, len(step["content"]))
        case "TemplateProcessing":
            return max(1, sum("Sequence" in piece for piece in step["single"]))
    return 1


def _added(step: dict[str, Any]) -> list[int]:
    """The ids that a step puts around a text."""
    match step["type"]:
        case "TemplateProcessing":
            return [id_ for token in step["special_tokens"].values() for id_ in token["ids"]]
        case "BertProcessing" | "RobertaProcessing":
            return [step["sep"][1], step["cls"][1]]
    return []
