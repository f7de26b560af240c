"""The recurrences of the LSTM and of the CIFG with projection, and their gradient.

With x the input, m the previous output and c the previous cell, [x, m] W + b are the gates of

    LSTM (Gers et al. 2000)       c' = sigmoid(f) c + sigmoid(i) tanh(g)
    gates i, f, g, o              m' = sigmoid(o) tanh(c')

    CIFG (Greff et al. 2015)      F  = sigmoid(f + 1)               (with peepholes: f + p_f c + 1)
    gates j, f, o                 c' = F c + (1 - F) tanh(j)
                                  m' = (sigmoid(o) tanh(c')) W_P        (with peepholes: o + p_o c')

with the projection of Sak et al. 2014. The gradient is written out because automatic
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


class Cell(NamedTuple):
    """What distinguishes one recurrence from the other; gates and states are [B, ...].

    Attributes:
      step: (weights, gates, c) -> its results, which have `output` (m') and `cell` (c').
      slope: (weights) -> a function of the results of a step, c, and the cotangents of m' and c',
        which returns those of the gates and of c.
      others: (weights, results, c, cotangents of m', of the gates) of all steps, [T, B, ...] -> the
        gradients of `projection` and `peepholes`.
    """

    step: Callable[[Weights, Array, Array], Any]
    slope: Callable[[Weights], Callable[[Any, Array, Array, Array], tuple[Array, Array]]]
    others: Callable[[Weights, Any, Array, Array, Array], tuple[Array | None, Array | None]]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def run(cell: Cell, x_TxBxI: Array, weights: Weights) -> Array:
    """Outputs m [T, B, P] of the recurrence from the zero state; reverse-mode differentiable."""
    return _forward(cell, x_TxBxI, weights)[0]


def _forward(cell: Cell, x_TxBxI: Array, weights: Weights) -> tuple[Array, tuple[Any, ...]]:
    length, batch, _ = x_TxBxI.shape
    recurrent_PxG = weights.recurrent

    def body(carry: tuple[Array, Array], x_BxG: Array) -> tuple[tuple[Array, Array], Any]:
        m_BxP, c_BxH = carry
        one = cell.step(weights, x_BxG + m_BxP @ recurrent_PxG, c_BxH)
        return (one.output, one.cell), one

    x_TxBxG = weights.gate_inputs(_rows(x_TxBxI)).reshape(length, batch, -1)
    m_BxP = jnp.zeros((batch, recurrent_PxG.shape[0]), x_TxBxI.dtype)
    c_BxH = jnp.zeros((batch, weights.hidden), x_TxBxI.dtype)
    steps = lax.scan(body, (m_BxP, c_BxH), x_TxBxG)[1]
    return steps.output, (x_TxBxI, steps, weights)


def _backward(cell: Cell, residuals: tuple[Any, ...], dm_TxBxP: Array) -> tuple[Array, Weights]:
    x_TxBxI, steps, weights = residuals
    c_TxBxH = _before(steps.cell)
    # Transposed once: on CPUs a transposed product takes half as long again at every step.
    recurrent_GxP = weights.recurrent.T
    slope = cell.slope(weights)

    def body(carry: tuple[Array, Array], inputs: tuple[Array, Any, Array]) -> Any:
        dm_BxP, dc_BxH = carry
        dm_out_BxP, one, c_BxH = inputs
        dm_BxP = dm_BxP + dm_out_BxP
        d_gates_BxG, dc_BxH = slope(one, c_BxH, dm_BxP, dc_BxH)
        return (d_gates_BxG @ recurrent_GxP, dc_BxH), (d_gates_BxG, dm_BxP)

    start = (jnp.zeros_like(dm_TxBxP[0]), jnp.zeros_like(steps.cell[0]))
    inputs = (dm_TxBxP, steps, c_TxBxH)
    d_gates_TxBxG, dm_TxBxP = lax.scan(body, start, inputs, reverse=True)[1]
    d_gates_NxG = _rows(d_gates_TxBxG)
    read_NxK = _rows(jnp.concatenate([x_TxBxI, _before(steps.output)], axis=-1))
    dx_NxI = d_gates_NxG @ weights.kernel[: weights.inputs].T
    others = cell.others(weights, steps, c_TxBxH, dm_TxBxP, d_gates_TxBxG)
    d_weights = Weights(read_NxK.T @ d_gates_NxG, jnp.sum(d_gates_NxG, axis=0), *others)
    return dx_NxI.reshape(x_TxBxI.shape), d_weights


run.defvjp(_forward, _backward)


def _before(states_TxBxK: Array) -> Array:
    """The state before each step, zeros before the first."""
    return jnp.concatenate([jnp.zeros_like(states_TxBxK[:1]), states_TxBxK[:-1]])


def _rows(states_TxBxK: Array) -> Array:
    return states_TxBxK.reshape(-1, states_TxBxK.shape[-1])


class LSTMStep(NamedTuple):
    """The results of one step, [B, H], or of all, [T, B, H]; the gates after their activations."""

    output: Array
    cell: Array
    write: Array
    forget: Array
    candidate: Array
    expose: Array


def _lstm_step(weights: Weights, gates_Bx4H: Array, c_BxH: Array) -> LSTMStep:
    i_BxH, f_BxH, g_BxH, o_BxH = jnp.split(gates_Bx4H, 4, axis=-1)
    write_BxH, forget_BxH = jax.nn.sigmoid(i_BxH), jax.nn.sigmoid(f_BxH)
    candidate_BxH, expose_BxH = jnp.tanh(g_BxH), jax.nn.sigmoid(o_BxH)
    cell_BxH = forget_BxH * c_BxH + write_BxH * candidate_BxH
    output_BxH = expose_BxH * jnp.tanh(cell_BxH)
    return LSTMStep(output_BxH, cell_BxH, write_BxH, forget_BxH, candidate_BxH, expose_BxH)


def _lstm_slope(weights: Weights) -> Callable[..., tuple[Array, Array]]:
    def slope(one: LSTMStep, c_BxH: Array, dh_BxH: Array, dc_BxH: Array) -> tuple[Array, Array]:
        tanh_cell_BxH = jnp.tanh(one.cell)
        dc_BxH = dc_BxH + dh_BxH * one.expose * (1.0 - tanh_cell_BxH * tanh_cell_BxH)
        d_gates = [
            dc_BxH * one.candidate * one.write * (1.0 - one.write),
            dc_BxH * c_BxH * one.forget * (1.0 - one.forget),
            dc_BxH * one.write * (1.0 - one.candidate * one.candidate),
            dh_BxH * tanh_cell_BxH * one.expose * (1.0 - one.expose),
        ]
        return jnp.concatenate(d_gates, axis=-1), dc_BxH * one.forget

    return slope


LSTM = Cell(_lstm_step, _lstm_slope, lambda *_: (None, None))


class CIFGStep(NamedTuple):
    """The results of one step, [B, P] or [B, H], or of all, [T, B, ...]."""

    output: Array
    cell: Array
    exposed: Array
    candidate: Array
    forget: Array
    expose: Array


def cifg_step(weights: Weights, gates_Bx3H: Array, c_BxH: Array) -> CIFGStep:
    """One step of the CIFG, from [x, m] W + b and the previous cell."""
    assert weights.projection is not None
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
    return CIFGStep(output_BxP, cell_BxH, exposed_BxH, candidate_BxH, forget_BxH, expose_BxH)


def _cifg_slope(weights: Weights) -> Callable[..., tuple[Array, Array]]:
    assert weights.projection is not None
    projection_PxH, peepholes = weights.projection.T, weights.peepholes

    def slope(one: CIFGStep, c_BxH: Array, dm_BxP: Array, dc_BxH: Array) -> tuple[Array, Array]:
        dh_BxH = dm_BxP @ projection_PxH
        tanh_cell_BxH = jnp.tanh(one.cell)
        do_BxH = dh_BxH * tanh_cell_BxH * one.expose * (1.0 - one.expose)
        dc_BxH = dc_BxH + dh_BxH * one.expose * (1.0 - tanh_cell_BxH * tanh_cell_BxH)
        if peepholes is not None:
            dc_BxH = dc_BxH + peepholes[1][None, :] * do_BxH
        df_BxH = dc_BxH * (c_BxH - one.candidate) * one.forget * (1.0 - one.forget)
        dj_BxH = dc_BxH * (1.0 - one.forget) * (1.0 - one.candidate * one.candidate)
        dc_BxH = dc_BxH * one.forget
        if peepholes is not None:
            dc_BxH = dc_BxH + peepholes[0][None, :] * df_BxH
        return jnp.concatenate([dj_BxH, df_BxH, do_BxH], axis=-1), dc_BxH

    return slope


def _cifg_others(
    weights: Weights, steps: CIFGStep, c_TxBxH: Array, dm_TxBxP: Array, d_gates_TxBx3H: Array
) -> tuple[Array, Array | None]:
    d_projection = _rows(steps.exposed).T @ _rows(dm_TxBxP)
    if weights.peepholes is None:
        return d_projection, None
    _, df_TxBxH, do_TxBxH = jnp.split(d_gates_TxBx3H, 3, axis=-1)
    slopes = (df_TxBxH * c_TxBxH, do_TxBxH * steps.cell)
    return d_projection, jnp.stack([jnp.sum(slope, (0, 1)) for slope in slopes])


CIFG = Cell(cifg_step, _cifg_slope, _cifg_others)
