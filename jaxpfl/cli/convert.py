"""`jaxpfl convert` and `convert-model`."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="SOURCE", help="what to read; see jaxpfl.data.open")
    out = "a new folder; it is private, and complete or absent"
    parser.add_argument("out", metavar="OUT", type=Path, help=out)
    public = (
        "write token ids in place of the texts, for a word model of this vocabulary: a "
        "vocabulary.json, a folder with tokens, TensorFlow Federated's "
        "stackoverflow.word_count.tar.bz2, or any source of PUBLIC text, whose words are counted"
    )
    parser.add_argument("--vocabulary", metavar="PUBLIC", help=public)
    size = "the model's vocab_size: the most frequent words, and four special ids"
    parser.add_argument("--vocab-size", metavar="IDS", type=int, help=size)


def run(arguments: argparse.Namespace, _: Sequence[str]) -> dict[str, Any]:
    from jaxpfl.data.convert import convert
    from jaxpfl.errors import InputError

    encoder = None
    if arguments.vocabulary is not None:
        from jaxpfl.text.tokenisers.public_words import public_words

        encoder = public_words(arguments.vocabulary, arguments.vocab_size)
    elif arguments.vocab_size is not None:
        raise InputError("--vocab-size must come with --vocabulary, which says whose words it is")
    record = convert(arguments.source, arguments.out, encoder)
    return {**record, "text": f"{record['clients']} clients written to {record['out']}"}


def add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", type=Path, help="a model in a GGUF file")
    folder = "for config.json, the weights as safetensors, and the tokeniser's files"
    parser.add_argument("out", metavar="FOLDER", type=Path, help=folder)
    dtype = "of the written weights (default: float32, which keeps the file's values exactly)"
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help=dtype)


def run_model(arguments: argparse.Namespace, _: Sequence[str]) -> dict[str, Any]:
    from jaxpfl.models.checkpoints import gguf_files

    gguf_files.convert(arguments.file, arguments.out, dtype=arguments.dtype)
    text = f"the model of {arguments.file} is written to {arguments.out}"
    return {"file": str(arguments.file), "out": str(arguments.out), "text": text}
