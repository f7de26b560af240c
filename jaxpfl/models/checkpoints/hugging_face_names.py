"""The correspondence between the tensors of a Hugging Face checkpoint and our parameters.

A checkpoint stores the tensors of every layer separately, mostly as [outputs, inputs]; our kernels
are [inputs, outputs], and a decoder's layers are stacked. For queries, keys and values our encoders
and GPT-2's checkpoints have one matrix, our decoders and other checkpoints three. A list of
`Block`s describes this for reading and for writing.
"""

import dataclasses
import re
from collections.abc import Iterator
from dataclasses import dataclass

import jax

from jaxpfl.models.base import named_leaves
from jaxpfl.models.checkpoints.model_files import check_sizes
from jaxpfl.models.decoder.network import Decoder
from jaxpfl.models.encoder.network import Encoder


@dataclass(frozen=True)
class Block:
    """Block `part` of a tensor's `parts` is block `leaf_part` of a parameter's `leaf_parts`.

    Blocks are equal parts along the axis of the outputs, a parameter's last.

    Attributes:
      tensor: name in the checkpoint, without the model's prefix.
      leaf: the parameter, its keys joined by dots.
      layer: index in the parameter's first axis; None where layers are not stacked.
      transposed: whether the tensor is [outputs, inputs] and the parameter [inputs, outputs].
    """

    tensor: str
    leaf: str
    layer: int | None = None
    transposed: bool = False
    part: int = 0
    parts: int = 1
    leaf_part: int = 0
    leaf_parts: int = 1


# By our names, those of an encoder's tensors; `{}` is the number of a layer, or of its group.
_BERT = {
    "layer": "encoder.layer.{}.",
    "qkv": "attention.self.query attention.self.key attention.self.value",
    "attention": "attention.output.dense",
    "up": "intermediate.dense",
    "down": "output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "output_norm": "output.LayerNorm",
    "head.dense": "cls.predictions.transform.dense",
    "head.norm": "cls.predictions.transform.LayerNorm",
    "head": "cls.predictions",
}
_ROBERTA_HEAD = {
    "head.dense": "lm_head.dense",
    "head.norm": "lm_head.layer_norm",
    "head": "lm_head",
}
_ENCODERS = {
    "bert": _BERT,
    "roberta": _BERT | _ROBERTA_HEAD,
    "albert": {
        "layer": "encoder.albert_layer_groups.{}.albert_layers.0.",
        "qkv": "attention.query attention.key attention.value",
        "attention": "attention.dense",
        "up": "ffn",
        "down": "ffn_output",
        "attention_norm": "attention.LayerNorm",
        "output_norm": "full_layer_layer_norm",
        "head.dense": "predictions.dense",
        "head.norm": "predictions.LayerNorm",
        "head": "predictions",
    },
}
# Without the queries, keys and values, which are one matrix.
GPT2_PROJECTIONS = {"o": "attn.c_proj", "up": "mlp.c_fc", "down": "mlp.c_proj"}
LLAMA_PROJECTIONS = {
    **{name: f"self_attn.{name}_proj" for name in ("q", "k", "v", "o")},
    **{name: f"mlp.{name}_proj" for name in ("gate", "up", "down")},
}
_LLAMA_NORMS = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
_HEAD_NORMS = {"q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm"}
_NORMS = {
    "qwen3": _LLAMA_NORMS | _HEAD_NORMS,
    "gemma3_text": {
        "attention_norm": "input_layernorm",
        "attention_out_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_out_norm": "post_feedforward_layernorm",
        **_HEAD_NORMS,
    },
}

# The starts of the names of a head's tensors, which never have the model's prefix.
_OUTSIDE = ("lm_head.", "cls.", "predictions.")
_PREFIXES = {"gpt2": "transformer."} | {kind: f"{kind}." for kind in _ENCODERS}
# Tensors that our models do not use, by their short names.
IGNORED = re.compile(
    r"(pooler|cls\.seq_relationship|sop_classifier|classifier|qa_outputs)\."
    r"|embeddings\.(position_ids|token_type_ids)$"
    r"|h\.\d+\.attn\.(masked_)?bias$|.*\.rotary_emb\.inv_freq$"
)


class Naming:
    """The names of the tensors in checkpoints of an architecture.

    Attributes:
      head: a name that only checkpoints with a language-model head have; "" if all have one.
      tied: copies of other tensors that some checkpoints store, each with the name of the other.
    """

    def __init__(self, model_type: str):
        self._prefix = _PREFIXES.get(model_type, "model.")
        embedding = "wte.weight" if model_type == "gpt2" else "embed_tokens.weight"
        self.head, self.tied = "", {"lm_head.weight": embedding}
        if model_type in _ENCODERS:
            theirs, embedding = _ENCODERS[model_type], "embeddings.word_embeddings.weight"
            self.head, output = f"{theirs['head.dense']}.weight", theirs["head"]
            self.tied = {f"{output}.{part}": embedding for part in ("weight", "decoder.weight")}
            self.tied[f"{output}.decoder.bias"] = f"{output}.bias"

    def short(self, name: str) -> str:
        """The name without prefix, in its current form."""
        short = re.sub(r"\.gamma$", ".weight", name.removeprefix(self._prefix))
        return re.sub(r"\.beta$", ".bias", short)

    def full(self, short: str) -> str:
        """The name with its prefix, if it has one."""
        return short if short.startswith(_OUTSIDE) else self._prefix + short


def blocks(model: Encoder | Decoder) -> list[Block]:
    """The blocks that all parameters of the plain model consist of, in the checkpoint's order."""
    if isinstance(model, Encoder):
        return list(_encoder(model))
    return list(_gpt2(model) if model.name == "gpt2" else _llama(model))


def _gpt2(model: Decoder) -> Iterator[Block]:
    yield Block("wte.weight", "embed.token")
    yield Block("wpe.weight", "embed.position")
    for layer in range(model.config.layers):
        for ours, theirs in (("attention_norm", "ln_1"), ("mlp_norm", "ln_2")):
            yield from _norm(f"h.{layer}.{theirs}", f"layers.{ours}", layer)
        for part, ours in enumerate("qkv"):
            for leaf, kind in (("kernel", "weight"), ("bias", "bias")):
                tensor = f"h.{layer}.attn.c_attn.{kind}"
                yield Block(tensor, f"layers.{ours}.{leaf}", layer, part=part, parts=3)
        for ours, theirs in GPT2_PROJECTIONS.items():
            yield Block(f"h.{layer}.{theirs}.weight", f"layers.{ours}.kernel", layer)
            yield Block(f"h.{layer}.{theirs}.bias", f"layers.{ours}.bias", layer)
    yield from _norm("ln_f", "norm")
    if not model.config.tied:
        yield Block("lm_head.weight", "head.kernel", transposed=True)


def _llama(model: Decoder) -> Iterator[Block]:
    yield Block("embed_tokens.weight", "embed.token")
    for layer in range(model.config.layers):
        before = f"layers.{layer}."
        for ours, theirs in _NORMS.get(model.name, _LLAMA_NORMS).items():
            yield Block(f"{before}{theirs}.weight", f"layers.{ours}.scale", layer)
        for ours, theirs in LLAMA_PROJECTIONS.items():
            yield Block(f"{before}{theirs}.weight", f"layers.{ours}.kernel", layer, transposed=True)
            if model.config.biased(ours):
                yield Block(f"{before}{theirs}.bias", f"layers.{ours}.bias", layer)
    yield Block("norm.weight", "norm.scale")
    if not model.config.tied:
        yield Block("lm_head.weight", "head.kernel", transposed=True)


def _encoder(model: Encoder) -> Iterator[Block]:
    config, names = model.config, _ENCODERS[model.name]
    embedded = {"word": "word", "position": "position", "segment": "token_type"}
    for ours, theirs in embedded.items():
        yield Block(f"embeddings.{theirs}_embeddings.weight", f"embeddings.{ours}")
    yield from _norm("embeddings.LayerNorm", "embeddings.norm")
    if config.model_type == "albert":
        yield from _linear("encoder.embedding_hidden_mapping_in", "widen")
    for i in range(config.groups):
        before = names["layer"].format(i)
        for part, theirs in enumerate(names["qkv"].split()):
            yield from _linear(before + theirs, f"layer_{i}.qkv", part=part, parts=3)
        for ours in ("attention", "up", "down"):
            yield from _linear(before + names[ours], f"layer_{i}.{ours}")
        for ours in ("attention_norm", "output_norm"):
            yield from _norm(before + names[ours], f"layer_{i}.{ours}")
    if model.head:
        yield from _linear(names["head.dense"], "head.dense")
        yield from _norm(names["head.norm"], "head.norm")
        yield Block(f"{names['head']}.bias", "head.bias")


def _linear(tensor: str, leaf: str, part: int = 0, parts: int = 1) -> Iterator[Block]:
    """The blocks of an encoder's linear map, one of `parts` that are one parameter."""
    for kind, ours, turned in (("weight", "kernel", True), ("bias", "bias", False)):
        yield Block(
            f"{tensor}.{kind}", f"{leaf}.{ours}", None, turned, leaf_part=part, leaf_parts=parts
        )


def _norm(tensor: str, leaf: str, layer: int | None = None) -> Iterator[Block]:
    yield Block(f"{tensor}.weight", f"{leaf}.scale", layer)
    yield Block(f"{tensor}.bias", f"{leaf}.bias", layer)


def require_sizes(model: Encoder | Decoder) -> None:
    """Refuses sizes far above any published model's."""
    sizes = dataclasses.asdict(model.config)
    heads = {"heads times head_size": model.config.heads * sizes.get("head_size", 0)}
    check_sizes(sizes | heads, layers=1_000)


def stored(model: Encoder | Decoder) -> dict[str, tuple[tuple[int, ...], list[Block]]]:
    """By name, as transformers stores it: a tensor's shape, and the parts of our leaves in it."""
    # transformers gives the tensors of an encoder without a head no prefix.
    bare = isinstance(model, Encoder) and not model.head
    shapes = named_leaves(jax.eval_shape(lambda: model.init(jax.random.key(0))))
    names = Naming(model.name)
    tensors: dict[str, tuple[tuple[int, ...], list[Block]]] = {}
    for block in blocks(model):
        name = block.tensor if bare else names.full(block.tensor)
        shape = stored_shape(block, shapes[block.leaf].shape)
        tensors.setdefault(name, (shape, []))[1].append(block)
    return tensors


def stored_shape(block: Block, leaf_shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape in a file of the tensor that a block is of."""
    own = leaf_shape if block.layer is None else leaf_shape[1:]
    shape = (*own[:-1], own[-1] // block.leaf_parts * block.parts)
    return shape[::-1] if block.transposed else shape
