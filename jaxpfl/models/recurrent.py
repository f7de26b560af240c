"""The base of the recurrent language models, and the LSTM, the field's next-character predictor.

Source: McMahan et al. 2017; Reddi et al. 2021, appendix C. With 90 characters, an embedding of 8
and two layers of 256 units the LSTM has 820,522 parameters, as the field's Shakespeare baseline.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from jaxpfl.checked import Checked, PositiveInt
from jaxpfl.models.base import PAD, Batch, Metrics, NetworkModel, Params, require_below
from jaxpfl.models.layers.embedding import look_up
from jaxpfl.models.layers.initial import glorot_uniform, uniform
from jaxpfl.models.layers.output_layer import next_token_loss
from jaxpfl.models.layers.recurrence import Weights, lstm, run_cell


class RecurrentNetwork(nnx.Module):
    """Logits h W^T + b of the last layer's outputs h, [T, B, H]; W None = the embedding."""

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
        # Padding is at the end of a row, where it influences no real token.
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


class LSTMLayer(nnx.Module):
    """One layer, run over a whole sequence from the zero state."""

    def __init__(self, inputs: int, hidden: int, key: Array):
        # As Keras initialises an LSTM, except that inputs and state share one draw.
        self.kernel = nnx.Param(glorot_uniform(key, (inputs + hidden, 4 * hidden)))
        # A forget gate that begins open (Jozefowicz et al. 2015).
        gates_4xH = jnp.zeros((4, hidden), jnp.float32).at[1].set(1.0)
        self.bias = nnx.Param(gates_4xH.reshape(-1))

    def __call__(self, x_TxBxI: Array) -> Array:
        return run_cell(lstm, x_TxBxI, Weights(self.kernel[...], self.bias[...]))


@dataclass(frozen=True)
class LSTMLanguageModel(Checked, RecurrentModel):
    """An LSTM language model; batches hold "tokens" int32 [B, L + 1], padded with -1 at the end.

    Matrices begin Glorot-uniform, forget biases as 1, embeddings small and uniform.
    """

    vocab_size: PositiveInt = 90
    embedding: PositiveInt = 8
    hidden: PositiveInt = 256
    layers: PositiveInt = 2
    name: str = "lstm"

    def _network(self, key: Array) -> RecurrentNetwork:
        keys = [jax.random.fold_in(key, i) for i in range(self.layers + 2)]
        shape = (self.vocab_size, self.embedding)
        widths = [self.embedding, *[self.hidden] * (self.layers - 1)]
        output_shape = (self.vocab_size, self.hidden)
        return RecurrentNetwork(
            uniform(keys[0], shape, 0.05),
            [LSTMLayer(width, self.hidden, keys[i + 1]) for i, width in enumerate(widths)],
            glorot_uniform(keys[-1], output_shape),
            jnp.zeros(self.vocab_size, jnp.float32),
        )
