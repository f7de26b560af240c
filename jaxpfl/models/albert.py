"""ALBERT encoders (Lan et al. 2020): BERT with factorised embeddings and shared layers.

The embeddings have `embedding_size` features and one matrix maps them to the hidden size; the
layers take their parameters from few groups, mostly from a single one. Layer i of n uses group
floor(i groups / n). The layer itself is BERT's.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Self

import jax
from flax import nnx
from jax import Array

from jaxpfl.errors import InputError
from jaxpfl.models.base import Params, merge, split
from jaxpfl.models.bert import BertConfig, Embeddings, Layer, Linear


@dataclass(frozen=True)
class AlbertConfig(BertConfig):
    """Sizes and settings of an ALBERT encoder, named as in a Hugging Face config.json."""

    vocab_size: int = 30_000
    hidden_size: int = 4_096
    num_attention_heads: int = 64
    intermediate_size: int = 16_384
    hidden_act: str = "gelu_new"
    embedding_size: int = 128
    num_hidden_groups: int = 1

    model_type: ClassVar[str] = "albert"

    def __post_init__(self):
        super().__post_init__()
        if self.num_hidden_groups > self.num_hidden_layers:
            raise InputError(
                f"num_hidden_groups must not exceed num_hidden_layers = "
                f"{self.num_hidden_layers}, found {self.num_hidden_groups}"
            )

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Reads what a config.json holds, see `BertConfig.from_dict`."""
        inner = values.get("inner_group_num", 1)
        if inner != 1:
            raise InputError(f"inner_group_num must be 1, found {inner!r}")
        return super().from_dict(values)

    def group(self, layer: int) -> int:
        """The group of parameters that a layer uses."""
        return layer * self.num_hidden_groups // self.num_hidden_layers


class Network(nnx.Module):
    """Embeddings, the map to the hidden size, and the groups' layers applied in turn."""

    def __init__(self, config: AlbertConfig, key: Array):
        keys = [jax.random.fold_in(key, i) for i in range(config.num_hidden_groups + 2)]
        self.groups = tuple(config.group(i) for i in range(config.num_hidden_layers))
        self.embeddings = Embeddings(config, config.embedding_size, keys[0])
        self.widen = Linear(config.embedding_size, config.hidden_size, config, keys[1])
        for i in range(config.num_hidden_groups):
            setattr(self, f"layer_{i}", Layer(config, keys[i + 2]))

    def __call__(self, tokens_BxL: Array, mask_BxL: Array) -> Array:
        x_NxH = self.widen(self.embeddings(tokens_BxL))
        for group in self.groups:
            x_NxH = getattr(self, f"layer_{group}")(x_NxH, mask_BxL)
        return x_NxH.reshape(*tokens_BxL.shape, -1)


@dataclass(frozen=True)
class Albert:
    """An ALBERT encoder: pure functions over a nested dict of float32 arrays."""

    config: AlbertConfig
    name: str = "albert"

    @cached_property
    def _graphdef(self) -> nnx.GraphDef:
        return nnx.split(nnx.eval_shape(lambda: Network(self.config, jax.random.key(0))))[0]

    def init(self, key: Array) -> Params:
        """Normal matrices of deviation `initializer_range`, zero biases, unit scales."""
        return split(Network(self.config, key))[1]

    def hidden(self, params: Params, tokens_BxL: Array, mask_BxL: Array) -> Array:
        """The last layer's output, float32 [B, L, H], see `jaxpfl.models.bert.Bert.hidden`."""
        return merge(self._graphdef, params)(tokens_BxL, mask_BxL)
