"""What the recurrent language models share, and the LSTM, the field's next-character predictor.

Source: McMahan et al. 2017; Reddi et al. 2021, appendix C. With 90 characters, an embedding of 8
and two layers of 256 units the LSTM has 820,522 parameters, as the field's Shakespeare baseline.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jaxpfl.checked import Checked, PositiveInt
from jaxpfl.models.base import PAD, Batch, LossModel, Metrics, Params, glorot, require_below
from jaxpfl.models.layers.embedding import look_up
from jaxpfl.models.layers.output_layer import next_token_loss
from jaxpfl.models.layers.recurrence import Cell, Weights, lstm, run


class RecurrentModel(LossModel):
    """A language model; batches hold "tokens" int32 [B, L + 1], padded with -1 at the end.

    The model reads the first L tokens and predicts the last L. Every token except padding is a
    target. The parameters are {"embedding" [V, I], "layer_0" ..: `Weights` by name, "output" [V, H]
    (without it, the embedding), "output_bias" [V]}.
    """

    columns = ("tokens",)
    vocab_size: int
    layers: int
    oov: int | None = None
    cell: Cell

    def logits(self, params: Params, tokens_BxL: Array) -> Array:
        """Float32 logits [B, L, V] of the token that follows each given one."""
        logits_NxV = self._logits(params, self._outputs(params, tokens_BxL.T))
        batch, length = tokens_BxL.shape
        return logits_NxV.reshape(length, batch, -1).transpose(1, 0, 2)

    def check(self, columns: Mapping[str, Any]) -> None:
        """Raises `InputError` if the columns do not fit the settings."""
        require_below(columns, "tokens", "vocab_size", self.vocab_size)

    def loss(self, params: Params, batch: Batch, mask: Array) -> tuple[Array, Metrics]:
        """Mean cross-entropy over the real targets."""
        tokens_TxB = jnp.where(mask[:, None], batch["tokens"], PAD).T
        h_NxH, targets_N = self._outputs(params, tokens_TxB[:-1]), tokens_TxB[1:].reshape(-1)
        return next_token_loss(h_NxH, *_output_layer(params), targets_N, oov=self.oov)

    def _outputs(self, params: Params, tokens_TxB: Array) -> Array:
        """The last layer's outputs [T * B, H], which predict the token after each one."""
        # Padding is at the end of a row, where what it reads influences no real token.
        x_TxBxI: Any = look_up(params["embedding"], jnp.maximum(tokens_TxB, 0))
        for i in range(self.layers):
            x_TxBxI = run(self.cell, x_TxBxI, Weights(**params[f"layer_{i}"]))
        return x_TxBxI.reshape(-1, x_TxBxI.shape[-1])

    def _logits(self, params: Params, h_NxH: Array) -> Array:
        matrix_VxH, bias_V = _output_layer(params)
        return h_NxH @ matrix_VxH.T + bias_V[None, :]


def _output_layer(params: Params) -> tuple[Array, Array]:
    return params.get("output", params["embedding"]), params["output_bias"]


@dataclass(frozen=True)
class LSTMLanguageModel(Checked, RecurrentModel):
    """An LSTM language model; batches hold "tokens" int32 [B, L + 1], padded with -1 at the end.

    Matrices begin Glorot-uniform (inputs and state share one draw), forget biases as 1, embeddings
    small and uniform.

    Attributes:
      vocab_size: number of token ids, including the special tokens.
      embedding, hidden, layers: sizes.
    """

    vocab_size: PositiveInt = 90
    embedding: PositiveInt = 8
    hidden: PositiveInt = 256
    layers: PositiveInt = 2
    name: str = "lstm"

    cell = staticmethod(lstm)

    def init(self, key: Array) -> Params:
        keys = [jax.random.fold_in(key, i) for i in range(self.layers + 2)]
        shape, hidden = (self.vocab_size, self.embedding), self.hidden
        params: Params = {
            "embedding": jax.random.uniform(keys[0], shape, jnp.float32, -0.05, 0.05),
            "output": glorot(keys[-1], self.vocab_size, hidden),
            "output_bias": jnp.zeros(self.vocab_size, jnp.float32),
        }
        for i in range(self.layers):
            inputs = hidden if i else self.embedding
            # A forget gate that begins open (Jozefowicz et al. 2015).
            bias_4xH = jnp.zeros((4, hidden), jnp.float32).at[1].set(1.0)
            kernel = glorot(keys[i + 1], inputs + hidden, 4 * hidden)
            params[f"layer_{i}"] = {"kernel": kernel, "bias": bias_4xH.reshape(-1)}
        return params
