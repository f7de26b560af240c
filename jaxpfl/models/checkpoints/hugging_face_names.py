"""The correspondence between the tensors of a Hugging Face checkpoint and our parameters.

A checkpoint stores the tensors of every layer separately, mostly as [outputs, inputs]; our kernels
are [inputs, outputs], and a decoder's layers are stacked. For queries, keys and values our encoders
and GPT-2's checkpoints have one matrix, our decoders and other checkpoints three. A list of
`Block`s describes this for reading and for writing.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from jaxpfl.models.decoder.network import Decoder
from jaxpfl.models.encoder.network import Encoder

Path = tuple[str, ...]
"""The keys of a parameter in the nested dict."""


@dataclass(frozen=True)
class Block:
    """Block `part` of a tensor's `parts` is block `leaf_part` of a parameter's `leaf_parts`.

    Blocks are equal parts along the axis of the outputs, a parameter's last.

    Attributes:
      tensor: name in the checkpoint, without the model's prefix.
      leaf: the parameter.
      layer: index in the parameter's first axis; None where layers are not stacked.
      transposed: whether the tensor is [outputs, inputs] and the parameter [inputs, outputs].
    """

    tensor: str
    leaf: Path
    layer: int | None = None
    transposed: bool = False
    part: int = 0
    parts: int = 1
    leaf_part: int = 0
    leaf_parts: int = 1


@dataclass(frozen=True)
class Naming:
    """The names of tensors in checkpoints of an architecture.

    Attributes:
      prefix: may precede every name, except those that start with `outside`.
      outside: the start of the names of the head's tensors, which never have the prefix.
      ignored: a regular expression for the names of tensors that the model does not use.
      tied: names of copies that some checkpoints store, and the tensors that they must equal.
      head: a name that only checkpoints with a language-model head have; "" if all have one.
    """

    prefix: str
    outside: str
    ignored: str
    tied: dict[str, str]
    head: str = ""

    def short(self, name: str) -> str:
        """The name without prefix, in its current form."""
        short = name.removeprefix(self.prefix)
        for old, new in ((".gamma", ".weight"), (".beta", ".bias")):
            if short.endswith(old):
                short = short.removesuffix(old) + new
        return short

    def full(self, short: str) -> str:
        """The name with its prefix, if it has one."""
        return short if self.outside and short.startswith(self.outside) else self.prefix + short

    def is_ignored(self, short: str) -> bool:
        return re.match(self.ignored, short) is not None


_ENCODER_IGNORED = (
    r"(pooler|cls\.seq_relationship|sop_classifier|classifier|qa_outputs)\."
    r"|embeddings\.(position_ids|token_type_ids)$"
)
_WORDS = "embeddings.word_embeddings.weight"
NAMINGS = {
    "gpt2": Naming(
        prefix="transformer.",
        outside="lm_head.",
        ignored=r"h\.\d+\.attn\.(masked_)?bias$",
        tied={"lm_head.weight": "wte.weight"},
    ),
    "llama": Naming(
        prefix="model.",
        outside="lm_head.",
        ignored=r".*\.rotary_emb\.inv_freq$",
        tied={"lm_head.weight": "embed_tokens.weight"},
    ),
    "bert": Naming(
        prefix="bert.",
        outside="cls.",
        ignored=_ENCODER_IGNORED,
        tied={
            "cls.predictions.decoder.weight": _WORDS,
            "cls.predictions.decoder.bias": "cls.predictions.bias",
        },
        head="cls.predictions.transform.dense.weight",
    ),
    "albert": Naming(
        prefix="albert.",
        outside="predictions.",
        ignored=_ENCODER_IGNORED,
        tied={
            "predictions.decoder.weight": _WORDS,
            "predictions.decoder.bias": "predictions.bias",
        },
        head="predictions.dense.weight",
    ),
    "roberta": Naming(
        prefix="roberta.",
        outside="lm_head.",
        ignored=_ENCODER_IGNORED,
        tied={"lm_head.decoder.weight": _WORDS, "lm_head.decoder.bias": "lm_head.bias"},
        head="lm_head.dense.weight",
    ),
}


def blocks(model: Encoder | Decoder) -> list[Block]:
    """The blocks that all parameters of the plain model consist of, in the checkpoint's order."""
    if isinstance(model, Encoder):
        return list(_encoder(model))
    return list(_gpt2(model) if model.config.model_type == "gpt2" else _llama(model))


def _gpt2(model: Decoder) -> Iterator[Block]:
    yield Block("wte.weight", ("embed", "token"))
    yield Block("wpe.weight", ("embed", "position"))
    for layer in range(model.config.layers):
        for ours, theirs in (("attention_norm", "ln_1"), ("mlp_norm", "ln_2")):
            yield from _norm(f"h.{layer}.{theirs}", ("layers", ours), layer)
        for part, ours in enumerate("qkv"):
            for leaf, kind in (("kernel", "weight"), ("bias", "bias")):
                tensor = f"h.{layer}.attn.c_attn.{kind}"
                yield Block(tensor, ("layers", ours, leaf), layer, part=part, parts=3)
        for ours, theirs in GPT2_PROJECTIONS.items():
            yield Block(f"h.{layer}.{theirs}.weight", ("layers", ours, "kernel"), layer)
            yield Block(f"h.{layer}.{theirs}.bias", ("layers", ours, "bias"), layer)
    yield from _norm("ln_f", ("norm",))
    if not model.config.tied:
        yield Block("lm_head.weight", ("head", "kernel"), transposed=True)


def _llama(model: Decoder) -> Iterator[Block]:
    yield Block("embed_tokens.weight", ("embed", "token"))
    for layer in range(model.config.layers):
        before = f"layers.{layer}."
        yield Block(before + "input_layernorm.weight", ("layers", "attention_norm", "scale"), layer)
        yield Block(
            before + "post_attention_layernorm.weight", ("layers", "mlp_norm", "scale"), layer
        )
        for ours, theirs in LLAMA_PROJECTIONS.items():
            tensor = f"{before}{theirs}.weight"
            yield Block(tensor, ("layers", ours, "kernel"), layer, transposed=True)
    yield Block("norm.weight", ("norm", "scale"))
    if not model.config.tied:
        yield Block("lm_head.weight", ("head", "kernel"), transposed=True)


# Without the queries, keys and values, which are one matrix.
GPT2_PROJECTIONS = {"o": "attn.c_proj", "up": "mlp.c_fc", "down": "mlp.c_proj"}
LLAMA_PROJECTIONS = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}

# The tensors of an encoder's layer: query, key and value; the other linear maps; the norms.
_BERT_LAYER = (
    ("attention.self.query", "attention.self.key", "attention.self.value"),
    {"attention": "attention.output.dense", "up": "intermediate.dense", "down": "output.dense"},
    {"attention_norm": "attention.output.LayerNorm", "output_norm": "output.LayerNorm"},
)
_ALBERT_LAYER = (
    ("attention.query", "attention.key", "attention.value"),
    {"attention": "attention.dense", "up": "ffn", "down": "ffn_output"},
    {"attention_norm": "attention.LayerNorm", "output_norm": "full_layer_layer_norm"},
)
_HEADS = {
    "bert": (
        "cls.predictions.transform.dense",
        "cls.predictions.transform.LayerNorm",
        "cls.predictions.bias",
    ),
    "albert": ("predictions.dense", "predictions.LayerNorm", "predictions.bias"),
    "roberta": ("lm_head.dense", "lm_head.layer_norm", "lm_head.bias"),
}


def _encoder(model: Encoder) -> Iterator[Block]:
    config = model.config
    assert config.groups is not None
    albert = config.model_type == "albert"
    for ours, theirs in (("word", "word"), ("position", "position"), ("segment", "token_type")):
        yield Block(f"embeddings.{theirs}_embeddings.weight", ("embeddings", ours))
    yield from _norm("embeddings.LayerNorm", ("embeddings", "norm"))
    if albert:
        yield from _linear("encoder.embedding_hidden_mapping_in", ("widen",))
    attention, linear, norms = _ALBERT_LAYER if albert else _BERT_LAYER
    for i in range(config.groups):
        layer = f"layer_{i}"
        before = (
            f"encoder.albert_layer_groups.{i}.albert_layers.0." if albert else f"encoder.layer.{i}."
        )
        for part, theirs in enumerate(attention):
            yield from _linear(before + theirs, (layer, "qkv"), part=part, parts=3)
        for ours, theirs in linear.items():
            yield from _linear(before + theirs, (layer, ours))
        for ours, theirs in norms.items():
            yield from _norm(before + theirs, (layer, ours))
    if model.head:
        dense, norm, bias = _HEADS[config.model_type]
        yield from _linear(dense, ("head", "dense"))
        yield from _norm(norm, ("head", "norm"))
        yield Block(bias, ("head", "bias"))


def _linear(tensor: str, leaf: Path, part: int = 0, parts: int = 1) -> Iterator[Block]:
    """The blocks of an encoder's linear map, one of `parts` that are one parameter."""
    yield Block(
        f"{tensor}.weight", (*leaf, "kernel"), transposed=True, leaf_part=part, leaf_parts=parts
    )
    yield Block(f"{tensor}.bias", (*leaf, "bias"), leaf_part=part, leaf_parts=parts)


def _norm(tensor: str, leaf: Path, layer: int | None = None) -> Iterator[Block]:
    yield Block(f"{tensor}.weight", (*leaf, "scale"), layer)
    yield Block(f"{tensor}.bias", (*leaf, "bias"), layer)
