"""BERT encoders (Devlin et al. 2019): the post-layer-norm Transformer over word pieces.

For token ids t at positions 0..L-1, all in one segment, with x = [N, H] the N = B L tokens:

    x  = Norm(E_word[t] + E_position[l] + E_segment[0])
    x <- Norm(x + W_O Attention(W_Q x, W_K x, W_V x) + b_O)      in every layer
    x <- Norm(x + W_down act(W_up x + b_up) + b_down)

Attention is softmax(q k^T / sqrt(D)) v per head of D = H / heads features, over the real tokens of
the same row. The three input products are one matrix [H, 3H]. Dropout is left out: these networks
are used as they were published.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cached_property, partial
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from jaxpfl.checks import non_negative_int, one_of, positive, positive_int
from jaxpfl.errors import InputError
from jaxpfl.models.base import Params, merge, split

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_new": partial(jax.nn.gelu, approximate=True),
    "gelu_pytorch_tanh": partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
}
"""By the names that Hugging Face configurations use; "gelu" is the exact one, by erf."""


@dataclass(frozen=True)
class BertConfig:
    """Sizes and settings of a BERT encoder, named as in a Hugging Face config.json.

    Raises:
      InputError: a size is not a positive whole number, sizes do not fit together, or the
        activation is unknown.
    """

    vocab_size: int = 30_522
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3_072
    hidden_act: str = "gelu"
    max_position_embeddings: int = 512
    type_vocab_size: int = 2
    layer_norm_eps: float = 1e-12
    initializer_range: float = 0.02
    pad_token_id: int = 0

    model_type: ClassVar[str] = "bert"

    def __post_init__(self):
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "pad_token_id":
                non_negative_int(field.name, value)
            elif field.type is int:
                positive_int(field.name, value)
            elif field.type is float:
                positive(field.name, value)
        one_of("hidden_act", self.hidden_act, tuple(ACTIVATIONS))
        if self.hidden_size % self.num_attention_heads:
            raise InputError(
                f"hidden_size must be a multiple of num_attention_heads = "
                f"{self.num_attention_heads}, found {self.hidden_size}"
            )

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Reads what a config.json holds; fields it does not have take their defaults.

        Raises:
          InputError: another architecture, or a variant that this network does not compute.
        """
        if values.get("model_type") != cls.model_type:
            raise InputError(
                f"model_type must be {cls.model_type!r}, found {values.get('model_type')!r}"
            )
        one_of(
            "position_embedding_type",
            values.get("position_embedding_type", "absolute"),
            ("absolute",),
        )
        for field in ("is_decoder", "add_cross_attention"):
            if values.get(field, False) is not False:
                raise InputError(f"{field} must be false: only encoders are supported")
        known = {field.name for field in fields(cls)}
        given = {
            name: value for name, value in values.items() if name in known and value is not None
        }
        return cls(**given)


def linear_init(config: BertConfig) -> jax.nn.initializers.Initializer:
    return jax.nn.initializers.normal(config.initializer_range)


class Linear(nnx.Module):
    """x W + b."""

    def __init__(self, inputs: int, outputs: int, config: BertConfig, key: Array):
        self.kernel = nnx.Param(linear_init(config)(key, (inputs, outputs), jnp.float32))
        self.bias = nnx.Param(jnp.zeros(outputs, jnp.float32))

    def __call__(self, x_NxI: Array) -> Array:
        return x_NxI @ self.kernel[...] + self.bias[...][None, :]


class Norm(nnx.Module):
    """Layer normalisation over the features, with scale and bias (Ba et al. 2016)."""

    def __init__(self, size: int, epsilon: float):
        self.epsilon = epsilon
        self.scale = nnx.Param(jnp.ones(size, jnp.float32))
        self.bias = nnx.Param(jnp.zeros(size, jnp.float32))

    def __call__(self, x_NxH: Array) -> Array:
        centred_NxH = x_NxH - jnp.mean(x_NxH, axis=-1, keepdims=True)
        variance_Nx1 = jnp.mean(jnp.square(centred_NxH), axis=-1, keepdims=True)
        unit_NxH = centred_NxH * jax.lax.rsqrt(variance_Nx1 + self.epsilon)
        return unit_NxH * self.scale[...][None, :] + self.bias[...][None, :]


class Embeddings(nnx.Module):
    """Sum of word, position and segment embeddings, normalised; every token in segment 0."""

    def __init__(self, config: BertConfig, size: int, key: Array):
        initialise = linear_init(config)
        keys = [jax.random.fold_in(key, i) for i in range(3)]
        self.word = nnx.Param(initialise(keys[0], (config.vocab_size, size), jnp.float32))
        self.position = nnx.Param(
            initialise(keys[1], (config.max_position_embeddings, size), jnp.float32)
        )
        self.segment = nnx.Param(initialise(keys[2], (config.type_vocab_size, size), jnp.float32))
        self.norm = Norm(size, config.layer_norm_eps)

    def __call__(self, tokens_BxL: Array) -> Array:
        """Float32 [B * L, size]."""
        batch, length = tokens_BxL.shape
        places_LxE = self.position[...][:length] + self.segment[...][:1]
        x_BxLxE = self.word[...][tokens_BxL] + places_LxE[None]
        return self.norm(x_BxLxE.reshape(batch * length, -1))


class Layer(nnx.Module):
    """Self-attention and feed-forward block, each with its residual and norm."""

    def __init__(self, config: BertConfig, key: Array):
        keys = [jax.random.fold_in(key, i) for i in range(4)]
        hidden, inner = config.hidden_size, config.intermediate_size
        self.heads = config.num_attention_heads
        self.activation = config.hidden_act
        self.qkv = Linear(hidden, 3 * hidden, config, keys[0])
        self.attention = Linear(hidden, hidden, config, keys[1])
        self.attention_norm = Norm(hidden, config.layer_norm_eps)
        self.up = Linear(hidden, inner, config, keys[2])
        self.down = Linear(inner, hidden, config, keys[3])
        self.output_norm = Norm(hidden, config.layer_norm_eps)

    def __call__(self, x_NxH: Array, mask_BxL: Array) -> Array:
        attended_NxH = self.attention(attend(self.qkv(x_NxH), mask_BxL, self.heads))
        x_NxH = self.attention_norm(x_NxH + attended_NxH)
        inner_NxI = ACTIVATIONS[self.activation](self.up(x_NxH))
        return self.output_norm(x_NxH + self.down(inner_NxI))


def attend(qkv_Nx3H: Array, mask_BxL: Array, heads: int) -> Array:
    """Every token's mean of the values of its row's real tokens, by softmax of q k / sqrt(D).

    Args:
      qkv_Nx3H: queries, keys and values of N = B L tokens, row after row.
      mask_BxL: True = real token. A row without any attends to all alike; its result is finite
        and means nothing.

    Returns:
      Float32 [N, H].
    """
    batch, length = mask_BxL.shape
    features = qkv_Nx3H.shape[1] // (3 * heads)
    # Heads before positions: both products are then plain matrix products, which CPUs run fastest.
    qkv_3xBxKxLxD = jnp.transpose(
        qkv_Nx3H.reshape(batch, length, 3, heads, features), (2, 0, 3, 1, 4)
    )
    q, k, v = (qkv_3xBxKxLxD[i] for i in range(3))
    scores_BxKxLxL = jnp.matmul(q * (1 / math.sqrt(features)), jnp.swapaxes(k, 2, 3))
    # Finite, so that a row of padding alone gives no NaN.
    barrier_BxL = jnp.where(mask_BxL, 0.0, jnp.finfo(jnp.float32).min / 2)
    weights_BxKxLxL = jax.nn.softmax(scores_BxKxLxL + barrier_BxL[:, None, None, :], axis=-1)
    attended_BxKxLxD = jnp.matmul(weights_BxKxLxL, v)
    return jnp.swapaxes(attended_BxKxLxD, 1, 2).reshape(batch * length, -1)


class Network(nnx.Module):
    """Embeddings and layers."""

    def __init__(self, config: BertConfig, key: Array):
        self.depth = config.num_hidden_layers
        self.embeddings = Embeddings(config, config.hidden_size, jax.random.fold_in(key, 0))
        for i in range(self.depth):
            setattr(self, f"layer_{i}", Layer(config, jax.random.fold_in(key, i + 1)))

    def __call__(self, tokens_BxL: Array, mask_BxL: Array) -> Array:
        x_NxH = self.embeddings(tokens_BxL)
        for i in range(self.depth):
            x_NxH = getattr(self, f"layer_{i}")(x_NxH, mask_BxL)
        return x_NxH.reshape(*tokens_BxL.shape, -1)


@dataclass(frozen=True)
class Bert:
    """A BERT encoder: pure functions over a nested dict of float32 arrays."""

    config: BertConfig
    name: str = "bert"

    @cached_property
    def _graphdef(self) -> nnx.GraphDef:
        return nnx.split(nnx.eval_shape(lambda: Network(self.config, jax.random.key(0))))[0]

    def init(self, key: Array) -> Params:
        """Normal matrices of deviation `initializer_range`, zero biases, unit scales."""
        return split(Network(self.config, key))[1]

    def hidden(self, params: Params, tokens_BxL: Array, mask_BxL: Array) -> Array:
        """The last layer's output, float32 [B, L, H].

        Args:
          params: as returned by `init` or `jaxpfl.models.pretrained.load`.
          tokens_BxL: int32 ids, L at most `max_position_embeddings`.
          mask_BxL: True = real token. What masked positions hold has no influence on the output
            at the real ones; their own output is finite and means nothing.
        """
        return merge(self._graphdef, params)(tokens_BxL, mask_BxL)
