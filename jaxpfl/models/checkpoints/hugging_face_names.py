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
    r"(pooler|cls\.seq_relationship|sop_classifier|(pre_)?classifier|qa_outputs)\."
    r"|embeddings\.(position_ids|token_type_ids)$"
)
_WORDS = "embeddings.word_embeddings.weight"
_ROBERTA_TIED = {"lm_head.decoder.weight": _WORDS, "lm_head.decoder.bias": "lm_head.bias"}
_LLAMA = Naming(
    prefix="model.",
    outside="lm_head.",
    ignored=r".*\.rotary_emb\.inv_freq$",
    tied={"lm_head.weight": "embed_tokens.weight"},
)
NAMINGS = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "gpt2": Naming(
        prefix="transformer.",
        outside="lm_head.",
        ignored=r"h\.\d+\.attn\.(masked_)?bias$",
        tied={"lm_head.weight": "wte.weight"},
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
        tied=_ROBERTA_TIED,
        head="lm_head.dense.weight",
    ),
    "mpnet": Naming(
        prefix="mpnet.",
        outside="lm_head.",
        ignored=_ENCODER_IGNORED,
        tied=_ROBERTA_TIED,
        head="lm_head.dense.weight",
    ),
    "distilbert": Naming(
        prefix="distilbert.",
        outside="vocab_",
        ignored=_ENCODER_IGNORED,
        tied={"vocab_projector.weight": _WORDS},
        head="vocab_transform.weight",
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
            tensor = f"{before}{theirs}"
            yield Block(f"{tensor}.weight", ("layers", ours, "kernel"), layer, transposed=True)
            if model.config.biased(ours):
                yield Block(f"{tensor}.bias", ("layers", ours, "bias"), layer)
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


@dataclass(frozen=True)
class _EncoderLayer:
    """The names of the tensors of an encoder's layer.

    Attributes:
      before: precedes them all; `{}` is the layer's number, or that of its group.
      attention: the linear maps to queries, keys and values.
      linear: from our linear maps to the others.
      norms: from our norms to theirs.
    """

    before: str
    attention: tuple[str, str, str]
    linear: dict[str, str]
    norms: dict[str, str]


_BERT_LAYER = _EncoderLayer(
    "encoder.layer.{}.",
    ("attention.self.query", "attention.self.key", "attention.self.value"),
    {"attention": "attention.output.dense", "up": "intermediate.dense", "down": "output.dense"},
    {"attention_norm": "attention.output.LayerNorm", "output_norm": "output.LayerNorm"},
)
_LAYERS = {
    "bert": _BERT_LAYER,
    "roberta": _BERT_LAYER,
    "albert": _EncoderLayer(
        "encoder.albert_layer_groups.{}.albert_layers.0.",
        ("attention.query", "attention.key", "attention.value"),
        {"attention": "attention.dense", "up": "ffn", "down": "ffn_output"},
        {"attention_norm": "attention.LayerNorm", "output_norm": "full_layer_layer_norm"},
    ),
    "distilbert": _EncoderLayer(
        "transformer.layer.{}.",
        ("attention.q_lin", "attention.k_lin", "attention.v_lin"),
        {"attention": "attention.out_lin", "up": "ffn.lin1", "down": "ffn.lin2"},
        {"attention_norm": "sa_layer_norm", "output_norm": "output_layer_norm"},
    ),
    "mpnet": _EncoderLayer(
        "encoder.layer.{}.",
        ("attention.attn.q", "attention.attn.k", "attention.attn.v"),
        {"attention": "attention.attn.o", "up": "intermediate.dense", "down": "output.dense"},
        {"attention_norm": "attention.LayerNorm", "output_norm": "output.LayerNorm"},
    ),
}
_LM_HEAD = ("lm_head.dense", "lm_head.layer_norm", "lm_head.bias")
_HEADS = {
    "bert": (
        "cls.predictions.transform.dense",
        "cls.predictions.transform.LayerNorm",
        "cls.predictions.bias",
    ),
    "albert": ("predictions.dense", "predictions.LayerNorm", "predictions.bias"),
    "roberta": _LM_HEAD,
    "mpnet": _LM_HEAD,
    "distilbert": ("vocab_transform", "vocab_layer_norm", "vocab_projector.bias"),
}


def _encoder(model: Encoder) -> Iterator[Block]:
    config = model.config
    assert config.groups is not None
    embedded = {"word": "word", "position": "position"}
    if config.segments:
        embedded["segment"] = "token_type"
    for ours, theirs in embedded.items():
        yield Block(f"embeddings.{theirs}_embeddings.weight", ("embeddings", ours))
    yield from _norm("embeddings.LayerNorm", ("embeddings", "norm"))
    if config.model_type == "albert":
        yield from _linear("encoder.embedding_hidden_mapping_in", ("widen",))
    if config.model_type == "mpnet":
        yield Block("encoder.relative_attention_bias.weight", ("relative", "table"))
    names = _LAYERS[config.model_type]
    for i in range(config.groups):
        layer, before = f"layer_{i}", names.before.format(i)
        for part, theirs in enumerate(names.attention):
            yield from _linear(before + theirs, (layer, "qkv"), part=part, parts=3)
        for ours, theirs in names.linear.items():
            yield from _linear(before + theirs, (layer, ours))
        for ours, theirs in names.norms.items():
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
