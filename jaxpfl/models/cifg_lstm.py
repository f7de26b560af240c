"""CIFG-LSTM language models: the word- and char-LM of Augenstein et al. 2020.

The cell has a coupled input-forget gate (Greff et al. 2015), a projection (Sak et al. 2014) and
optional peepholes, see `jaxpfl.models.layers.recurrence`. The output layer is m E^T + b_out with E
the input embedding (tied) or another matrix. The word model (10,000 tokens, embedding 96, hidden
670, projection 96, tied) has exactly 1,422,250 parameters, untied 2,382,250; the char model (258
symbols, embedding 128, three layers of 256 hidden and 128 projected units, untied) 756,738, with
peepholes 758,274.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from jaxpfl.checked import Checked, PositiveInt
from jaxpfl.checks import real
from jaxpfl.errors import InputError
from jaxpfl.models.base import OOV, Params
from jaxpfl.models.layers.initial import glorot_uniform, normal
from jaxpfl.models.layers.recurrence import Weights, cifg, one_step, run_cell
from jaxpfl.models.recurrent import RecurrentModel, RecurrentNetwork

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

    def __post_init__(self):
        super().__post_init__()
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

    def _network(self, key: Array) -> RecurrentNetwork:
        keys = [jax.random.fold_in(key, i) for i in range(self.layers + 2)]
        sizes = (self.hidden, self.projection, self.peepholes)
        widths = [self.embedding, *[self.projection] * (self.layers - 1)]
        output, bias = None, jnp.zeros(self.vocab_size, jnp.float32)
        if not self.tied:
            shape = (self.vocab_size, self.projection)
            output = glorot_uniform(keys[-1], shape)
        if self.output_bias_prior is not None:
            bias = jnp.asarray(self.output_bias_prior, jnp.float32)
        return RecurrentNetwork(
            normal(keys[0], (self.vocab_size, self.embedding), self.embedding**-0.5),
            [CIFGLayer(width, *sizes, keys[i + 1]) for i, width in enumerate(widths)],
            output,
            bias,
        )

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
