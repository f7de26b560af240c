"""The first and the last layer of a language model, with gradients of their own.

EMBEDDING. The gradient of a look-up adds row n's gradient d_n to row id(n) of the matrix. As a
scatter-add, it is a race of atomic additions on a GPU: their order, and with it the last bits of
the sum, differ from one run to the next. Here the rows that share an id are first added up by a
matrix product, and only the first of them is scattered, so that no two additions meet:

    s_n = sum_m [id(m) = id(n)] d_m,      dE_v = s_n  for the first n with id(n) = v

The product takes 2 N^2 E operations for N rows of E entries, in blocks of N <= 1,024: for the word
model 1% of a training step, where a one-hot product [V, N] [N, E] would take 20%.

OUTPUT LAYER. For features m_n, a matrix E and biases b, the loss over the N_real rows that count is

    L = 1 / N_real sum_n ( log sum_v exp(l_nv) - l_n,target(n) ),   l_nv = m_n . E_v + b_v

The gradient is written out because, with a vocabulary of thousands, passes over arrays [N, V] take
much of its time. It does not form softmax - one_hot:

    e_nv = exp(l_nv - max_v l_nv),   s_n = sum_v e_nv,   k_n = 1 / (N_real s_n) or 0
    dL/dm_n = k_n (e E)_n              - E_target(n) / N_real
    dL/dE   = e^T (k m)                - the m_n / N_real added to row target(n)
    dL/db   = e^T k                    - 1 / N_real added to entry target(n)

so e is the only array of that size and is read by matrix products only. The targets cost a gather
and an addition of N rows (`add_rows`).
"""

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxpfl.models.base import PAD, Metrics, masked_loss, traced_platform

_BLOCK = 1_024
# Rows whose logits, for thousands of tokens, fit a core's cache.
_METRIC_ROWS = 64


def add_rows(matrix_VxE: Array, ids_N: Array, rows_NxE: Array) -> Array:
    """The matrix after rows_NxE[n] was added to row ids_N[n] < V, for every n, in fixed order."""
    rows = matrix_VxE.shape[0]
    for start in range(0, ids_N.shape[0], _BLOCK):
        ids_B, rows_BxE = ids_N[start : start + _BLOCK], rows_NxE[start : start + _BLOCK]
        equal_BxB = ids_B[:, None] == ids_B[None, :]
        # In full precision: other products may round their factors.
        sums_BxE = lax.dot(
            equal_BxB.astype(rows_BxE.dtype),
            rows_BxE,
            precision=lax.Precision.HIGHEST,
            preferred_element_type=jnp.float32,
        )
        repeated_B = jnp.any(jnp.tril(equal_BxB, -1), axis=1)
        # Beyond the matrix, where nothing is added.
        beyond_B = rows + jnp.arange(ids_B.shape[0], dtype=ids_B.dtype)
        matrix_VxE = matrix_VxE.at[jnp.where(repeated_B, beyond_B, ids_B)].add(
            sums_BxE.astype(matrix_VxE.dtype), mode="drop", unique_indices=True
        )
    return matrix_VxE


@jax.custom_vjp
def look_up(matrix_VxE: Array, ids: Array) -> Array:
    """Rows of the matrix by ids [...] in [0, V): [..., E]; reverse-mode differentiable in it."""
    return matrix_VxE[ids]


def _look_up_forward(matrix_VxE: Array, ids: Array) -> tuple[Array, tuple[Array, Array]]:
    # No entry of the matrix is kept: only its shape and type are needed.
    return matrix_VxE[ids], (ids, jnp.zeros((matrix_VxE.shape[0], 0), matrix_VxE.dtype))


def _look_up_backward(residuals: tuple[Array, Array], d_rows: Array) -> tuple[Array, None]:
    ids, like_Vx0 = residuals
    width = d_rows.shape[-1]
    zeros_VxE = jnp.zeros((like_Vx0.shape[0], width), like_Vx0.dtype)
    return add_rows(zeros_VxE, ids.reshape(-1), d_rows.reshape(-1, width)), None


look_up.defvjp(_look_up_forward, _look_up_backward)


def next_token_loss(
    m_NxP: Array, matrix_VxP: Array, bias_V: Array, targets_N: Array, *, oov: int | None = None
) -> tuple[Array, Metrics]:
    """Mean cross-entropy over the targets that are not `PAD`, and the metrics of `masked_loss`."""
    real_N = targets_N != PAD
    loss = mean_cross_entropy(m_NxP, matrix_VxP, bias_V, jnp.maximum(targets_N, 0), real_N)
    # Training does not use the metrics, and XLA then leaves out their logits.
    layer = lax.stop_gradient((m_NxP, matrix_VxP, bias_V))
    return loss, _metrics(*layer, targets_N, real_N, oov)


def _metrics(
    m_NxP: Array, matrix_VxP: Array, bias_V: Array, targets_N: Array, real_N: Array, oov: int | None
) -> Metrics:
    """The metrics of `masked_loss`.

    On a CPU, blocks of rows that count are computed one after the other: their logits stay in its
    cache, all logits of a batch would not, and a block of padding alone is left out.
    """

    def of(m_RxP: Array, targets_R: Array, real_R: Array) -> Metrics:
        logits_RxV = m_RxP @ matrix_VxP.T + bias_V[None, :]
        return masked_loss(logits_RxV, targets_R, real_R, oov=oov)[1]

    number = len(targets_N)
    if number <= _METRIC_ROWS or traced_platform() != "cpu":
        return of(m_NxP, targets_N, real_N)
    count = jnp.sum(real_N, dtype=jnp.int32)
    order_N = jnp.pad(jnp.argsort(~real_N), (0, -number % _METRIC_ROWS))

    def add(block: Array, sums: tuple[Array, Array]) -> tuple[Array, Array]:
        rows_R = lax.dynamic_slice_in_dim(order_N, block * _METRIC_ROWS, _METRIC_ROWS)
        real_R = block * _METRIC_ROWS + jnp.arange(_METRIC_ROWS) < count
        metrics = of(m_NxP[rows_R], targets_N[rows_R], real_R)
        return sums[0] + metrics["loss_sum"], sums[1] + metrics["correct"]

    blocks = (count + (_METRIC_ROWS - 1)) // _METRIC_ROWS
    loss_sum, correct = lax.fori_loop(0, blocks, add, (jnp.float32(0.0), jnp.float32(0.0)))
    return {"loss_sum": loss_sum, "correct": correct, "count": count.astype(jnp.float32)}


@jax.custom_vjp
def mean_cross_entropy(
    m_NxP: Array, matrix_VxP: Array, bias_V: Array, targets_N: Array, real_N: Array
) -> Array:
    """Mean cross-entropy in nats of softmax(m E^T + b), a float32 scalar.

    The first three arguments are float32, and the mean is reverse-mode differentiable in them. It
    is 0 with zero gradients when no row counts, and finite for finite logits.

    Args:
      targets_N: integer classes in [0, V).
      real_N: bool, True for a row that counts. Any other row contributes exactly zero to the loss
        and to every gradient, if its features are finite.
    """
    return _cross_entropy_forward(m_NxP, matrix_VxP, bias_V, targets_N, real_N)[0]


def _cross_entropy_forward(
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


def _cross_entropy_backward(
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


mean_cross_entropy.defvjp(_cross_entropy_forward, _cross_entropy_backward)
