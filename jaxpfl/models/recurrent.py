"""Recurrent language models: the LSTM, and the CIFG-LSTM of Augenstein et al. 2020.

The LSTM is the field's next-character predictor (McMahan et al. 2017; Reddi et al. 2021, appendix
C). With 90 characters, an embedding of 8 and two layers of 256 units it has 820,522 parameters, as
the field's Shakespeare baseline.

The CIFG cell has a coupled input-forget gate (Greff et al. 2015), a projection (Sak et al. 2014)
and optional peepholes, see `jaxpfl.models.layers.recurrence`. The output layer is m E^T + b_out
with E the input embedding (tied) or another matrix. The word model (10,000 tokens, embedding 96,
hidden 670, projection 96, tied) has exactly 1,422,250 parameters, untied 2,382,250; the char model
(258 symbols, embedding 128, three layers of 256 hidden and 128 projected units, untied) 756,738,
with peepholes 758,274.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from jaxpfl.checked import Checked, PositiveInt
from jaxpfl.checks import real
from jaxpfl.errors import InputError
from jaxpfl.models.base import OOV, PAD, Batch, Metrics, NetworkModel, Params, require_below
from jaxpfl.models.layers.embedding import look_up, next_token_loss
from jaxpfl.models.layers.initial import glorot_uniform, normal, uniform
from jaxpfl.models.layers.recurrence import Weights, cifg, lstm, one_step, run_cell


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
        embedding = uniform(keys[0], (self.vocab_size, self.embedding), 0.05)
        widths = [self.embedding, *[self.hidden] * (self.layers - 1)]
        layers = [LSTMLayer(width, self.hidden, keys[i + 1]) for i, width in enumerate(widths)]
        output = glorot_uniform(keys[-1], (self.vocab_size, self.hidden))
        return RecurrentNetwork(embedding, layers, output, jnp.zeros(self.vocab_size, jnp.float32))


Carry = tuple[tuple[Array, Array], ...]
"""Per layer: output m [B, projection] and cell c [B, hidden]."""


class CIFGLayer(nnx.Module):
    """One CIFG layer: run over a whole sequence, or for one step."""

    def __init__(self, inputs: int, hidden: int, projection: int, peepholes: bool, key: Array):
        keys = [jax.random.fold_in(key, i) for i in range(2)]
        self.kernel = nnx.Param(glorot_uniform(keys[0], (inputs + projection, 3 * hidden)))
        self.bias = nnx.Param(jnp.zeros(3 * hidden, jnp.float32))
        self.projection = nnx.Param(glorot_uniform(keys[1], (hidden, projection)))
        self.peepholes = nnx.Param(jnp.zeros((2, hidden), jnp.float32)) if peepholes else None

    def _weights(self) -> Weights:
        peepholes = None if self.peepholes is None else self.peepholes[...]
        return Weights(self.kernel[...], self.bias[...], self.projection[...], peepholes)

    def __call__(self, x_TxBxI: Array) -> Array:
        """Outputs [T, B, projection] from the zero state."""
        return run_cell(cifg, x_TxBxI, self._weights())

    def step(self, x_BxI: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        """One token: the next (output, cell)."""
        weights = self._weights()
        one = one_step(cifg, weights, weights.gate_inputs(x_BxI), *carry)
        return one.output, one.cell


@dataclass(frozen=True)
class CIFGLanguageModel(Checked, RecurrentModel):
    """A CIFG-LSTM language model; batches hold "tokens" int32 [B, L + 1].

    A row is bos, words, eos, padding (-1). Every token except bos and padding is a target, end of
    sentence and out-of-vocabulary included. In top-1 accuracy, a prediction of the end of sentence
    counts like one of a word; a prediction of out-of-vocabulary is never correct. Matrices begin
    Glorot-uniform, embeddings with an expected squared norm of 1.

    Attributes:
      vocab_size: number of token ids, including the special tokens.
      embedding, hidden, projection, layers: sizes; `projection` must equal `embedding` if tied.
      tied: the output matrix is the input embedding.
      peepholes: diagonal connections from the cell to the forget and output gates.
      output_bias_prior: log frequencies of the tokens in PUBLIC text, the initial output bias that
        makes the untrained model a unigram model of that text; zeros if None.
      oov: the id of out-of-vocabulary words; None for characters and the like.
    """

    vocab_size: PositiveInt = 10_000
    embedding: PositiveInt = 96
    hidden: PositiveInt = 670
    projection: PositiveInt = 96
    layers: PositiveInt = 1
    tied: bool = True
    peepholes: bool = False
    output_bias_prior: tuple[float, ...] | None = None
    oov: int | None = OOV
    name: str = "cifg_lstm"

    def check_fields(self) -> None:
        if self.tied and self.projection != self.embedding:
            expected = f"equal embedding ({self.embedding}) when tied"
            raise InputError(f"projection must {expected}, found {self.projection}")
        if self.output_bias_prior is not None:
            if (values := len(self.output_bias_prior)) != self.vocab_size:
                expected = f"vocab_size = {self.vocab_size} values"
                raise InputError(f"output_bias_prior must have {expected}, found {values}")
            for value in self.output_bias_prior:
                real("output_bias_prior", value)

    def _network(self, key: Array) -> RecurrentNetwork:
        keys = [jax.random.fold_in(key, i) for i in range(self.layers + 2)]
        embedding = normal(keys[0], (self.vocab_size, self.embedding), self.embedding**-0.5)
        sizes = (self.hidden, self.projection, self.peepholes)
        widths = [self.embedding, *[self.projection] * (self.layers - 1)]
        layers = [CIFGLayer(width, *sizes, keys[i + 1]) for i, width in enumerate(widths)]
        output, bias = None, jnp.zeros(self.vocab_size, jnp.float32)
        if not self.tied:
            output = glorot_uniform(keys[-1], (self.vocab_size, self.projection))
        if self.output_bias_prior is not None:
            bias = jnp.asarray(self.output_bias_prior, jnp.float32)
        return RecurrentNetwork(embedding, layers, output, bias)

    def initial_carry(self, batch: int) -> Carry:
        """The state before the first token of `batch` sequences."""
        m_BxP = jnp.zeros((batch, self.projection), jnp.float32)
        c_BxH = jnp.zeros((batch, self.hidden), jnp.float32)
        return ((m_BxP, c_BxH),) * self.layers

    def step(self, params: Params, tokens_B: Array, carry: Carry) -> tuple[Array, Carry]:
        """Reads one token per sequence: logits [B, V] of the next one, and the new state."""
        network = self._merged(params)
        x_BxI = network.embedding[...][jnp.maximum(tokens_B, 0)]
        states = []
        for layer, before in zip(network.layers, carry, strict=True):
            states.append(layer.step(x_BxI, before))
            x_BxI = states[-1][0]
        return network.logits(x_BxI), tuple(states)
