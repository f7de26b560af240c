"""Adapters in a folder: adapter_config.json and adapter_model.safetensors.

Settings and names are those of the library PEFT, which can read a Llama's adapters from here and
write them for here. GPT-2's checkpoints have one matrix for queries, keys and values, our networks
three, each with its own adapter; these are named attn.q, attn.k and attn.v, which PEFT does not
know. In a file, A is [rank, inputs] and B [outputs, rank], separately for every layer.
"""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpfl.errors import InputError
from jaxpfl.models.base import Params
from jaxpfl.models.checkpoints.hugging_face_names import GPT2_PROJECTIONS, LLAMA_PROJECTIONS
from jaxpfl.models.checkpoints.model_files import finite, read_object
from jaxpfl.models.checkpoints.safetensors_files import (
    Described,
    Tensors,
    open_file,
    replace_files,
    write_file,
    write_json,
)
from jaxpfl.models.decoder import lora
from jaxpfl.models.decoder.config import PROJECTIONS, LoRA
from jaxpfl.models.decoder.network import Decoder

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"

# Variants that are not computed here: each field with the values that leave the variant off.
_OFF = {
    "use_dora": (False, None),
    "use_rslora": (False, None),
    "fan_in_fan_out": (False, None),
    "lora_bias": (False, None),
    "bias": ("none", None),
    "modules_to_save": (None, []),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "layers_to_transform": (None, []),
}


def save(folder: str | Path, model: Decoder, params: Params) -> None:
    """Writes the adapters of a model, without its base (see `jaxpfl.models.decoder.lora.attach`).

    They replace the adapters that the folder holds. A crash leaves the old ones, the new ones, or a
    folder without adapter_config.json, which `load` refuses.

    Raises:
      InputError: the model has no adapters, or one is not finite.
    """
    if model.lora is None:
        raise InputError("the model has no adapters to save")
    adapters, _ = lora.split(params)
    described, sources = {}, {}
    for target, layer, leaf, name in _places(model, tuple(adapters)):
        value = adapters[target][leaf]
        described[name] = Described(value.shape[:0:-1], value.dtype.name)
        sources[name] = (value, layer, f"adapter {target}/{leaf}")

    def read(name: str) -> np.ndarray:
        value, layer, what = sources[name]
        return finite(what, np.asarray(value[layer])).T

    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": model.lora.rank,
        "lora_alpha": model.lora.alpha,
        "target_modules": sorted(_projections(model)[target] for target in adapters),
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
        "base_model_name_or_path": None,
    }
    replace_files(
        Path(folder),
        {
            WEIGHTS: lambda path: write_file(path, described, read),
            CONFIG: lambda path: write_json(path, settings),
        },
    )


def load(folder: str | Path, model: Decoder, params: Params) -> tuple[Decoder, dict[str, Any]]:
    """The model with the adapters in a folder, and its parameters, which share the base's arrays.

    Args:
      model, params: the base that the adapters were trained with, without adapters.

    Raises:
      InputError: a file is missing, the model has adapters already, the settings ask for a variant
        that is not computed here, or a tensor is missing, unexpected, of another shape or not
        finite.
      CorruptFile: a file is broken.
    """
    folder = Path(folder)
    if model.lora is not None:
        raise InputError("the model has adapters already: merge or detach them first")
    settings = _settings(folder / CONFIG, model)
    path = folder / WEIGHTS
    adapters: dict[str, Any] = {}
    for target in settings.targets:
        kernel = params["layers"][target]["kernel_int8" if model.int8 else "kernel"]
        layers, inputs, outputs = kernel.shape
        adapters[target] = {
            "a": np.empty((layers, inputs, settings.rank), np.float32),
            "b": np.empty((layers, settings.rank, outputs), np.float32),
        }
    with open_file(path) as file:
        tensors = Tensors(path, {name: (path, file) for name in file.keys()})  # noqa: SIM118
        unused = set(tensors)
        for target, layer, leaf, name in _places(model, settings.targets):
            unused.discard(name)
            tensors.check(name, adapters[target][leaf].shape[:0:-1])
            adapters[target][leaf][layer] = tensors.finite(name).T
        if unused:
            raise InputError(f"{path}: tensor {min(unused)!r} is not an adapter of this model")
    joined = lora.join(jax.tree.map(jnp.asarray, adapters), params)
    return dataclasses.replace(model, lora=settings), joined


def _settings(path: Path, model: Decoder) -> LoRA:
    values = read_object(path)
    if values.get("peft_type") != "LORA":
        raise InputError(f"{path}: peft_type must be 'LORA', found {values.get('peft_type')!r}")
    for field, allowed in _OFF.items():
        if values.get(field) not in allowed:
            raise InputError(f"{path}: {field} must be {allowed[0]!r}, found {values[field]!r}")
    modules = values.get("target_modules")
    if not isinstance(modules, list) or not all(isinstance(name, str) for name in modules):
        raise InputError(f"{path}: target_modules must be a list of names, found {modules!r}")
    known = _projections(model)
    targets = []
    for module in modules:
        found = [ours for ours, theirs in known.items() if f".{theirs}".endswith(f".{module}")]
        if not found:
            raise InputError(
                f"{path}: target_modules must be among {', '.join(known.values())} "
                f"(of {model.name}), found {module!r}"
            )
        targets += found
    try:
        ordered = tuple(name for name in PROJECTIONS if name in targets)
        return LoRA(values.get("r"), values.get("lora_alpha"), ordered)  # pyright: ignore
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def _projections(model: Decoder) -> dict[str, str]:
    if model.name == "gpt2":
        return {"q": "attn.q", "k": "attn.k", "v": "attn.v", **GPT2_PROJECTIONS}
    return LLAMA_PROJECTIONS


def _places(model: Decoder, targets: tuple[str, ...]) -> list[tuple[str, int, str, str]]:
    """The target, layer, leaf and tensor name of every matrix of the adapters."""
    before = "base_model.model." + ("transformer.h" if model.name == "gpt2" else "model.layers")
    return [
        (target, layer, leaf, f"{before}.{layer}.{_projections(model)[target]}.{theirs}.weight")
        for layer in range(model.config.layers)
        for target in targets
        for leaf, theirs in (("a", "lora_A"), ("b", "lora_B"))
    ]
