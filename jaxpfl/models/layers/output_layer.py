"""The mean cross-entropy of a linear output layer, its gradient, and next-token losses.

For features m_n, a matrix E and biases b, the loss over the N_real rows that count is

    L = 1 / N_real sum_n ( log sum_v exp(l_nv) - l_n,target(n) ),   l_nv = m_n . E_v + b_v

The gradient is written out because, with a vocabulary of thousands, passes over arrays [N, V] take
much of its time. It does not form softmax - one_hot:

    e_nv = exp(l_nv - max_v l_nv),   s_n = sum_v e_nv,   k_n = 1 / (N_real s_n) or 0
    dL/dm_n = k_n (e E)_n              - E_target(n) / N_real
    dL/dE   = e^T (k m)                - the m_n / N_real added to row target(n)
    dL/db   = e^T k                    - 1 / N_real added to entry target(n)

so e is the only array of that size and is read by matrix products only. The targets cost a gather
and an addition of N rows (`layers.embedding.add_rows`).
"""

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxpfl.models.base import PAD, Metrics, masked_loss
from jaxpfl.models.layers.embedding import add_rows


def next_token_loss(
    m_NxP: Array, matrix_VxP: Array, bias_V: Array, targets_N: Array, *, oov: int | None = None
) -> tuple[Array, Metrics]:
    """Mean cross-entropy over the targets that are not `PAD`, and the metrics of `masked_loss`."""
    real_N = targets_N != PAD
    loss = mean_cross_entropy(m_NxP, matrix_VxP, bias_V, jnp.maximum(targets_N, 0), real_N)
    # Training does not use the metrics, and XLA then leaves out their logits.
    logits_NxV = m_NxP @ matrix_VxP.T + bias_V[None, :]
    return loss, masked_loss(logits_NxV, targets_N, real_N, oov=oov)[1]


@jax.custom_vjp
def mean_cross_entropy(
    m_NxP: Array, matrix_VxP: Array, bias_V: Array, targets_N: Array, real_N: Array
) -> Array:
    """Mean cross-entropy in nats of softmax(m E^T + b), a float32 scalar.

    The first three arguments are float32, and the mean is reverse-mode differentiable in them.

    Args:
      targets_N: integer classes in [0, V).
      real_N: bool, True for a row that counts. Any other row contributes exactly zero to the loss
        and to every gradient, if its features are finite.

    Returns:
      The mean; 0 with zero gradients when no row counts; finite for finite logits.
    """
    return _forward(m_NxP, matrix_VxP, bias_V, targets_N, real_N)[0]


def _forward(
    m_NxP: Array, matrix_VxP: Array, bias_V: Array, targets_N: Array, real_N: Array
) -> tuple[Array, tuple[Array, ...]]:
    # The bias is one more column of the matrix: adding it would be another pass over [N, V].
    ones_Nx1 = jnp.ones((m_NxP.shape[0], 1), m_NxP.dtype)
    m_NxQ = jnp.concatenate([m_NxP, ones_Nx1], axis=1)
    logits_NxV = m_NxQ @ jnp.concatenate([matrix_VxP, bias_V[:, None]], axis=1).T
    highest_N = jnp.max(logits_NxV, axis=-1)
    exp_NxV = jnp.exp(logits_NxV - highest_N[:, None])
    sum_N = jnp.sum(exp_NxV, axis=-1)
    picked_N = jnp.sum(m_NxP * matrix_VxP[targets_N], axis=-1) + bias_V[targets_N]
    nll_N = highest_N + jnp.log(sum_N) - picked_N
    weight_N = real_N.astype(jnp.float32) / jnp.maximum(jnp.sum(real_N, dtype=jnp.float32), 1.0)
    loss = jnp.sum(nll_N * weight_N)
    return loss, (m_NxP, matrix_VxP, targets_N, weight_N, exp_NxV, sum_N)


def _backward(
    residuals: tuple[Array, ...], d_loss: Array
) -> tuple[Array, Array, Array, None, None]:
    m_NxP, matrix_VxP, targets_N, weight_N, exp_NxV, sum_N = residuals
    weight_N = weight_N * d_loss
    k_N = weight_N / sum_N
    over_rows = (((0,), (0,)), ((), ()))
    dm_NxP = (exp_NxV @ matrix_VxP) * k_N[:, None] - weight_N[:, None] * matrix_VxP[targets_N]
    d_matrix = lax.dot_general(exp_NxV, m_NxP * k_N[:, None], over_rows)
    d_bias = lax.dot_general(exp_NxV, k_N, over_rows)
    d_matrix = add_rows(d_matrix, targets_N, -weight_N[:, None] * m_NxP)
    d_bias = add_rows(d_bias[:, None], targets_N, -weight_N[:, None])[:, 0]
    return dm_NxP, d_matrix, d_bias, None, None


mean_cross_entropy.defvjp(_forward, _backward)
