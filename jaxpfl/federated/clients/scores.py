"""Clients' scores of public candidates as contributions, without a vector over the candidates.

A client's score of candidate j is the mean cosine between the candidate and the client's own
texts: e_j . m with e_j of unit length and m the mean of its normalised embeddings. All its scores
are A m, where A [candidates, d] holds the candidates, centred or not (centring the scores over all
candidates, or over the responses to one prompt, is centring the rows). A is public and has few
columns, so a client need not send A m, which may have 18,000 entries; with the Cholesky factor L of
A^T A = L L^T it sends its d coordinates

    y = L^T m,    and    ||y||^2 = m^T A^T A m = ||A m||^2.

The door clips y, which is to clip the scores; it sums and adds N(0, sigma^2 I) to the d
coordinates. The scores are then A L^-T (sum of y + noise): A L^-T has orthonormal columns, and
computing with a release costs no privacy. Its guarantee is the door's for vectors of d entries,
whatever A, L and their rounding are: a wrong L gives wrong scores and never a weaker guarantee.

Noise added to all entries of A m would be the same mechanism. Its part outside the columns of A is
no score of anyone, and is left out at no cost, so that in root mean square a score's noise is sigma
sqrt(d / candidates). `orthogonal_noise` draws the rest, for comparisons.

Source of the scores: POPri (Hou et al., "Private federated learning using preference-optimized
synthetic data"), its public code for the centring; of `NearestVotes`: private evolution (Lin et
al. 2024, "Differentially private synthetic data via foundation model APIs 1: images", Algorithm
2). The coordinates and the projected noise are ours.
"""

import contextlib
import dataclasses
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy.linalg

from jaxpfl.errors import InputError
from jaxpfl.federated.clients.client import Batch
from jaxpfl.privacy.mechanisms import standard_normal

Centring = Literal["none", "all", "prompt"]


class ScoreSpace(NamedTuple):
    """The space of possible scores; public. A and the lower triangular L are float32."""

    rows_KxJxD: np.ndarray
    factor_DxD: np.ndarray

    def scores(self, coordinates_D: jax.Array) -> np.ndarray:
        """Returns the scores of (noisy, summed) coordinates, float32 [prompts, responses]."""
        solved_D = scipy.linalg.solve_triangular(
            self.factor_DxD, np.asarray(coordinates_D), trans=1, lower=True, check_finite=False
        )
        return self.rows_KxJxD @ solved_D

    @jax.jit
    def orthogonal_noise(self, key: jax.Array, std: jax.Array) -> jax.Array:
        """Returns noise in the directions that no client's scores have, float32 [K, J].

        Added to released scores it makes their noise N(0, std^2) in each entry, independently. It
        is not needed for privacy.
        """
        rows_KxJxD, factor_DxD = self
        prompts, responses, _ = rows_KxJxD.shape
        noise_M = standard_normal(key, (prompts * responses,)) * std
        noise_KxJ = noise_M.reshape(prompts, responses)
        inside_D = jnp.tensordot(noise_KxJ, rows_KxJxD, 2, precision="highest")
        inside_D = jax.scipy.linalg.solve_triangular(factor_DxD, inside_D, lower=True)
        solved_D = jax.scipy.linalg.solve_triangular(factor_DxD, inside_D, lower=True, trans=1)
        return noise_KxJ - jnp.matmul(rows_KxJxD, solved_D, precision="highest")


def score_space(candidates_KxJxD: jax.Array | np.ndarray, centring: Centring) -> ScoreSpace:
    """Returns the space of scores of candidates, which is computed on the host.

    L L^T is A^T A and a multiple of the identity: the least of 2^-21, 2^-19, 2^-17, ... times the
    trace of A^T A with which it exists in float32. A client's coordinates are longer than its
    scores by that much, so its scores come out smaller, noticeably only where they nearly vanish.

    Args:
      candidates_KxJxD: float32 embeddings, finite, of any length; a zero row scores 0.
      centring: "none"; "all": scores sum to 0 over all candidates; "prompt": over the responses
        to each prompt. Candidates that are all alike then score exactly 0.
    """
    given_KxJxD = np.asarray(candidates_KxJxD, np.float32)
    rows_KxJxD = np.array(unit_rows(given_KxJxD))
    if centring != "none":
        prompts, _, dim = given_KxJxD.shape
        shape = (prompts if centring == "prompt" else 1, -1, dim)
        given_GxTxD, rows_GxTxD = given_KxJxD.reshape(shape), rows_KxJxD.reshape(shape)
        # The first row is subtracted before the mean, so that rows that are nearly alike lose
        # little; groups that were given as one row become exactly 0.
        rows_GxTxD -= rows_GxTxD[:, :1].copy()
        rows_GxTxD -= rows_GxTxD.mean(axis=1, keepdims=True, dtype=np.float64).astype(np.float32)
        rows_GxTxD[(given_GxTxD == given_GxTxD[:, :1]).all(axis=(1, 2))] = 0
    rows_MxD = rows_KxJxD.reshape(-1, rows_KxJxD.shape[2])
    with np.errstate(all="ignore"):
        gram_DxD = rows_MxD.T @ rows_MxD
        ridge = np.float32(2.0**-21) * np.trace(gram_DxD) + np.float32(1e-20)
        # A ridge above the trace does not fail, unless the Gram matrix is not finite.
        for _ in range(13):
            with contextlib.suppress(np.linalg.LinAlgError):  # rounding has made it indefinite
                ridged_DxD = gram_DxD + ridge * np.eye(len(gram_DxD), dtype=np.float32)
                factor_DxD = np.linalg.cholesky(ridged_DxD)
                if np.isfinite(factor_DxD).all():
                    return ScoreSpace(rows_KxJxD, factor_DxD)
            ridge *= np.float32(4)
    return ScoreSpace(rows_KxJxD, np.full_like(gram_DxD, np.nan))


@jax.jit
def unit_rows(rows: jax.Array) -> jax.Array:
    """Returns float32 rows [..., d] of unit length; zero rows stay zero."""
    scaled = _moderate(rows)
    square = jnp.sum(jnp.square(scaled), axis=-1, keepdims=True)
    return scaled * jax.lax.rsqrt(jnp.where(square > 0, square, jnp.float32(1)))


def _moderate(rows: jax.Array) -> jax.Array:
    """Rows [..., d], each times a power of two, such that the squares of any row fit float32."""
    _, exponent = jnp.frexp(jnp.max(jnp.abs(rows), axis=-1, keepdims=True))
    # Not a division by the largest: the reciprocal of a giant is flushed to zero.
    return rows * jnp.ldexp(jnp.float32(1), -jnp.clip(exponent, -120, 120))


def mean_embeddings(embedding_NxD: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Returns each client's mean of its normalised embeddings, float32 [clients, d]. PRIVATE.

    Zero embeddings count as texts; a client without texts has the mean zero, one with an embedding
    that is not finite has NaN, so that the door leaves out the whole client.
    """
    sizes = np.diff(offsets)
    means_CxD = np.zeros((len(sizes), embedding_NxD.shape[1]), np.float32)
    # In pieces: the float64 copies take the memory of one.
    pieces = np.array_split(np.flatnonzero(sizes > 0), max(1, int(sizes.sum()) // 16_384))
    for piece in (piece for piece in pieces if len(piece)):
        first = offsets[piece[0]]
        rows = np.asarray(embedding_NxD[first : offsets[piece[-1] + 1]], np.float64)
        with np.errstate(invalid="ignore"):
            largest = np.max(np.abs(rows), axis=1, keepdims=True)
            rows = rows / np.where(largest == 0, 1.0, largest)
            rows /= np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1.0)
            sums = np.add.reduceat(rows, offsets[piece] - first, axis=0)
        means_CxD[piece] = sums / sizes[piece][:, None]
    return means_CxD


@dataclasses.dataclass(frozen=True)
class LinearScores:
    """A client function by steps: the coordinates of a client's scores, float32 [d].

    It reads the column "mean_embedding", one example a client; the broadcast is `factor_DxD`.

    Attributes:
      scaled_to: the L2 norm that all scores but zero ones are scaled to; None leaves them to be
        clipped. So scores that are divided by their standard deviation are clipped to a small norm.
    """

    scaled_to: float | None = None

    def init(self, factor_DxD: jax.Array, key: jax.Array) -> jax.Array:
        return jnp.zeros(factor_DxD.shape[0], jnp.float32)

    def step(
        self, factor_DxD: jax.Array, mean_D: Any, batch: Batch, mask_B: Any, key: jax.Array
    ) -> jax.Array:
        rows_BxD = batch["mean_embedding"].astype(jnp.float32)
        _require_same_dimension(rows_BxD.shape[-1], factor_DxD.shape[-1])
        return mean_D + jnp.sum(jnp.where(mask_B[:, None], rows_BxD, jnp.float32(0)), axis=0)

    def finish(self, factor_DxD: jax.Array, mean_D: jax.Array) -> jax.Array:
        """Returns y = L^T m."""
        if self.scaled_to is not None:
            mean_D = _moderate(mean_D)  # lengths cancel
        coordinates_D = jnp.matmul(mean_D, factor_DxD, precision="highest")
        if self.scaled_to is None:
            return coordinates_D
        norm = jnp.sqrt(jnp.sum(jnp.square(coordinates_D)))
        return coordinates_D * (jnp.float32(self.scaled_to) / jnp.where(norm == 0, 1, norm))


@dataclasses.dataclass(frozen=True)
class NearestVotes:
    """A client function by steps: how many of its texts are nearest to each candidate, float32 [M].

    It reads the column "embedding"; the broadcast is the candidates' unit rows, float32 [M, d].
    Nearest is by cosine, ties go to the lowest index, and a zero embedding does not vote. A client
    with an embedding that is not finite is left out by the door. In L2 norm a client that votes
    with n texts has at most n, all for one candidate.
    """

    def init(self, unit_MxD: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jnp.zeros(unit_MxD.shape[0], jnp.float32), jnp.bool_(True)

    def step(
        self, unit_MxD: jax.Array, state: Any, batch: Batch, real_B: Any, key: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        votes_M, finite = state
        rows_BxD = batch["embedding"].astype(jnp.float32)
        _require_same_dimension(rows_BxD.shape[-1], unit_MxD.shape[-1])
        finite = finite & jnp.all(~real_B | jnp.all(jnp.isfinite(rows_BxD), axis=1))
        # The same candidate is nearest whatever the text's length.
        product_BxM = jnp.matmul(_moderate(rows_BxD), unit_MxD.T, precision="highest")
        nearest_B = jnp.argmax(product_BxM, axis=1)
        vote_B = (real_B & jnp.any(rows_BxD != 0, axis=1)).astype(jnp.float32)
        return votes_M.at[nearest_B].add(vote_B), finite

    def finish(self, unit_MxD: jax.Array, state: Any) -> jax.Array:
        votes_M, finite = state
        return jnp.where(finite, votes_M, jnp.float32(jnp.nan))


def _require_same_dimension(clients: int, candidates: int) -> None:
    if clients != candidates:
        raise InputError(
            f"the candidates' embeddings have {candidates} dimensions, the clients' have {clients}"
        )
