"""What the recurrent language models share: an embedding, layers in turn and an output layer."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import Array

from jaxpfl.models.base import PAD, Batch, Metrics, NetworkModel, Params, require_below
from jaxpfl.models.layers.embedding import look_up
from jaxpfl.models.layers.output_layer import next_token_loss


class RecurrentNetwork(nnx.Module):
    """Logits h W^T + b of the last layer's outputs h.

    Args:
      layers: modules from [T, B, I] to [T, B, H].
      output_VxH: W; None = the embedding.
    """

    def __init__(
        self,
        embedding_VxI: Array,
        layers: Sequence[nnx.Module],
        output_VxH: Array | None,
        bias_V: Array,
    ):
        self.depth = len(layers)
        self.embedding = nnx.Param(embedding_VxI)
        for i, layer in enumerate(layers):
            setattr(self, f"layer_{i}", layer)
        self.output = None if output_VxH is None else nnx.Param(output_VxH)
        self.output_bias = nnx.Param(bias_V)

    @property
    def layers(self) -> list[Any]:
        return [getattr(self, f"layer_{i}") for i in range(self.depth)]

    def output_layer(self) -> tuple[Array, Array]:
        """W [V, H] and b [V]."""
        matrix = self.embedding if self.output is None else self.output
        return matrix[...], self.output_bias[...]

    def logits(self, h_NxH: Array) -> Array:
        matrix_VxH, bias_V = self.output_layer()
        return h_NxH @ matrix_VxH.T + bias_V[None, :]

    def __call__(self, tokens_TxB: Array) -> Array:
        """The last layer's outputs [T * B, H], which predict the token after each one."""
        # Padding is at the end of a row, where what it reads influences no real token.
        x_TxBxI = look_up(self.embedding[...], jnp.maximum(tokens_TxB, 0))
        for layer in self.layers:
            x_TxBxI = layer(x_TxBxI)
        return x_TxBxI.reshape(-1, x_TxBxI.shape[-1])


class RecurrentModel(NetworkModel):
    """A language model; batches hold "tokens" int32 [B, L + 1], padded with -1 at the end.

    The model reads the first L tokens and predicts the last L. Every token except padding is a
    target.
    """

    columns = ("tokens",)
    vocab_size: int
    oov: int | None = None

    def logits(self, params: Params, tokens_BxL: Array) -> Array:
        """Float32 logits [B, L, V] of the token that follows each given one."""
        network = self._merged(params)
        logits_NxV = network.logits(network(tokens_BxL.T))
        batch, length = tokens_BxL.shape
        return logits_NxV.reshape(length, batch, -1).transpose(1, 0, 2)

    def check(self, columns: Mapping[str, Any]) -> None:
        """Raises `InputError` if the columns do not fit the settings."""
        require_below(columns, "tokens", "vocab_size", self.vocab_size)

    def loss(self, params: Params, batch: Batch, mask: Array) -> tuple[Array, Metrics]:
        """Mean cross-entropy over the real targets."""
        tokens_TxB = jnp.where(mask[:, None], batch["tokens"], PAD).T
        network = self._merged(params)
        outputs, targets_N = network(tokens_TxB[:-1]), tokens_TxB[1:].reshape(-1)
        matrix_VxH, bias_V = network.output_layer()
        return next_token_loss(outputs, matrix_VxH, bias_V, targets_N, oov=self.oov)
