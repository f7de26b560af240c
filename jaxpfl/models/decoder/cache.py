"""Keys and values of the tokens that sequences have read, and attention of the next token to them.

Keys lie [features, tokens] and values [tokens, features], so that a step's two products read them
in the order in which they lie. A token's keys and values of all layers are written at once, at the
place of that token in its own sequence: inside a loop that is done in place, and what a sequence
holds does not depend on when it began.
"""

import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from jaxpfl.models.decoder.layers import MASKED


class Cache(NamedTuple):
    """What S sequences have read, with room for C tokens of each.

    Attributes:
      keys: [layers, S, kv_heads, head_size, C].
      values: [layers, S, kv_heads, C, head_size].
      place_S: int32, how many tokens each sequence holds; what lies behind is never seen.
    """

    keys: Array
    values: Array
    place_S: Array

    @classmethod
    def empty(cls, config: Any, sequences: int, room: int, dtype: Any) -> "Cache":
        """Sequences that have read nothing, of a model with this `DecoderConfig`."""
        outer = (config.layers, sequences, config.kv_heads)
        return cls(
            jnp.zeros((*outer, config.head_size, room), dtype),
            jnp.zeros((*outer, room, config.head_size), dtype),
            jnp.zeros(sequences, jnp.int32),
        )

    @property
    def room(self) -> int:
        """C."""
        return self.keys.shape[-1]

    def write(self, k: Array, v: Array) -> "Cache":
        """One more token of every sequence: k and v [layers, S, kv_heads, head_size].

        A sequence that is full overwrites its last token.
        """
        place_S = jnp.minimum(self.place_S, self.room - 1)
        rows_S = jnp.arange(place_S.shape[0])
        # Where indices are apart, the axes they pick come first.
        return Cache(
            self.keys.at[:, rows_S, :, :, place_S].set(jnp.moveaxis(k, 1, 0)),
            self.values.at[:, rows_S, :, place_S].set(jnp.moveaxis(v, 1, 0)),
            self.place_S + 1,
        )

    def begin(self, sequence: Array, source: "Cache", row: Array) -> "Cache":
        """`sequence` starts anew as a copy of `row` of a cache with as much room or less."""

        def copy(to: Array, of: Array) -> Array:
            size = (of.shape[0], 1, *of.shape[2:])
            part = lax.dynamic_slice(of, (0, row, 0, 0, 0), size)
            return lax.dynamic_update_slice(to, part, (0, sequence, 0, 0, 0))

        return Cache(
            copy(self.keys, source.keys),
            copy(self.values, source.values),
            lax.dynamic_update_slice(
                self.place_S, lax.dynamic_slice(source.place_S, (row,), (1,)), (sequence,)
            ),
        )

    def barrier(self) -> Array:
        """What is added to the scores of the tokens, float32 [S, C]: 0 where there is one."""
        seen_SxC = jnp.arange(self.room, dtype=jnp.int32)[None] < self.place_S[:, None]
        return jnp.where(seen_SxC, jnp.float32(0), jnp.float32(MASKED))


def attend_to_cache(
    q_SxHxD: Array,
    k_SxKxD: Array,
    v_SxKxD: Array,
    keys_SxKxDxC: Array,
    values_SxKxCxD: Array,
    barrier_SxC: Array,
) -> Array:
    """What `attend` gives for one query per sequence that sees the cache and its own token.

    Args:
      q_SxHxD, k_SxKxD, v_SxKxD: the token's.
      keys_SxKxDxC, values_SxKxCxD: one layer of the cache.
      barrier_SxC: see `Cache.barrier`.

    Returns:
      [S, H D], in the dtype of the queries.
    """
    slots, heads, features = q_SxHxD.shape
    kv_heads = k_SxKxD.shape[1]
    q = q_SxHxD * jnp.asarray(1 / math.sqrt(features), q_SxHxD.dtype)
    q_SxKxGxD = q.reshape(slots, kv_heads, heads // kv_heads, features)
    scores_SxKxGxC = jnp.matmul(q_SxKxGxD, keys_SxKxDxC, preferred_element_type=jnp.float32)
    scores_SxKxGxC = scores_SxKxGxC + barrier_SxC[:, None, None]
    # Its own token apart: joined to the cache, it would cost a copy of that.
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
