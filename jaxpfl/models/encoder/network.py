"""Encoders of the BERT family: the post-layer-norm Transformer over word pieces.

BERT (Devlin et al. 2019), MiniLM (Wang et al. 2020), ALBERT (Lan et al. 2020) and RoBERTa (Liu et
al. 2019). For token ids t at positions 0..L-1, all in one segment, with x = [N, H] the N = B L
tokens:

    x  = Norm(E_word[t] + E_position[l] + E_segment[0])        (ALBERT: x W_widen + b_widen)
    x <- Norm(x + W_O Attention(W_Q x, W_K x, W_V x) + b_O)      in every layer
    x <- Norm(x + W_down act(W_up x + b_up) + b_down)

Attention is softmax(q k^T / sqrt(D)) v per head of D = H / heads features, over the real tokens of
the same row, and in a causal model over those up to the token itself. W_Q, W_K and W_V are one
matrix [H, 3H]. ALBERT's layers share their parameters within few groups, mostly a single one. The
optional language-model head is E_word Norm(act(W x + b)) + c. Dropout is left out.
"""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpfl.checks import one_of
from jaxpfl.errors import InputError
from jaxpfl.models.base import PAD, Batch, Metrics, NetworkModel, Params, TokenModel
from jaxpfl.models.decoder.layers import ACTIVATIONS, Linear, Norm
from jaxpfl.models.encoder.config import CAUSAL_TYPES, EncoderConfig
from jaxpfl.models.layers.embedding import next_token_loss
from jaxpfl.models.layers.initial import normal


def _linear(inputs: int, outputs: int, config: EncoderConfig, key: Array) -> Linear:
    return Linear(inputs, outputs, key, deviation=config.initializer_range, bias=True)


def _norm(size: int, config: EncoderConfig) -> Norm:
    return Norm(size, config.norm_epsilon, centred=True)


class Embeddings(nnx.Module):
    """The normalised sum of word, position and segment embeddings; every token is in segment 0."""

    def __init__(self, config: EncoderConfig, key: Array):
        size, deviation = config.embedding_size, config.initializer_range
        keys = [jax.random.fold_in(key, i) for i in range(3)]
        self.first = config.first_position
        rows = self.first + config.positions
        self.word = nnx.Param(normal(keys[0], (config.vocab_size, size), deviation))
        self.position = nnx.Param(normal(keys[1], (rows, size), deviation))
        self.segment = nnx.Param(normal(keys[2], (config.segments, size), deviation))
        self.norm = _norm(size, config)

    def __call__(self, tokens_BxL: Array, mask_BxL: Array) -> Array:
        """Float32 [B * L, embedding_size]."""
        batch, length = tokens_BxL.shape
        position = self.position[...]
        places_BxLxE = position[None, :length]
        if self.first:
            # Positions count real tokens only, wherever the padding is.
            order_BxL = jnp.where(mask_BxL, jnp.cumsum(mask_BxL, axis=1, dtype=jnp.int32), 0)
            places_BxLxE = position[order_BxL + (self.first - 1)]
        places_BxLxE = places_BxLxE + self.segment[...][None, :1]
        # At PAD, -1, the table would give its last row.
        x_BxLxE = self.word[...][jnp.maximum(tokens_BxL, 0)] + places_BxLxE
        return self.norm(x_BxLxE.reshape(batch * length, -1))


class Layer(nnx.Module):
    """Self-attention and feed-forward block, each with its residual and norm."""

    def __init__(self, config: EncoderConfig, key: Array):
        keys = [jax.random.fold_in(key, i) for i in range(4)]
        hidden, inner = config.hidden_size, config.inner_size
        self.heads = config.heads
        self.activation = config.activation
        self.qkv = _linear(hidden, 3 * hidden, config, keys[0])
        self.attention = _linear(hidden, hidden, config, keys[1])
        self.attention_norm = _norm(hidden, config)
        self.up = _linear(hidden, inner, config, keys[2])
        self.down = _linear(inner, hidden, config, keys[3])
        self.output_norm = _norm(hidden, config)

    def __call__(self, x_NxH: Array, barrier_BxKxLxL: Array) -> Array:
        attended_NxH = attend(self.qkv(x_NxH), barrier_BxKxLxL, self.heads)
        x_NxH = self.attention_norm(x_NxH + self.attention(attended_NxH))
        inner_NxI = ACTIVATIONS[self.activation](self.up(x_NxH))
        return self.output_norm(x_NxH + self.down(inner_NxI))


def attend(qkv_Nx3H: Array, barrier_BxKxLxL: Array, heads: int) -> Array:
    """Attention to the tokens of the same row, float32 [N, H]; the barrier is added to scores."""
    batch, length = barrier_BxKxLxL.shape[0], barrier_BxKxLxL.shape[-1]
    features = qkv_Nx3H.shape[1] // (3 * heads)
    # With heads before positions, both are plain matrix products, which run fastest on CPUs.
    qkv_BxLx3xKxD = qkv_Nx3H.reshape(batch, length, 3, heads, features)
    qkv_3xBxKxLxD = jnp.transpose(qkv_BxLx3xKxD, (2, 0, 3, 1, 4))
    q, k, v = (qkv_3xBxKxLxD[i] for i in range(3))
    scores_BxKxLxL = jnp.matmul(q * (1 / math.sqrt(features)), jnp.swapaxes(k, 2, 3))
    weights_BxKxLxL = jax.nn.softmax(scores_BxKxLxL + barrier_BxKxLxL, axis=-1)
    attended_BxKxLxD = jnp.matmul(weights_BxKxLxL, v)
    return jnp.swapaxes(attended_BxKxLxD, 1, 2).reshape(batch * length, -1)


class Head(nnx.Module):
    """The language-model head: the features and the biases of the tied output layer."""

    def __init__(self, config: EncoderConfig, key: Array):
        # RoBERTa's head uses the exact GELU, whatever its layers use.
        exact = config.model_type == "roberta"
        self.activation = "gelu" if exact else config.activation
        self.dense = _linear(config.hidden_size, config.embedding_size, config, key)
        self.norm = _norm(config.embedding_size, config)
        self.bias = nnx.Param(jnp.zeros(config.vocab_size, jnp.float32))

    def __call__(self, x_NxH: Array) -> Array:
        return self.norm(ACTIVATIONS[self.activation](self.dense(x_NxH)))


class Network(nnx.Module):
    """Embeddings, the map to the hidden size (ALBERT), the layers in turn, and the head."""

    def __init__(self, model: "Encoder", key: Array):
        config = model.config
        keys = [jax.random.fold_in(key, i) for i in range(config.groups + 3)]
        self.causal = model.causal
        self.turns = tuple(config.group(i) for i in range(config.layers))
        self.embeddings = Embeddings(config, keys[0])
        for i in range(config.groups):
            setattr(self, f"layer_{i}", Layer(config, keys[i + 1]))
        albert, sizes = config.model_type == "albert", (config.embedding_size, config.hidden_size)
        self.widen = _linear(*sizes, config, keys[-2]) if albert else None
        self.head = Head(config, keys[-1]) if model.head else None

    def __call__(self, tokens_BxL: Array, mask_BxL: Array) -> Array:
        x_NxH = self.embeddings(tokens_BxL, mask_BxL)
        if self.widen is not None:
            x_NxH = self.widen(x_NxH)
        length = tokens_BxL.shape[1]
        seen_BxMxL = mask_BxL[:, None, :]
        if self.causal:
            seen_BxMxL = seen_BxMxL & jnp.tril(jnp.ones((length, length), bool))[None]
        # Finite, because a row that is all padding must not give NaN.
        lowest = jnp.finfo(jnp.float32).min / 2
        barrier_BxKxLxL = jnp.where(seen_BxMxL, 0.0, lowest)[:, None]
        for group in self.turns:
            x_NxH = getattr(self, f"layer_{group}")(x_NxH, barrier_BxKxLxL)
        return x_NxH.reshape(*tokens_BxL.shape, -1)

    def output_layer(self, x_NxH: Array) -> tuple[Array, Array, Array]:
        """Features [N, E], matrix [V, E] and biases [V], which give the logits."""
        assert self.head is not None
        return self.head(x_NxH), self.embeddings.word[...], self.head.bias[...]


@dataclass(frozen=True)
class Encoder(TokenModel, NetworkModel):
    """An encoder of the BERT family.

    A causal one ("bert" or "roberta") with a head is a `jaxpfl.models.base.Model`: a batch holds
    "tokens" int32 [B, L], padded with -1 at the end of a row, and every token predicts the next.

    Attributes:
      causal: whether a token sees only those up to itself, as with `is_decoder` in transformers.
      head: whether there is a language-model head, for masked tokens or (causal) the next token.
    """

    config: EncoderConfig
    causal: bool = False
    head: bool = False

    def __post_init__(self) -> None:
        if self.causal:
            one_of("the model_type of a causal encoder", self.name, CAUSAL_TYPES)

    def _network(self, key: Array) -> Network:
        return Network(self, key)

    def shardings(self, mesh: Mesh, params: Params) -> Params:
        """Shardings that put a copy on every device of a mesh, because these networks are small."""
        return jax.tree.map(lambda leaf: NamedSharding(mesh, PartitionSpec()), params)

    def hidden(self, params: Params, tokens_BxL: Array, mask_BxL: Array | None = None) -> Array:
        """The last layer's output, float32 [B, L, H].

        Args:
          params: as returned by `init` or `jaxpfl.models.checkpoints.pretrained.load`.
          tokens_BxL: int32 ids, L at most `config.positions`.
          mask_BxL: True for a real token, by default where the id is not PAD. Other positions do
            not influence the output at real ones; their own output is finite and arbitrary.
        """
        self.check_length(tokens_BxL.shape[1])
        mask_BxL = tokens_BxL != PAD if mask_BxL is None else mask_BxL
        return self._merged(params)(tokens_BxL, mask_BxL)

    def logits(self, params: Params, hidden_BxLxH: Array) -> Array:
        """Logits [..., V] of the token at every place (causal: of the token after it)."""
        flat_NxH = hidden_BxLxH.reshape(-1, hidden_BxLxH.shape[-1])
        features_NxE, matrix_VxE, bias_V = self._output_layer(params, flat_NxH)
        logits_NxV = features_NxE @ matrix_VxE.T + bias_V[None, :]
        return logits_NxV.reshape(*hidden_BxLxH.shape[:-1], -1)

    def loss(self, params: Params, batch: Batch, mask: Array) -> tuple[Array, Metrics]:
        """Mean cross-entropy of the next tokens, of a causal model with a head."""
        if not self.causal:
            raise InputError("only a causal encoder predicts the next token, found causal=False")
        tokens_BxL = jnp.where(mask[:, None], batch["tokens"], PAD)
        flat_NxH = self.hidden(params, tokens_BxL[:, :-1]).reshape(-1, self.config.hidden_size)
        return next_token_loss(*self._output_layer(params, flat_NxH), tokens_BxL[:, 1:].reshape(-1))

    def _output_layer(self, params: Params, flat_NxH: Array) -> tuple[Array, Array, Array]:
        if not self.head:
            raise InputError("the encoder has no language-model head: its weights had none")
        return self._merged(params).output_layer(flat_NxH)
