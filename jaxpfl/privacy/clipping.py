"""Clipping, which bounds a client's influence.

A contribution is a pytree of arrays, whose L2 norm over all leaves is clipped to S (McMahan et al.
2018, section 3.2). All arithmetic is float32 at least, whatever the contribution's type.

Guarantees for every input, with S from SMALLEST_CLIP_NORM on:

| contribution               | becomes                                                           |
|----------------------------|-------------------------------------------------------------------|
| of norm at most S          | itself, to the bit                                                |
| of norm above S            | itself times S / norm: of norm S, in the same direction           |
| of norm above 1.8e19       | zero as a whole: its square overflows                             |
| with a NaN or an infinity  | zero as a whole                                                   |
| any, with a smaller S      | zero as a whole: squares underflow, and the norm would be wrong   |

The result is therefore always finite and of L2 norm at most S (1 + 1e-6), and zero stays zero. "To
the bit" excludes subnormal numbers, which devices may flush to zero.

Contributions are not scaled before they are squared, which would take 13 to 25 % more time. Squares
below 1.2e-38 are flushed to zero, so that values below 1.1e-19 are missing from the norm; but with
S >= 1e-12 even 1e8 of them, in a contribution of norm S, are less than 6e-7 of it.
"""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxpfl import checks
from jaxpfl.checked import Checked, OpenFraction, Positive
from jaxpfl.errors import InputError

PyTree = Any

# Between them the clip is exact. A plan's clip norm and an adaptive one stay in this range; no
# contribution needs a larger one.
SMALLEST_CLIP_NORM = 1e-12
LARGEST_CLIP_NORM = 1e12


@dataclasses.dataclass(frozen=True)
class AdaptiveClip(Checked):
    """Adaptive quantile clipping (Andrew et al. 2021, Algorithm 1).

    Each client also sends b_i - 1/2, where b_i is 1 if its update's norm is at most the clip norm,
    else 0. The values get the multiplier z_D = (z^-2 - (2 sigma_b)^-2)^(-1/2) instead of z, so that
    values and quantile together cost what z alone would (Theorem 1).

    Attributes:
      target_quantile: the share of clients whose update should be within the clip norm.
      learning_rate: of the geometric update.
      indicator_noise: sigma_b, the deviation of the noise on the sum of (b_i - 1/2), in clients;
        None = 0.05 times the planned clients per round.
    """

    target_quantile: OpenFraction = 0.5
    learning_rate: Positive = 0.2
    indicator_noise: Positive | None = None

    def indicator_noise_std(self, clients_per_round: int) -> float:
        """Returns sigma_b, in clients."""
        return 0.05 * clients_per_round if self.indicator_noise is None else self.indicator_noise

    def check_noise(self, multiplier: float, clients_per_round: int) -> None:
        """Refuses a z for which no z_D exists."""
        std = self.indicator_noise_std(clients_per_round)
        if not 2 * std > multiplier:
            raise InputError(
                f"indicator_noise = {std:g} must exceed half of noise_multiplier = {multiplier:g}, "
                "because the quantile alone would otherwise cost more than the plan"
            )

    def value_multiplier(self, multiplier: float, clients_per_round: int) -> float:
        """Returns z_D for the z of the plan."""
        return (multiplier**-2 - (2 * self.indicator_noise_std(clients_per_round)) ** -2) ** -0.5


@dataclasses.dataclass(frozen=True)
class Clip:
    """The clip of contributions: to the L2 norm `norm`, or adaptively from it on, see above."""

    norm: float
    adaptive: AdaptiveClip | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "norm", checks.positive("clip_norm", self.norm))
        if not SMALLEST_CLIP_NORM <= self.norm <= LARGEST_CLIP_NORM:
            raise InputError(
                f"clip_norm must lie in [1e-12, 1e12], found {self.norm:g}: a smaller norm cannot "
                "be computed exactly in float32, and no contribution needs a larger one"
            )
        if self.adaptive is not None:
            checks.instance("adaptive_clip", self.adaptive, AdaptiveClip, "an AdaptiveClip")


@partial(jax.jit, static_argnames=("ordered",))
def clip_factors(
    contribution: PyTree, clip_norm: jax.Array, ordered: bool = False
) -> tuple[PyTree, jax.Array, jax.Array]:
    """Returns the factors by which one client's contribution is multiplied to be clipped.

    Args:
      contribution: pytree of arrays of any real type.
      clip_norm: S, float32 scalar; with infinity only contributions that are not finite change.
      ordered: the norm is added up in one order, so that the same contribution has the same bits of
        factor in every program. It takes some five times as long. Without it, XLA chooses an order
        for each program.

    Returns:
      A float32 scalar in (0, 1] for each leaf; the norm before clipping (float32 scalar, PRIVATE);
      and whether the contribution counts (bool scalar). Where the table above says zero it does not
      count, and the norm is infinite. The caller must leave such a contribution out instead of
      multiplying it, because NaN * 0 is NaN.
    """
    leaves, structure = jax.tree.flatten(contribution)
    squares = [_square_sum(leaf, ordered) for leaf in leaves]
    norm = jnp.sqrt(_pairwise_sum(squares))
    # A NaN or an infinity anywhere makes the norm NaN or infinite. The constant is compared as
    # float32, so that the smallest clip norm itself is accepted.
    finite = jnp.isfinite(norm) & (clip_norm >= jnp.float32(SMALLEST_CLIP_NORM))
    # min(1, S / norm), with 1 at norm 0.
    factor = jnp.where(norm > clip_norm, clip_norm / jnp.maximum(norm, clip_norm), jnp.float32(1))
    factors = [factor] * len(leaves)
    return jax.tree.unflatten(structure, factors), jnp.where(finite, norm, jnp.inf), finite


def _square_sum(leaf: jax.Array, ordered: bool) -> jax.Array:
    if not ordered:
        return jnp.sum(jnp.square(leaf.astype(jnp.float32)))
    # Halves are added to each other, element by element. The barriers keep XLA from joining a
    # product and a sum to one operation with one rounding, and from computing halves again.
    square_N = jax.lax.optimization_barrier(jnp.square(leaf.astype(jnp.float32)).reshape(-1))
    width = 1 << max(0, square_N.size - 1).bit_length()
    part_W = jnp.pad(square_N, (0, width - square_N.size))
    while width > 1:
        width //= 2
        part_W = jax.lax.optimization_barrier(part_W[:width] + part_W[width:])
    return part_W[0]


def _pairwise_sum(values: list[jax.Array]) -> jax.Array:
    """The sum of scalars, float32. Added in turn, 150 equal ones would have an error of 2e-6."""
    if len(values) < 2:
        return sum(values, jnp.float32(0))
    half = len(values) // 2
    return _pairwise_sum(values[:half]) + _pairwise_sum(values[half:])
