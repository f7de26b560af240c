"""Noise that each client adds to what it sends, before anything is summed (trust "local").

A message is clip_S(contribution) + N(0, (z S)^2 / n), on the grid of `mechanisms.on_grid`. A
contribution that is not finite counts as zero, and its noise is sent all the same. A client's noise
follows from a secret of the release that has a purpose of its own (`privacy.keys`) and from the
hash of the client's id, as if the client had drawn it: no client's program can compute it, and no
part of it depends on who else takes part. It does not follow from the message, so that a replayed
round with another result is refused: two messages with the same noise reveal their difference.

Messages are summed exactly, in steps of their largest possible size. The server adds nothing.
"""

import dataclasses
from functools import partial
from typing import ClassVar

import jax
import jax.numpy as jnp

from jaxpfl.federated.clients.client import keys_of
from jaxpfl.federated.mesh import PyTree
from jaxpfl.federated.release.accumulators import ClipSteps, map_pairs
from jaxpfl.privacy.mechanisms import coordinates, cut, on_grid, standard_normal

_REACH = 10
"""More deviations than `standard_normal` reaches, 9.6."""


@jax.jit
def noisy_rows(
    leaves_C: PyTree,
    factors_C: PyTree,
    finite_C: jax.Array,
    real_C: jax.Array,
    words_Cx2: jax.Array,
    key: jax.Array,
    std: jax.Array,
) -> PyTree:
    """Returns what clients send, float32 leaves [chunk, ...]; zeros for padding.

    A step that `release.information_flow` recognises, and therefore compiled by itself.

    Args:
      leaves_C: contributions [chunk, ...], which `factors_C` clip.
      finite_C, real_C: which contributions are finite, and which clients are no padding.
      words_Cx2: the hashes of the clients' ids.
      key: SECRET, of this release alone.
      std: of the noise of one client, float32 scalar.
    """
    shape = jax.ShapeDtypeStruct
    like = jax.tree.map(lambda leaf: shape(leaf.shape[1:], jnp.float32), leaves_C)

    def drawn(data: jax.Array) -> PyTree:
        own = jax.random.wrap_key_data(data, impl=jax.random.key_impl(key))
        return cut(standard_normal(own, (coordinates(like),)), like)

    def sent(leaf_C: jax.Array, factor_C: jax.Array, noise_C: jax.Array) -> jax.Array:
        rows = (-1,) + (1,) * (leaf_C.ndim - 1)
        clipped_C = leaf_C.astype(jnp.float32) * factor_C.reshape(rows)
        clipped_C = jnp.where(finite_C.reshape(rows), clipped_C, 0)
        noisy_C = on_grid(clipped_C + std * noise_C, std)
        return jnp.where(real_C.reshape(rows), noisy_C, 0)

    return jax.tree.map(sent, leaves_C, factors_C, jax.vmap(drawn)(keys_of(key, words_Cx2)))


@dataclasses.dataclass(frozen=True)
class Messages(ClipSteps):
    """Exact integer sums of messages, whose steps are those of S and `_REACH` deviations."""

    local: ClassVar[bool] = True
    noisy = staticmethod(noisy_rows)

    def scale(self, clip_norm: jax.Array, noise_multiplier: jax.Array) -> jax.Array:
        """Steps of a value of 1; the noise multiplier is that of one client."""
        return super().scale(clip_norm * (1 + _REACH * noise_multiplier), noise_multiplier)

    def add(self, subtotal: PyTree, leaves_C: PyTree, factors_C, scale, counts_C=None) -> PyTree:
        """Adds messages [chunk, ...], which are clipped and zero where nobody counts."""
        return map_pairs(partial(self._add, scale), subtotal, leaves_C)

    def add_noise(self, total: PyTree, noise: PyTree | None, scale: jax.Array) -> PyTree:
        """Returns the sum of messages as float32 leaves; they have their noise."""
        return map_pairs(lambda pair: self._add_noise(scale, pair, jnp.float32(0)), total)
