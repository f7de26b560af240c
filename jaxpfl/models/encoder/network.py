"""Encoders of the BERT family: the post-layer-norm Transformer over word pieces.

BERT (Devlin et al. 2019), MiniLM (Wang et al. 2020), ALBERT (Lan et al. 2020) and RoBERTa (Liu et
al. 2019). For token ids t at positions 0..L-1, all in one segment, with x = [B, L, H] the
tokens:

    x  = Norm(E_word[t] + E_position[l] + E_segment[0])        (ALBERT: x W_widen + b_widen)
    x <- Norm(x + W_O Attention(W_Q x, W_K x, W_V x) + b_O)      in every layer
    x <- Norm(x + W_down act(W_up x + b_up) + b_down)

Attention is softmax(q k^T / sqrt(D)) v per head of D = H / heads features, over the real tokens of
the same row, and in a causal model over those up to the token itself. W_Q, W_K and W_V are one
matrix [H, 3H]. ALBERT's layers share their parameters within few groups, mostly a single one. The
optional language-model head is E_word Norm(act(W x + b)) + c. Dropout is left out.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpfl.checks import one_of
from jaxpfl.errors import InputError
from jaxpfl.models.base import PAD, Batch, LossModel, Metrics, Params
from jaxpfl.models.decoder.layers import ACTIVATIONS, attend, linear, linear_of, norm, norm_of
from jaxpfl.models.encoder.config import CAUSAL_TYPES, EncoderConfig
from jaxpfl.models.layers.output_layer import next_token_loss


@dataclass(frozen=True)
class Encoder(LossModel):
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

    columns = ("tokens",)

    def __post_init__(self) -> None:
        if self.causal:
            one_of("the model_type of a causal encoder", self.name, CAUSAL_TYPES)

    @property
    def name(self) -> str:
        return self.config.model_type

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    def init(self, key: Array) -> Params:
        config, hidden, size = self.config, self.config.hidden_size, self.config.embedding_size
        keys = [jax.random.fold_in(key, i) for i in range(config.groups + 3)]

        def linear(key: Array, inputs: int, outputs: int) -> Params:
            return linear_of(key, inputs, outputs, deviation=config.initializer_range, bias=True)

        normal = jax.nn.initializers.normal(config.initializer_range)
        rows = config.first_position + config.positions
        tables = {"word": config.vocab_size, "position": rows, "segment": config.segments}
        embeddings: Params = {"norm": norm_of(size, centred=True)}
        for i, (name, number) in enumerate(tables.items()):
            own = jax.random.fold_in(keys[0], i)
            embeddings[name] = normal(own, (number, size), jnp.float32)
        params: Params = {"embeddings": embeddings}
        for i in range(config.groups):
            own = [jax.random.fold_in(keys[i + 1], j) for j in range(4)]
            params[f"layer_{i}"] = {
                "qkv": linear(own[0], hidden, 3 * hidden),
                "attention": linear(own[1], hidden, hidden),
                "attention_norm": norm_of(hidden, centred=True),
                "up": linear(own[2], hidden, config.inner_size),
                "down": linear(own[3], config.inner_size, hidden),
                "output_norm": norm_of(hidden, centred=True),
            }
        if config.model_type == "albert":
            params["widen"] = linear(keys[-2], size, hidden)
        if self.head:
            params["head"] = {
                "dense": linear(keys[-1], hidden, size),
                "norm": norm_of(size, centred=True),
                "bias": jnp.zeros(config.vocab_size, jnp.float32),
            }
        return params

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
        if tokens_BxL.shape[1] > self.config.positions:
            raise InputError(
                f"a row must have at most {self.config.positions} tokens, found "
                f"{tokens_BxL.shape[1]}"
            )
        mask_BxL = tokens_BxL != PAD if mask_BxL is None else mask_BxL
        x = self._embedded(params["embeddings"], tokens_BxL, mask_BxL)
        if "widen" in params:
            x = linear(params["widen"], x)
        seen_BxMxL = mask_BxL[:, None, :]
        if self.causal:
            length = tokens_BxL.shape[1]
            seen_BxMxL = seen_BxMxL & jnp.tril(jnp.ones((length, length), bool))[None]
        for i in range(self.config.layers):
            x = self._layer(params[f"layer_{self.config.group(i)}"], x, seen_BxMxL)
        return x

    def _embedded(self, own: Params, tokens_BxL: Array, mask_BxL: Array) -> Array:
        """The normalised sum of the embeddings, float32 [B, L, embedding_size]."""
        first = self.config.first_position
        places_BxLxE = own["position"][None, : tokens_BxL.shape[1]]
        if first:
            # These positions count real tokens only, wherever the padding is.
            order_BxL = jnp.where(mask_BxL, jnp.cumsum(mask_BxL, axis=1, dtype=jnp.int32), 0)
            places_BxLxE = own["position"][order_BxL + (first - 1)]
        places_BxLxE = places_BxLxE + own["segment"][None, :1]
        # At PAD, -1, the table would give its last row.
        x_BxLxE = own["word"][jnp.maximum(tokens_BxL, 0)] + places_BxLxE
        return self._norm(own["norm"], x_BxLxE)

    def _layer(self, own: Params, x: Array, seen_BxMxL: Array) -> Array:
        qkv_BxLx3xHxD = linear(own["qkv"], x).reshape(*x.shape[:2], 3, self.config.heads, -1)
        attended = attend(*(qkv_BxLx3xHxD[:, :, i] for i in range(3)), seen_BxMxL)
        x = self._norm(own["attention_norm"], x + linear(own["attention"], attended))
        inner = ACTIVATIONS[self.config.activation](linear(own["up"], x))
        return self._norm(own["output_norm"], x + linear(own["down"], inner))

    def _norm(self, own: Params, x: Array) -> Array:
        return norm(own, x, self.config.norm_epsilon)

    def logits(self, params: Params, hidden_BxLxH: Array) -> Array:
        """Logits [..., V] of the token at every place (causal: of the token after it)."""
        flat_NxH = hidden_BxLxH.reshape(-1, hidden_BxLxH.shape[-1])
        features_NxE, matrix_VxE, bias_V = self._output_layer(params, flat_NxH)
        logits_NxV = features_NxE @ matrix_VxE.T + bias_V[None, :]
        return logits_NxV.reshape(*hidden_BxLxH.shape[:-1], -1)

    def masked_logits(
        self, params: Params, tokens_BxL: Array, mask_BxL: Array | None = None
    ) -> Array:
        """Logits float32 [B, L, V] of the tokens behind mask tokens; see `hidden` and `logits`."""
        return self.logits(params, self.hidden(params, tokens_BxL, mask_BxL))

    def loss(self, params: Params, batch: Batch, mask: Array) -> tuple[Array, Metrics]:
        """Mean cross-entropy of the next tokens, of a causal model with a head."""
        if not self.causal:
            raise InputError("only a causal encoder predicts the next token, found causal=False")
        tokens_BxL = jnp.where(mask[:, None], batch["tokens"], PAD)
        flat_NxH = self.hidden(params, tokens_BxL[:, :-1]).reshape(-1, self.config.hidden_size)
        return next_token_loss(*self._output_layer(params, flat_NxH), tokens_BxL[:, 1:].reshape(-1))

    def _output_layer(self, params: Params, flat_NxH: Array) -> tuple[Array, Array, Array]:
        """Features [N, E], matrix [V, E] and biases [V], which give the logits."""
        if not self.head:
            raise InputError("the encoder has no language-model head: its weights had none")
        head = params["head"]
        # RoBERTa's head uses the exact GELU, whatever its layers use.
        exact = self.name == "roberta"
        activation = ACTIVATIONS["gelu" if exact else self.config.activation]
        features_NxE = self._norm(head["norm"], activation(linear(head["dense"], flat_NxH)))
        return features_NxE, params["embeddings"]["word"], head["bias"]
