"""Moments of clients' embeddings as contributions: count, sum, second moment.

    count    1 for an example                                  moves by 1 with one example
    sum      clip_c(e)                                         moves by c
    second   v v^T with v = clip_c(clip_c(e) - centre)         moves by c^2 (Frobenius norm)

They are summed over a client's examples, or averaged: then 1, c and c^2 bound the whole client.
`clip_c(x) = x min(1, c / ||x||)`. An embedding that is not finite does not count as an example.

Sums do not depend on the order of the examples. In float32 they would: one example more would
change all roundings, and a sum over very many examples that were made for it by several times its
bound. Coordinates are therefore cut, towards zero, to multiples of a power of two near c 2^-19 (in
batches of 17 to 64 rows), which never lengthens a vector. Products of such numbers are added up
exactly for up to 1,024 examples in such batches, else each addition loses at most 2^-47 of the sum.
A contribution is rounded to float32, and again by the factor sqrt(2) below.
`release.example_rounding` says how far one example then moves a sum over clients.

A client sends half of a symmetric matrix: the diagonal, and sqrt(2) times one triangle. The half's
L2 norm is then the Frobenius norm of the whole, and after equal noise, off-diagonal entries have
sqrt(2) times less noise than with the plain triangle. The half is stored in the rectangular full
packed layout of Gustavson et al. 2010 ("Rectangular full packed format for Cholesky's algorithm",
ACM TOMS 37), which takes two slices and one select where a triangle takes a gather.

Source: Hou et al. 2023, "Privately Customizing Prefinetuning to Better Match User Data in Federated
Learning" (FreD), Algorithm 1.
"""

import dataclasses
import math
from functools import partial, reduce
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpfl.errors import InputError
from jaxpfl.federated.clients.client import Batch
from jaxpfl.federated.double_word import DoubleWord, plus

Moment = Literal["count", "sum", "second"]


class _Total(NamedTuple):
    """A client's sums so far: the moment in units, the number of examples, and the unit."""

    moment: DoubleWord
    count: jax.Array
    unit: jax.Array


@dataclasses.dataclass(frozen=True)
class ClientMoment:
    """A client function by steps: one moment of the embeddings, the only column that it is given.

    `average` divides by the client's number of examples (0 for a client without any); a half that
    is not `isometric` is the plain triangle. The broadcast is the centre, float32 [d], which
    "count" and "sum" only read d from.
    """

    moment: Moment
    clip_norm: float
    average: bool = False
    isometric: bool = True

    roundings: ClassVar[int] = 3  # of a block's sum, as it is sent

    @property
    def example_bound(self) -> float:
        """The bound on one example's L2 norm: 1, c or c^2 (see `BoundedByExample`)."""
        return {"count": 1.0, "sum": self.clip_norm, "second": self.clip_norm**2}[self.moment]

    def init(self, centre_D: jax.Array, key: jax.Array) -> _Total:
        dimension = centre_D.shape[0]
        shape = {"count": (), "sum": (dimension,), "second": (dimension, dimension)}[self.moment]
        zeros = jnp.zeros(shape, jnp.float32)
        return _Total(DoubleWord(zeros, zeros), jnp.float32(0), jnp.float32(0))

    def step(
        self, centre_D: jax.Array, total: _Total, batch: Batch, mask_B: jax.Array, key: jax.Array
    ) -> _Total:
        grid = _Grid.of(self.clip_norm, mask_B.shape[0])
        (rows_BxD,) = (column.astype(jnp.float32) for column in batch.values())
        rows_BxD, valid_B = _clipped(rows_BxD, mask_B, self.clip_norm)
        count = total.count + jnp.sum(valid_B.astype(jnp.float32))
        if self.moment == "count":
            return total._replace(count=count)
        shift = jnp.float32(2.0 ** (grid.bits + 1))
        if self.moment == "sum":
            coarse_BxD, fine_BxD = grid.parts(rows_BxD)
            parts = (jnp.sum(coarse_BxD, axis=0) * shift, jnp.sum(fine_BxD, axis=0))
            # A power of two, so that only the sum is rounded.
            return _Total(reduce(plus, parts, total.moment), count, jnp.float32(grid.step))
        centred_BxD, _ = _clipped(rows_BxD - centre_D[None, :], valid_B, self.clip_norm)
        coarse_BxD, fine_BxD = grid.parts(centred_BxD)
        multiply = partial(jnp.matmul, precision="highest")
        large_DxD = multiply(coarse_BxD.T, coarse_BxD) * (shift * shift)
        mixed_DxD = multiply(coarse_BxD.T, fine_BxD) * shift
        parts = (large_DxD, mixed_DxD, mixed_DxD.T, multiply(fine_BxD.T, fine_BxD))
        return _Total(reduce(plus, parts, total.moment), count, jnp.float32(grid.step**2))

    def finish(self, centre_D: jax.Array, total: _Total) -> jax.Array:
        """Returns a scalar, [d], or the half of [d, d] (see `half_shape`)."""
        if self.moment == "count":
            return jnp.minimum(total.count, 1) if self.average else total.count
        moment = (total.moment.high + total.moment.low) * total.unit
        if self.average:
            moment = moment / jnp.maximum(total.count, 1)
        return to_half(moment, self.isometric) if self.moment == "second" else moment


@dataclasses.dataclass(frozen=True)
class LabelledMoment:
    """A client function by steps: one moment of each of K labels side by side, as one contribution.

    An example belongs to the label in the column "label", a whole number below K; one with another
    number belongs to none. An average divides by the number of ALL examples of the client that
    belong to one. An example moves the coordinates of its own label alone, so that K labels have
    the bounds of one: 1, c and c^2, of the whole contribution. The broadcast is each label's
    centre, float32 [K, d].
    """

    of_label: ClientMoment
    labels: int

    roundings: ClassVar[int] = ClientMoment.roundings

    @property
    def moment(self) -> Moment:
        return self.of_label.moment

    @property
    def example_bound(self) -> float:
        return self.of_label.example_bound

    def init(self, centre_KxD: jax.Array, key: jax.Array) -> _Total:
        return jax.vmap(self.of_label.init, (0, None))(centre_KxD, key)

    def step(
        self, centre_KxD: jax.Array, total: _Total, batch: Batch, mask_B: jax.Array, key: jax.Array
    ) -> _Total:
        rows = {name: column for name, column in batch.items() if name != "label"}
        if batch["label"].shape != mask_B.shape:
            raise InputError(
                "the column 'label' must have one whole number for each example, found the shape "
                f"{list(batch['label'].shape[1:])} for one"
            )

        def step(label: jax.Array, centre_D: jax.Array, total: _Total) -> _Total:
            own_B = mask_B & (batch["label"] == label)
            return self.of_label.step(centre_D, total, rows, own_B, key)

        return jax.vmap(step)(jnp.arange(self.labels, dtype=jnp.int32), centre_KxD, total)

    def finish(self, centre_KxD: jax.Array, total: _Total) -> jax.Array:
        """Returns [K], [K, d], or the halves of [K, d, d]."""
        all_examples = jnp.maximum(jnp.sum(total.count), 1)
        if self.moment == "count":
            return total.count / all_examples if self.of_label.average else total.count
        total = total._replace(count=jnp.full_like(total.count, all_examples))
        return jax.vmap(self.of_label.finish)(centre_KxD, total)


@dataclasses.dataclass(frozen=True)
class JointMoment:
    """A client function by steps: one moment of several embeddings, as one contribution.

    The moment of embedding k, the column k of `columns`, is multiplied by sqrt(share k). Shares sum
    to 1, so that all embeddings have the bounds of one: 1, c and c^2, of the whole contribution.
    Noise on it hides embedding k as noise that is sqrt(1 / share k) as large would alone. A count
    is the first one's. The broadcast is a tuple of each embedding's centre; a contribution, of its
    moment. A bound on one example is stated by no one, so that the unit must be the client.
    """

    of_one: ClientMoment | LabelledMoment
    columns: tuple[str, ...]
    shares: tuple[float, ...]

    def init(self, centres: tuple[jax.Array, ...], key: jax.Array) -> tuple[_Total, ...]:
        return tuple(self.of_one.init(centre, key) for centre in centres)

    def step(
        self, centres: Any, totals: Any, batch: Batch, mask_B: jax.Array, key: jax.Array
    ) -> tuple[_Total, ...]:
        shared = {name: column for name, column in batch.items() if name not in self.columns}
        # The count is of all embeddings, so that an example that lacks one is in none.
        for column in self.columns:
            mask_B = mask_B & jnp.all(jnp.isfinite(batch[column]), axis=-1)
        return tuple(
            self.of_one.step(centre, total, {column: batch[column], **shared}, mask_B, key)
            for centre, total, column in zip(centres, totals, self.columns, strict=True)
        )

    def finish(self, centres: tuple[jax.Array, ...], totals: tuple[_Total, ...]) -> Any:
        moments = tuple(map(self.of_one.finish, centres, totals))
        if self.of_one.moment == "count":
            return moments[0]
        scaled = zip(moments, self.shares, strict=True)
        return tuple(moment * jnp.float32(math.sqrt(share)) for moment, share in scaled)


class _Grid(NamedTuple):
    """The multiples of `step` to which coordinates are cut, and how their products stay exact.

    With q = `bits`, a coordinate is step (2^(q + 1) coarse + fine), where the whole numbers coarse
    and fine are at most 2^q in size. A batch of B rows then has sums of products of at most
    B 2^(2 q) <= 2^24, and float32 holds all whole numbers up to there. n rows have sums of at most
    n 2^(4 q + 2), and a pair of float32 holds those up to 2^48: with q = 9, 1,024 rows.
    """

    step: float
    bits: int

    @classmethod
    def of(cls, clip_norm: float, batch: int) -> "_Grid":
        """The finest grid for vectors of norm at most c and batches of this many rows."""
        bits = (24 - math.ceil(math.log2(batch))) // 2
        return cls(2.0 ** (math.ceil(math.log2(clip_norm)) - 2 * bits - 1), bits)

    def parts(self, rows_BxD: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Coarse and fine parts, whole numbers in float32, of rows cut towards zero."""
        most = jnp.float32(2.0 ** (2 * self.bits + 1))
        whole_BxD = jnp.clip(jnp.trunc(rows_BxD * jnp.float32(1 / self.step)), -most, most)
        shift = jnp.float32(2.0 ** (self.bits + 1))
        coarse_BxD = jnp.round(whole_BxD / shift)
        return coarse_BxD, whole_BxD - coarse_BxD * shift


def _clipped(rows_BxD: jax.Array, real_B: jax.Array, clip_norm: float) -> tuple:
    """Rows clipped to `clip_norm`, zero where not real or not finite; and the rows that count."""
    largest_B = jnp.max(jnp.abs(rows_BxD), axis=1)
    valid_B = real_B & jnp.isfinite(largest_B)
    # The square of a giant row would overflow, so that it must be scaled before it can be clipped.
    giant_B = largest_B > jnp.float32(1e15)
    scaled_BxD = rows_BxD * jnp.where(giant_B, jnp.float32(1e-22), jnp.float32(1))[:, None]
    norm_B = jnp.sqrt(jnp.sum(jnp.square(scaled_BxD), axis=1))
    whole_B = jnp.where(giant_B, jnp.float32(1e22), jnp.float32(1))
    factor_B = jnp.minimum(whole_B, clip_norm / jnp.maximum(norm_B, jnp.float32(1e-30)))
    return jnp.where(valid_B[:, None], scaled_BxD * factor_B[:, None], jnp.float32(0)), valid_B


def half_shape(dimension: int) -> tuple[int, int]:
    """The shape of the half of a symmetric [d, d] matrix; an odd dimension is padded."""
    even = dimension + dimension % 2
    return (even + 1, even // 2)


def to_half(matrix_DxD: jax.Array, isometric: bool = True) -> jax.Array:
    """Returns the half of a symmetric float32 matrix: shape `half_shape(d)`.

    One that is not `isometric` has entries off the diagonal as they are.

    With k = d / 2 (d even), entry (r, j) is matrix[r - 1, j] for r > j, and else
    matrix[k + r, k + j]: the left half of the lower triangle, and above it the triangle of the
    lower right block.
    """
    dimension = matrix_DxD.shape[0]
    odd = dimension % 2
    padded = jnp.pad(matrix_DxD, ((0, odd), (0, odd)))
    k = (dimension + odd) // 2
    left = jnp.pad(padded[:, :k], ((1, 0), (0, 0)))
    right = jnp.pad(padded[k:, k:], ((0, k + 1), (0, 0)))
    lower, weight = _layout(dimension)
    half = jnp.where(lower, left, right)
    return half * weight if isometric else half


def from_half(half: np.ndarray, dimension: int, isometric: bool = True) -> np.ndarray:
    """Returns the symmetric matrix [dimension, dimension] of a half, float64, on the host."""
    lower, weight = _layout(dimension)
    values = np.asarray(half, np.float64) / np.float64(weight if isometric else 1)
    row, column = np.indices(values.shape)
    k = values.shape[1]
    i, j = np.where(lower, row - 1, k + row), np.where(lower, column, k + column)
    inside = (i < dimension) & (j < dimension)
    matrix = np.zeros((dimension, dimension))
    matrix[i[inside], j[inside]] = values[inside]
    matrix[j[inside], i[inside]] = values[inside]
    return matrix


def _layout(dimension: int) -> tuple[np.ndarray, np.ndarray]:
    """The entries of a half that come from the left part; all weights (1 on the diagonal)."""
    rows, k = half_shape(dimension)
    row, column = np.indices((rows, k))
    lower = row > column
    diagonal = (row - 1 == column) | (row == column)
    return lower, np.where(diagonal, 1.0, math.sqrt(2.0)).astype(np.float32)
