"""Sizes and settings of decoder language models, and their form in a Hugging Face config.json."""

import json
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, Self, get_args

import numpy as np

from jaxpfl.checked import Checked, NonNegativeInt, PositiveFloat32, PositiveInt
from jaxpfl.checks import one_of, positive_float32
from jaxpfl.errors import InputError

Architecture = Literal["gpt2", "llama", "mistral", "qwen2", "qwen3", "gemma3_text"]
MODEL_TYPES = get_args(Architecture)
_WINDOWED = ("mistral", "gemma3_text")
Activation = Literal["gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "silu"]

PROJECTIONS = ("q", "k", "v", "o", "gate", "up", "down")
"""The linear maps of a layer, in attention and in the feed-forward block (no "gate" in GPT-2)."""

# From the fields of a config.json to ours.
_NAMES = {
    "vocab_size": "vocab_size",
    "initializer_range": "initializer_range",
    "tie_word_embeddings": "tied",
}
_GPT2_NAMES = _NAMES | {
    "n_embd": "hidden_size",
    "n_layer": "layers",
    "n_head": "heads",
    "n_inner": "inner_size",
    "n_positions": "positions",
    "layer_norm_epsilon": "norm_epsilon",
    "activation_function": "activation",
}
_LLAMA_NAMES = _NAMES | {
    "hidden_size": "hidden_size",
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "head_dim": "head_size",
    "intermediate_size": "inner_size",
    "max_position_embeddings": "positions",
    "rms_norm_eps": "norm_epsilon",
    "hidden_act": "activation",
}
_GEMMA_NAMES = {name: ours for name, ours in _LLAMA_NAMES.items() if ours != "activation"} | {
    "hidden_activation": "activation",
    "query_pre_attn_scalar": "query_scalar",
    "rope_local_base_freq": "local_rope_theta",
    "sliding_window_pattern": "window_period",
}
_FIELDS = {"gpt2": _GPT2_NAMES, "gemma3_text": _GEMMA_NAMES}
# The values that transformers gives to fields which a config.json leaves out.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "llama": {"norm_epsilon": 1e-6, "positions": 2_048},
    "mistral": {"norm_epsilon": 1e-6, "positions": 131_072, "kv_heads": 8},
    "qwen2": {"norm_epsilon": 1e-6, "positions": 32_768, "kv_heads": 32},
    "qwen3": {"norm_epsilon": 1e-6, "positions": 32_768, "kv_heads": 32, "head_size": 128},
    "gemma3_text": {
        "norm_epsilon": 1e-6,
        "positions": 131_072,
        "kv_heads": 4,
        "head_size": 256,
        "query_scalar": 256,
        "rope_theta": 1e6,
    },
}
# Variants that these networks do not compute: each field with the only value that is supported.
_FIXED: dict[str, dict[str, bool | None]] = {
    "gpt2": {
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
    },
    "llama": {"attention_bias": False, "mlp_bias": False},
    "qwen2": {"use_sliding_window": False},
    "qwen3": {"attention_bias": False, "use_sliding_window": False},
    "gemma3_text": {
        "attention_bias": False,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "use_bidirectional_attention": False,
    },
}


@dataclass(frozen=True)
class RopeScaling(Checked):
    """Llama 3.1's stretching of the rotary frequencies, by the names of transformers.

    With P the positions trained on, `original_max_position_embeddings`, wavelengths up to P /
    `high_freq_factor` do not change, those above P / `low_freq_factor` are multiplied by `factor`,
    and in between the frequencies are interpolated.
    """

    factor: PositiveFloat32
    low_freq_factor: PositiveFloat32
    high_freq_factor: PositiveFloat32
    original_max_position_embeddings: PositiveInt

    def check_fields(self) -> None:
        if not self.low_freq_factor < self.high_freq_factor:
            expected = f"low_freq_factor must be below high_freq_factor = {self.high_freq_factor}"
            raise InputError(f"{expected}, found {self.low_freq_factor}")


@dataclass(frozen=True)
class LoRA(Checked):
    """The rank of adapters and the linear maps that have them, by default POPri's (Hou 2025)."""

    rank: PositiveInt = 4
    alpha: PositiveFloat32 = 8.0
    targets: tuple[str, ...] = PROJECTIONS

    def check_fields(self) -> None:
        if not self.targets or len(set(self.targets)) != len(self.targets):
            expected = "targets must be different names, at least one"
            raise InputError(f"{expected}, found {self.targets!r}")
        for i, target in enumerate(self.targets):
            one_of(f"targets[{i}]", target, PROJECTIONS)

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


@dataclass(frozen=True)
class DecoderConfig(Checked):
    """The architecture and the sizes of a decoder.

    Attributes:
      model_type: "gpt2" (layer norms, learned positions, biases, one up and one down projection),
        "llama" (RMS norms, rotary positions, no biases, a gated up projection), "mistral" (llama
        with a sliding window), "qwen2" (llama with biases of the queries, keys and values), "qwen3"
        (llama with norms of each head's queries and keys) or "gemma3_text" (qwen3 with scaled
        embeddings, norms also after both blocks, whose scales are stored less one, and two kinds
        of layers, see `window`).
      hidden_size: features of a token between the layers.
      kv_heads: heads of keys and values, each shared by `heads / kv_heads` heads of queries;
        0 means as many as `heads`.
      head_size: features of a head; 0 means `hidden_size / heads`.
      inner_size: features inside the feed-forward block; 0 means four times `hidden_size`.
      positions: the number of tokens of the longest sequence.
      activation: the feed-forward block's; "" means "gelu_new" (gpt2), "gelu_pytorch_tanh"
        (gemma3_text) or "silu".
      tied: whether the output layer is the token embedding; None means True for gpt2 and
        gemma3_text only.
      rope_theta, rope_scaling: settings of the rotary positions (not in "gpt2"); a number as
        scaling divides all frequencies ("linear" in transformers).
      window: a token sees itself and the `window - 1` tokens before it ("mistral" and "gemma3_text"
        only); None for all earlier tokens.
      window_period, local_rope_theta: in "gemma3_text", layers whose number, from 1, is a multiple
        of the period have no window; the others turn by this theta, without scaling.
      query_scalar: scores are divided by its square root, in "gemma3_text"; 0 means `head_size`.
      initializer_range: standard deviation of random weights.
    """

    model_type: Architecture
    vocab_size: PositiveInt
    hidden_size: PositiveInt
    layers: PositiveInt
    heads: PositiveInt
    kv_heads: NonNegativeInt = 0
    head_size: NonNegativeInt = 0
    inner_size: NonNegativeInt = 0
    positions: PositiveInt = 1_024
    norm_epsilon: PositiveFloat32 = 1e-5
    activation: str = ""
    tied: bool | None = None
    rope_theta: PositiveFloat32 = 10_000.0
    rope_scaling: RopeScaling | float | None = None
    window: PositiveInt | None = None
    window_period: PositiveInt = 6
    local_rope_theta: PositiveFloat32 = 10_000.0
    query_scalar: NonNegativeInt = 0
    initializer_range: PositiveFloat32 = 0.02

    def check_fields(self) -> None:
        gpt2, gemma = self.model_type == "gpt2", self.model_type == "gemma3_text"
        if gpt2 or not self.head_size:
            check_multiple("hidden_size", self.hidden_size, "heads", self.heads)
        fill_in(
            self,
            kv_heads=self.heads,
            head_size=self.hidden_size // self.heads,
            inner_size=4 * self.hidden_size,
            activation="gelu_new" if gpt2 else "gelu_pytorch_tanh" if gemma else "silu",
        )
        fill_in(self, query_scalar=self.head_size)
        if self.tied is None:
            object.__setattr__(self, "tied", gpt2 or gemma)
        if not isinstance(self.rope_scaling, RopeScaling | None):
            scaling = positive_float32("rope_scaling", self.rope_scaling)
            object.__setattr__(self, "rope_scaling", scaling)
        one_of("activation", self.activation, get_args(Activation))
        if not isinstance(self.tied, bool):
            raise InputError(f"tied must be true or false, found {self.tied!r}")
        check_multiple("heads", self.heads, "kv_heads", self.kv_heads)
        if gpt2:
            size = self.hidden_size // self.heads
            check_fixed(self, kv_heads=self.heads, head_size=size, rope_scaling=None)
        elif self.head_size % 2:
            raise InputError(f"head_size must be even for rotary positions, found {self.head_size}")
        if not gemma:
            check_fixed(self, window_period=6, local_rope_theta=1e4, query_scalar=self.head_size)
        if self.window is not None:
            one_of("the model_type of a decoder with a window", self.model_type, _WINDOWED)

    def biased(self, projection: str) -> bool:
        """Whether a linear map has biases."""
        biased = {"gpt2": PROJECTIONS, "qwen2": ("q", "k", "v")}
        return projection in biased.get(self.model_type, ())

    @property
    def kinds(self) -> list[tuple[float, RopeScaling | float | None, int | None]]:
        """Theta, scaling and window of each kind of layers; see `kind_L`."""
        if self.model_type != "gemma3_text":
            return [(self.rope_theta, self.rope_scaling, self.window)]
        local = (self.local_rope_theta, None, self.window)
        return [(self.rope_theta, self.rope_scaling, None), local]

    @property
    def kind_L(self) -> np.ndarray | None:
        """Bool, which layers are of the second kind; None if there is one kind alone."""
        if len(self.kinds) == 1:
            return None
        return np.arange(1, self.layers + 1) % self.window_period != 0

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Reads the values of a config.json; fields that it does not have take their defaults."""
        model_type: Any = one_of("model_type", values.get("model_type"), MODEL_TYPES)
        names = _FIELDS.get(model_type, _LLAMA_NAMES)
        given = read_fields(values, names, _FIXED.get(model_type, {}))
        for name, ours in names.items():
            if ours in ("vocab_size", "hidden_size", "layers", "heads") and ours not in given:
                raise InputError(f"the field {name!r} is missing")
        given = _DEFAULTS[model_type] | given
        if model_type == "gemma3_text":
            given |= _period(values) | _two_ropes(values)
        elif model_type != "gpt2":
            given |= _rope(values)
        if model_type in _WINDOWED:
            given["window"] = values.get("sliding_window", 4_096)
        kinds = values.get("layer_types")
        all_see = "full_attention" if given.get("window") is None else "sliding_attention"
        if model_type != "gemma3_text" and kinds and set(map(str, kinds)) != {all_see}:
            raise InputError(f"layer_types must be {all_see!r} for every layer, found {kinds!r}")
        return cls(model_type=model_type, **given)

    def to_dict(self) -> dict[str, Any]:
        """The fields of a config.json, as transformers reads them; the inverse of `from_dict`."""
        gpt2 = self.model_type == "gpt2"
        names = _FIELDS.get(self.model_type, _LLAMA_NAMES)
        family = self.model_type.removesuffix("_text").capitalize()
        values: dict[str, Any] = {
            "model_type": self.model_type,
            "architectures": ["GPT2LMHeadModel" if gpt2 else f"{family}ForCausalLM"],
            **{theirs: getattr(self, ours) for theirs, ours in names.items()},
            # The tokeniser's files name them. transformers would give absent ones ids of its own.
            "bos_token_id": None,
            "eos_token_id": None,
        }
        if gpt2:
            values |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
            return values
        values |= _FIXED.get(self.model_type, {}) | {"rope_theta": self.rope_theta}
        if isinstance(self.rope_scaling, RopeScaling):
            values["rope_scaling"] = {"rope_type": "llama3"} | asdict(self.rope_scaling)
        elif self.rope_scaling is not None:
            values["rope_scaling"] = {"rope_type": "linear", "factor": self.rope_scaling}
        if self.model_type in _WINDOWED:
            values["sliding_window"] = self.window
        return values


def read_fields(
    values: dict[str, Any], names: dict[str, str], fixed: dict[str, Any]
) -> dict[str, Any]:
    """Fields of a config.json by our `names` for theirs; `fixed` ones have one value alone."""
    for field, only in fixed.items():
        value = values.get(field, only)
        # null means false, or the default.
        if value != only and (value is not None or only is True):
            raise InputError(f"{field} must be {json.dumps(only)}, found {json.dumps(value)}")
    return {ours: values[name] for name, ours in names.items() if values.get(name) is not None}


def fill_in(config: Any, **defaults: Any) -> None:
    """Gives fields of a config that are 0 or empty their default values."""
    for field, default in defaults.items():
        if getattr(config, field) in (0, ""):
            object.__setattr__(config, field, default)


def check_fixed(config: Any, **only: Any) -> None:
    """Refuses a config whose fields have other values than those given."""
    for field, value in only.items():
        if (actual := getattr(config, field)) != value:
            raise InputError(f"{field} must be {value} in {config.model_type}, found {actual}")


def check_multiple(name: str, value: int, divisor_name: str, divisor: int) -> None:
    """Refuses a size that is not a multiple of another one."""
    if value % divisor:
        raise InputError(f"{name} must be a multiple of {divisor_name} = {divisor}, found {value}")


def _rope(values: dict[str, Any]) -> dict[str, Any]:
    """Theta and scaling, from the form of transformers 4 (two fields) or 5 (one)."""
    for field in ("rope_parameters", "rope_scaling"):
        if not isinstance(values.get(field), dict | None):
            raise InputError(f"{field} must be an object, found {values[field]!r}")
    # In this order, as in transformers 5.
    stated = values.get("rope_scaling") or values.get("rope_parameters") or {}
    for place in (values, stated):
        if (part := place.get("partial_rotary_factor")) not in (None, 1):
            raise InputError(f"partial_rotary_factor must be 1, found {part!r}")
    places = (stated, values.get("rope_parameters") or {}, values)
    thetas = [place["rope_theta"] for place in places if place.get("rope_theta") is not None]
    rope: dict[str, Any] = {"rope_theta": thetas[0]} if thetas else {}
    kind = stated.get("rope_type", stated.get("type", "default"))
    one_of("rope_scaling.rope_type", kind, ("default", "linear", "llama3"))
    if kind == "linear":
        rope["rope_scaling"] = positive_float32("rope_scaling.factor", stated.get("factor"))
    if kind == "llama3":
        names = [field.name for field in fields(RopeScaling)]
        for name in names:
            if name not in stated:
                raise InputError(f"the field 'rope_scaling.{name}' is missing")
        rope["rope_scaling"] = RopeScaling(**{name: stated[name] for name in names})
    return rope


def _two_ropes(values: dict[str, Any]) -> dict[str, Any]:
    """The same for Gemma 3, whose form of transformers 5 has an object for each kind of layers."""
    both = values.get("rope_parameters") or {}
    if not isinstance(both, dict):
        raise InputError(f"rope_parameters must be an object, found {both!r}")
    for kind in sorted({*both} - {"full_attention", "sliding_attention"}):
        expected = "full_attention and sliding_attention alone, each with its own settings"
        raise InputError(f"rope_parameters must have {expected}, found {kind!r}")
    rope = _rope(values | {"rope_parameters": both.get("full_attention")})
    local = _rope({"rope_parameters": both.get("sliding_attention")})
    if "rope_scaling" in local:
        raise InputError("rope_parameters.sliding_attention must have no scaling")
    return rope | {f"local_{name}": theta for name, theta in local.items()}


def _period(values: dict[str, Any]) -> dict[str, int]:
    """Gemma 3's `window_period`, where `layer_types` tells it."""
    kinds = values.get("layer_types")
    if kinds is None:
        return {}
    names = ["full_attention", "sliding_attention"]
    if isinstance(kinds, list) and len(kinds) == values.get("num_hidden_layers"):
        period = [*kinds, names[0]].index(names[0]) + 1
        if kinds == [names[i % period != 0] for i in range(1, len(kinds) + 1)]:
            return {"window_period": period}
    expected = f"{names[1]!r} for every layer, but {names[0]!r} for each multiple of the first such"
    raise InputError(f"layer_types must be {expected}, found {kinds!r}")
