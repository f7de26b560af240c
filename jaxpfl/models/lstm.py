"""An LSTM language model: the field's next-character predictor.

Source: McMahan et al. 2017; Reddi et al. 2021, appendix C. The network is an embedding, LSTM layers
(`jaxpfl.models.layers.lstm_cell`) and a dense output. With 90 characters, an embedding of 8 and two
layers of 256 units it has 820,522 parameters, the number of the field's Shakespeare baseline.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from jaxpfl.checks import positive_int
from jaxpfl.models.base import PAD, Batch, Metrics, Params, masked_loss, require_below, split
from jaxpfl.models.layers import lstm_cell
from jaxpfl.models.layers.embedding import look_up
from jaxpfl.models.layers.output_layer import mean_cross_entropy


class LSTMLayer(nnx.Module):
    """One layer, run over a whole sequence from the zero state."""

    def __init__(self, inputs: int, hidden: int, key: Array):
        # As Keras initialises an LSTM, except that inputs and state share one draw.
        initialise = jax.nn.initializers.glorot_uniform()
        self.kernel = nnx.Param(initialise(key, (inputs + hidden, 4 * hidden), jnp.float32))
        # A forget gate that begins open (Jozefowicz et al. 2015).
        gates_4xH = jnp.zeros((4, hidden), jnp.float32).at[1].set(1.0)
        self.bias = nnx.Param(gates_4xH.reshape(-1))

    def __call__(self, x_TxBxI: Array) -> Array:
        return lstm_cell.run(x_TxBxI, lstm_cell.Weights(self.kernel[...], self.bias[...]))


class Network(nnx.Module):
    """Embedding, LSTM layers, output layer."""

    def __init__(self, config: "LSTMLanguageModel", key: Array):
        keys = [jax.random.fold_in(key, i) for i in range(config.layers + 2)]
        shape = (config.vocab_size, config.embedding)
        uniform = jax.random.uniform(keys[0], shape, jnp.float32, -0.05, 0.05)
        self.depth = config.layers
        self.embedding = nnx.Param(uniform)
        for i in range(config.layers):
            inputs = config.embedding if i == 0 else config.hidden
            setattr(self, f"layer_{i}", LSTMLayer(inputs, config.hidden, keys[i + 1]))
        initialise = jax.nn.initializers.glorot_uniform()
        shape = (config.vocab_size, config.hidden)
        self.output = nnx.Param(initialise(keys[-1], shape, jnp.float32))
        self.output_bias = nnx.Param(jnp.zeros(config.vocab_size, jnp.float32))

    def logits(self, h_NxH: Array) -> Array:
        """Logits [N, V] from the last layer's outputs."""
        return h_NxH @ self.output[...].T + self.output_bias[...][None, :]

    def __call__(self, tokens_TxB: Array) -> Array:
        """The last layer's outputs [T * B, H], which predict the token after each one."""
        # Padding is at the end of a row, where what it reads influences no real token.
        x_TxBxI = look_up(self.embedding[...], jnp.maximum(tokens_TxB, 0))
        for i in range(self.depth):
            x_TxBxI = getattr(self, f"layer_{i}")(x_TxBxI)
        return x_TxBxI.reshape(-1, x_TxBxI.shape[-1])


@dataclass(frozen=True)
class LSTMLanguageModel:
    """An LSTM language model; batches hold "tokens" int32 [B, L + 1], padded with -1 at the end.

    The model reads the first L tokens and predicts the last L. Every token except padding is a
    target, in the loss and in top-1 accuracy.

    Attributes:
      vocab_size: number of token ids, including the special tokens.
      embedding, hidden, layers: sizes.

    Raises:
      InputError: a size is not a positive whole number.
    """

    vocab_size: int = 90
    embedding: int = 8
    hidden: int = 256
    layers: int = 2
    name: str = "lstm"

    columns = ("tokens",)

    def __post_init__(self):
        for field in ("vocab_size", "embedding", "hidden", "layers"):
            positive_int(field, getattr(self, field))

    @cached_property
    def _graphdef(self) -> nnx.GraphDef:
        return nnx.split(nnx.eval_shape(lambda: Network(self, jax.random.key(0))))[0]

    def init(self, key: Array) -> Params:
        """Glorot-uniform matrices, forget biases of 1, small uniform embeddings."""
        return split(Network(self, key))[1]

    def logits(self, params: Params, tokens_BxL: Array) -> Array:
        """Float32 logits [B, L, V] of the token that follows each given one."""
        network = nnx.merge(self._graphdef, params)
        logits_NxV = network.logits(network(tokens_BxL.T))
        batch, length = tokens_BxL.shape
        return logits_NxV.reshape(length, batch, -1).transpose(1, 0, 2)

    def check(self, columns: Mapping[str, Any]) -> None:
        """Raises `InputError` if the columns do not fit the settings."""
        require_below(columns, "tokens", "vocab_size", self.vocab_size)

    def loss(self, params: Params, batch: Batch, mask: Array) -> tuple[Array, Metrics]:
        """Mean cross-entropy over the real targets, see `jaxpfl.models.base.Model.loss`."""
        network, h_NxH, targets_N = self._read(params, batch, mask)
        real_N = targets_N != PAD
        classes_N = jnp.maximum(targets_N, 0)
        matrix_VxH, bias_V = network.output[...], network.output_bias[...]
        loss = mean_cross_entropy(h_NxH, matrix_VxH, bias_V, classes_N, real_N)
        # Training does not use the metrics, and XLA then leaves out their logits.
        return loss, masked_loss(network.logits(h_NxH), targets_N, real_N)[1]

    def evaluate(self, params: Params, batch: Batch, mask: Array) -> Metrics:
        """Sums of loss, correct predictions and targets."""
        network, h_NxH, targets_N = self._read(params, batch, mask)
        return masked_loss(network.logits(h_NxH), targets_N, targets_N != PAD)[1]

    def _read(self, params: Params, batch: Batch, mask: Array) -> tuple[Network, Array, Array]:
        """The network, its last layer's outputs [N, H] and the targets [N], PAD where masked."""
        tokens_TxB = jnp.where(mask[:, None], batch["tokens"], PAD).T
        network = nnx.merge(self._graphdef, params)
        return network, network(tokens_TxB[:-1]), tokens_TxB[1:].reshape(-1)
