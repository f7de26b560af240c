"""The CIFG recurrence with projection, and its gradient.

For input x, cell_before output m and cell_before cell c (Greff et al. 2015; Sak et al. 2014):

    [j, f, o] = [x, m] W + b
    F  = sigmoid(f + 1)                     (with peepholes: f + p_f * c + 1)
    c' = F * c + (1 - F) * tanh(j)
    m' = (sigmoid(o) * tanh(c')) W_P        (with peepholes: o + p_o * c')

The gradient is written out because automatic differentiation of a scan adds every step's weight
gradient to an accumulator inside the loop. Here the loop carries only the cotangents of m and c,
and the gradients of W, W_P and the peepholes are one product each over all steps.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax


class Weights(NamedTuple):
    """The parameters of a layer.

    Attributes:
      kernel: W [I + P, 3H]; the first I rows multiply x, the others m; columns j, f, o.
      bias: b [3H].
      projection: W_P [H, P].
      peepholes: p_f and p_o [2, H], or None.
    """

    kernel: Array
    bias: Array
    projection: Array
    peepholes: Array | None

    @property
    def inputs(self) -> int:
        """I."""
        return self.kernel.shape[0] - self.projection.shape[1]

    def gate_inputs(self, x_NxI: Array) -> Array:
        """The part [N, 3H] of the gates that does not depend on m: [x, 0] W + b."""
        return x_NxI @ self.kernel[: self.inputs] + self.bias[None, :]

    @property
    def recurrent(self) -> Array:
        """The rows [P, 3H] of W that multiply m."""
        return self.kernel[self.inputs :]


class Step(NamedTuple):
    """The intermediate results of one step, [B, P] or [B, H], or of all, [T, B, ...]."""

    output: Array
    cell: Array
    exposed: Array
    candidate: Array
    forget: Array
    expose: Array


def step(weights: Weights, gates_Bx3H: Array, c_BxH: Array) -> Step:
    """One step of the recurrence, from [x, m] W + b and the cell_before cell."""
    j_BxH, f_BxH, o_BxH = jnp.split(gates_Bx3H, 3, axis=-1)
    if weights.peepholes is not None:
        f_BxH = f_BxH + weights.peepholes[0][None, :] * c_BxH
    candidate_BxH = jnp.tanh(j_BxH)
    forget_BxH = jax.nn.sigmoid(f_BxH + 1.0)
    cell_BxH = forget_BxH * c_BxH + (1.0 - forget_BxH) * candidate_BxH
    if weights.peepholes is not None:
        o_BxH = o_BxH + weights.peepholes[1][None, :] * cell_BxH
    expose_BxH = jax.nn.sigmoid(o_BxH)
    exposed_BxH = expose_BxH * jnp.tanh(cell_BxH)
    output_BxP = exposed_BxH @ weights.projection
    return Step(output_BxP, cell_BxH, exposed_BxH, candidate_BxH, forget_BxH, expose_BxH)


def _scan(x_TxBxI: Array, weights: Weights) -> Step:
    def body(carry: tuple[Array, Array], x_Bx3H: Array) -> tuple[tuple[Array, Array], Step]:
        m_BxP, c_BxH = carry
        one = step(weights, x_Bx3H + m_BxP @ recurrent, c_BxH)
        return (one.output, one.cell), one

    length, batch, _ = x_TxBxI.shape
    hidden, projection = weights.projection.shape
    recurrent = weights.recurrent
    x_TxBx3H = weights.gate_inputs(rows(x_TxBxI)).reshape(length, batch, -1)
    dtype = x_TxBxI.dtype
    start = (jnp.zeros((batch, projection), dtype), jnp.zeros((batch, hidden), dtype))
    return lax.scan(body, start, x_TxBx3H)[1]


@jax.custom_vjp
def run(x_TxBxI: Array, weights: Weights) -> Array:
    """Outputs m [T, B, P] of the recurrence from the zero state; reverse-mode differentiable."""
    return _scan(x_TxBxI, weights).output


def _forward(x_TxBxI: Array, weights: Weights) -> tuple[Array, tuple[Array, Step, Weights]]:
    steps = _scan(x_TxBxI, weights)
    return steps.output, (x_TxBxI, steps, weights)


def before(states_TxBxK: Array) -> Array:
    """The state before each step, zeros before the first."""
    return jnp.concatenate([jnp.zeros_like(states_TxBxK[:1]), states_TxBxK[:-1]])


def rows(states_TxBxK: Array) -> Array:
    """[T * B, K]."""
    return states_TxBxK.reshape(-1, states_TxBxK.shape[-1])


def _backward(residuals: tuple[Array, Step, Weights], dm_TxBxP: Array) -> tuple[Array, Weights]:
    x_TxBxI, steps, weights = residuals
    cell_before = before(steps.cell)
    # Transposed once, because on CPUs a transposed product takes half as long again at every step.
    recurrent_3HxP = weights.recurrent.T
    projection_PxH = weights.projection.T

    def body(
        carry: tuple[Array, Array], inputs: tuple[Array, Step, Array]
    ) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
        dm_BxP, dc_BxH = carry
        dm_out_BxP, one, c_BxH = inputs
        dm_BxP = dm_BxP + dm_out_BxP
        dh_BxH = dm_BxP @ projection_PxH
        tanh_cell_BxH = jnp.tanh(one.cell)
        do_BxH = dh_BxH * tanh_cell_BxH * one.expose * (1.0 - one.expose)
        dc_BxH = dc_BxH + dh_BxH * one.expose * (1.0 - tanh_cell_BxH * tanh_cell_BxH)
        if weights.peepholes is not None:
            dc_BxH = dc_BxH + weights.peepholes[1][None, :] * do_BxH
        df_BxH = dc_BxH * (c_BxH - one.candidate) * one.forget * (1.0 - one.forget)
        dj_BxH = dc_BxH * (1.0 - one.forget) * (1.0 - one.candidate * one.candidate)
        dc_BxH = dc_BxH * one.forget
        if weights.peepholes is not None:
            dc_BxH = dc_BxH + weights.peepholes[0][None, :] * df_BxH
        dx_Bx3H = jnp.concatenate([dj_BxH, df_BxH, do_BxH], axis=-1)
        return (dx_Bx3H @ recurrent_3HxP, dc_BxH), (dx_Bx3H, dm_BxP)

    start = (jnp.zeros_like(dm_TxBxP[0]), jnp.zeros_like(steps.cell[0]))
    inputs = (dm_TxBxP, steps, cell_before)
    dx_TxBx3H, dm_TxBxP = lax.scan(body, start, inputs, reverse=True)[1]
    dx_Nx3H = rows(dx_TxBx3H)
    read_NxK = rows(jnp.concatenate([x_TxBxI, before(steps.output)], axis=-1))
    d_kernel = read_NxK.T @ dx_Nx3H
    d_bias = jnp.sum(dx_Nx3H, axis=0)
    d_projection = rows(steps.exposed).T @ rows(dm_TxBxP)
    d_peepholes = None
    if weights.peepholes is not None:
        _, df_TxBxH, do_TxBxH = jnp.split(dx_TxBx3H, 3, axis=-1)
        d_peepholes = jnp.stack(
            [jnp.sum(df_TxBxH * cell_before, (0, 1)), jnp.sum(do_TxBxH * steps.cell, (0, 1))]
        )
    dx_NxI = dx_Nx3H @ weights.kernel[: weights.inputs].T
    return dx_NxI.reshape(x_TxBxI.shape), Weights(d_kernel, d_bias, d_projection, d_peepholes)


run.defvjp(_forward, _backward)
