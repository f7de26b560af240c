"""Sizes and settings of BERT-like encoders, and their form in a Hugging Face config.json."""

from dataclasses import dataclass
from typing import Any, Literal, Self

from jaxpfl.checked import Checked, NonNegativeInt, PositiveFloat32, PositiveInt
from jaxpfl.checks import non_negative_int, one_of, positive_int
from jaxpfl.errors import InputError
from jaxpfl.models.decoder import config

MODEL_TYPES = ("bert", "albert", "roberta")
CAUSAL_TYPES = ("bert", "roberta")
"""Those that transformers, too, can make causal."""

_NAMES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
    "intermediate_size": "inner_size",
    "hidden_act": "activation",
    "max_position_embeddings": "positions",
    "type_vocab_size": "segments",
    "layer_norm_eps": "norm_epsilon",
    "initializer_range": "initializer_range",
    "pad_token_id": "pad",
}
_ALBERT_NAMES = {"embedding_size": "embedding_size", "num_hidden_groups": "groups"}
# The values that transformers gives to fields which a config.json leaves out.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "bert": {},
    "albert": {
        "vocab_size": 30_000,
        "hidden_size": 4_096,
        "heads": 64,
        "inner_size": 16_384,
        "activation": "gelu_new",
        "embedding_size": 128,
        "groups": 1,
    },
    "roberta": {"vocab_size": 50_265, "pad": 1},
}
# Variants that these networks do not compute: each field with the only value that is supported.
_FIXED: dict[str, Any] = {
    "position_embedding_type": "absolute",
    "add_cross_attention": False,
    "inner_group_num": 1,
}


@dataclass(frozen=True)
class EncoderConfig(Checked):
    """The architecture and the sizes of an encoder; the defaults are BERT-base's.

    Attributes:
      model_type: "bert" (MiniLM too), "albert" (factorised embeddings, layers shared within
        groups) or "roberta" (the first real token has position `pad + 1`).
      hidden_size: features of a token between the layers.
      inner_size: features inside the feed-forward block; 0 means four times `hidden_size`.
      activation: the feed-forward block's, by the name that Hugging Face gives it.
      positions: the number of tokens of the longest sequence.
      segments: rows of the segment embedding; every token is in segment 0.
      initializer_range: standard deviation of random weights.
      embedding_size: features of an embedding ("albert" only); 0 means `hidden_size`.
      groups: into how many groups the layers are divided, all layers of a group having the same
        parameters ("albert" only); 0 means one group per layer.
      pad: id of the padding token; only the positions of RoBERTa depend on it.
    """

    model_type: Literal["bert", "albert", "roberta"] = "bert"
    vocab_size: PositiveInt = 30_522
    hidden_size: PositiveInt = 768
    layers: PositiveInt = 12
    heads: PositiveInt = 12
    inner_size: NonNegativeInt = 0
    activation: config.Activation = "gelu"
    positions: PositiveInt = 512
    segments: PositiveInt = 2
    norm_epsilon: PositiveFloat32 = 1e-12
    initializer_range: PositiveFloat32 = 0.02
    embedding_size: NonNegativeInt = 0
    groups: NonNegativeInt = 0
    pad: NonNegativeInt = 0

    def check_fields(self) -> None:
        size = self.hidden_size
        config.fill_in(self, inner_size=4 * size, embedding_size=size, groups=self.layers)
        config.check_multiple("hidden_size", size, "heads", self.heads)
        if self.groups > self.layers:
            raise InputError(f"groups must not exceed layers = {self.layers}, found {self.groups}")
        if self.model_type != "albert":
            config.check_fixed(self, embedding_size=size, groups=self.layers)

    @property
    def first_position(self) -> int:
        """The row of the position embedding that belongs to a text's first token."""
        return self.pad + 1 if self.model_type == "roberta" else 0

    def group(self, layer: int) -> int:
        return layer * self.groups // self.layers

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Reads the values of a config.json; fields that it does not have take their defaults."""
        model_type: Any = one_of("model_type", values.get("model_type"), MODEL_TYPES)
        given = _DEFAULTS[model_type] | config.read_fields(values, _names(model_type), _FIXED)
        # 0 stands for a default in our own fields alone.
        for field in ("inner_size", "embedding_size", "groups"):
            positive_int(field, given.get(field, 1))
        if model_type == "roberta":
            # The field counts the table's rows; those up to the padding token's are never used.
            pad = non_negative_int("pad_token_id", given["pad"])
            rows = positive_int("max_position_embeddings", given.get("positions", 512))
            if rows <= pad + 1:
                least = f"pad_token_id + 1 = {pad + 1}"
                raise InputError(f"max_position_embeddings must be above {least}, found {rows}")
            given["positions"] = rows - pad - 1
        return cls(model_type=model_type, **given)

    def to_dict(self) -> dict[str, Any]:
        """The fields of a config.json, as transformers reads them; the inverse of `from_dict`."""
        names = _names(self.model_type)
        values = {theirs: getattr(self, ours) for theirs, ours in names.items()}
        values["max_position_embeddings"] = self.positions + self.first_position
        values |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        return {"model_type": self.model_type, **values, "tie_word_embeddings": True}


def _names(model_type: str) -> dict[str, str]:
    return _NAMES | (_ALBERT_NAMES if model_type == "albert" else {})
