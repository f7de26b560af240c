"""Adapters in a folder: adapter_config.json and adapter_model.safetensors.

Settings and names are those of the library PEFT (0.21): it reads our files, and we read its
adapters of our decoders. In a file, A is [rank, inputs] and B [outputs, rank], separately for every
layer. A setting that is not supported here must be off, unless it cannot change the trained model's
outputs: an ignored variant of LoRA would be another model.

GPT-2's queries, keys and values are one matrix in its checkpoints. An adapter of rank R on it is
read as three of rank R with the same A. Ours, of rank r each, are written as one of rank 3 r:

    A = [A_q; A_k; A_v]        B = diag(B_q, B_k, B_v)        alpha = 3 alpha

with zeros for a projection that has no adapter, and are read again bit by bit. PEFT's rank_pattern
and alpha_pattern say so; they are supported for nothing else.
"""

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from scipy.linalg import block_diag

from jaxpfl import files
from jaxpfl.errors import InputError, named
from jaxpfl.models import adapter_trees
from jaxpfl.models.base import Params
from jaxpfl.models.checkpoints import hub
from jaxpfl.models.checkpoints.hugging_face_names import GPT2_PROJECTIONS, LLAMA_PROJECTIONS
from jaxpfl.models.checkpoints.model_files import finite, open_file, read_object, write_folder
from jaxpfl.models.decoder.config import PROJECTIONS, LoRA
from jaxpfl.models.decoder.network import Decoder

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
FUSED = "attn.c_attn"
"""GPT-2's matrix for queries, keys and values."""

_LEAVES = {"a": "lora_A", "b": "lora_B"}
# Some initialisations change the base itself ("pissa", "olora", "corda", "loftq"); these do not.
_ALLOWED: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "task_type": ("CAUSAL_LM", None),
    "init_lora_weights": (True, False, "gaussian", "orthogonal"),
    "bias": ("none", None),
    "runtime_config": ({"ephemeral_gpu_offload": False}, None),
    "use_rslora": (False, True, None),
}
# These are read, or do not change what the trained adapters compute. PEFT sets fan_in_fan_out to
# what the base's layers need, and its file has A [rank, inputs] and B [outputs, rank] either way.
_ANY = (
    "r lora_alpha target_modules auto_mapping base_model_name_or_path fan_in_fan_out "
    "inference_mode lora_dropout megatron_core peft_version qalora_group_size revision"
)
_OFF: tuple[Any, ...] = (None, False, [], {})
"""Any other setting must have one of these: it is a variant of LoRA that is off."""


def save(folder: str | Path, model: Decoder, params: Params, *, base: str | None = None) -> None:
    """Writes the adapters of a model, without its base (see `jaxpfl.models.decoder.lora.attach`).

    They replace the adapters that the folder holds. A crash leaves the old ones, the new ones, or a
    folder without adapter_config.json, which `load` refuses. `base` is the folder or the hub name
    of the base, which PEFT looks up; None leaves it open.
    """
    if model.lora is None:
        raise InputError("the model has no adapters to save")
    adapters, _ = adapter_trees.split(params)
    modules = {name: own for name, own in _modules(model).items() if set(own) & set(adapters)}
    tensors = {
        _name(model, module, layer, leaf): _stored(adapters, own, leaf, layer)
        for module, own in modules.items()
        for leaf in _LEAVES
        for layer in range(model.config.layers)
    }
    rank, alpha, tripled = model.lora.rank, model.lora.alpha, FUSED in modules
    # PEFT has the commit of a model on the hub in a field of its own.
    name, revision = (None, None) if base is None else hub.with_commit(base)
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": name,
        "revision": revision,
        "r": rank,
        "lora_alpha": alpha,
        "rank_pattern": {FUSED: 3 * rank} if tripled else {},
        "alpha_pattern": {FUSED: 3 * alpha} if tripled else {},
        "target_modules": sorted(modules),
        "fan_in_fan_out": model.name == "gpt2",
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }
    write_folder(folder, settings, tensors, tensors.__getitem__, (WEIGHTS, CONFIG))


def _stored(adapters: Params, own: tuple[str, ...], leaf: str, layer: int) -> np.ndarray:
    """A matrix as the file has it; several projections are joined as the module's head says."""
    some = next(adapters[name][leaf] for name in own if name in adapters)
    turned = [np.zeros(some.shape[:0:-1], some.dtype)] * len(own)
    for number, name in enumerate(own):
        if name in adapters:
            values = np.asarray(adapters[name][leaf][layer])
            turned[number] = finite(f"adapter {name}/{leaf}", values).T
    return np.concatenate(turned) if leaf == "a" else np.asarray(block_diag(*turned))


def load(folder: str | Path, model: Decoder, params: Params) -> tuple[Decoder, dict[str, Any]]:
    """The model with the adapters in a folder, and its parameters, which share the base's arrays.

    Args:
      model, params: the base that the adapters were trained with, without adapters.

    Raises:
      InputError: a file is missing, the model has adapters already, a setting is not supported or
        not known, or a tensor is missing, unexpected, of another shape or not finite.
      CorruptFile: a file is broken.
    """
    folder = files.user_path(folder)
    if model.lora is not None:
        raise InputError("the model has adapters already: merge or detach them first")
    settings, tripled = _read_settings(folder / CONFIG, model)
    adapters: dict[str, dict[str, np.ndarray]] = {}
    with open_file(folder / WEIGHTS) as tensors:
        unused = set(tensors)
        for module, own in _modules(model).items():
            if own[0] not in settings.targets:
                continue
            rank = settings.rank * (3 if tripled and module == FUSED else 1)
            kernel = "kernel_int8" if model.int8 else "kernel"
            shapes = [params["layers"][name][kernel].shape for name in own]
            layers, inputs, _ = shapes[0]
            ends = np.cumsum([shape[-1] for shape in shapes])
            sizes = {"a": (layers, inputs, rank), "b": (layers, rank, int(ends[-1]))}
            names = {
                (leaf, layer): _name(model, module, layer, leaf)
                for leaf in sizes
                for layer in range(layers)
            }
            # All shapes are checked before memory is taken for the rank that the settings claim.
            for (leaf, _), name in names.items():
                unused.discard(name)
                tensors.require(name, sizes[leaf][:0:-1])
            whole = {leaf: np.empty(size, np.float32) for leaf, size in sizes.items()}
            for (leaf, layer), name in names.items():
                whole[leaf][layer] = tensors.finite(name).T
            parts = zip(own, np.split(whole["b"], ends[:-1], axis=-1), strict=True)
            shared = {name: {"a": whole["a"], "b": part} for name, part in parts}
            adapters |= _separate(folder / WEIGHTS, shared) if rank > settings.rank else shared
        if unused:
            what = f"tensor {min(unused)!r} is not an adapter of this model"
            raise InputError(f"{folder / WEIGHTS}: {what}")
    targets = tuple(name for name in PROJECTIONS if name in adapters)
    joined = adapter_trees.join(jax.tree.map(jnp.array, adapters), params)
    settings = dataclasses.replace(settings, targets=targets)
    return dataclasses.replace(model, lora=settings), joined


def _separate(path: Path, shared: dict[str, Any]) -> dict[str, dict[str, np.ndarray]]:
    """Adapters of a third of the rank, without those that are zero unless all of them are."""
    separate = {}
    for number, (name, adapter) in enumerate(shared.items()):
        a = np.split(adapter["a"], len(shared), axis=-1)[number]
        parts = np.split(adapter["b"], len(shared), axis=-2)
        b = parts.pop(number)
        if any(part.any() for part in parts):
            # Adapters of ours that were trained further as one matrix are not three of one rank.
            expected = "block-diagonal, with a block for each of queries, keys and values"
            raise InputError(f"{path}: lora_B of {FUSED} must be {expected}, found other values")
        separate[name] = {"a": a, "b": b}
    used = {name: pair for name, pair in separate.items() if pair["a"].any() or pair["b"].any()}
    return used or separate


def _modules(model: Decoder) -> dict[str, tuple[str, ...]]:
    """The linear maps of a published layer, each with the projections of ours that it consists of.

    Names are those inside a layer, as in {"attn.c_attn": ("q", "k", "v"), "attn.c_proj": ("o",)}.
    """
    if model.name == "gpt2":
        return {FUSED: ("q", "k", "v")} | {name: (own,) for own, name in GPT2_PROJECTIONS.items()}
    return {name: (own,) for own, name in LLAMA_PROJECTIONS.items()}


def _name(model: Decoder, module: str, layer: int, leaf: str) -> str:
    before = "base_model.model." + ("transformer.h" if model.name == "gpt2" else "model.layers")
    return f"{before}.{layer}.{module}.{_LEAVES[leaf]}.weight"


def _read_settings(path: Path, model: Decoder) -> tuple[LoRA, bool]:
    """The settings in an adapter_config.json, and whether `FUSED` has three times rank and alpha.

    An rsLoRA's alpha is that of an equal plain LoRA.
    """
    values = read_object(path)
    targets = _targets(path, values, model)
    rank, alpha, stabilised = (values.get(name) for name in ("r", "lora_alpha", "use_rslora"))
    tripled = False
    # With rsLoRA, three times both would be another scale.
    if isinstance(rank, int) and isinstance(alpha, int | float) and not stabilised:
        patterns = values.get("rank_pattern"), values.get("alpha_pattern")
        adapted = model.name == "gpt2" and "q" in targets
        tripled = adapted and patterns == ({FUSED: 3 * rank}, {FUSED: 3 * alpha})
    settled = {*_ANY.split(), *(("rank_pattern", "alpha_pattern") if tripled else ())}
    for key in sorted({"peft_type", *values} - settled):
        value, allowed = values.get(key), _ALLOWED.get(key, _OFF)
        # 1 and 0 are not true and false here, although they are equal in Python.
        if not any(type(value) is type(option) and value == option for option in allowed):
            expected = "off" if allowed is _OFF else repr(allowed[0])
            raise InputError(f"{path}: {key} must be {expected}, found {value!r}")
    with named(path):
        settings = LoRA(rank, alpha, targets)  # pyright: ignore
        if stabilised:
            # PEFT multiplies by alpha / sqrt(r), we by alpha / r.
            settings = LoRA(settings.rank, settings.alpha * math.sqrt(settings.rank), targets)
    return settings, tripled


def _targets(path: Path, values: Mapping[str, Any], model: Decoder) -> tuple[str, ...]:
    given = values.get("target_modules")
    if not isinstance(given, list) or not all(isinstance(name, str) for name in given):
        raise InputError(f"{path}: target_modules must be a list of names, found {given!r}")
    modules = _modules(model)
    targets: set[str] = set()
    for module in given:
        matches = [own for theirs, own in modules.items() if f".{theirs}".endswith(f".{module}")]
        if not matches:
            expected = f"among {', '.join(modules)} (of {model.name})"
            raise InputError(f"{path}: target_modules must be {expected}, found {module!r}")
        targets.update(*matches)
    return tuple(name for name in PROJECTIONS if name in targets)
