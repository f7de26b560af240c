"""One token of 64 sequences by a decoder of SmolLM2-135M's shape: what each dtype and part costs.

    python -m benchmarks.micro.decoder_step

Random weights, 64 sequences with 128 tokens in a cache for 160, as `jaxpfl.text.sample` steps. The
rows are processor seconds, the least of the repeats, which other programs disturb less than the
clock; the variants take turns:

    float32              weights and products
    bfloat16             weights, products and cache, packed as `jaxpfl.text.sample` does on a CPU
    bfloat16, unpacked   the same with weights as they are
    stored in bfloat16   bfloat16 weights, which each step turns into float32
    products             the matrix products of the layers and of the vocabulary alone, float32
    attention            attention to the cache alone, scanned over the layers, float32
    attention, unrolled  the same with a layer after the other in the program
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import tyro
from jax import lax

from benchmarks import harness
from benchmarks.shapes import smollm2
from jaxpfl.models.decoder.layers import Cache, attend_to_cache, packed
from jaxpfl.models.decoder.network import Decoder


@dataclasses.dataclass(frozen=True)
class Config:
    sequences: int = 64
    held: int = 128  # tokens of each in the cache
    room: int = 160
    repeats: int = 8


def main(config: Config) -> list[dict]:
    shape, sequences = smollm2(), config.sequences
    places_S = jnp.full(sequences, config.held, jnp.int32)
    token_S = jnp.ones(sequences, jnp.int32)
    full = jax.jit(Decoder(shape).init)(jax.random.key(0))
    narrow = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), full)
    caches = {
        dtype: Cache.empty(shape, sequences, config.room, jnp.dtype(dtype))._replace(
            place_S=places_S
        )
        for dtype in ("float32", "bfloat16")
    }
    programs: dict[str, Any] = {}
    for name, model, params in (
        ("float32", Decoder(shape), full),
        ("bfloat16", Decoder(shape, compute="bfloat16"), jax.jit(packed)(narrow)),
        ("bfloat16, unpacked", Decoder(shape, compute="bfloat16"), narrow),
        ("stored in bfloat16", Decoder(shape), narrow),
    ):
        cache = caches[model.compute]
        step = jax.jit(lambda params, cache, model=model: model.step(params, token_S, cache)[0])
        programs[name] = lambda step=step, params=params, cache=cache: step(params, cache)

    cache, x_SxH = caches["float32"], jnp.ones((sequences, shape.hidden_size), jnp.float32)

    @jax.jit
    def products(params):
        def layer(x, own):
            q, k, v, gate, up = (x @ own[name]["kernel"] for name in ("q", "k", "v", "gate", "up"))
            x = x + (q + jnp.tile(k + v, (1, 3))) @ own["o"]["kernel"]
            return x + (gate * up) @ own["down"]["kernel"], None

        return lax.scan(layer, x_SxH, params["layers"])[0] @ params["embed"]["token"].T

    q_SxHxD = x_SxH.reshape(sequences, shape.heads, -1)
    k_SxKxD = q_SxHxD[:, : shape.kv_heads]

    def attention(unroll):
        def layer(x, own):
            keys, values = own
            q = q_SxHxD + x[:, :1, None]
            return x + attend_to_cache(q, k_SxKxD, k_SxKxD, keys, values, barrier), None

        barrier = cache.barrier()
        held = (cache.keys, cache.values)
        return lambda *held: lax.scan(layer, x_SxH, held, unroll=unroll)[0], held

    programs["products"] = lambda: products(full)
    for name, unroll in (("attention", 1), ("attention, unrolled", shape.layers)):
        function, held = attention(unroll)
        function = jax.jit(function)
        programs[name] = lambda function=function, held=held: function(*held)

    found = harness.turns(programs, config.repeats)
    best = {name: min(turn.cpu_seconds for turn in found[name]) for name in programs}
    rows = [
        {"what": name, "sequences": sequences, "cpu seconds": seconds}
        for name, seconds in best.items()
    ]
    harness.table(rows, ["what", "cpu seconds"])
    print(f"recorded in {harness.record('decoder_step', rows)}")
    return rows


if __name__ == "__main__":
    main(tyro.cli(Config))
