"""The parts of Transformers: linear maps (with adapters or int8 weights), norms and attention.

Weights may be stored in float32 or bfloat16. Every part computes in the dtype of its input, except
that norms, softmax and rotary angles are computed in float32.

`Cache` stores keys as [features, tokens] and values as [tokens, features], the order in which a
step's products read memory. Those of one token are written for all layers at once, at its place in
its sequence: XLA updates the cache in place, and entries do not depend on when a sequence began.
Those of bfloat16 are stored as their bits (`packed`).
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from jaxpfl.models.decoder.config import LoRA, RopeScaling
from jaxpfl.models.layers.initial import normal

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_new": partial(jax.nn.gelu, approximate=True),
    "gelu_pytorch_tanh": partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
}
"""By their names in Hugging Face's configurations; "gelu" is the exact function."""

LINEAR = "linear"
"""The name of the outputs of linear maps, which the backward pass keeps."""

MASKED = -1e30
"""Added to the score of a key that must not be seen; finite, so that no row is NaN."""


class Linear(nnx.Module):
    """x W (+ bias) (+ alpha / rank (x A) B, the adapter of Hu et al. 2021).

    With `int8`, W is stored as integers and one scale per output (`models.decoder.quantise`).
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        key: Array,
        *,
        deviation: float,
        bias: bool = False,
        int8: bool = False,
        lora: LoRA | None = None,
    ):
        self.adapter_scale = 1.0 if lora is None else lora.scale
        if int8:
            self.kernel_int8 = nnx.Param(jnp.zeros((inputs, outputs), jnp.int8))
            self.kernel_scale = nnx.Param(jnp.ones(outputs, jnp.float32))
        else:
            self.kernel = nnx.Param(normal(key, (inputs, outputs), deviation))
        self.bias = nnx.Param(jnp.zeros(outputs, jnp.float32)) if bias else None
        rank = 0 if lora is None else lora.rank
        self.a = nnx.Param(jnp.zeros((inputs, rank), jnp.float32)) if rank else None
        self.b = nnx.Param(jnp.zeros((rank, outputs), jnp.float32)) if rank else None

    def __call__(self, x: Array) -> Array:
        """[..., inputs] to [..., outputs], in the dtype of `x`."""
        # With two axes the kernel's gradient is one product that needs no transposed copy.
        outer, x = x.shape[:-1], x.reshape(-1, x.shape[-1])
        if hasattr(self, "kernel_int8"):
            scale = self.kernel_scale[...].astype(x.dtype)
            y = matmul(x, self.kernel_int8[...].astype(x.dtype)) * scale[None, :]
        else:
            y = matmul(x, self.kernel[...].astype(x.dtype))
        if self.bias is not None:
            y = y + self.bias[...].astype(x.dtype)[None, :]
        if self.a is not None and self.b is not None:
            inner = matmul(x, self.a[...].astype(x.dtype))
            y = y + matmul(inner * self.adapter_scale, self.b[...].astype(x.dtype))
        return checkpoint_name(y, LINEAR).reshape(*outer, y.shape[-1])


class Norm(nnx.Module):
    """Layer norm (scale and bias) or RMS norm (scale alone), computed in float32.

    The scale is stored less `offset`.
    """

    def __init__(self, size: int, epsilon: float, *, centred: bool, offset: float = 0.0):
        self.epsilon, self.offset = epsilon, offset
        self.scale = nnx.Param(jnp.full(size, 1 - offset, jnp.float32))
        self.bias = nnx.Param(jnp.zeros(size, jnp.float32)) if centred else None

    def __call__(self, x: Array) -> Array:
        wide = x.astype(jnp.float32)
        if self.bias is not None:
            wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
        square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
        y = wide * lax.rsqrt(square + self.epsilon)
        scale = self.scale[...].astype(jnp.float32)
        if self.offset:
            scale = scale + self.offset
        y = y * _along_last(scale, x.ndim)
        if self.bias is not None:
            y = y + _along_last(self.bias[...].astype(jnp.float32), x.ndim)
        return y.astype(x.dtype)


class Steering(nnx.Module):
    """x + vector: moves what a layer writes, at every token."""

    def __init__(self, size: int):
        self.vector = nnx.Param(jnp.zeros(size, jnp.float32))

    def __call__(self, x: Array) -> Array:
        return x + _along_last(self.vector[...].astype(x.dtype), x.ndim)


def wide_matmul(left: Array, right: Array, transposed: bool = False) -> Array:
    """The float32 product of [..., N, K] and [..., K, M], or transposed [..., M, K].

    The outer axes are equal. Its gradients, too, are products of operands in their own dtype,
    added up in float32. By JAX's own rule they would be float32 for bfloat16 operands, and copy
    the larger operand, such as a vocabulary's matrix.
    """
    return _wide(left, right, transposed)


def matmul(left: Array, right: Array) -> Array:
    """`wide_matmul`, rounded to the dtype of `left`.

    A processor's fast products of bfloat16 add up in float32, and XLA uses them for nothing else.
    """
    return wide_matmul(left, right).astype(left.dtype)


def _sums(left: Array, right: Array, of_left: int, of_right: int) -> Array:
    """Float32 sums of products over one of the last two axes of each, 0 or 1."""
    outer, first = tuple(range(left.ndim - 2)), left.ndim - 2
    axes = (((first + of_left,), (first + of_right,)), (outer, outer))
    return lax.dot_general(left, right, axes, preferred_element_type=jnp.float32)


def _wide_product(left: Array, right: Array, transposed: bool) -> Array:
    return _sums(left, right, 1, int(transposed))


def _wide_backward(transposed: bool, operands: Any, d_product: Array) -> tuple[Array, Array]:
    left, right = operands
    d_product = d_product.astype(left.dtype)
    d_left = _sums(d_product, right, 1, 1 - int(transposed))
    d_right = _sums(d_product, left, 0, 0) if transposed else _sums(left, d_product, 0, 0)
    return d_left.astype(left.dtype), d_right.astype(right.dtype)


_wide = jax.custom_vjp(_wide_product, nondiff_argnums=(2,))
_wide.defvjp(lambda *given: (_wide_product(*given), given[:2]), _wide_backward)


def packed(params: Any) -> Any:
    """The leaves of bfloat16 as their bits, uint16, which every part of a decoder reads as well.

    XLA's compiler for CPUs has no bfloat16 slice or update: it makes the whole array float32 for
    each of them. Nothing can be differentiated in packed leaves.
    """
    return _recast(params, jnp.bfloat16, jnp.uint16)


_packed = jax.jit(packed)


def packed_on_cpu(params: Any) -> Any:
    """`packed` where that is faster; a copy of the leaves of bfloat16."""
    return _packed(params) if jax.default_backend() == "cpu" else params


def unpacked(params: Any) -> Any:
    """The inverse of `packed`."""
    return _recast(params, jnp.uint16, jnp.bfloat16)


def _recast(params: Any, old: Any, new: Any) -> Any:
    """The bits of all leaves of one dtype as numbers of another."""
    return jax.tree.map(
        lambda leaf: lax.bitcast_convert_type(leaf, new) if leaf.dtype == old else leaf, params
    )


def attend(q_BxLxHxD: Array, k_BxMxKxD: Array, v_BxMxKxD: Array, seen_BxLxM: Array) -> Array:
    """Grouped-query attention, softmax(q k^T) v, [B, L, H D] in the dtype of q.

    Head h of the queries reads head floor(h K / H) of the keys and values. `seen_BxLxM` is True
    where a query sees a key; the result of a query that sees none is finite and arbitrary.
    """
    batch, length, heads, features = q_BxLxHxD.shape
    kv_heads, keys = k_BxMxKxD.shape[2], k_BxMxKxD.shape[1]
    group = heads // kv_heads
    # Heads before positions, and a group's queries in one matrix: plain matrix products.
    q_BxKxGLxD = (
        q_BxLxHxD.reshape(batch, length, kv_heads, group, features)
        .transpose(0, 2, 3, 1, 4)
        .reshape(batch, kv_heads, group * length, features)
    )
    scores = wide_matmul(q_BxKxGLxD, k_BxMxKxD.transpose(0, 2, 3, 1))
    barrier_BxLxM = jnp.where(seen_BxLxM, jnp.float32(0), jnp.float32(MASKED))
    scores_BxKxGxLxM = scores.reshape(batch, kv_heads, group, length, keys)
    scores_BxKxGxLxM = scores_BxKxGxLxM + barrier_BxLxM[:, None, None]
    weights = jax.nn.softmax(scores_BxKxGxLxM, axis=-1).astype(q_BxLxHxD.dtype)
    attended = matmul(weights.reshape(scores.shape), v_BxMxKxD.transpose(0, 2, 1, 3))
    return (
        attended.reshape(batch, kv_heads, group, length, features)
        .transpose(0, 3, 1, 2, 4)
        .reshape(batch, length, heads * features)
    )


def rotary_frequencies(size: int, theta: float, scaling: RopeScaling | float | None) -> np.ndarray:
    """Radians per position of heads of `size` features, float32 [size / 2] (Su et al. 2021).

    `scaling` is Llama 3.1's, or a divisor of all frequencies (Chen et al. 2023).
    """
    frequencies = theta ** -(np.arange(0, size, 2, dtype=np.float64) / size)
    if isinstance(scaling, RopeScaling):
        turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        share = np.clip((turns - low) / (high - low), 0.0, 1.0)
        frequencies = frequencies * (share + (1 - share) / scaling.factor)
    elif scaling is not None:
        frequencies = frequencies / scaling
    return frequencies.astype(np.float32)


def rotate(x_BxLxHxD: Array, angles_BxLxE: Array) -> Array:
    """Rotates features i and i + D/2 of every head by angle i of the token, E = D / 2."""
    cos = jnp.cos(angles_BxLxE)[:, :, None]
    sin = jnp.sin(angles_BxLxE)[:, :, None]
    first, second = jnp.split(x_BxLxHxD.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x_BxLxHxD.dtype)


def _along_last(vector: Array, rank: int) -> Array:
    """The vector as an array of `rank` axes of which only the last is not 1."""
    return vector.reshape((1,) * (rank - 1) + vector.shape)


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
    dtype, wide = q_SxHxD.dtype, jnp.float32
    attended = jnp.matmul(
        weights_SxKxGxC.astype(dtype), values_SxKxCxD, preferred_element_type=wide
    )
    attended = (attended + own * v_SxKxD[:, :, None].astype(jnp.float32)) / total
    return attended.astype(dtype).reshape(slots, heads * features)
