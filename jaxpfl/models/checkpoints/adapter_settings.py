"""adapter_config.json: what it may ask for, and how a published model names its linear maps.

Settings are those of the library PEFT (0.21). A setting is read if it is supported here, ignored if
it cannot change what the trained model computes, and refused otherwise, unless it has the value
that PEFT gives it by default: a variant of LoRA that was read past would be another model.

GPT-2's checkpoints have one matrix for queries, keys and values, "attn.c_attn", our networks three.
Its adapter of rank 3 r and alpha 3 alpha, whose B is block-diagonal, computes what three adapters
of rank r and the same alpha do (`adapters.save` writes it). `rank_pattern` and `alpha_pattern` say
so; they are supported for nothing else.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxpfl.errors import InputError
from jaxpfl.models.checkpoints import hub
from jaxpfl.models.checkpoints.hugging_face_names import GPT2_PROJECTIONS, LLAMA_PROJECTIONS
from jaxpfl.models.checkpoints.model_files import read_object
from jaxpfl.models.decoder.config import PROJECTIONS, LoRA
from jaxpfl.models.decoder.network import Decoder

FUSED = "attn.c_attn"
"""GPT-2's matrix for queries, keys and values."""

_READ = {"peft_type", "r", "lora_alpha", "target_modules", "use_rslora"}
# No value of these changes what the trained adapters compute. PEFT itself sets fan_in_fan_out to
# what the base's layers need, and its file has A [rank, inputs] and B [outputs, rank] either way.
_HARMLESS = {
    "auto_mapping",
    "base_model_name_or_path",
    "fan_in_fan_out",
    "inference_mode",
    "lora_dropout",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
}
# All others: PEFT's default first, then the values that mean the same for trained adapters. Some
# initialisations change the base itself ("pissa", "olora", "corda", "loftq"); these do not.
_ALLOWED: dict[str, tuple[Any, ...]] = {
    "task_type": ("CAUSAL_LM", None),
    "init_lora_weights": (True, False, "gaussian", "orthogonal"),
    "exclude_modules": (None, []),
    "bias": ("none", None),
    "modules_to_save": (None, []),
    "layers_to_transform": (None, []),
    "layers_pattern": (None, []),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "megatron_config": (None,),
    "trainable_token_indices": (None, []),
    "loftq_config": ({}, None),
    "eva_config": (None,),
    "corda_config": (None,),
    "lora_ga_config": (None,),
    "use_dora": (False, None),
    "velora_config": (None,),
    "alora_invocation_tokens": (None,),
    "use_qalora": (False, None),
    "monteclora_config": (None,),
    "layer_replication": (None,),
    "runtime_config": ({"ephemeral_gpu_offload": False}, None),
    "lora_bias": (False, None),
    "target_parameters": (None, []),
    "use_bdlora": (None,),
    "arrow_config": (None,),
    "kasa_config": (None,),
    "ensure_weight_tying": (False, None),
}
_PATTERNS = ("rank_pattern", "alpha_pattern")


@dataclass(frozen=True)
class AdapterSettings:
    """The settings of adapters in a file.

    Attributes:
      lora: rank, alpha and targets; an rsLoRA's alpha is the one of an equal plain LoRA.
      tripled: whether the adapter of `FUSED` has three times this rank and alpha.
    """

    lora: LoRA
    tripled: bool = False


def modules(model: Decoder) -> dict[str, tuple[str, ...]]:
    """The linear maps of a published layer, each with the projections of ours that it consists of.

    Names are those inside a layer, as in {"attn.c_attn": ("q", "k", "v"), "attn.c_proj": ("o",)}.
    """
    if model.name == "gpt2":
        return {FUSED: ("q", "k", "v")} | {name: (own,) for own, name in GPT2_PROJECTIONS.items()}
    return {name: (own,) for own, name in LLAMA_PROJECTIONS.items()}


def described(model: Decoder, targets: tuple[str, ...], base: str | None) -> dict[str, Any]:
    """The content of adapter_config.json for a model's adapters of these projections.

    `base` is a folder, or a name on the hub, whose commit PEFT has in a field of its own.
    """
    assert model.lora is not None
    rank, alpha = model.lora.rank, model.lora.alpha
    named = [name for name, own in modules(model).items() if set(own) & set(targets)]
    tripled = FUSED in named
    name, revision = (None, None) if base is None else hub.with_commit(base)
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": name,
        "revision": revision,
        "r": rank,
        "lora_alpha": alpha,
        "rank_pattern": {FUSED: 3 * rank} if tripled else {},
        "alpha_pattern": {FUSED: 3 * alpha} if tripled else {},
        "target_modules": sorted(named),
        "fan_in_fan_out": model.name == "gpt2",
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }


def read(path: Path, model: Decoder) -> AdapterSettings:
    """The settings in an adapter_config.json.

    Raises:
      InputError: a setting is not supported or not known; names it, with the value found.
      CorruptFile: the file is not a JSON object.
    """
    values = read_object(path)
    if values.get("peft_type") != "LORA":
        raise InputError(f"{path}: peft_type must be 'LORA', found {values.get('peft_type')!r}")
    tripled = _is_tripled(values)
    for key in sorted(values.keys() - _READ - _HARMLESS - set(_PATTERNS if tripled else ())):
        found = values[key]
        if key not in _ALLOWED:
            raise InputError(
                f"{path}: {key} is not known here, found {found!r}: it may change what the "
                "adapters compute; expected settings of PEFT 0.21's LoraConfig"
            )
        # 1 and 0 are not true and false here, although they are equal in Python.
        if not any(type(found) is type(each) and found == each for each in _ALLOWED[key]):
            raise InputError(f"{path}: {key} must be {_ALLOWED[key][0]!r}, found {found!r}")
    targets = _targets(path, values, model)
    if tripled and not (model.name == "gpt2" and "q" in targets):
        raise InputError(
            f"{path}: rank_pattern must be {{}} where {FUSED} is not adapted, found "
            f"{values['rank_pattern']!r}"
        )
    try:
        lora = LoRA(values.get("r"), values.get("lora_alpha"), targets)  # pyright: ignore
        if _rank_stabilised(values):
            # PEFT multiplies by alpha / sqrt(r), we by alpha / r.
            lora = LoRA(lora.rank, lora.alpha * math.sqrt(lora.rank), targets)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    return AdapterSettings(lora, tripled)


def _rank_stabilised(values: Mapping[str, Any]) -> bool:
    found = values.get("use_rslora")
    if found not in (None, False, True):
        raise InputError(f"use_rslora must be true or false, found {found!r}")
    return bool(found)


def _is_tripled(values: Mapping[str, Any]) -> bool:
    """Whether the patterns give `FUSED` three times the rank and alpha, and nothing else.

    With rsLoRA this would be another scale, so the patterns are then refused.
    """
    rank, alpha = values.get("r"), values.get("lora_alpha")
    if not isinstance(rank, int) or not isinstance(alpha, int | float) or values.get("use_rslora"):
        return False
    expected = ({FUSED: 3 * rank}, {FUSED: 3 * alpha})
    return tuple(values.get(name) for name in _PATTERNS) == expected


def _targets(path: Path, values: Mapping[str, Any], model: Decoder) -> tuple[str, ...]:
    """The adapted projections, in the order of `PROJECTIONS`."""
    given = values.get("target_modules")
    if not isinstance(given, list) or not all(isinstance(name, str) for name in given):
        raise InputError(f"{path}: target_modules must be a list of names, found {given!r}")
    known = modules(model)
    targets: set[str] = set()
    for module in given:
        found = [own for theirs, own in known.items() if f".{theirs}".endswith(f".{module}")]
        if not found:
            raise InputError(
                f"{path}: target_modules must be among {', '.join(known)} (of {model.name}), "
                f"found {module!r}"
            )
        targets.update(*found)
    return tuple(name for name in PROJECTIONS if name in targets)
