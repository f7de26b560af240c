"""CIFG-LSTM language models: the word- and char-LM of Augenstein et al. 2020.

The cell has a coupled input-forget gate (Greff et al. 2015), a projection (Sak et al. 2014) and
optional peepholes, see `jaxpfl.models.layers.cifg_cell`. The output layer is m E^T + b_out with E
the input embedding (tied) or another matrix. The word model (10,000 tokens, embedding 96, hidden
670, projection 96, tied) has exactly 1,422,250 parameters, untied 2,382,250; the char model (258
symbols, embedding 128, three layers of 256 hidden and 128 projected units, untied) 756,738, with
peepholes 758,274.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from jaxpfl.checks import positive_int, real
from jaxpfl.errors import InputError
from jaxpfl.models.base import OOV, PAD, Batch, Metrics, Params, masked_loss, require_below, split
from jaxpfl.models.layers import cifg_cell
from jaxpfl.models.layers.embedding import look_up
from jaxpfl.models.layers.output_layer import mean_cross_entropy

Carry = tuple[tuple[Array, Array], ...]
"""Per layer: output m [B, projection] and cell c [B, hidden]."""


class CIFGLayer(nnx.Module):
    """One CIFG layer: run over a whole sequence, or for one step."""

    def __init__(self, inputs: int, hidden: int, projection: int, peepholes: bool, key: Array):
        initialise = jax.nn.initializers.glorot_uniform()
        keys = [jax.random.fold_in(key, i) for i in range(2)]
        self.kernel = nnx.Param(initialise(keys[0], (inputs + projection, 3 * hidden), jnp.float32))
        self.bias = nnx.Param(jnp.zeros(3 * hidden, jnp.float32))
        self.projection = nnx.Param(initialise(keys[1], (hidden, projection), jnp.float32))
        self.peepholes = nnx.Param(jnp.zeros((2, hidden), jnp.float32)) if peepholes else None

    def _weights(self) -> cifg_cell.Weights:
        peepholes = None if self.peepholes is None else self.peepholes[...]
        return cifg_cell.Weights(self.kernel[...], self.bias[...], self.projection[...], peepholes)

    def __call__(self, x_TxBxI: Array) -> Array:
        """Outputs [T, B, projection] from the zero state."""
        return cifg_cell.run(x_TxBxI, self._weights())

    def step(self, x_BxI: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        """One token: the next (output, cell)."""
        weights, (m_BxP, c_BxH) = self._weights(), carry
        gates_Bx3H = weights.gate_inputs(x_BxI) + m_BxP @ weights.recurrent
        one = cifg_cell.step(weights, gates_Bx3H, c_BxH)
        return one.output, one.cell


class Network(nnx.Module):
    """Embedding, CIFG layers, output layer."""

    def __init__(self, config: "CIFGLanguageModel", key: Array):
        keys = [jax.random.fold_in(key, i) for i in range(config.layers + 2)]
        shape = (config.vocab_size, config.embedding)
        unit_rows = jax.nn.initializers.variance_scaling(1.0, "fan_out", "normal")
        self.depth = config.layers
        self.embedding = nnx.Param(unit_rows(keys[0], shape, jnp.float32))
        for i in range(config.layers):
            inputs = config.embedding if i == 0 else config.projection
            layer = CIFGLayer(
                inputs, config.hidden, config.projection, config.peepholes, keys[i + 1]
            )
            setattr(self, f"layer_{i}", layer)
        initialise = jax.nn.initializers.glorot_uniform()
        shape = (config.vocab_size, config.projection)
        self.output = None if config.tied else nnx.Param(initialise(keys[-1], shape, jnp.float32))
        bias = jnp.zeros(config.vocab_size, jnp.float32)
        if config.output_bias_prior is not None:
            bias = jnp.asarray(config.output_bias_prior, jnp.float32)
        self.output_bias = nnx.Param(bias)

    def output_layer(self) -> tuple[Array, Array]:
        """Matrix [V, P] and bias [V]."""
        matrix = self.embedding if self.output is None else self.output
        return matrix[...], self.output_bias[...]

    def logits(self, m_NxP: Array) -> Array:
        """Logits [N, V] from the last layer's outputs."""
        matrix_VxP, bias_V = self.output_layer()
        return m_NxP @ matrix_VxP.T + bias_V[None, :]

    def __call__(self, tokens_TxB: Array) -> Array:
        """The last layer's outputs [T * B, P], which predict the token after each one."""
        # The rows that padding reads influence no real token.
        x_TxBxI = look_up(self.embedding[...], jnp.maximum(tokens_TxB, 0))
        for i in range(self.depth):
            x_TxBxI = getattr(self, f"layer_{i}")(x_TxBxI)
        return x_TxBxI.reshape(-1, x_TxBxI.shape[-1])

    def step(self, tokens_B: Array, carry: Carry) -> tuple[Array, Carry]:
        x_BxI = self.embedding[...][jnp.maximum(tokens_B, 0)]
        states = []
        for i in range(self.depth):
            state = getattr(self, f"layer_{i}").step(x_BxI, carry[i])
            x_BxI = state[0]
            states.append(state)
        return self.logits(x_BxI), tuple(states)


@dataclass(frozen=True)
class CIFGLanguageModel:
    """A CIFG-LSTM language model; batches hold "tokens" int32 [B, L + 1].

    A row is bos, words, eos, padding (-1). The model reads the first L tokens and predicts the last
    L. Every token except padding is a target, end of sentence and out-of-vocabulary included. In
    top-1 accuracy, a prediction of the end of sentence counts like one of a word; a prediction of
    out-of-vocabulary is never correct.

    Attributes:
      vocab_size: number of token ids, including the special tokens.
      embedding, hidden, projection, layers: sizes; `projection` must equal `embedding` if tied.
      tied: the output matrix is the input embedding.
      peepholes: diagonal connections from the cell to the forget and output gates.
      output_bias_prior: log frequencies of the tokens in PUBLIC text, the initial output bias that
        makes the untrained model a unigram model of that text; zeros if None.
      oov: the id of out-of-vocabulary words; None for characters and the like.

    Raises:
      InputError: a size is not a positive whole number, or sizes do not fit together.
    """

    vocab_size: int = 10_000
    embedding: int = 96
    hidden: int = 670
    projection: int = 96
    layers: int = 1
    tied: bool = True
    peepholes: bool = False
    output_bias_prior: tuple[float, ...] | None = None
    oov: int | None = OOV
    name: str = "cifg_lstm"

    columns = ("tokens",)

    def __post_init__(self):
        for field in ("vocab_size", "embedding", "hidden", "projection", "layers"):
            positive_int(field, getattr(self, field))
        if self.tied and self.projection != self.embedding:
            raise InputError(
                f"projection must equal embedding ({self.embedding}) when tied, "
                f"found {self.projection}"
            )
        if self.output_bias_prior is not None:
            if len(self.output_bias_prior) != self.vocab_size:
                raise InputError(
                    f"output_bias_prior must have vocab_size = {self.vocab_size} values, "
                    f"found {len(self.output_bias_prior)}"
                )
            for value in self.output_bias_prior:
                real("output_bias_prior", value)

    @cached_property
    def _graphdef(self) -> nnx.GraphDef:
        return nnx.split(nnx.eval_shape(lambda: Network(self, jax.random.key(0))))[0]

    def init(self, key: Array) -> Params:
        """Glorot-uniform matrices, embeddings of expected squared norm 1, zero biases."""
        return split(Network(self, key))[1]

    def logits(self, params: Params, tokens_BxL: Array) -> Array:
        """Float32 logits [B, L, V] of the token that follows each given one."""
        network = nnx.merge(self._graphdef, params)
        logits_NxV = network.logits(network(tokens_BxL.T))
        length, batch = tokens_BxL.shape[1], tokens_BxL.shape[0]
        return logits_NxV.reshape(length, batch, -1).transpose(1, 0, 2)

    def check(self, columns: Mapping[str, Any]) -> None:
        """Raises `InputError` if the columns do not fit the settings."""
        require_below(columns, "tokens", "vocab_size", self.vocab_size)

    def loss(self, params: Params, batch: Batch, mask: Array) -> tuple[Array, Metrics]:
        """Mean cross-entropy over the real targets, see `jaxpfl.models.base.Model.loss`."""
        network, m_NxP, targets_N = self._read(params, batch, mask)
        real_N = targets_N != PAD
        classes_N = jnp.maximum(targets_N, 0)
        loss = mean_cross_entropy(m_NxP, *network.output_layer(), classes_N, real_N)
        # Training does not use the metrics, and XLA then leaves out their logits.
        return loss, self._sums(network, m_NxP, targets_N)

    def evaluate(self, params: Params, batch: Batch, mask: Array) -> Metrics:
        """Sums of loss, correct predictions and targets."""
        network, m_NxP, targets_N = self._read(params, batch, mask)
        return self._sums(network, m_NxP, targets_N)

    def _sums(self, network: Network, m_NxP: Array, targets_N: Array) -> Metrics:
        logits_NxV = network.logits(m_NxP)
        return masked_loss(logits_NxV, targets_N, targets_N != PAD, oov=self.oov)[1]

    def _read(self, params: Params, batch: Batch, mask: Array) -> tuple[Network, Array, Array]:
        """The network, its last layer's outputs [N, P] and the targets [N], PAD where masked."""
        tokens_TxB = jnp.where(mask[:, None], batch["tokens"], PAD).T
        network = nnx.merge(self._graphdef, params)
        return network, network(tokens_TxB[:-1]), tokens_TxB[1:].reshape(-1)

    def initial_carry(self, batch: int) -> Carry:
        """The state before the first token of `batch` sequences."""
        m_BxP = jnp.zeros((batch, self.projection), jnp.float32)
        c_BxH = jnp.zeros((batch, self.hidden), jnp.float32)
        return ((m_BxP, c_BxH),) * self.layers

    def step(self, params: Params, tokens_B: Array, carry: Carry) -> tuple[Array, Carry]:
        """Reads one token per sequence: logits [B, V] of the next one, and the new state."""
        return nnx.merge(self._graphdef, params).step(tokens_B, carry)
