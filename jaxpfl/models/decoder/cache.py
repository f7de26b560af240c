"""Keys and values of the tokens that sequences have read, and attention of the next token to them.

Keys are stored as [features, tokens] and values as [tokens, features], the order in which a step's
products read memory. Those of one token are written for all layers at once, at its place in its
sequence: XLA updates the cache in place, and entries do not depend on when a sequence began.
Those of bfloat16 are stored as their bits (`layers.packed`).
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from jaxpfl.models.decoder.layers import MASKED, packed


class Cache(NamedTuple):
    """The keys and values of S sequences, with room for C tokens of each.

    Attributes:
      keys: [layers, S, kv_heads, head_size, C].
      values: [layers, S, kv_heads, C, head_size].
      place_S: int32, how many tokens each sequence holds; later entries are never seen.
    """

    keys: Array
    values: Array
    place_S: Array

    @classmethod
    def empty(cls, config: Any, sequences: int, room: int, dtype: Any) -> "Cache":
        """The cache of sequences without tokens, for a model with this `DecoderConfig`."""
        outer = (config.layers, sequences, config.kv_heads)
        shapes = (*outer, config.head_size, room), (*outer, room, config.head_size)
        keys, values = (packed(jnp.zeros(shape, dtype)) for shape in shapes)
        return cls(keys, values, jnp.zeros(sequences, jnp.int32))

    def write(self, k: Array, v: Array) -> "Cache":
        """Adds one token to every sequence: k and v are [layers, S, kv_heads, head_size], packed.

        A sequence that is full overwrites its last token.
        """
        place_S = jnp.minimum(self.place_S, self.keys.shape[-1] - 1)
        rows_S = jnp.arange(place_S.shape[0])
        # A slice between the two index arrays puts their axis first, hence `moveaxis`.
        return Cache(
            self.keys.at[:, rows_S, :, :, place_S].set(jnp.moveaxis(k, 1, 0)),
            self.values.at[:, rows_S, :, place_S].set(jnp.moveaxis(v, 1, 0)),
            self.place_S + 1,
        )

    def begin(self, sequence: Array, source: "Cache", row: Array) -> "Cache":
        """Replaces `sequence` by `row` of `source`, a cache with at most as much room."""

        def copy(to: Array, of: Array) -> Array:
            size = (of.shape[0], 1, *of.shape[2:])
            part = lax.dynamic_slice(of, (0, row, 0, 0, 0), size)
            return lax.dynamic_update_slice(to, part, (0, sequence, 0, 0, 0))

        place = lax.dynamic_slice(source.place_S, (row,), (1,))
        return Cache(
            copy(self.keys, source.keys),
            copy(self.values, source.values),
            lax.dynamic_update_slice(self.place_S, place, (sequence,)),
        )

    def barrier(self, window: int | None = None) -> Array:
        """Float32 [S, C], added to attention scores: 0 at tokens, `MASKED` elsewhere.

        With a window, the next token sees only itself and the `window - 1` tokens before it.
        """
        places_C = jnp.arange(self.keys.shape[-1], dtype=jnp.int32)
        seen_SxC = places_C[None] < self.place_S[:, None]
        if window is not None:
            seen_SxC &= places_C[None] > self.place_S[:, None] - window
        return jnp.where(seen_SxC, jnp.float32(0), jnp.float32(MASKED))


def attend_to_cache(
    q_SxHxD: Array,
    k_SxKxD: Array,
    v_SxKxD: Array,
    keys_SxKxDxC: Array,
    values_SxKxCxD: Array,
    barrier_SxC: Array,
) -> Array:
    """Attention of one new token per sequence, whose are q, k and v, to the cache and to itself.

    Returns [S, H D], in the dtype of the queries, equal to `attend` up to rounding.
    """
    slots, heads, features = q_SxHxD.shape
    kv_heads = k_SxKxD.shape[1]
    q_SxKxGxD = q_SxHxD.reshape(slots, kv_heads, heads // kv_heads, features)
    scores_SxKxGxC = jnp.matmul(q_SxKxGxD, keys_SxKxDxC, preferred_element_type=jnp.float32)
    scores_SxKxGxC = scores_SxKxGxC + barrier_SxC[:, None, None]
    # The new token is not joined to the cache, which would copy the cache.
    own = jnp.matmul(q_SxKxGxD, k_SxKxD[..., None], preferred_element_type=jnp.float32)
    largest = jnp.maximum(jnp.max(scores_SxKxGxC, axis=-1, keepdims=True), own)
    weights_SxKxGxC = jnp.exp(scores_SxKxGxC - largest)
    own = jnp.exp(own - largest)
    total = jnp.sum(weights_SxKxGxC, axis=-1, keepdims=True) + own
    dtype = q_SxHxD.dtype
    attended = jnp.matmul(
        weights_SxKxGxC.astype(dtype), values_SxKxCxD, preferred_element_type=jnp.float32
    )
    attended = (attended + own * v_SxKxD[:, :, None].astype(jnp.float32)) / total
    return attended.astype(dtype).reshape(slots, heads * features)
