"""The recurrences of the LSTM and of the CIFG with projection, and their gradient.

With x the input, m the previous output and c the previous cell, [x, m] W + b are the gates of

    LSTM (Gers et al. 2000)       c' = sigmoid(f) c + sigmoid(i) tanh(g)
    gates i, f, g, o              m' = sigmoid(o) tanh(c')

    CIFG (Greff et al. 2015)      F  = sigmoid(f + 1)               (with peepholes: f + p_f c + 1)
    gates j, f, o                 c' = F c + (1 - F) tanh(j)
                                  m' = (sigmoid(o) tanh(c')) W_P        (with peepholes: o + p_o c')

with the projection of Sak et al. 2014. The gradient of the loop is written out because automatic
differentiation of a scan adds every step's weight gradient to an accumulator inside the loop. Here
the loop carries only the cotangents of m and c, and the gradients of the weights are one product
each over all steps.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax


class Weights(NamedTuple):
    """The parameters of a layer of G H gates, with outputs of size P (LSTM: P = H).

    Attributes:
      kernel: W [I + P, G H]; the first I rows multiply x, the others m.
      bias: b [G H].
      projection: W_P [H, P] (CIFG).
      peepholes: p_f and p_o [2, H], or None (CIFG).
    """

    kernel: Array
    bias: Array
    projection: Array | None = None
    peepholes: Array | None = None

    @property
    def hidden(self) -> int:
        """H."""
        return self.bias.shape[0] // 4 if self.projection is None else self.projection.shape[0]

    @property
    def inputs(self) -> int:
        """I."""
        outputs = self.hidden if self.projection is None else self.projection.shape[1]
        return self.kernel.shape[0] - outputs

    def gate_inputs(self, x_NxI: Array) -> Array:
        """The part [N, G H] of the gates that does not depend on m: [x, 0] W + b."""
        return x_NxI @ self.kernel[: self.inputs] + self.bias[None, :]

    @property
    def recurrent(self) -> Array:
        """The rows [P, G H] of W that multiply m."""
        return self.kernel[self.inputs :]


# (weights, gates, c) -> sigmoid(o) tanh(c') and c', all [B, ...].
Cell = Callable[[Weights, Array, Array], tuple[Array, Array]]


class Steps(NamedTuple):
    """The results of all steps, [T, B, ...].

    Attributes:
      output, cell: m' and c'.
      exposed: sigmoid(o) tanh(c'), which the projection multiplies.
      slope: of each step, from the cotangents of `exposed` and `cell` to those of the gates and c.
    """

    output: Array
    cell: Array
    exposed: Array
    slope: Callable[[tuple[Array, Array]], tuple[Array, Array]]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def run_cell(cell: Cell, x_TxBxI: Array, weights: Weights) -> Array:
    """Outputs m [T, B, P] of the recurrence from the zero state; reverse-mode differentiable."""
    return _forward(cell, x_TxBxI, weights)[0]


def one_step(cell: Cell, weights: Weights, x_BxG: Array, m_BxP: Array, c_BxH: Array) -> Steps:
    """One step, from `Weights.gate_inputs` of x and the previous output and cell."""
    gates_BxG = x_BxG + m_BxP @ weights.recurrent
    (exposed_BxH, cell_BxH), slope = jax.vjp(partial(cell, weights), gates_BxG, c_BxH)
    output_BxP = exposed_BxH if weights.projection is None else exposed_BxH @ weights.projection
    return Steps(output_BxP, cell_BxH, exposed_BxH, slope)


def _forward(cell: Cell, x_TxBxI: Array, weights: Weights) -> tuple[Array, tuple[Any, ...]]:
    length, batch, _ = x_TxBxI.shape

    def body(carry: tuple[Array, Array], x_BxG: Array) -> tuple[tuple[Array, Array], Any]:
        one = one_step(cell, weights, x_BxG, *carry)
        return (one.output, one.cell), one

    x_TxBxG = weights.gate_inputs(_rows(x_TxBxI)).reshape(length, batch, -1)
    m_BxP = jnp.zeros((batch, weights.recurrent.shape[0]), x_TxBxI.dtype)
    c_BxH = jnp.zeros((batch, weights.hidden), x_TxBxI.dtype)
    steps = lax.scan(body, (m_BxP, c_BxH), x_TxBxG)[1]
    return steps.output, (x_TxBxI, steps, weights)


def _backward(cell: Cell, residuals: tuple[Any, ...], dm_TxBxP: Array) -> tuple[Array, Weights]:
    x_TxBxI, steps, weights = residuals
    # Transposed once: on CPUs a transposed product takes half as long again at every step.
    recurrent_GxP = weights.recurrent.T
    projection_PxH = None if weights.projection is None else weights.projection.T

    def body(carry: tuple[Array, Array], inputs: tuple[Array, Any]) -> Any:
        (dm_BxP, dc_BxH), (dm_out_BxP, slope) = carry, inputs
        dm_BxP = dm_BxP + dm_out_BxP
        dh_BxH = dm_BxP if projection_PxH is None else dm_BxP @ projection_PxH
        d_gates_BxG, dc_BxH = slope((dh_BxH, dc_BxH))
        return (d_gates_BxG @ recurrent_GxP, dc_BxH), (d_gates_BxG, dm_BxP)

    start = (jnp.zeros_like(dm_TxBxP[0]), jnp.zeros_like(steps.cell[0]))
    d_gates_TxBxG, dm_TxBxP = lax.scan(body, start, (dm_TxBxP, steps.slope), reverse=True)[1]
    d_gates_NxG = _rows(d_gates_TxBxG)
    read_NxK = _rows(jnp.concatenate([x_TxBxI, _before(steps.output)], axis=-1))
    dx_NxI = d_gates_NxG @ weights.kernel[: weights.inputs].T
    d_projection = d_peepholes = None
    if weights.projection is not None:
        d_projection = _rows(steps.exposed).T @ _rows(dm_TxBxP)
    if weights.peepholes is not None:
        _, df_TxBxH, do_TxBxH = jnp.split(d_gates_TxBxG, 3, axis=-1)
        slopes = (df_TxBxH * _before(steps.cell), do_TxBxH * steps.cell)
        d_peepholes = jnp.stack([jnp.sum(slope, (0, 1)) for slope in slopes])
    d_kernel, d_bias = read_NxK.T @ d_gates_NxG, jnp.sum(d_gates_NxG, axis=0)
    return dx_NxI.reshape(x_TxBxI.shape), Weights(d_kernel, d_bias, d_projection, d_peepholes)


run_cell.defvjp(_forward, _backward)


def _before(states_TxBxK: Array) -> Array:
    """The state before each step, zeros before the first."""
    return jnp.concatenate([jnp.zeros_like(states_TxBxK[:1]), states_TxBxK[:-1]])


def _rows(states_TxBxK: Array) -> Array:
    return states_TxBxK.reshape(-1, states_TxBxK.shape[-1])


def lstm(weights: Weights, gates_Bx4H: Array, c_BxH: Array) -> tuple[Array, Array]:
    """The LSTM's `Cell`."""
    i_BxH, f_BxH, g_BxH, o_BxH = jnp.split(gates_Bx4H, 4, axis=-1)
    cell_BxH = jax.nn.sigmoid(f_BxH) * c_BxH + jax.nn.sigmoid(i_BxH) * jnp.tanh(g_BxH)
    return jax.nn.sigmoid(o_BxH) * jnp.tanh(cell_BxH), cell_BxH


def cifg(weights: Weights, gates_Bx3H: Array, c_BxH: Array) -> tuple[Array, Array]:
    """The CIFG's `Cell`."""
    j_BxH, f_BxH, o_BxH = jnp.split(gates_Bx3H, 3, axis=-1)
    if weights.peepholes is not None:
        f_BxH = f_BxH + weights.peepholes[0][None, :] * c_BxH
    forget_BxH = jax.nn.sigmoid(f_BxH + 1.0)
    cell_BxH = forget_BxH * c_BxH + (1.0 - forget_BxH) * jnp.tanh(j_BxH)
    if weights.peepholes is not None:
        o_BxH = o_BxH + weights.peepholes[1][None, :] * cell_BxH
    return jax.nn.sigmoid(o_BxH) * jnp.tanh(cell_BxH), cell_BxH
