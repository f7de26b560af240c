"""Responses of a decoder to prompts of token ids, on the device, by its cache of keys and values.

A prompt is read once for all its responses. Its cache, without its last token, is copied to the
slots that answer it, and each begins with that token
(`jaxpfl.text.generation.continuous_batching`). Prompts are read in
waves of a bounded number of tokens, while the responses of earlier waves go on in their slots.

Prompts are padded to the next rung of a ladder, so that few programs are compiled; the slots run
empty where the rung changes. How a request is computed so depends on itself, on the settings and
on the number of slots, but not on the other requests.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpfl.checks import non_negative, non_negative_int, positive_int, real
from jaxpfl.errors import InputError
from jaxpfl.models.base import Params
from jaxpfl.models.decoder.network import PAD, Decoder
from jaxpfl.text.generation.continuous_batching import Slots
from jaxpfl.text.generation.prefill import (
    DATA,
    KEY_IMPL,
    Controls,
    Program,
    collect,
    idle_slots,
    run_wave,
    waves_of,
)
from jaxpfl.text.generation.sentences import steps
from jaxpfl.text.generation.stop import check_stop, stop_table

_LADDER = np.array([16, 32, 64, 96, 128, 192, 256, 384, 512])
_CPU_SLOTS, _SLOTS = 64, 1_024
_CPU_WAVE_TOKENS, _WAVE_TOKENS = 512, 16_384
# Of a device's memory, for the cache of the slots.
_CACHE_SHARE = 0.45


@dataclass(frozen=True)
class Sampling:
    """How responses are drawn.

    Attributes:
      max_new_tokens: after so many tokens a response ends.
      temperature: of the softmax; 0 takes the most probable token.
      top_p: draws from the fewest most probable tokens that have this share of the probability
        (Holtzman et al. 2020); 1 is off.
      top_k: draws from so many most probable tokens; 0 is off. It goes before `top_p`.
      stop: a response ends before the first of these texts. See `jaxpfl.text.generation.stop`.
    """

    max_new_tokens: int = 64
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop: tuple[str, ...] = ()

    def __post_init__(self):
        positive_int("max_new_tokens", self.max_new_tokens)
        non_negative("temperature", self.temperature)
        if not 0 < real("top_p", self.top_p) <= 1:
            raise InputError(f"top_p must lie in 0 .. 1 and not be 0, found {self.top_p!r}")
        non_negative_int("top_k", self.top_k)
        object.__setattr__(self, "stop", check_stop(self.stop))


def sample(
    model: Decoder,
    params: Params,
    prompts_PxL: np.ndarray,
    key: Array,
    *,
    sampling: Sampling,
    responses: int = 1,
    ends: Sequence[int] = (),
    token_bytes: tuple[bytes, ...] | None = None,
    slots: int | None = None,
    mesh: Mesh | None = None,
    progress: bool = False,
) -> np.ndarray:
    """Token ids int32 [P, J, max_new_tokens]: J responses to each prompt, padded by -1.

    The first of `ends`, or the token that completes a stop string, is the last token of a response.
    Request (p, j) has the key `fold_in(fold_in(key, p), j)`, and token t is drawn with that key
    folded in t: it gives the same tokens whatever else is asked for. (A key that is not of
    threefry2x32 is turned into one first.)

    Args:
      params: as the model has them; on a mesh, perhaps laid out by `Decoder.shardings`.
      prompts_PxL: int32 ids, at least one a row, padded on the right by -1.
      key: typed.
      responses: J.
      ends: ids that end a response.
      token_bytes: what each id stands for (`Tokeniser.token_bytes`); stop strings need it, and ids
        that it lacks are never drawn.
      slots: sequences that run at a time on a device; by default 64 on a CPU (shared by its
        virtual devices), and elsewhere 1,024 or as many as fit.
      mesh: the requests are dealt to the devices along its axis "data".
      progress: show a bar on stderr.

    Raises:
      InputError: a prompt is empty or too long, or has ids that are not the model's.
    """
    prompts_PxL = _checked_prompts(model, prompts_PxL, sampling.max_new_tokens)
    positive_int("responses", responses)
    number = len(prompts_PxL)
    drawn_NxT = np.full((number * responses, sampling.max_new_tokens), PAD, np.int32)
    program = Program(
        model=model,
        mesh=mesh if mesh is not None and DATA in mesh.shape else None,
        max_tokens=sampling.max_new_tokens,
        ends=_checked_ends(model, ends),
        greedy=sampling.temperature == 0,
        top_p=sampling.top_p < 1,
        top_k=sampling.top_k if sampling.top_k < model.vocab_size else 0,
    )
    controls = _controls(model, sampling, token_bytes)
    devices = 1 if program.mesh is None else program.mesh.shape[DATA]
    if mesh is not None:
        params = _on_mesh(params, mesh)
    words_NxW = _request_words(key, number, responses)
    lengths_P = np.sum(prompts_PxL != PAD, axis=1)
    rungs = np.append(_LADDER[_LADDER < model.config.positions], model.config.positions)
    rung_P = rungs[np.searchsorted(rungs, lengths_P - 1)]
    waves = [
        (rung, wave, is_last)
        for rung in np.unique(rung_P).tolist()
        for wave, is_last in waves_of(
            prompts_PxL,
            np.flatnonzero(rung_P == rung),
            words_NxW,
            responses,
            devices,
            rung,
            _wave_prompts(rung),
        )
    ]
    state: Slots | None = None
    logs: list[tuple[Array, Array]] = []
    for i in steps(range(len(waves)), "Generating", progress):
        rung, wave, is_last = waves[i]
        room = rung + sampling.max_new_tokens
        if state is None:
            state = idle_slots(program, slots or _slots(model, room, devices), room, devices)
        state, *log = run_wave(program, params, controls, state, wave, jnp.bool(is_last))
        state = None if is_last else state
        logs.append(tuple(log))
        # Looked at late, so that the device has its next work before it is done with this.
        if len(logs) > 2:
            collect(drawn_NxT, *logs.pop(0))
    for log in logs:
        collect(drawn_NxT, *log)
    return drawn_NxT.reshape(number, responses, sampling.max_new_tokens)


def _on_cpu() -> bool:
    return jax.default_backend() == "cpu"


def _wave_prompts(rung: int) -> int:
    """Prompts that a device reads at a time."""
    return max(1, (_CPU_WAVE_TOKENS if _on_cpu() else _WAVE_TOKENS) // max(rung, 16))


def _slots(model: Decoder, room: int, devices: int) -> int:
    """Sequences that run at a time on a device: a power of two that its memory has room for.

    Devices of a CPU are virtual: they share its cores.
    """
    if _on_cpu():
        return max(_CPU_SLOTS // devices, 16)
    config = model.config
    features = 2 * config.layers * config.kv_heads * config.head_size
    each = features * room * jnp.dtype(model.compute).itemsize
    limit = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit", 2**34)
    fitting = max(1, int(limit * _CACHE_SHARE) // each)
    return min(1 << (fitting.bit_length() - 1), _SLOTS)


def _request_words(key: Array, prompts: int, responses: int) -> np.ndarray:
    """The words of the keys of requests (p, j), uint32 [P J, 2]."""
    if str(jax.random.key_impl(key)) != KEY_IMPL:
        key = jax.random.wrap_key_data(jax.random.bits(key, (2,), jnp.uint32), impl=KEY_IMPL)

    def of_prompt(p: Array) -> Array:
        own = jax.random.fold_in(key, p)
        return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(own, jnp.arange(responses))

    keys_PxJ = jax.jit(jax.vmap(of_prompt))(jnp.arange(prompts))
    return np.asarray(jax.random.key_data(keys_PxJ)).reshape(prompts * responses, -1)


def _controls(
    model: Decoder, sampling: Sampling, token_bytes: tuple[bytes, ...] | None
) -> Controls:
    vocabulary = model.vocab_size
    known = vocabulary if token_bytes is None else len(token_bytes)
    if known > vocabulary:
        raise InputError(
            f"token_bytes has {known} tokens, but the model's vocab_size is {vocabulary}"
        )
    table_NxV = None
    if sampling.stop:
        if token_bytes is None:
            raise InputError("stop strings need token_bytes: what each token stands for")
        whole = (*token_bytes, *[b""] * (vocabulary - known))
        table_NxV = jnp.asarray(stop_table(sampling.stop, whole))
    return Controls(
        temperature=jnp.float32(sampling.temperature),
        top_p=jnp.float32(sampling.top_p),
        banned_V=jnp.arange(vocabulary) >= known,
        table_NxV=table_NxV,
    )


def _on_mesh(params: Params, mesh: Mesh) -> Params:
    """The parameters as they lie, where that is on this mesh already; else on all its devices."""
    everywhere = NamedSharding(mesh, PartitionSpec())

    def place(leaf: Any) -> Array:
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, NamedSharding) and sharding.mesh == mesh:
            return leaf
        return jax.device_put(leaf, everywhere)

    return jax.tree.map(place, params)


def _checked_ends(model: Decoder, ends: Sequence[int]) -> tuple[int, ...]:
    for end in ends:
        if not 0 <= end < model.vocab_size:
            raise InputError(
                f"ends must be ids of the model, 0 .. {model.vocab_size - 1}, found {end}"
            )
    return tuple(int(end) for end in ends)


def _checked_prompts(model: Decoder, prompts_PxL: np.ndarray, new: int) -> np.ndarray:
    """The prompts as int32 [P, L]; refuses those that the model cannot read."""
    prompts_PxL = np.asarray(prompts_PxL)
    if prompts_PxL.ndim != 2 or prompts_PxL.dtype != np.int32:
        raise InputError(
            f"prompts must be int32 [prompts, length], found {prompts_PxL.dtype} "
            f"{list(prompts_PxL.shape)}"
        )
    real_PxL = prompts_PxL != PAD
    lengths_P = real_PxL.sum(1)
    positions = model.config.positions
    inside_PxL = np.arange(prompts_PxL.shape[1]) < lengths_P[:, None]
    known_PxL = (prompts_PxL >= 0) & (prompts_PxL < model.vocab_size)
    for bad_P, problem in (
        (lengths_P == 0, "has no token"),
        ((real_PxL != inside_PxL).any(1), "has padding before its last token"),
        ((real_PxL & ~known_PxL).any(1), f"has ids outside 0 .. {model.vocab_size - 1}"),
        # The last token drawn is never read.
        (
            lengths_P + new - 1 > positions,
            f"has too many tokens: with {new} new ones at most {positions - new + 1} fit",
        ),
    ):
        if bad_P.any():
            raise InputError(f"prompt {int(np.argmax(bad_P))} {problem}")
    return prompts_PxL
