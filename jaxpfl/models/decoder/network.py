"""Decoder language models: GPT-2 (Radford et al. 2019) and those in the form of Llama.

These are Llama 3 (Grattafiori et al. 2024), Mistral (Jiang et al. 2023), Qwen2 and Qwen3 (Yang et
al. 2024 and 2025), and Gemma 3 for text alone (Gemma Team 2025).

With x = [B, L, H] the tokens of B sequences and Norm before every block:

    x  = E_token[t]                (+ E_position[l] in gpt2; elsewhere positions turn q and k)
    x  = sqrt(H) E_token[t]        gemma3_text, and Norm after every block too, before the sum
    x <- x + W_o Attention(W_q n, W_k n, W_v n)      with n = Norm(x), in every layer
    x <- x + W_down act(W_up n)                      gpt2
    x <- x + W_down (act(W_gate n) * W_up n)         all others
    logits = Norm(x) W_head,    W_head = E_token^T if tied

Qwen3 and Gemma 3 have a Norm of each head's queries and keys, before they are turned. Attention is
causal, and where there is a window (`DecoderConfig.window`) to the last tokens alone. The
parameters of all layers are stacked, [layers, ...], and a scan goes over them, so that a model
compiles in the time of one layer. Dropout is left out. Rows are padded with `PAD` on the right;
padding is never a target, and no real token sees it.
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpfl.checked import Checked
from jaxpfl.errors import InputError
from jaxpfl.models.base import PAD, Batch, Metrics, Params, TokenModel, masked_loss, split
from jaxpfl.models.decoder import layers
from jaxpfl.models.decoder.config import PROJECTIONS, DecoderConfig, LoRA
from jaxpfl.models.decoder.layers import Cache, attend_to_cache
from jaxpfl.models.layers.embedding import look_up
from jaxpfl.models.layers.initial import normal


class Layer(nnx.Module):
    """Attention and feed-forward block, each with its norms and the residual around it."""

    def __init__(self, model: "Decoder", key: Array):
        config, lora = model.config, model.lora
        hidden, inner = config.hidden_size, config.inner_size
        queries, keys = config.heads * config.head_size, config.kv_heads * config.head_size
        # GPT-2 (section 2.3) scales the weights whose outputs are summed over the layers.
        residual = (2 * config.layers) ** -0.5

        def linear(name: str, inputs: int, outputs: int, factor: float = 1.0) -> layers.Linear:
            return layers.Linear(
                inputs,
                outputs,
                jax.random.fold_in(key, PROJECTIONS.index(name)),
                deviation=config.initializer_range * factor,
                bias=config.biased(name),
                int8=model.int8,
                lora=lora if lora is not None and name in lora.targets else None,
            )

        self.head_size, self.activation = config.head_size, config.activation
        self.query_scale = 1 / math.sqrt(config.query_scalar)
        gemma = config.model_type == "gemma3_text"
        of_heads = gemma or config.model_type == "qwen3"
        self.q_norm = _norm(config, config.head_size) if of_heads else None
        self.k_norm = _norm(config, config.head_size) if of_heads else None
        self.attention_norm, self.mlp_norm = _norm(config), _norm(config)
        self.attention_out_norm = _norm(config) if gemma else None
        self.mlp_out_norm = _norm(config) if gemma else None
        self.q = linear("q", hidden, queries)
        self.k = linear("k", hidden, keys)
        self.v = linear("v", hidden, keys)
        self.o = linear("o", queries, hidden, residual)
        self.gate = None if config.model_type == "gpt2" else linear("gate", hidden, inner)
        self.up = linear("up", hidden, inner)
        self.down = linear("down", inner, hidden, residual)
        self.steering = layers.Steering(hidden) if model.steered else None

    def project(self, x: Array, angles: Array | None) -> tuple[Array, Array, Array]:
        """Scaled queries [B, L, heads, D], keys and values [B, L, kv_heads, D] of x [B, L, H]."""
        n = self.attention_norm(x)
        size = self.head_size
        parts = [linear(n) for linear in (self.q, self.k, self.v)]
        q, k, v = (y.reshape(*y.shape[:2], y.shape[2] // size, size) for y in parts)
        q, k = _maybe(self.q_norm, q), _maybe(self.k_norm, k)
        if angles is not None:
            q, k = layers.rotate(q, angles), layers.rotate(k, angles)
        return q * jnp.asarray(self.query_scale, q.dtype), k, v

    def finish(self, x: Array, attended: Array) -> Array:
        """The layer's output from its input and the output of attention."""
        x = x + _maybe(self.attention_out_norm, self.o(attended))
        n = self.mlp_norm(x)
        activation = layers.ACTIVATIONS[self.activation]
        if self.gate is None:
            inner = activation(self.up(n))
        else:
            inner = activation(self.gate(n)) * self.up(n)
        return _maybe(self.steering, x + _maybe(self.mlp_out_norm, self.down(inner)))


def _norm(config: DecoderConfig, size: int = 0) -> layers.Norm:
    kind, offset = config.model_type, float(config.model_type == "gemma3_text")
    size = size or config.hidden_size
    return layers.Norm(size, config.norm_epsilon, centred=kind == "gpt2", offset=offset)


def _maybe(part: layers.Norm | layers.Steering | None, x: Array) -> Array:
    return x if part is None else part(x)


def _of_kind(second: Array | None, views: list[Any]) -> Any:
    """The arrays of a layer's kind; `second` is None or a bool."""
    return views[0] if second is None else jax.tree.map(partial(lax.select_n, second), *views)


@dataclass(frozen=True)
class Decoder(Checked, TokenModel):
    """A decoder language model.

    The parameters are {"embed": {"token" [V, H], "position" [positions, H] (gpt2)}, "layers":
    {part: {leaf [layers, ...]}}, "norm", "head": {"kernel" [H, V]} (untied)}, with kernels
    [inputs, outputs]. See `jaxpfl.models.decoder.lora` for adapters and
    `jaxpfl.models.decoder.quantise` for int8.

    Attributes:
      lora: the adapters that the parameters have, or None.
      int8: whether the linear maps of the layers are stored as int8.
      compute: "float32" or "bfloat16", the dtype of the products and of the cache. Norms, softmax,
        rotary angles, logits and losses are always float32. Parameters may be stored in either.
      steered: whether the parameters have a vector for each layer that is added to its output, see
        `steer`.
      remat: in training, store one array per layer for the backward pass and recompute the rest,
        which takes less memory and a third more time. Otherwise the products of the linear maps are
        stored, and only what lies between them is recomputed, which is faster than storing it.

    Batches hold "tokens" int32 [B, L], padded with -1 on the right; every real token except the
    first of a row is a target.
    """

    config: DecoderConfig
    lora: LoRA | None = None
    int8: bool = False
    compute: Literal["float32", "bfloat16"] = "float32"
    steered: bool = False
    remat: bool = False

    @cached_property
    def _layer(self) -> nnx.GraphDef:
        return nnx.split(nnx.eval_shape(lambda: Layer(self, jax.random.key(0))))[0]

    def _normed(self, params: Params, x: Array) -> Array:
        """The last norm of x [B, L, H]."""
        norm = nnx.split(nnx.eval_shape(lambda: _norm(self.config)))[0]
        return nnx.merge(norm, layers.unpacked(params["norm"]))(x)

    def init(self, key: Array, dtype: Any = jnp.float32) -> Params:
        """Random parameters of `dtype`, float32 or bfloat16.

        Matrices are normal with deviation `initializer_range`, divided by sqrt(2 layers) where
        they write to the residual stream; scales are one and biases zero. Refused are a model with
        adapters and one with int8 weights.
        """
        if self.lora is not None or self.int8:
            what = "a model with adapters or int8 weights has no random parameters"
            raise InputError(f"{what}: draw a plain model's, then use lora.attach or quantise")
        config, keys = self.config, [jax.random.fold_in(key, i) for i in range(4)]
        width, deviation = config.hidden_size, config.initializer_range

        def layer(number: Array) -> Params:
            return split(Layer(self, jax.random.fold_in(keys[2], number)))[1]

        embed = {"token": normal(keys[0], (config.vocab_size, width), deviation)}
        if config.model_type == "gpt2":
            embed["position"] = normal(keys[1], (config.positions, width), deviation)
        stacked = jax.vmap(layer)(jnp.arange(config.layers))
        params = {"embed": embed, "layers": stacked, "norm": split(_norm(config))[1]}
        if not config.tied:
            params["head"] = {"kernel": normal(keys[3], (width, config.vocab_size), deviation)}
        return jax.tree.map(lambda leaf: leaf.astype(dtype), params)

    def hidden(
        self,
        params: Params,
        tokens_BxL: Array,
        positions_BxL: Array | None = None,
        branch_BxL: Array | None = None,
    ) -> Array:
        """The last norm's output, [B, L, H] in the dtype of `compute`.

        Args:
          params: as returned by `init` or `jaxpfl.models.checkpoints.pretrained.load`.
          tokens_BxL: int32 ids, -1 for padding. No real token sees padding; the output at padding
            is finite and arbitrary.
          positions_BxL: int32, 0 .. L - 1 by default.
          branch_BxL: int32. A token sees only earlier tokens of branch 0 and of its own branch, so
            that one row can hold several continuations of one prompt (branch 0).
        """
        x, views = self._start(params, tokens_BxL, positions_BxL, branch_BxL)

        def layer(x: Array, slices: Any) -> tuple[Array, None]:
            return self._one(x, slices, views)[0], None

        policies = jax.checkpoint_policies
        linear_maps = policies.save_only_these_names(layers.LINEAR)
        policy = policies.nothing_saveable if self.remat else linear_maps
        # Inside a scan, XLA cannot merge the recomputation with the forward pass.
        body = jax.checkpoint(layer, policy=policy, prevent_cse=False)
        x, _ = lax.scan(body, x, (params["layers"], self.config.kind_L))
        return self._normed(params, x)

    def layer_means(self, params: Params, tokens_BxL: Array) -> Array:
        """The output of each layer, the mean over a row's tokens but the first: [layers, B, H].

        In float32. The first token is left out because later ones attend to it whatever it is, so
        that large models give it an output of its own kind (Xiao et al. 2024, attention sinks).
        """
        x, views = self._start(params, tokens_BxL)
        later_BxL = jnp.asarray(tokens_BxL != PAD).at[:, 0].set(False).astype(jnp.float32)
        share_BxL = later_BxL / jnp.maximum(jnp.sum(later_BxL, axis=1, keepdims=True), 1)

        def layer(x: Array, slices: Any) -> tuple[Array, Array]:
            x = self._one(x, slices, views)[0]
            return x, jnp.sum(share_BxL[:, :, None] * x.astype(jnp.float32), axis=1)

        return lax.scan(layer, x, (params["layers"], self.config.kind_L))[1]

    def steer(self, params: Params, vectors_LxH: Any) -> tuple["Decoder", dict[str, Any]]:
        """The model that adds a vector to each layer's output, and its parameters.

        All other arrays are those of `params`.
        """
        vectors = {"vector": jnp.asarray(vectors_LxH, jnp.float32)}
        steered = dict(params) | {"layers": dict(params["layers"]) | {"steering": vectors}}
        return replace(self, steered=True), steered

    def logits(self, params: Params, hidden: Array) -> Array:
        """Float32 logits [..., V] of the next token, from the output of `hidden`."""
        # Only the product needs the whole embedding: looking up tokens reads a few rows of it.
        outer = _gathered({name: params[name] for name in ("embed", "head") if name in params})
        tied = bool(self.config.tied)
        matrix = layers.unpacked(outer["embed"]["token"] if tied else outer["head"]["kernel"])
        flat_NxH = hidden.reshape(-1, hidden.shape[-1])
        logits = layers.wide_matmul(flat_NxH, matrix.astype(hidden.dtype), tied)
        return logits.reshape(*hidden.shape[:-1], -1)

    def loss(self, params: Params, batch: Batch, mask: Array) -> tuple[Array, Metrics]:
        """Mean cross-entropy over the real targets."""
        tokens_BxL = jnp.where(mask[:, None], batch["tokens"], PAD)
        hidden_BxLxH = self.hidden(params, tokens_BxL[:, :-1])
        targets_N = tokens_BxL[:, 1:].reshape(-1)
        logits_NxV = self.logits(params, hidden_BxLxH.reshape(-1, self.config.hidden_size))
        return masked_loss(logits_NxV, targets_N, targets_N != PAD)

    def _one(
        self, x: Array, slices: tuple[Params, Array | None], views: list[Any]
    ) -> tuple[Array, tuple[Array, Array]]:
        """The output of a layer of its own parameters and kind, and its keys and values."""
        network = nnx.merge(self._layer, layers.unpacked(_gathered(slices[0])))
        seen_BxLxL, angles = _of_kind(slices[1], views)
        q, k, v = network.project(x, angles)
        return network.finish(x, layers.attend(q, k, v, seen_BxLxL)), (k, v)

    def prefill(self, params: Params, tokens_PxL: Array, room: int) -> Cache:
        """The cache of P sequences, int32 padded with -1, with room for `room` more tokens each."""
        x, views = self._start(params, tokens_PxL)

        def layer(x: Array, slices: Any) -> tuple[Array, tuple[Array, Array]]:
            x, read = self._one(x, slices, views)
            return x, layers.packed(read)

        _, (k, v) = lax.scan(layer, x, (params["layers"], self.config.kind_L))
        keys = jnp.pad(k.transpose(0, 1, 3, 4, 2), ((0, 0),) * 4 + ((0, room),))
        values = jnp.pad(v.transpose(0, 1, 3, 2, 4), ((0, 0),) * 3 + ((0, room), (0, 0)))
        return Cache(keys, values, jnp.sum(tokens_PxL != PAD, axis=1, dtype=jnp.int32))

    def step(self, params: Params, tokens_S: Array, cache: Cache) -> tuple[Array, Cache]:
        """Reads one token of every sequence; returns float32 logits [S, V] of the next ones.

        A sequence whose cache is full overwrites its last token.
        """
        x, views = self._start(params, tokens_S[:, None], cache.place_S[:, None])
        # A new token sees the cache, not other new ones.
        views = [
            (cache.barrier(window), angles)
            for (_, _, window), (_, angles) in zip(self.config.kinds, views, strict=True)
        ]

        def layer(x: Array, slices: Any) -> tuple[Array, tuple[Array, Array]]:
            own, second, keys, values = slices
            network = nnx.merge(self._layer, layers.unpacked(_gathered(own)))
            barrier_SxC, angles = _of_kind(second, views)
            q, k, v = (part[:, 0] for part in network.project(x, angles))
            keys, values = layers.unpacked((keys, values))
            attended_SxE = attend_to_cache(q, k, v, keys, values, barrier_SxC)
            # The cache is read here and written once for all layers: a scan that returned it
            # would copy it whole for every token.
            return network.finish(x, attended_SxE[:, None]), layers.packed((k, v))

        slices = (params["layers"], self.config.kind_L, cache.keys, cache.values)
        x, (k, v) = lax.scan(layer, x, slices)
        return self.logits(params, self._normed(params, x)[:, 0]), cache.write(k, v)

    def _start(
        self,
        params: Params,
        tokens_BxL: Array,
        positions_BxL: Array | None = None,
        branch_BxL: Array | None = None,
    ) -> tuple[Array, list[tuple[Array, Array | None]]]:
        """Embedded tokens [B, L, H]; by kind, visible tokens [B, L, L] and angles [B, L, D/2]."""
        batch, length = tokens_BxL.shape
        if positions_BxL is None:
            self.check_length(length)
        real_BxL = tokens_BxL != PAD
        seen_BxLxL = jnp.tril(jnp.ones((length, length), jnp.bool))[None] & real_BxL[:, None]
        if branch_BxL is not None:
            own_BxLxL = branch_BxL[:, :, None] == branch_BxL[:, None]
            seen_BxLxL &= own_BxLxL | (branch_BxL == 0)[:, None]
        if positions_BxL is None:
            positions_BxL = jnp.broadcast_to(jnp.arange(length)[None], (batch, length))
        config, embed = self.config, params["embed"]
        x = layers.unpacked(_dealt(look_up(embed["token"], jnp.maximum(tokens_BxL, 0))))
        if config.model_type == "gpt2":
            x = x + layers.unpacked(look_up(embed["position"], positions_BxL))
            return x.astype(self.compute), [(seen_BxLxL, None)]
        if config.model_type == "gemma3_text":
            # Rounded to the dtype of the embeddings, as the model was trained.
            x = x * jnp.asarray(math.sqrt(config.hidden_size), x.dtype)
        apart_BxLxL = positions_BxL[:, :, None] - positions_BxL[:, None]
        views: list[tuple[Array, Array | None]] = []
        for theta, scaling, window in config.kinds:
            frequencies_E = jnp.asarray(layers.rotary_frequencies(config.head_size, theta, scaling))
            angles = positions_BxL[:, :, None].astype(jnp.float32) * frequencies_E[None, None]
            near = seen_BxLxL if window is None else seen_BxLxL & (apart_BxLxL < window)
            views.append((near, angles))
        return x.astype(self.compute), views

    def shardings(self, mesh: Mesh, params: Params) -> Params:
        """The `NamedSharding` on a mesh of each parameter, an array or a shape.

        Heads and inner features are sharded over the mesh axis "model" (Shoeybi et al. 2019), the
        other side of each matrix over "data", gathered when it is used (fully sharded data
        parallelism). An axis that the mesh does not have, or that does not divide the size, is left
        out.
        """
        return jax.tree.map_with_path(partial(_place, mesh), params)


def _place(mesh: Any, keys: Any, leaf: Any) -> NamedSharding:
    wanted = _axes(keys[-2].key, keys[-1].key)
    wanted = (None,) * (len(leaf.shape) - len(wanted)) + wanted
    axes = [
        axis if axis in mesh.shape and size % mesh.shape[axis] == 0 else None
        for axis, size in zip(wanted, leaf.shape, strict=True)
    ]
    return NamedSharding(mesh, PartitionSpec(*axes))


def _dealt(x: Array) -> Array:
    """Rows over the devices of "data", as the tokens are."""
    mesh = jax.typeof(x).sharding.mesh
    if "data" not in mesh.auto_axes or len(x) % mesh.shape["data"]:
        return x
    return lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec("data")))


def _gathered(params: Params) -> Params:
    """The parameters that a product needs, whole along "data".

    Without this XLA may sum products of shards for the whole batch, many times as many bytes.
    """

    def gather(keys: Any, leaf: Array) -> Array:
        mesh = jax.typeof(leaf).sharding.mesh
        if "data" not in mesh.auto_axes:
            return leaf
        axes = [axis if axis == "model" else None for axis in _place(mesh, keys, leaf).spec]
        return lax.with_sharding_constraint(leaf, NamedSharding(mesh, PartitionSpec(*axes)))

    return jax.tree.map_with_path(gather, params)


def _axes(part: str, leaf: str) -> tuple[str | None, ...]:
    """The mesh axes over which the last axes of a leaf are sharded."""
    if part == "embed":
        return ("model" if leaf == "token" else None, "data")
    if part not in (*PROJECTIONS, "head"):
        return ()
    inputs, outputs = ("model", "data") if part in ("o", "down") else ("data", "model")
    if leaf in ("kernel_scale", "bias"):
        return (outputs,)
    return (None if leaf == "b" else inputs, None if leaf == "a" else outputs)
