"""Published models: loading their weights as parameters of our networks, and saving parameters.

    model, params = pretrained.load(pretrained.resolve("distilbert/distilgpt2"))
    pretrained.save("tuned", model, params)

A folder is what Hugging Face's libraries write: config.json, the weights as safetensors, and for
text the tokenizer's files. Only JSON and safetensors are read, so no file can run code.
"""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxpfl import files
from jaxpfl.checks import one_of
from jaxpfl.errors import InputError, named
from jaxpfl.models.base import Params, named_leaves
from jaxpfl.models.checkpoints import hugging_face_names, model_files
from jaxpfl.models.checkpoints.hub import resolve as resolve
from jaxpfl.models.checkpoints.hugging_face_names import Block, Naming
from jaxpfl.models.checkpoints.model_files import Tensors, open_tensors, write_folder
from jaxpfl.models.checkpoints.model_files import weight_files as weight_files
from jaxpfl.models.decoder import config as decoder_config
from jaxpfl.models.decoder.config import DecoderConfig
from jaxpfl.models.decoder.network import Decoder
from jaxpfl.models.encoder import config as encoder_config
from jaxpfl.models.encoder.config import EncoderConfig
from jaxpfl.models.encoder.network import Encoder

MODEL_TYPES = (*encoder_config.MODEL_TYPES, *decoder_config.MODEL_TYPES)

# How transformers spells the architectures in the names of its classes.
_CLASSES = {"bert": "Bert", "albert": "Albert", "roberta": "Roberta"}
# Rows of a tensor that are read at a time: so few that they fit in a cache while they are turned.
_ROWS = 64


def load(
    folder: str | Path, *, dtype: str = "float32", mesh: Mesh | None = None
) -> tuple[Encoder | Decoder, Params]:
    """The model in a folder, and its parameters.

    An encoder has a head if the weights have one; with `is_decoder` in config.json it is causal.

    Args:
      folder: holds config.json and model.safetensors, or shards with their index.
      dtype: "float32" or "bfloat16", the dtype of the parameters and of a decoder's computations
        (`Decoder.compute`); encoders are float32 only. Weights stored in float32, bfloat16 or
        float16 are converted exactly, except to a narrower dtype.
      mesh: the devices over which `model.shardings` distributes the parameters; None for the
        default device. In addition to the parameters already placed, at most one (of all layers)
        is in memory.

    Raises:
      InputError: a file is missing, the architecture is not supported, or a tensor is missing,
        unexpected, of another shape or dtype, or not finite. Shapes are checked before values
        are read.
      CorruptFile: a file is broken.
    """
    one_of("dtype", dtype, tuple(model_files.DTYPES))
    folder = files.user_path(folder)
    model = read_config(folder / "config.json")
    if isinstance(model, Decoder):
        model = dataclasses.replace(model, compute=dtype)
    elif dtype != "float32":
        raise InputError(f"dtype must be 'float32' for a {model.name} encoder, found {dtype!r}")
    with open_tensors(folder) as tensors:
        if isinstance(model, Encoder):
            has_head = Naming(model.name).head in _by_short(tensors, model)
            model = dataclasses.replace(model, head=has_head)
        return model, _parameters(tensors, model, model_files.DTYPES[dtype], mesh)


def read_config(path: str | Path) -> Encoder | Decoder:
    """The model that a config.json describes, without the head of an encoder; errors as `load`."""
    values = model_files.read_object(files.user_path(path))
    with named(path):
        model_type = one_of("model_type", values.get("model_type"), MODEL_TYPES)
        if model_type in decoder_config.MODEL_TYPES:
            model = Decoder(DecoderConfig.from_dict(values))
        else:
            causal = values.get("is_decoder") or False
            if not isinstance(causal, bool):
                raise InputError(f"is_decoder must be true or false, found {causal!r}")
            model = Encoder(EncoderConfig.from_dict(values), causal=causal)
        hugging_face_names.require_sizes(model)
        return model


def save(folder: str | Path, model: Encoder | Decoder, params: Params) -> None:
    """Writes config.json and the weights in Hugging Face's format, which transformers reads too.

    `load` gives the saved parameters, float32 or bfloat16, back bit by bit. A model in the folder
    is replaced; a crash leaves the old model, the new one, or a folder without config.json, which
    `load` refuses. The files of a tokenizer are neither written nor removed.
    """
    if isinstance(model, Decoder) and model.lora is not None:
        hint = "merge them first (lora.merge), or save them alone (checkpoints.adapters.save)"
        raise InputError(f"a model with adapters cannot be saved as a whole: {hint}")
    if isinstance(model, Decoder) and model.int8:
        raise InputError("int8 weights cannot be saved: save the model that was quantised")
    leaves = model_files.check_parameters(model, params, tuple(model_files.DTYPES))
    tensors = hugging_face_names.stored(model)
    shapes = {
        name: jax.ShapeDtypeStruct(shape, leaves[first.leaf].dtype)
        for name, (shape, (first, *_)) in tensors.items()
    }

    def read(name: str) -> np.ndarray:
        first, *_ = sources = tensors[name][1]
        parts = [_cut(block, leaves[block.leaf]) for block in sources]
        tensor = np.concatenate(parts, -1) if len(parts) > 1 else parts[0]
        model_files.finite(f"parameter {first.leaf}", tensor)
        return tensor.T if first.transposed else tensor

    kinds = {leaf.dtype.name for leaf in leaves.values()}
    config = model.config.to_dict() | {"dtype": kinds.pop() if len(kinds) == 1 else "float32"}
    if isinstance(model, Encoder):
        kind = "ForMaskedLM" if model.head else "Model"
        if model.causal and model.head:
            kind = "LMHeadModel" if model.name == "bert" else "ForCausalLM"
        config["architectures"] = [_CLASSES[model.name] + kind]
        config |= {"is_decoder": True} if model.causal else {}
    write_folder(folder, config, shapes, read)


def _parameters(
    tensors: Tensors, model: Encoder | Decoder, dtype: np.dtype, mesh: Mesh | None
) -> dict[str, Any]:
    """The parameters of a model, from tensors that are all checked before a value is read."""
    names, by_short = Naming(model.name), _by_short(tensors, model)
    expected = jax.eval_shape(lambda: model.init(jax.random.key(0)))
    shapes = named_leaves(expected)
    sources: dict[str, list[tuple[str, Block]]] = {leaf: [] for leaf in shapes}
    unused = dict(by_short)
    for block in hugging_face_names.blocks(model):
        name = by_short.get(block.tensor, block.tensor)
        tensors.require(name, hugging_face_names.stored_shape(block, shapes[block.leaf].shape))
        sources[block.leaf].append((name, block))
        unused.pop(block.tensor, None)
    for short, name in sorted(unused.items()):
        if short in names.tied:
            _require_copy(tensors, name, by_short.get(names.tied[short]))
        elif not hugging_face_names.IGNORED.match(short):
            raise InputError(f"{tensors.file(name)}: tensor {name!r} is not part of the model")
    shardings = {} if mesh is None else named_leaves(model.shardings(mesh, expected))
    params: list[jax.Array] = []
    for leaf, expected_leaf in shapes.items():
        whole = _read(tensors, sources[leaf], expected_leaf.shape, dtype)
        if mesh is None:
            params.append(jax.device_put(whole))
        else:
            part_of, placement = whole.__getitem__, shardings[leaf]
            params.append(jax.make_array_from_callback(whole.shape, placement, part_of))
    return jax.tree.unflatten(jax.tree.structure(expected), params)


def _require_copy(tensors: Tensors, name: str, original: str | None) -> None:
    """Refuses a tensor that is to be a copy of another one and is not, because it is not read."""
    if original is None:
        return
    shape = tensors.shape(original)
    tensors.require(name, shape)
    for start in range(0, shape[0], _ROWS):
        rows = (slice(start, min(start + _ROWS, shape[0])),)
        if not np.array_equal(tensors.finite(name, rows), tensors.finite(original, rows)):
            what = f"tensor {name!r} must be equal to {original!r}, of which config.json makes it a"
            hint = "copy: set tie_word_embeddings to false, or leave it out"
            raise InputError(f"{tensors.file(name)}: {what} {hint}")


def _by_short(tensors: Tensors, model: Encoder | Decoder) -> dict[str, str]:
    """The names in the file, by the names without prefix."""
    names, by_short = Naming(model.name), {}
    for name in tensors:
        other = by_short.setdefault(names.short(name), name)
        if other != name:
            raise InputError(f"{tensors.file(name)}: {other!r} and {name!r} are the same parameter")
    return by_short


def _read(
    tensors: Tensors, sources: list[tuple[str, Block]], shape: tuple[int, ...], dtype: Any
) -> np.ndarray:
    made = np.empty(shape, dtype)
    for name, block in sources:
        target = _cut(block, made)
        width = target.shape[-1]
        outputs = slice(block.part * width, (block.part + 1) * width)
        where = (*[slice(0, size) for size in target.shape[:-1]], outputs)
        if block.transposed:
            target, where = target.T, where[::-1]
        for start in range(0, len(target), _ROWS):
            rows = range(where[0].start, where[0].stop)[start : start + _ROWS]
            part = (slice(rows.start, rows.stop), *where[1:])
            target[start : start + _ROWS] = tensors.finite(name, part)
    return made


def _cut(block: Block, leaf: Any) -> np.ndarray:
    """A block's part of a parameter, in the parameter's orientation."""
    own = leaf if block.layer is None else leaf[block.layer]
    width = own.shape[-1] // block.leaf_parts
    return np.asarray(own[..., block.leaf_part * width : (block.leaf_part + 1) * width])
