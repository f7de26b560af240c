"""Converts a model of llama2.c, such as stories260K, to Hugging Face's format.

    python tools/llama2c.py stories260K.bin tok512.bin FOLDER

FOLDER then holds config.json, model.safetensors and the tokenizer's files, which
`jaxpfl.models.checkpoints.pretrained` and `jaxpfl.text.tokenisers` read, and other libraries too.

Weights: a header of seven little-endian int32 (hidden size, inner size, layers, heads, heads of
keys and values, vocabulary, negative if the output layer is not the embedding, and positions), then
the tensors of `_shapes` in float32, each for all layers; matrices are [outputs, inputs]. Rotary
positions rotate neighbouring features (2i, 2i + 1) of a head (Su et al. 2021), here features
(i, i + D/2): the rows of W_q and W_k are reordered for that, which leaves q . k unchanged.

Tokenizer: the length of the longest piece (int32), then for each piece its score (float32), its
length (int32) and its bytes. Ids 0, 1 and 2 are unknown, start and end; 3 .. 258 are single bytes.
Neighbours whose concatenation is a piece are joined in the order of its score.
"""

import math
import pathlib
import struct
import sys
from typing import Any

import jax
import numpy as np
import tokenizers
from tokenizers import decoders, models, normalizers, processors

from jaxpfl.errors import CorruptFile, InputError
from jaxpfl.models.base import Params
from jaxpfl.models.checkpoints import pretrained
from jaxpfl.models.checkpoints.model_files import expect_file
from jaxpfl.models.decoder.config import DecoderConfig
from jaxpfl.models.decoder.network import Decoder
from jaxpfl.text.tokenisers.fast import FastTokeniser

_FIELDS = ("hidden_size", "inner_size", "layers", "heads", "kv_heads", "vocab_size", "positions")
_HEADER, _RECORD = struct.Struct("<7i"), struct.Struct("<fi")
_SPECIAL = ["<unk>", "<s>", "</s>"]


def weights(path: pathlib.Path) -> tuple[Decoder, Params]:
    """The decoder in a file, and its parameters in float32.

    Raises:
      InputError: there is no such file, or its sizes are not those of a model.
      CorruptFile: its length does not agree with its header.
    """
    content = expect_file(path).read_bytes()
    if len(content) < _HEADER.size:
        raise CorruptFile(f"{path} must begin with 28 bytes of sizes, found {len(content)}")
    sizes: dict[str, Any] = dict(zip(_FIELDS, _HEADER.unpack_from(content), strict=True))
    tied = sizes["vocab_size"] > 0
    try:
        config = DecoderConfig(
            "llama", **sizes | {"vocab_size": abs(sizes["vocab_size"])}, tied=tied
        )
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    shapes = _shapes(config)
    expected = _HEADER.size + 4 * sum(math.prod(shape) for shape in shapes.values())
    if len(content) != expected:
        raise CorruptFile(
            f"{path} must have {expected} bytes by its header ({sizes}), found {len(content)}"
        )
    values = np.frombuffer(content, "<f4", offset=_HEADER.size).astype(np.float32)
    parts = np.split(values, np.cumsum([math.prod(shape) for shape in shapes.values()])[:-1])
    named = zip(shapes.items(), parts, strict=True)
    tensors = {name: part.reshape(shape) for (name, shape), part in named}
    for name in ("q", "k"):
        halves = (config.layers, -1, config.head_size // 2, 2, config.hidden_size)
        rows = tensors[name].reshape(halves)
        tensors[name] = np.swapaxes(rows, 2, 3).reshape(tensors[name].shape)
    norms = {name: {"scale": tensors[name]} for name in ("attention_norm", "mlp_norm")}
    maps = ("q", "k", "v", "o", "gate", "up", "down")
    params: dict[str, Any] = {
        "embed": {"token": tensors["embedding"]},
        "layers": norms | {name: {"kernel": np.swapaxes(tensors[name], 1, 2)} for name in maps},
        "norm": {"scale": tensors["norm"]},
    }
    if not tied:
        params["head"] = {"kernel": tensors["output"].T}
    return Decoder(config), jax.device_put(params)


def _shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """The shapes of the file's tensors, in its order; the rotary angles are not used."""
    hidden, inner, layers = config.hidden_size, config.inner_size, config.layers
    queries, keys = config.heads * config.head_size, config.kv_heads * config.head_size
    angles = (config.positions, config.head_size // 2)
    return {
        "embedding": (config.vocab_size, hidden),
        "attention_norm": (layers, hidden),
        "q": (layers, queries, hidden),
        "k": (layers, keys, hidden),
        "v": (layers, keys, hidden),
        "o": (layers, hidden, queries),
        "mlp_norm": (layers, hidden),
        "gate": (layers, inner, hidden),
        "down": (layers, hidden, inner),
        "up": (layers, inner, hidden),
        "norm": (hidden,),
        "rotary_cos": angles,
        "rotary_sin": angles,
        **({} if config.tied else {"output": (config.vocab_size, hidden)}),
    }


def tokeniser(path: pathlib.Path) -> FastTokeniser:
    """The tokeniser in a file. The start token ends a text, too: in training it began the next."""
    content, place = expect_file(path).read_bytes(), 4
    pieces: list[str] = []
    scores: list[float] = []
    while place + _RECORD.size <= len(content):
        score, length = _RECORD.unpack_from(content, place)
        if length < 1:
            break
        place += _RECORD.size + length
        pieces.append(content[place - length : place].decode(errors="replace"))
        scores.append(score)
    if place != len(content) or pieces[3:259] != [f"<0x{value:02X}>" for value in range(256)]:
        raise CorruptFile(f"{path} must be a whole tokenizer of llama2.c")
    pieces = [*_SPECIAL, *(piece.replace(" ", "\u2581") for piece in pieces[3:])]
    ids = {piece: i for i, piece in reversed([*enumerate(pieces)])}
    merges = [
        (pieces[i][:cut], pieces[i][cut:])
        for i in sorted(range(259, len(pieces)), key=lambda i: -scores[i])
        for cut in range(1, len(pieces[i]))
        if pieces[i][:cut] in ids and pieces[i][cut:] in ids
    ]
    found = tokenizers.Tokenizer(models.BPE(ids, merges, unk_token="<unk>", byte_fallback=True))
    found.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    found.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    found.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    found.add_special_tokens(_SPECIAL)
    return FastTokeniser(found, name=path.stem, end_of_text=1, ends=(2,), start=1)


def main(model: pathlib.Path, tokens: pathlib.Path, folder: pathlib.Path) -> None:
    pretrained.save(folder, *weights(model))
    tokeniser(tokens).save(folder)


if __name__ == "__main__":
    main(*map(pathlib.Path, sys.argv[1:4]))
