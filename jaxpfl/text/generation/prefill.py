"""Waves of prompts and of the requests for them: how they are dealt to devices, and their program.

A wave's program reads its prompts and then runs the slots until all its requests have begun; they
end in the waves that follow. So no slot waits for another, and the memory for prompts is that of
one wave.
"""

from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpfl.checks import positive_int
from jaxpfl.models.base import Params
from jaxpfl.models.decoder.cache import Cache
from jaxpfl.models.decoder.network import PAD, Decoder
from jaxpfl.text.generation import continuous_batching as slots_module
from jaxpfl.text.generation.continuous_batching import Requests, Sequences, Slots
from jaxpfl.text.generation.draw import draw, greedy, keep_top_k, keep_top_p, probabilities

DATA = "data"
"""The mesh axis whose devices share the requests."""

KEY_IMPL, _KEY_WORDS = "threefry2x32", 2


class Program(NamedTuple):
    """What a program is compiled for, beside shapes."""

    model: Decoder
    mesh: Mesh | None
    max_tokens: int
    ends: tuple[int, ...]
    greedy: bool
    top_p: bool
    top_k: int


class Controls(NamedTuple):
    """Settings that a program takes as they come.

    Attributes:
      banned_V: bool, ids that are never drawn.
      table_NxV: of the stop strings, see `jaxpfl.text.generation.stop.stop_table`, or None.
    """

    temperature: Array
    top_p: Array
    banned_V: Array
    table_NxV: Array | None


class Wave(NamedTuple):
    """Prompts and the requests for them, of each of D devices.

    Attributes:
      tokens_DxPxL: int32, prompts without their last tokens.
      prompt_DxR: int32, which prompt a request is for.
      requests: with arrays [D, R].
    """

    tokens_DxPxL: Any
    prompt_DxR: Any
    requests: Requests


@partial(jax.jit, static_argnums=0, donate_argnums=3)
def run_wave(
    program: Program,
    params: Params,
    controls: Controls,
    state: Slots,
    wave: Wave,
    last: Array,
) -> tuple[Slots, Array, Array]:
    """Slots, logs and their filled rows, of every device."""

    def alone(params: Params, controls: Controls, state: Slots, wave: Wave, last: Array):
        state, wave = jax.tree.map(lambda leaf: leaf[0], (state, wave))
        found = _run_alone(program, params, controls, state, wave, last)
        return jax.tree.map(lambda leaf: leaf[None], found)

    if program.mesh is None:
        return alone(params, controls, state, wave, last)
    whole, dealt = PartitionSpec(), PartitionSpec(DATA)
    return jax.shard_map(
        alone,
        mesh=program.mesh,
        in_specs=(whole, whole, dealt, dealt, whole),
        out_specs=dealt,
        axis_names={DATA},
        check_vma=False,
    )(params, controls, state, wave, last)


def _run_alone(
    program: Program,
    params: Params,
    controls: Controls,
    state: Slots,
    wave: Wave,
    last: Array,
) -> tuple[Slots, Array, Array]:
    """A wave of one device: its prompts, then its requests."""
    model = program.model
    prompts = model.prefill(params, wave.tokens_DxPxL, 0)

    def begin(cache: Cache, takes_S: Array, row_S: Array) -> Cache:
        def unfinished(state: tuple[Array, Cache]) -> Array:
            return jnp.any(state[0])

        # A slot at a time, in place: a choice between old and new would write the whole cache.
        def copy(state: tuple[Array, Cache]) -> tuple[Array, Cache]:
            takes_S, cache = state
            slot = jnp.argmax(takes_S).astype(jnp.int32)
            prompt = wave.prompt_DxR[row_S[slot]]
            return takes_S.at[slot].set(False), cache.begin(slot, prompts, prompt)

        return lax.while_loop(unfinished, copy, (takes_S, cache))[1]

    def drawn(keys_S: Array, logits_SxV: Array) -> Array:
        logits_SxV = jnp.where(controls.banned_V[None, :], -jnp.inf, logits_SxV)
        if program.greedy:
            return greedy(logits_SxV)
        weights_SxV = probabilities(logits_SxV, controls.temperature)
        if program.top_k:
            weights_SxV = keep_top_k(weights_SxV, program.top_k)
        if program.top_p:
            weights_SxV = keep_top_p(weights_SxV, controls.top_p)
        return draw(keys_S, weights_SxV)

    def ended(tokens_S: Array, stop_S: Array) -> tuple[Array, Array]:
        ends_S = jnp.zeros(tokens_S.shape, jnp.bool)
        for end in program.ends:
            ends_S = jnp.logical_or(ends_S, tokens_S == end)
        if controls.table_NxV is not None:
            stop_S = controls.table_NxV[stop_S, tokens_S]
            ends_S = jnp.logical_or(ends_S, stop_S == controls.table_NxV.shape[0] - 1)
        return ends_S, stop_S

    sequences = Sequences(
        step=partial(model.step, params),
        begin=begin,
        draw=drawn,
        ended=ended,
        max_tokens=program.max_tokens,
        key_impl=KEY_IMPL,
    )
    return slots_module.run(sequences, state, wave.requests, last)


def idle_slots(program: Program, slots: int, room: int, devices: int) -> Slots:
    """Empty slots on every device, with room for so many tokens each."""
    return _maker(program.model, program.mesh, positive_int("slots", slots), room, devices)()


@lru_cache(maxsize=32)
def _maker(
    model: Decoder, mesh: Mesh | None, slots: int, room: int, devices: int
) -> Callable[[], Slots]:
    def make() -> Slots:
        cache = Cache.empty(model.config, slots, room, model.compute)
        one = slots_module.idle(slots, _KEY_WORDS, cache)
        return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf[None], (devices, *leaf.shape)), one)

    if mesh is None:
        return jax.jit(make)
    return jax.jit(make, out_shardings=NamedSharding(mesh, PartitionSpec(DATA)))


def waves_of(
    prompts_PxL: np.ndarray,
    group_G: np.ndarray,
    words_NxW: np.ndarray,
    responses: int,
    devices: int,
    rung: int,
    prompts: int,
) -> Iterator[tuple[Wave, bool]]:
    """The waves of the prompts `group_G`, and which is the last.

    Args:
      group_G: rows of `prompts_PxL`.
      words_NxW: of the keys of all requests (p, j).
      rung: what the prompts are padded to.
      prompts: of a wave, on a device.
    """
    # The requests (g, j), in this order, are dealt to the devices in blocks.
    bounds = np.arange(devices + 1) * len(group_G) * responses // devices
    first_D, end_D = bounds[:-1] // responses, -(-bounds[1:] // responses)
    number = max(1, -(-int(np.max(end_D - first_D)) // prompts))
    for i in range(number):
        tokens_DxPxL = np.full((devices, prompts, rung), PAD, np.int32)
        prompt_DxR = np.zeros((devices, prompts * responses), np.int32)
        number_DxR, token_DxR = np.zeros_like(prompt_DxR), np.zeros_like(prompt_DxR)
        words_DxRxW = np.zeros((*prompt_DxR.shape, words_NxW.shape[1]), np.uint32)
        count_D = np.zeros(devices, np.int32)
        for d in range(devices):
            start = min(first_D[d] + i * prompts, end_D[d])
            stop = min(start + prompts, end_D[d])
            rows_PxL = prompts_PxL[group_G[start:stop]]
            lengths_P = np.sum(rows_PxL != PAD, axis=1)
            lasts_P = rows_PxL[np.arange(len(rows_PxL)), lengths_P - 1]
            width = min(rung, rows_PxL.shape[1])
            read_PxL = np.where(np.arange(width) < lengths_P[:, None] - 1, rows_PxL[:, :width], PAD)
            tokens_DxPxL[d, : len(rows_PxL), :width] = read_PxL
            low = max(start * responses, bounds[d])
            requests_R = np.arange(low, max(low, min(stop * responses, bounds[d + 1])))
            count_D[d] = count = len(requests_R)
            here_R = requests_R // responses
            prompt_DxR[d, :count] = here_R - start
            number_DxR[d, :count] = group_G[here_R] * responses + requests_R % responses
            token_DxR[d, :count] = lasts_P[here_R - start]
            words_DxRxW[d, :count] = words_NxW[number_DxR[d, :count]]
        requests = Requests(number_DxR, words_DxRxW, token_DxR, count_D)
        yield Wave(tokens_DxPxL, prompt_DxR, requests), i == number - 1


def collect(drawn_NxT: np.ndarray, log_DxLx3xS: Array, filled_D: Array) -> None:
    for log_Lx3xS, filled in zip(np.asarray(log_DxLx3xS), np.asarray(filled_D), strict=True):
        slots_module.collect(drawn_NxT, log_Lx3xS, int(filled))
