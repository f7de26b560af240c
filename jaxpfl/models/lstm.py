"""An LSTM language model: the field's next-character predictor.

Source: McMahan et al. 2017; Reddi et al. 2021, appendix C. With 90 characters, an embedding of 8
and two layers of 256 units it has 820,522 parameters, as the field's Shakespeare baseline.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from jaxpfl.checks import positive_int
from jaxpfl.models.layers.recurrence import LSTM, Weights, run
from jaxpfl.models.recurrent import RecurrentModel, RecurrentNetwork


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
        return run(LSTM, x_TxBxI, Weights(self.kernel[...], self.bias[...]))


@dataclass(frozen=True)
class LSTMLanguageModel(RecurrentModel):
    """An LSTM language model; batches hold "tokens" int32 [B, L + 1], padded with -1 at the end.

    Matrices begin Glorot-uniform, forget biases as 1, embeddings small and uniform.

    Attributes:
      vocab_size: number of token ids, including the special tokens.
      embedding, hidden, layers: sizes.
    """

    vocab_size: int = 90
    embedding: int = 8
    hidden: int = 256
    layers: int = 2
    name: str = "lstm"

    def __post_init__(self):
        for field in ("vocab_size", "embedding", "hidden", "layers"):
            positive_int(field, getattr(self, field))

    def _network(self, key: Array) -> RecurrentNetwork:
        keys = [jax.random.fold_in(key, i) for i in range(self.layers + 2)]
        shape = (self.vocab_size, self.embedding)
        widths = [self.embedding, *[self.hidden] * (self.layers - 1)]
        output_shape = (self.vocab_size, self.hidden)
        return RecurrentNetwork(
            jax.random.uniform(keys[0], shape, jnp.float32, -0.05, 0.05),
            [LSTMLayer(width, self.hidden, keys[i + 1]) for i, width in enumerate(widths)],
            jax.nn.initializers.glorot_uniform()(keys[-1], output_shape, jnp.float32),
            jnp.zeros(self.vocab_size, jnp.float32),
        )
