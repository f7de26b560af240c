"""The LSTM recurrence with forget gate (Gers et al. 2000) and its gradient.

With x_t the input, h the output, c the cell and W = [W_x; W_h] of I + H rows:

    i, f, g, o = split([x_t, h_(t-1)] W + b)
    c_t = sigmoid(f) c_(t-1) + sigmoid(i) tanh(g)
    h_t = sigmoid(o) tanh(c_t)

Automatic differentiation of the scan would add to the gradient of W at every step. Here the gates'
gradients of all steps are stacked instead, and one matrix product gives the gradient of W.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxpfl.models.layers.cifg_cell import before, rows


class Weights(NamedTuple):
    """The parameters of a layer.

    Attributes:
      kernel: W [I + H, 4H]; the first I rows multiply x, the others h; columns i, f, g, o.
      bias: b [4H].
    """

    kernel: Array
    bias: Array

    @property
    def hidden(self) -> int:
        """H."""
        return self.bias.shape[0] // 4

    @property
    def inputs(self) -> int:
        """I."""
        return self.kernel.shape[0] - self.hidden


class Step(NamedTuple):
    """The results of one step, [B, H], or of all, [T, B, H]; the gates after their activations."""

    output: Array
    cell: Array
    write: Array
    forget: Array
    candidate: Array
    expose: Array


def _step(gates_Bx4H: Array, c_BxH: Array) -> Step:
    i_BxH, f_BxH, g_BxH, o_BxH = jnp.split(gates_Bx4H, 4, axis=-1)
    write_BxH, forget_BxH = jax.nn.sigmoid(i_BxH), jax.nn.sigmoid(f_BxH)
    candidate_BxH, expose_BxH = jnp.tanh(g_BxH), jax.nn.sigmoid(o_BxH)
    cell_BxH = forget_BxH * c_BxH + write_BxH * candidate_BxH
    output_BxH = expose_BxH * jnp.tanh(cell_BxH)
    return Step(output_BxH, cell_BxH, write_BxH, forget_BxH, candidate_BxH, expose_BxH)


def _scan(x_TxBxI: Array, weights: Weights) -> Step:
    length, batch, inputs = x_TxBxI.shape
    recurrent_Hx4H = weights.kernel[inputs:]
    x_Nx4H = rows(x_TxBxI) @ weights.kernel[:inputs] + weights.bias[None, :]

    def body(carry: tuple[Array, Array], x_Bx4H: Array) -> tuple[tuple[Array, Array], Step]:
        h_BxH, c_BxH = carry
        one = _step(x_Bx4H + h_BxH @ recurrent_Hx4H, c_BxH)
        return (one.output, one.cell), one

    zeros_BxH = jnp.zeros((batch, weights.hidden), x_TxBxI.dtype)
    return lax.scan(body, (zeros_BxH, zeros_BxH), x_Nx4H.reshape(length, batch, -1))[1]


@jax.custom_vjp
def run(x_TxBxI: Array, weights: Weights) -> Array:
    """Outputs h [T, B, H] of the recurrence from the zero state; reverse-mode differentiable."""
    return _scan(x_TxBxI, weights).output


def _forward(x_TxBxI: Array, weights: Weights) -> tuple[Array, tuple[Array, Step, Weights]]:
    steps = _scan(x_TxBxI, weights)
    return steps.output, (x_TxBxI, steps, weights)


def _backward(residuals: tuple[Array, Step, Weights], dh_TxBxH: Array) -> tuple[Array, Weights]:
    x_TxBxI, steps, weights = residuals
    # Transposed once: on CPUs a transposed product takes longer at every step.
    recurrent_4HxH = weights.kernel[weights.inputs :].T

    def body(
        carry: tuple[Array, Array], inputs: tuple[Array, Step, Array]
    ) -> tuple[tuple[Array, Array], Array]:
        dh_BxH, dc_BxH = carry
        dh_out_BxH, one, c_BxH = inputs
        dh_BxH = dh_BxH + dh_out_BxH
        tanh_cell_BxH = jnp.tanh(one.cell)
        dc_BxH = dc_BxH + dh_BxH * one.expose * (1.0 - tanh_cell_BxH * tanh_cell_BxH)
        d_gates_Bx4H = jnp.concatenate(
            [
                dc_BxH * one.candidate * one.write * (1.0 - one.write),
                dc_BxH * c_BxH * one.forget * (1.0 - one.forget),
                dc_BxH * one.write * (1.0 - one.candidate * one.candidate),
                dh_BxH * tanh_cell_BxH * one.expose * (1.0 - one.expose),
            ],
            axis=-1,
        )
        return (d_gates_Bx4H @ recurrent_4HxH, dc_BxH * one.forget), d_gates_Bx4H

    start = (jnp.zeros_like(dh_TxBxH[0]), jnp.zeros_like(dh_TxBxH[0]))
    inputs = (dh_TxBxH, steps, before(steps.cell))
    d_gates_Nx4H = rows(lax.scan(body, start, inputs, reverse=True)[1])
    read_NxK = rows(jnp.concatenate([x_TxBxI, before(steps.output)], axis=-1))
    dx_NxI = d_gates_Nx4H @ weights.kernel[: weights.inputs].T
    d_weights = Weights(read_NxK.T @ d_gates_Nx4H, jnp.sum(d_gates_Nx4H, axis=0))
    return dx_NxI.reshape(x_TxBxI.shape), d_weights


run.defvjp(_forward, _backward)
