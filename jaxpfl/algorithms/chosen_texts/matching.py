"""Weights of public texts whose moments come near to the clients', by the dual of a convex problem.

FreD's second moments are taken about the RELEASED mean p, and are therefore linear in weights w of
single texts. With u_i = clip(x_i) - p and v_i = clip(u_i), as the clients compute them,

    minimise over w   KL(w || q) + [ |sum w_i u_i|^2 + |sum w_i v_i v_i' - S|_F^2 ] / (2 kappa)
    where             sum w_i = 1,  0 <= w_i <= cap

S is the released covariance as it is: noise may have left it negative eigenvalues. The objective is
strictly convex, so that its optimum is unique, and w is an exponential family that is cut at the
cap:

    w_i = min(cap, z q_i exp(-a'u_i - v_i'B v_i))

Its dual is a smooth concave function of the vector a and the symmetric matrix B,

    D(a, B) = min over w of [ KL(w || q) + a'm(w) + <B, S(w) - S> ] - kappa (|a|^2 + |B|_F^2) / 2

with the gradient (m(w) - kappa a, S(w) - S - kappa B), and goes to L-BFGS (Liu and Nocedal 1989).
With several embedders the bracket is the sum over them; each has its own p, S, a and B.

Known: Balog, Tolstikhin, Schoelkopf 2018, "Differentially private database release via kernel mean
embeddings" (weights of public points that match a noisy kernel mean; this is the quadratic
kernel); Dudik, Phillips, Schapire 2007 (relaxed maximum entropy); Liu, Vietri, Steinke, Ullman, Wu
2021, "Leveraging public data for practical private query release" (PMW^Pub).

All of this reads the release and public texts, and costs no privacy.

The first form of the choice, `descend`, goes down the Frechet distance itself,

    w_i <- w_i exp(eta r_i),  at most 1 / n,

with r_i `frechet.witness` of text i at the pool's present moments, against the clients' moments as
far as the release tells (`fred.scores.estimate`). The step eta grows by a tenth while the distance
falls and is halved where it rises. It stops early, and is no projection: nothing but the estimate
holds it back where the noise is large.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import minimize

from jaxpfl.algorithms.frechet import Reference, witness
from jaxpfl.algorithms.fred.query import PrivateMoments
from jaxpfl.algorithms.fred.scores import estimate
from jaxpfl.algorithms.gaussian_moments import Moments, clipped

# Rows of a block: 25 MB at d = 768, and the products run at nearly full speed.
_BLOCK_ROWS = 8_192

_STEP, _GROWTH, _LEAST_STEP = 8.0, 1.1, 0.5


class Evidence(NamedTuple):
    """What one embedder tells: the clients' released moments, and its embeddings of the pool.

    Attributes:
      released: the moments, as `private_moments` released them; PUBLIC.
      embeddings_NxD: of the pool's N texts, float32.
    """

    released: PrivateMoments
    embeddings_NxD: np.ndarray


class Solution(NamedTuple):
    """The optimum: weights [N], which sum to 1, and the dual's parameters in one vector."""

    weights_N: np.ndarray
    parameters: np.ndarray


class MomentMatching:
    """The problem of this file's head, for one pool and one release; solved at any kappa.

    Args:
      evidence: of each embedder, for the same N texts in the same order.
      base_N: q, positive; normalised here.
      cap: the largest weight, above 1 / N.
    """

    def __init__(self, evidence: Sequence[Evidence], base_N: np.ndarray, cap: float):
        self._parts = [_Part(one) for one in evidence]
        self._log_base_N = np.log(base_N / base_N.sum())
        self._cap = cap
        self.size = sum(part.size for part in self._parts)

    def dual(self, parameters: np.ndarray, kappa: float) -> tuple[float, np.ndarray, np.ndarray]:
        """D, its gradient [size], and the weights [N] at these parameters [size]."""
        energy_N, pieces, start = np.zeros(len(self._log_base_N)), [], 0
        for part in self._parts:
            pieces.append(parameters[start : start + part.size])
            start += part.size
            energy_N += part.energies(*part.unpacked(pieces[-1]))
        weights_N = capped_softmax(self._log_base_N - energy_N, self._cap)
        positive_N = weights_N > 0
        log_N = np.log(weights_N[positive_N]) - self._log_base_N[positive_N]
        value = float(weights_N[positive_N] @ (log_N + energy_N[positive_N]))
        value -= kappa / 2 * float(parameters @ parameters)
        gradients = []
        for part, piece in zip(self._parts, pieces, strict=True):
            value -= float(piece @ part.target)
            gradients.append(part.moments(weights_N) - part.target - kappa * piece)
        return value, np.concatenate(gradients), weights_N

    def solve(self, kappa: float, start: np.ndarray | None = None) -> Solution:
        """The optimum, from any start [size]; None starts at the base."""
        # Divided by these, parameters have the regulariser's curvature, which is then 1.
        scale = 1 / math.sqrt(kappa)

        def at(scaled: np.ndarray) -> tuple[float, np.ndarray]:
            value, gradient, _ = self.dual(scaled * scale, kappa)
            return -value, -gradient * scale

        first = np.zeros(self.size) if start is None else start / scale
        options = {"maxiter": 200, "maxcor": 10, "ftol": 1e-9, "gtol": 1e-4}
        search: Any = minimize(at, first, jac=True, method="L-BFGS-B", options=options)
        parameters = search.x * scale
        return Solution(self.dual(parameters, kappa)[2], parameters)


class _Part:
    """The features of one embedder, and its dual parameters: a [d], B in the isometric half."""

    def __init__(self, evidence: Evidence):
        released, rows_NxD = evidence
        clip_norm, mean_D = released.plan.clip_norm, released.moments.mean_D
        self._away_NxD = clipped(rows_NxD, clip_norm) - mean_D.astype(np.float32)
        self._second_NxD = clipped(self._away_NxD, clip_norm)
        self._lower = np.tril_indices(len(mean_D), -1)
        self.size = len(mean_D) + len(mean_D) * (len(mean_D) + 1) // 2
        self.target = self._packed(np.zeros_like(mean_D), released.moments.covariance_DxD)

    def _packed(self, a_D: np.ndarray, b_DxD: np.ndarray) -> np.ndarray:
        """Both in one vector, whose norm squared is |a|^2 + |B|_F^2."""
        return np.concatenate([a_D, np.diag(b_DxD), b_DxD[self._lower] * math.sqrt(2)])

    def unpacked(self, parameters: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        dimension = self._away_NxD.shape[1]
        b_DxD = np.zeros((dimension, dimension))
        b_DxD[self._lower] = parameters[2 * dimension :] / math.sqrt(2)
        b_DxD += b_DxD.T + np.diag(parameters[dimension : 2 * dimension])
        return parameters[:dimension], b_DxD

    def energies(self, a_D: np.ndarray, b_DxD: np.ndarray) -> np.ndarray:
        """a'u_i + v_i'B v_i, float64 [N]."""
        a_D, b_DxD = a_D.astype(np.float32), b_DxD.astype(np.float32)
        energy_N = np.empty(len(self._away_NxD))
        for start in range(0, len(energy_N), _BLOCK_ROWS):
            rows = slice(start, start + _BLOCK_ROWS)
            second_BxD = self._second_NxD[rows]
            energy_N[rows] = self._away_NxD[rows] @ a_D
            energy_N[rows] += np.einsum("nd,nd->n", second_BxD @ b_DxD, second_BxD)
        return energy_N

    def moments(self, weights_N: np.ndarray) -> np.ndarray:
        """The weighted means of u_i and of v_i v_i', packed."""
        dimension = self._away_NxD.shape[1]
        mean_D, second_DxD = np.zeros(dimension), np.zeros((dimension, dimension))
        chosen_M = np.flatnonzero(weights_N)
        for start in range(0, len(chosen_M), _BLOCK_ROWS):
            rows_B = chosen_M[start : start + _BLOCK_ROWS]
            weights_B = weights_N[rows_B].astype(np.float32)
            mean_D += weights_B @ self._away_NxD[rows_B]
            half_BxD = self._second_NxD[rows_B] * np.sqrt(weights_B)[:, None]
            second_DxD += half_BxD.T @ half_BxD
        return self._packed(mean_D, second_DxD)


def capped_softmax(logits_N: np.ndarray, cap: float) -> np.ndarray:
    """The weights min(cap, z exp(logit)) with the z by which they sum to 1; cap >= 1 / N."""
    weights_N = np.exp(logits_N - logits_N.max())
    weights_N /= weights_N.sum()
    if weights_N.max() <= cap:
        return weights_N
    order_N = np.argsort(-weights_N, kind="stable")
    sorted_N = weights_N[order_N]
    # If the k largest are at the cap, the others share what is left.
    rest_N = np.cumsum(sorted_N[::-1])[::-1]
    z_N = (1 - cap * np.arange(len(sorted_N))) / np.maximum(rest_N, 1e-300)
    first = int(np.argmax(z_N * sorted_N <= cap))
    return np.minimum(cap, z_N[first] * weights_N)


def weighted_moments(weights_N: np.ndarray, rows_NxD: np.ndarray) -> Moments:
    """Mean and covariance of rows with weights that sum to 1; rows without weight are not read."""
    chosen_M = np.flatnonzero(weights_N)
    weights_M, rows_MxD = weights_N[chosen_M], np.asarray(rows_NxD, np.float32)[chosen_M]
    mean_D = weights_M @ rows_MxD
    half_MxD = (rows_MxD - mean_D.astype(np.float32)) * np.sqrt(weights_M)[:, None]
    return Moments(float(len(chosen_M)), mean_D, (half_MxD.T @ half_MxD).astype(np.float64))


def descend(evidence: Evidence, base_N: np.ndarray, cap: float, *, steps: int = 60) -> np.ndarray:
    """Returns the weights [N] after the descent from `base_N`, at most `cap` each."""
    released, rows_NxD = evidence
    rows_NxD = clipped(rows_NxD, released.plan.clip_norm)
    log_N = np.log(base_N)
    weights_N = capped_softmax(log_N, cap)
    current = weighted_moments(weights_N, rows_NxD)
    target = estimate(released, current)
    reference, step = Reference(target), _STEP
    distance = reference.distance(current)
    for _ in range(steps):
        moved_N = log_N + step * witness(target, current, rows_NxD)
        tried_N = capped_softmax(moved_N, cap)
        nearer = weighted_moments(tried_N, rows_NxD)
        if (tried := reference.distance(nearer)) < distance:
            log_N, weights_N, current, distance = moved_N, tried_N, nearer, tried
            step *= _GROWTH
        elif step < _LEAST_STEP:
            break
        else:
            step /= 2
    return weights_N
