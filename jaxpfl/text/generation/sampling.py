"""Responses of a decoder to prompts of token ids, generated on the device with a key-value cache.

Each prompt is read once for all its responses, in prefill batches of a bounded number of tokens.
Its cache, without the last token, is copied to every slot that answers it, and the slot starts by
reading that token (`jaxpfl.text.generation.continuous_batching`). The program of a prefill batch
reads its prompts and then runs the slots until all of its requests have begun; they end while later
batches run. Therefore no slot waits for another, and only one batch's prompts are in memory.

Prompts are padded to one of a few lengths, so that few programs are compiled. Batches of one padded
length share the slots, which run empty before those of the next length begin, so that a response
does not depend on other requests.
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
from jaxpfl.errors import InputError
from jaxpfl.models.base import PAD, Params
from jaxpfl.models.decoder.layers import Cache, packed_on_cpu
from jaxpfl.models.decoder.network import Decoder
from jaxpfl.progress import track
from jaxpfl.text.generation import continuous_batching
from jaxpfl.text.generation.continuous_batching import Requests, Sequences, Slots, collect
from jaxpfl.text.generation.decoding import Decoding, draw, keep_top_p, probabilities, stop_table
from jaxpfl.text.microbatches import DATA, placed
from jaxpfl.text.tokenisers.base import Tokeniser, check_fits

_PADDED_LENGTHS = np.array([16, 32, 64, 96, 128, 192, 256, 384, 512])
# On a CPU, slots for floats of 4 bytes; twice as many for bfloat16.
_CPU_SLOTS, _SLOTS = 64, 1_024
_CPU_PREFILL_TOKENS, _PREFILL_TOKENS = 512, 16_384
# The share of a device's memory that the cache of the slots may take.
_CACHE_SHARE = 0.45
KEY_IMPL, _KEY_WORDS = "threefry2x32", 2


class Program(NamedTuple):
    """The static settings of a compiled program, beside the shapes of its arguments."""

    model: Decoder
    mesh: Mesh | None
    max_tokens: int
    ends: tuple[int, ...]
    greedy: bool
    top_p: bool


class Controls(NamedTuple):
    """Settings that can change without compiling another program.

    `banned_V` is True for ids that are never drawn; `table_NxV` is `decoding.stop_table`, or None
    without stop strings.
    """

    temperature: Array
    top_p: Array
    banned_V: Array
    table_NxV: Array | None


class PrefillBatch(NamedTuple):
    """For each of D devices, P prompts and the R requests for responses to them.

    Attributes:
      tokens_DxPxL: int32, the prompts without their last tokens.
      prompt_DxR: int32, the prompt that a request answers.
      requests: the requests, in arrays [D, R].
    """

    tokens_DxPxL: Any
    prompt_DxR: Any
    requests: Requests


@partial(jax.jit, static_argnums=0, donate_argnums=3)
def run_prefill_batch(
    program: Program,
    params: Params,
    controls: Controls,
    state: Slots,
    batch: PrefillBatch,
    last: Array,
) -> tuple[Slots, Array]:
    """Runs a prefill batch: the slots and logs of each device."""

    def alone(params, controls, state, batch, last):
        # The share of one device, D = 1.
        state, batch = jax.tree.map(lambda leaf: leaf[0], (state, batch))
        prompts = program.model.prefill(params, batch.tokens_DxPxL, 0)
        sequences = _sequences(program, params, controls, prompts, batch.prompt_DxR)
        state, log = continuous_batching.run(sequences, state, batch.requests, last)
        return jax.tree.map(lambda leaf: leaf[None], (state, log))

    if program.mesh is not None:
        whole, dealt = PartitionSpec(), PartitionSpec(DATA)
        alone = jax.shard_map(
            alone,
            mesh=program.mesh,
            in_specs=(whole, whole, dealt, dealt, whole),
            out_specs=dealt,
            axis_names={DATA},
            check_vma=False,
        )
    return alone(params, controls, state, batch, last)


def _sequences(
    program: Program, params: Params, controls: Controls, prompts: Cache, prompt_R: Array
) -> Sequences:
    """How one device generates responses to the prompts that it has read."""

    def begin(cache: Cache, takes_S: Array, row_S: Array) -> Cache:
        def unfinished(state: tuple[Array, Cache]) -> Array:
            return jnp.any(state[0])

        # One slot at a time, in place: `jnp.where` would write the whole cache.
        def copy(state: tuple[Array, Cache]) -> tuple[Array, Cache]:
            takes_S, cache = state
            slot = jnp.argmax(takes_S).astype(jnp.int32)
            return takes_S.at[slot].set(False), cache.begin(slot, prompts, prompt_R[row_S[slot]])

        return lax.while_loop(unfinished, copy, (takes_S, cache))[1]

    def drawn(keys_S: Array, logits_SxV: Array) -> Array:
        logits_SxV = jnp.where(controls.banned_V[None, :], -jnp.inf, logits_SxV)
        if program.greedy:
            # A tie goes to the lowest id.
            return jnp.argmax(logits_SxV, axis=-1).astype(jnp.int32)
        weights_SxV = probabilities(logits_SxV, controls.temperature)
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

    step = partial(program.model.step, params)
    return Sequences(step, begin, drawn, ended, program.max_tokens, KEY_IMPL)


@lru_cache(maxsize=32)
def idle_slots(
    model: Decoder, mesh: Mesh | None, slots: int, room: int, devices: int
) -> Callable[[], Slots]:
    """Makes empty slots on every device, each with a cache for `room` tokens."""

    def make() -> Slots:
        cache = Cache.empty(model.config, slots, room, model.compute)
        one = continuous_batching.idle(slots, _KEY_WORDS, cache)
        return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf[None], (devices, *leaf.shape)), one)

    if mesh is None:
        return jax.jit(make)
    return jax.jit(make, out_shardings=slot_shardings(mesh, model, jax.eval_shape(make)))


def slot_shardings(mesh: Mesh, model: Decoder, slots: Slots) -> Any:
    """The shardings of slots, arrays or shapes: over "data", and their caches over "model", too.

    Heads of keys and values are dealt as those of the parameters are (`Decoder.shardings`), if the
    axis divides their number.
    """
    heads = "model" in mesh.shape and model.config.kv_heads % mesh.shape["model"] == 0
    dealt = NamedSharding(mesh, PartitionSpec(DATA))
    by_head = NamedSharding(mesh, PartitionSpec(DATA, None, None, "model" if heads else None))
    shardings = jax.tree.map(lambda _: dealt, slots)
    cache = shardings.carry._replace(keys=by_head, values=by_head)
    return shardings._replace(carry=cache)


def prefill_batches(
    prompts_PxL: np.ndarray,
    group_G: np.ndarray,
    words_NxW: np.ndarray,
    responses: int,
    devices: int,
    padded_length: int,
    prompts: int,
) -> Iterator[tuple[PrefillBatch, bool]]:
    """The prefill batches of the prompts in the rows `group_G`, each with whether it is the last.

    Args:
      words_NxW: the words of the keys of all requests (p, j).
      responses: how many each prompt gets.
      prompts: how many of a batch each device reads.
    """
    # The requests (g, j), in this order, are dealt to the devices in blocks.
    bounds = np.arange(devices + 1) * len(group_G) * responses // devices
    first_D, end_D = bounds[:-1] // responses, -(-bounds[1:] // responses)
    number = max(1, -(-int(np.max(end_D - first_D)) // prompts))
    for i in range(number):
        tokens_DxPxL = np.full((devices, prompts, padded_length), PAD, np.int32)
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
            width = min(padded_length, rows_PxL.shape[1])
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
        yield PrefillBatch(tokens_DxPxL, prompt_DxR, requests), i == number - 1


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
    ends = () if tokeniser is None else tokeniser.ends
    greedy, top_p = decoding.temperature == 0, decoding.top_p < 1
    program = Program(model, mesh, decoding.max_new_tokens, ends, greedy, top_p)
    controls = _controls(model, decoding, tokeniser)
    devices = 1 if mesh is None else mesh.shape[DATA]
    words_NxW = _request_words(key, number, responses)
    limit = model.config.positions
    possible = np.append(_PADDED_LENGTHS[_PADDED_LENGTHS < limit], limit)
    padded_length_P = possible[np.searchsorted(possible, lengths_P - 1)]
    tokens = _CPU_PREFILL_TOKENS if jax.default_backend() == "cpu" else _PREFILL_TOKENS
    batches = []
    for padded_length in np.unique(padded_length_P).tolist():
        group_G = np.flatnonzero(padded_length_P == padded_length)
        sizes = responses, devices, padded_length, max(1, tokens // max(padded_length, 16))
        of_length = prefill_batches(prompts_PxL, group_G, words_NxW, *sizes)
        batches += [(padded_length, batch, is_last) for batch, is_last in of_length]
    state: Slots | None = None
    logs: list[Array] = []
    for padded_length, batch, is_last in track(batches, "generating", progress=progress):
        room = padded_length + decoding.max_new_tokens
        if state is None:
            size = slots or _slots(model, room, devices)
            state = idle_slots(model, mesh, size, room, devices)()
        state, log = run_prefill_batch(program, params, controls, state, batch, jnp.bool(is_last))
        state = None if is_last else state
        logs.append(log)
        # The log is read late, so that the device always has work waiting.
        if len(logs) > 2:
            collect(drawn_NxT, logs.pop(0))
    for log in logs:
        collect(drawn_NxT, log)
    return drawn_NxT.reshape(number, responses, decoding.max_new_tokens)


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
    if str(jax.random.key_impl(key)) != KEY_IMPL:
        words = jax.random.bits(key, (2,), jnp.uint32)
        key = jax.random.wrap_key_data(words, impl=KEY_IMPL)

    def of_prompt(p: Array) -> Array:
        own = jax.random.fold_in(key, p)
        return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(own, jnp.arange(responses))

    keys_PxJ = jax.jit(jax.vmap(of_prompt))(jnp.arange(prompts))
    return np.asarray(jax.random.key_data(keys_PxJ)).reshape(prompts * responses, -1)


def _controls(model: Decoder, decoding: Decoding, tokeniser: Tokeniser | None) -> Controls:
    ids, table_NxV = model.vocab_size, None
    if tokeniser is not None:
        check_fits(tokeniser, model.vocab_size)
        token_bytes = tokeniser.token_bytes()
        ids = len(token_bytes)
    if decoding.stop:
        if tokeniser is None:
            raise InputError(f"decoding.stop = {decoding.stop!r} needs a tokeniser, found none")
        whole = (*token_bytes, *[b""] * (model.vocab_size - ids))
        table_NxV = jnp.asarray(stop_table(decoding.stop, whole))
    temperature, top_p = jnp.float32(decoding.temperature), jnp.float32(decoding.top_p)
    return Controls(temperature, top_p, jnp.arange(model.vocab_size) >= ids, table_NxV)
