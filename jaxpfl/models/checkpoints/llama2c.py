"""Weights in the format of llama2.c, such as stories260K: a header, then float32 tensors.

The header is seven int32: hidden size, inner size, layers, heads, heads of keys and values,
vocabulary (negative if the output layer is not the embedding) and positions. Then follow the
tensors of `_shapes` in little-endian float32, each for all layers; matrices are [outputs, inputs].

In llama2.c, rotary positions rotate neighbouring features (2i, 2i + 1) of a head (Su et al. 2021),
here features (i, i + D/2). The rows of W_q and W_k are reordered for that, which leaves q . k
unchanged.
"""

import math
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxpfl.errors import CorruptFile, InputError
from jaxpfl.models.base import Params
from jaxpfl.models.checkpoints.model_files import expect_file, finite
from jaxpfl.models.decoder.config import DecoderConfig
from jaxpfl.models.decoder.network import Decoder

_FIELDS = ("hidden_size", "inner_size", "layers", "heads", "kv_heads", "vocab_size", "positions")
_HEADER = 4 * len(_FIELDS)
_LATER_MAGIC = 0x616B3432


def load(path: str | Path) -> tuple[Decoder, Params]:
    """The decoder in a file, and its parameters in float32.

    Raises:
      InputError: there is no such file, it is of a later version of the format, its sizes are not
        those of a model, or a tensor is not finite.
      CorruptFile: its length does not agree with its header.
    """
    path = expect_file(Path(path))
    with path.open("rb") as file:
        begin = file.read(_HEADER)
    if len(begin) < _HEADER:
        raise CorruptFile(f"{path} must begin with {_HEADER} bytes of sizes, found {len(begin)}")
    header = np.frombuffer(begin, "<i4")
    if header[0] == _LATER_MAGIC:
        raise InputError(f"{path}: only the first version of llama2.c's format is read")
    sizes = dict(zip(_FIELDS, header.tolist(), strict=True))
    vocab_size = sizes["vocab_size"]
    try:
        config = DecoderConfig(
            "llama", **sizes | {"vocab_size": abs(vocab_size)}, tied=vocab_size > 0
        )
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    shapes = _shapes(config)
    expected = _HEADER + 4 * sum(math.prod(shape) for shape in shapes.values())
    found = path.stat().st_size
    if found != expected:
        raise CorruptFile(
            f"{path} must have {expected} bytes by its header ("
            f"{', '.join(f'{field} {size}' for field, size in sizes.items())}), found {found}"
        )
    values = np.memmap(path, "<f4", "r", _HEADER)
    tensors = {}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + math.prod(shape)
        tensors[name] = values[start:end].reshape(shape)
        if not name.startswith("rotary"):
            finite(f"{path}: tensor {name!r}", tensors[name])
    return Decoder(config), jax.device_put(_parameters(config, tensors))


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


def _parameters(config: DecoderConfig, tensors: dict[str, np.ndarray]) -> dict[str, Any]:
    tensors = dict(tensors)
    for name in ("q", "k"):
        rows = tensors[name].reshape(
            config.layers, -1, config.head_size // 2, 2, config.hidden_size
        )
        tensors[name] = np.swapaxes(rows, 2, 3).reshape(tensors[name].shape)
    layers: dict[str, Any] = {
        name: {"scale": np.array(tensors[name], np.float32)}
        for name in ("attention_norm", "mlp_norm")
    }
    for name in ("q", "k", "v", "o", "gate", "up", "down"):
        layers[name] = {"kernel": _turned(tensors[name])}
    params: dict[str, Any] = {
        "embed": {"token": np.array(tensors["embedding"], np.float32)},
        "layers": layers,
        "norm": {"scale": np.array(tensors["norm"], np.float32)},
    }
    if not config.tied:
        params["head"] = {"kernel": _turned(tensors["output"])}
    return params


def _turned(tensor: np.ndarray) -> np.ndarray:
    """A copy [..., inputs, outputs] of a tensor [..., outputs, inputs]."""
    return np.array(np.swapaxes(tensor, -1, -2), np.float32, order="C")
