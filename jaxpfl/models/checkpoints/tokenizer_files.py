"""Reads a tokenizer.json that anybody may have written, by Hugging Face's library `tokenizers`.

The library reads JSON alone, so that no file can run code. But a short file can describe a
tokenizer that makes a long text of a short one (steps that each double it, padding to a billion
tokens), or that has an id for which a list of all ids would not fit the memory. Such files are
refused before a text is encoded.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jaxpfl import files
from jaxpfl.errors import CorruptFile, InputError
from jaxpfl.models.checkpoints.model_files import expect_file, require

# Far above any published tokenizer's.
_MOST_BYTES, _MOST_IDS, _MOST_GROWTH = 2**28, 2**22, 2**10
_PARTS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")


def read_tokenizer(path: Path) -> Any:
    """Reads a tokenizer.json; the tokenizer neither pads nor cuts."""
    tokenizers = require("tokenizers", "text")
    size = expect_file(path).stat().st_size
    if size > _MOST_BYTES:
        raise CorruptFile(f"{path} must have at most {_MOST_BYTES} bytes, found {size}")
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
        raise CorruptFile(
            f"{path}: the steps of the tokenizer may make a text more than {_MOST_GROWTH} times as "
            "long, which no published one does"
        )
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
