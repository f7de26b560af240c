"""Language models in GGUF files, llama.cpp's, made into folders that `pretrained` reads.

    convert("SmolLM2-135M-Instruct.Q4_1.gguf", "smollm2")

A file holds the network's sizes, its tensors in one of many quantised forms, the tokeniser and the
chat template. Architectures: llama (SmolLM2 too), qwen2 and qwen3. Tokenisers: byte-level BPE with
the splits of `_SPLITS`. The package `gguf` makes numbers of quantised blocks. The head is read
here, because that package believes the lengths that a file states, and so may read on without end.

Source: ggml-org/ggml, docs/gguf.md, version 3 of the format.
"""

import json
import math
import struct
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxpfl import files
from jaxpfl.checks import one_of
from jaxpfl.errors import CorruptFile, InputError, named
from jaxpfl.models.checkpoints.hugging_face_names import require_sizes, stored
from jaxpfl.models.checkpoints.model_files import DTYPES, expect_file, finite, require, write_folder
from jaxpfl.models.decoder.config import DecoderConfig
from jaxpfl.models.decoder.network import Decoder

ARCHITECTURES = ("llama", "qwen2", "qwen3")
# Far above any published model's.
_MOST_ENTRIES, _MOST_ITEMS = 2**16, 2**22
_SCALARS = dict(enumerate(("B", "b", "H", "h", "I", "i", "f", "?", "", "", "Q", "q", "d")))
_STRING, _ARRAY = 8, 9
_CONTROL, _USER_DEFINED = 3, 4

_LLAMA_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}|"
    r" ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# How a text is split before pieces are merged, by tokenizer.ggml.pre; None is GPT-2's way.
_SPLITS: dict[str, str | None] = {
    "default": None,
    "gpt-2": None,
    "smollm": None,
    "qwen2": _LLAMA_SPLIT.format(digits=""),
    "llama-bpe": _LLAMA_SPLIT.format(digits="{1,3}"),
}


class _Head:
    """The entries and the places of the tensors, each length checked before anything is made.

    Attributes:
      entries: numbers, texts and lists of them, by name.
      tensors: by name, the shape as numpy has it, the kind of numbers, and the place after `data`.
      data: where the tensors begin.
    """

    def __init__(self, path: Path):
        if not path.stat().st_size:
            raise CorruptFile(f"{path}: is empty")
        self.path, self.content, self._at = path, np.asarray(np.memmap(path, np.uint8, "r")), 0
        magic, version, tensors, entries = struct.unpack("<4sIQQ", self._bytes(24))
        if magic != b"GGUF":
            raise InputError(f"{path}: is no GGUF file")
        if version not in (2, 3):
            raise InputError(f"{path}: GGUF must have the version 2 or 3, found {version}")
        for number in (tensors, entries):
            if number > _MOST_ENTRIES:
                raise CorruptFile(f"{path}: damaged: it states {number} entries or tensors")
        self.entries: dict[str, Any] = {}
        for _ in range(entries):
            name = self._text()
            self.entries[name] = self._value(self._number("I"))
        self.tensors: dict[str, tuple[tuple[int, ...], int, int]] = {}
        for _ in range(tensors):
            name, rank = self._text(), self._number("I")
            if rank > 4:
                raise CorruptFile(f"{path}: damaged: a tensor has {rank} dimensions")
            shape = tuple(self._number("Q") for _ in range(rank))[::-1]
            self.tensors[name] = shape, self._number("I"), self._number("Q")
        alignment = self.entries.get("general.alignment", 32)
        if type(alignment) is not int or not 1 <= alignment <= 2**16:
            raise CorruptFile(f"{path}: damaged: general.alignment is no small positive number")
        self.data = -(-self._at // alignment) * alignment

    def _bytes(self, count: int) -> bytes:
        if count > len(self.content) - self._at:
            raise CorruptFile(f"{self.path}: damaged or cut off within its head")
        self._at += count
        return self.content[self._at - count : self._at].tobytes()

    def _number(self, form: str) -> Any:
        form = f"<{form}"
        return struct.unpack(form, self._bytes(struct.calcsize(form)))[0]

    def _text(self) -> str:
        try:
            return self._bytes(self._number("Q")).decode("utf-8")
        except UnicodeDecodeError:
            raise CorruptFile(f"{self.path}: damaged: a text in its head is not UTF-8") from None

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._text()
        if kind == _ARRAY:
            kind, count = self._number("I"), self._number("Q")
            if kind == _ARRAY or count > _MOST_ITEMS:
                raise CorruptFile(f"{self.path}: damaged: a list of lists, or of {count} items")
            return [self._value(kind) for _ in range(count)]
        form = _SCALARS.get(kind)
        if not form:
            raise CorruptFile(f"{self.path}: damaged: an entry of the unknown kind {kind}")
        return self._number(form)

    def get(self, name: str, kind: type, default: Any = None) -> Any:
        """An entry of this type, or the default."""
        value = self.entries.get(name, default)
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            what = "none" if value is None else files.JSON_NAMES[type(value)]
            expected = files.JSON_NAMES[kind]
            raise InputError(f"{self.path}: {name} must be {expected}, found {what}")
        return value

    def list_of(self, name: str, kind: type) -> list[Any]:
        items = self.get(name, list)
        if any(type(item) is not kind for item in items):
            raise InputError(f"{self.path}: each item of {name} must be {files.JSON_NAMES[kind]}")
        return items


def convert(path: str | Path, folder: str | Path, *, dtype: str = "float32") -> None:
    """Writes the model, the tokeniser and the chat template of a GGUF file to a folder.

    A folder with a config.json is complete. One tensor at a time is in memory.

    Args:
      folder: created if necessary; a model in it is replaced.
      dtype: "float32", which keeps every value of the file exactly; or "bfloat16".

    Raises:
      InputError: the file is missing or no GGUF, its architecture, tokeniser or quantisation is
        not supported, or its tensors are not those of the network that it describes.
      CorruptFile: the file is damaged or cut off.
    """
    path, folder = expect_file(files.user_path(path)), files.user_path(folder)
    library = require("gguf", "gguf")
    head = _Head(path)
    config = _config(head)
    tensors = _tensors(library, head, config)
    tokenizer = _tokenizer(head)
    heads = {"q_proj": config.heads, "k_proj": config.kv_heads}

    def read(theirs: str) -> np.ndarray:
        name, shape, kind, raw = tensors[theirs]
        # Numbers that are not quantised have their own dtype.
        typed = raw.view({0: np.float32, 1: np.float16}.get(kind, np.uint8))
        try:
            values = library.quants.dequantize(typed, library.GGMLQuantizationType(kind))
        except NotImplementedError:
            raise InputError(f"{path}: tensor {name!r} is quantised in an unknown way") from None
        values = finite(f"{path}: tensor {name!r}", values.astype(np.float32, copy=False))
        part = theirs.split(".")[-2]
        if config.model_type == "llama" and part in heads:
            # llama.cpp rotates neighbouring numbers, and so interleaves each head's two halves.
            values = values.reshape(heads[part], -1, 2, *shape[1:]).swapaxes(1, 2)
        return np.ascontiguousarray(values.reshape(shape)).astype(DTYPES[dtype], copy=False)

    number = DTYPES[dtype]
    shapes = {name: jax.ShapeDtypeStruct(shape, number) for name, (_, shape, *_) in tensors.items()}
    folder.mkdir(parents=True, exist_ok=True)
    for file, text in tokenizer.items():
        files.write_atomically(folder / file, text)
    write_folder(folder, config.to_dict() | {"dtype": dtype}, shapes, read)


def _config(head: _Head) -> DecoderConfig:
    path, name = head.path, head.get("general.architecture", str)
    one_of(f"{path}: general.architecture", name, ARCHITECTURES)
    if "rope_freqs.weight" in head.tensors:
        raise InputError(f"{path}: has scaled rotary positions, which no GGUF file states exactly")

    others = {key for key in head.entries if key.startswith(f"{name}.")}

    def entry(key: str, kind: type, default: Any = None) -> Any:
        others.discard(f"{name}.{key}")
        return head.get(f"{name}.{key}", kind, default)

    def short(key: str, default: float | None = None) -> float:
        """The shortest decimal number of a float32, as config.json states it."""
        return float(str(np.float32(entry(key, float, default))))

    heads = entry("attention.head_count", int)
    scaling = entry("rope.scaling.type", str, "none")
    with named(path):
        one_of(f"{name}.rope.scaling.type", scaling, ("none", "linear"))
        config = DecoderConfig(
            model_type=name,
            vocab_size=len(head.list_of("tokenizer.ggml.tokens", str)),
            hidden_size=entry("embedding_length", int),
            layers=entry("block_count", int),
            heads=heads,
            kv_heads=entry("attention.head_count_kv", int, heads),
            head_size=entry("attention.key_length", int, 0),
            inner_size=entry("feed_forward_length", int),
            positions=entry("context_length", int),
            norm_epsilon=short("attention.layer_norm_rms_epsilon"),
            rope_theta=short("rope.freq_base", 10_000.0),
            rope_scaling=short("rope.scaling.factor") if scaling == "linear" else None,
            tied="output.weight" not in head.tensors,
        )
        # Each states what these networks have in one way alone.
        fixed = dict.fromkeys(("rope.dimension_count", "attention.value_length"), config.head_size)
        fixed |= {"vocab_size": config.vocab_size, "expert_count": 0, "expert_used_count": 0}
        for key, only in fixed.items():
            if (stated := entry(key, int, only)) != only:
                raise InputError(f"{name}.{key} must be {only}, found {stated}")
        entry("rope.scaling.finetuned", bool, False)
        for key in sorted(others):
            raise InputError(f"{key} must be absent: it is of networks that are not computed here")
        require_sizes(Decoder(config))
    return config


def _tensors(library: Any, head: _Head, config: DecoderConfig) -> dict[str, Any]:
    """For each tensor of the network, the file's name for it, its shape, kind and mapped bytes."""
    architecture = library.MODEL_ARCH[config.model_type.upper()]
    names = library.get_tensor_name_map(architecture, config.layers)
    sizes = {int(kind): size for kind, size in library.constants.GGML_QUANT_SIZES.items()}
    tensors, others = {}, dict(head.tensors)
    for theirs, (shape, _) in stored(Decoder(config)).items():
        name = names.get_name(theirs, try_suffixes=(".weight", ".bias"))
        what = f"tensor {name!r}"
        if name not in others:
            raise InputError(f"{head.path}: {what} is missing")
        stated, kind, offset = others.pop(name)
        if stated != shape:
            expected = f"{what} must have the shape {list(shape)}"
            raise InputError(f"{head.path}: {expected}, found {list(stated)}")
        if kind not in sizes:
            raise InputError(f"{head.path}: {what} is quantised in an unknown way")
        block, block_bytes = sizes[kind]
        if shape[-1] % block:
            raise CorruptFile(f"{head.path}: damaged: {what} has rows of {shape[-1]} numbers")
        begin = head.data + offset
        end = begin + math.prod(shape) // block * block_bytes
        if end > len(head.content):
            raise CorruptFile(f"{head.path}: damaged or cut off: {what} ends behind the file")
        tensors[theirs] = name, shape, kind, head.content[begin:end]
    if others:
        raise InputError(f"{head.path}: tensor {min(others)!r} is not part of the network")
    return tensors


def _tokenizer(head: _Head) -> dict[str, str]:
    path = head.path
    # A byte-level BPE.
    one_of(f"{path}: tokenizer.ggml.model", head.get("tokenizer.ggml.model", str), ("gpt2",))
    split = head.get("tokenizer.ggml.pre", str, "default")
    one_of(f"{path}: tokenizer.ggml.pre", split, tuple(_SPLITS))
    tokens = head.list_of("tokenizer.ggml.tokens", str)
    kinds = head.list_of("tokenizer.ggml.token_type", int)
    merges = [tuple(merge.split(" ", 1)) for merge in head.list_of("tokenizer.ggml.merges", str)]
    if len(kinds) != len(tokens) or len(set(tokens)) != len(tokens):
        raise InputError(f"{path}: tokenizer.ggml.tokens must be different, with a type for each")
    library = require("tokenizers", "gguf")
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    settings["add_bos_token"] = head.get("tokenizer.ggml.add_bos_token", bool, False)
    ids = {}
    for role in ("bos", "eos"):
        token = head.get(f"tokenizer.ggml.{role}_token_id", int, -1)
        if token >= len(tokens):
            raise InputError(f"{path}: the {role} token must be below {len(tokens)}, found {token}")
        if token >= 0:
            settings[f"{role}_token"], ids[f"{role}_token_id"] = tokens[token], token
    try:
        vocab = {token: number for number, token in enumerate(tokens)}
        ignored = split == "llama-bpe"
        bpe = library.models.BPE(vocab=vocab, merges=merges, ignore_merges=ignored)
        made = library.Tokenizer(bpe)
        made.pre_tokenizer = _pre_tokenizer(library, split)
        made.decoder = library.decoders.ByteLevel()
        for add, wanted in ((made.add_special_tokens, _CONTROL), (made.add_tokens, _USER_DEFINED)):
            named = [token for token, kind in zip(tokens, kinds, strict=True) if kind == wanted]
            add([library.AddedToken(token, normalized=False) for token in named])
    # The library has no exception class of its own.
    except Exception as error:
        raise CorruptFile(f"{path}: its tokens and merges are no BPE: {error}") from None
    written = {
        "tokenizer.json": made.to_str(),
        "tokenizer_config.json": json.dumps(settings),
        "generation_config.json": json.dumps(ids),
    }
    template = head.get("tokenizer.chat_template", str, "")
    return written | ({"chat_template.jinja": template} if template else {})


def _pre_tokenizer(library: Any, split: str) -> Any:
    steps = library.pre_tokenizers
    pattern = _SPLITS[split]
    if pattern is not None:
        cut = steps.Split(library.Regex(pattern), behavior="isolated")
        return steps.Sequence([cut, steps.ByteLevel(add_prefix_space=False, use_regex=False)])
    whole = steps.ByteLevel(add_prefix_space=False)
    digits = steps.Digits(individual_digits=True)
    return steps.Sequence([digits, whole]) if split == "smollm" else whole
