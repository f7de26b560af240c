"""Responses of a decoder to prompts of token ids, generated on the device with a key-value cache.

Each prompt is read once for all its responses (prefill, `jaxpfl.text.generation.prefill`), in
batches of a bounded number of tokens. Its cache, without the last token, is copied to every slot
that answers it, and the slot starts by reading that token
(`jaxpfl.text.generation.continuous_batching`).

Prompts are padded to one of a few lengths, so that few programs are compiled. Batches of one padded
length share the slots, which run empty before those of the next length begin, so that a response
does not depend on other requests.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh

from jaxpfl.checks import positive_int
from jaxpfl.errors import InputError
from jaxpfl.models.base import PAD, Params
from jaxpfl.models.decoder.layers import packed_on_cpu
from jaxpfl.models.decoder.network import Decoder
from jaxpfl.progress import track
from jaxpfl.text.generation import prefill
from jaxpfl.text.generation.continuous_batching import Slots, collect
from jaxpfl.text.generation.decoding import Decoding, stop_table
from jaxpfl.text.microbatches import DATA, placed
from jaxpfl.text.tokenisers.base import Tokeniser, check_fits

_PADDED_LENGTHS = np.array([16, 32, 64, 96, 128, 192, 256, 384, 512])
# On a CPU, slots for floats of 4 bytes; twice as many for bfloat16.
_CPU_SLOTS, _SLOTS = 64, 1_024
_CPU_PREFILL_TOKENS, _PREFILL_TOKENS = 512, 16_384
# The share of a device's memory that the cache of the slots may take.
_CACHE_SHARE = 0.45


def sample(
    model: Decoder,
    params: Params,
    prompts_PxL: np.ndarray,
    key: Array,
    *,
    decoding: Decoding,
    responses: int = 1,
    tokeniser: Tokeniser | None = None,
    slots: int | None = None,
    mesh: Mesh | None = None,
    progress: bool = False,
) -> np.ndarray:
    """Samples J responses to each prompt: token ids int32 [P, J, max_new_tokens], padded with -1.

    A response ends with the first id of `tokeniser.ends`, or with the token that completes a stop
    string. Request (p, j) has the key `fold_in(fold_in(key, p), j)`, and its token t is drawn with
    that key folded in t, so it gives the same tokens whatever the other requests are. (A key that
    is not of threefry2x32 is first converted to one.)

    Args:
      params: the parameters of the model; on a mesh, they may be laid out by `Decoder.shardings`.
      prompts_PxL: int32 ids, at least one in each row, padded with -1 on the right.
      tokeniser: its `ends` end a response, stop strings are found in the bytes of its tokens, and
        ids that it does not have are never drawn. Without it every id may be drawn, only
        `max_new_tokens` ends a response, and stop strings are refused.
      slots: how many sequences a device generates at a time. By default 64 on a CPU, or 128 of
        bfloat16, which its virtual devices share, and elsewhere 1,024 or as many as fit in memory.
      mesh: the devices along its axis "data" share the requests.

    Raises:
      InputError: a prompt is empty or too long; or the tokeniser does not fit the model, or is
        missing where there are stop strings.
    """
    positive_int("responses", responses)
    lengths_P = np.sum(prompts_PxL != PAD, axis=1)
    # The last token drawn is never read.
    most = model.config.positions - decoding.max_new_tokens + 1
    bad_P = (lengths_P < 1) | (lengths_P > most)
    if bad_P.any():
        bad = int(np.argmax(bad_P))
        expected = f"1 to {most} tokens, with which {decoding.max_new_tokens} new ones fit"
        raise InputError(f"prompt {bad} must have {expected}, found {lengths_P[bad]}")
    params = packed_on_cpu(placed(params, mesh))
    number = len(prompts_PxL)
    drawn_NxT = np.full((number * responses, decoding.max_new_tokens), PAD, np.int32)
    program = prefill.Program(
        model=model,
        mesh=mesh,
        max_tokens=decoding.max_new_tokens,
        ends=() if tokeniser is None else tokeniser.ends,
        greedy=decoding.temperature == 0,
        top_p=decoding.top_p < 1,
    )
    controls = _controls(model, decoding, tokeniser)
    devices = 1 if mesh is None else mesh.shape[DATA]
    words_NxW = _request_words(key, number, responses)
    limit = model.config.positions
    possible = np.append(_PADDED_LENGTHS[_PADDED_LENGTHS < limit], limit)
    padded_length_P = possible[np.searchsorted(possible, lengths_P - 1)]
    batches = []
    for padded_length in np.unique(padded_length_P).tolist():
        of_length = prefill.prefill_batches(
            prompts_PxL,
            np.flatnonzero(padded_length_P == padded_length),
            words_NxW,
            responses,
            devices,
            padded_length,
            _prompts_per_batch(padded_length),
        )
        batches += [(padded_length, batch, is_last) for batch, is_last in of_length]
    state: Slots | None = None
    logs: list[Array] = []
    for padded_length, batch, is_last in track(batches, "generating", progress=progress):
        room = padded_length + decoding.max_new_tokens
        if state is None:
            size = slots or _slots(model, room, devices)
            state = prefill.idle_slots(model, mesh, size, room, devices)()
        state, log = prefill.run_prefill_batch(
            program, params, controls, state, batch, jnp.bool(is_last)
        )
        state = None if is_last else state
        logs.append(log)
        # The log is read late, so that the device always has work waiting.
        if len(logs) > 2:
            collect(drawn_NxT, logs.pop(0))
    for log in logs:
        collect(drawn_NxT, log)
    return drawn_NxT.reshape(number, responses, decoding.max_new_tokens)


def _prompts_per_batch(padded_length: int) -> int:
    tokens = _CPU_PREFILL_TOKENS if jax.default_backend() == "cpu" else _PREFILL_TOKENS
    return max(1, tokens // max(padded_length, 16))


def _slots(model: Decoder, room: int, devices: int) -> int:
    """How many sequences a device generates at a time: a power of two for which it has memory."""
    itemsize = jnp.dtype(model.compute).itemsize
    if jax.default_backend() == "cpu":
        # Virtual devices share the processor's cores.
        return max(_CPU_SLOTS * 4 // itemsize // devices, 16)
    config = model.config
    features = 2 * config.layers * config.kv_heads * config.head_size
    slot_bytes = features * room * itemsize
    limit = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit", 2**34)
    fitting = max(1, int(limit * _CACHE_SHARE) // slot_bytes)
    return min(1 << (fitting.bit_length() - 1), _SLOTS)


def _request_words(key: Array, prompts: int, responses: int) -> np.ndarray:
    if str(jax.random.key_impl(key)) != prefill.KEY_IMPL:
        words = jax.random.bits(key, (2,), jnp.uint32)
        key = jax.random.wrap_key_data(words, impl=prefill.KEY_IMPL)

    def of_prompt(p: Array) -> Array:
        own = jax.random.fold_in(key, p)
        return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(own, jnp.arange(responses))

    keys_PxJ = jax.jit(jax.vmap(of_prompt))(jnp.arange(prompts))
    return np.asarray(jax.random.key_data(keys_PxJ)).reshape(prompts * responses, -1)


def _controls(model: Decoder, decoding: Decoding, tokeniser: Tokeniser | None) -> prefill.Controls:
    ids, table_NxV = model.vocab_size, None
    if tokeniser is not None:
        check_fits(tokeniser, model.vocab_size)
        token_bytes = tokeniser.token_bytes()
        ids = len(token_bytes)
    if decoding.stop:
        if tokeniser is None:
            problem = (
                "needs a tokeniser, by which the text of a token is known: give one, or no stop"
            )
            raise InputError(f"decoding.stop = {decoding.stop!r} {problem}")
        whole = (*token_bytes, *[b""] * (model.vocab_size - ids))
        table_NxV = jnp.asarray(stop_table(decoding.stop, whole))
    temperature, top_p = jnp.float32(decoding.temperature), jnp.float32(decoding.top_p)
    return prefill.Controls(temperature, top_p, jnp.arange(model.vocab_size) >= ids, table_NxV)
