"""Sampling sequences from a recurrent language model, on the device."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxpfl.checks import positive, positive_int
from jaxpfl.models.base import PAD, Params
from jaxpfl.models.recurrent import CIFGLanguageModel
from jaxpfl.progress import track
from jaxpfl.text.generation import continuous_batching as slots
from jaxpfl.text.tokenisers.vocabulary import BOS, EOS, UNUSED, Vocabulary

# The logits of one step, of all sequences that run at a time, fit in a processor's cache.
_LOGITS = 2**18
# Sequences of one call on the device: as few as a run shows after a round, or many.
_REQUESTS = 64, 8192


@dataclass(frozen=True)
class SpecialIds:
    """The ids that a model reads first and draws last, and further ones that it never draws."""

    start: int
    end: int
    never: tuple[int, ...] = (UNUSED,)

    def banned(self, vocab_size: int) -> np.ndarray:
        """Which ids are never drawn: bool [vocab_size]."""
        return np.isin(np.arange(vocab_size), (self.start, *self.never))


WORD_IDS = SpecialIds(start=BOS, end=EOS)
"""The special ids of a `Vocabulary`."""


def sample_tokens(
    model: CIFGLanguageModel,
    params: Params,
    key: Array,
    requests_N: Any,
    *,
    max_tokens: int = 20,
    temperature: float = 1.0,
    ids: SpecialIds = WORD_IDS,
    progress: bool = False,
) -> np.ndarray:
    """Token ids int32 [N, max_tokens]: everything after the start up to the end, then PAD.

    Request r, a whole number, has the key `fold_in(key, r)`. Its token t is drawn with
    `fold_in(that key, t)` from the softmax of logits / temperature over the ids that can be drawn,
    so a request gives the same tokens whatever the other requests are (unless two draws are tied up
    to rounding).
    """
    positive_int("max_tokens", max_tokens)
    positive("temperature", temperature)
    number = len(requests_N)
    banned_V, scale = ids.banned(model.vocab_size), np.float32(temperature)
    tokens_NxT = np.full((number, max_tokens), PAD, np.int32)
    most = _REQUESTS[number > _REQUESTS[0]]
    for start in track(range(0, number, most), "sampling", progress=progress):
        # The last request is repeated to fill the array, so that two programs serve any number.
        rows = np.minimum(np.arange(start, start + most), number - 1)
        request_R = np.asarray(requests_N, np.int32)[rows]
        count = np.int32(min(number - start, most))
        log = _sample(model, max_tokens, ids, params, key, request_R, count, banned_V, scale)
        slots.collect(tokens_NxT[start:], log)
    return tokens_NxT


@partial(jax.jit, static_argnums=(0, 1, 2))
def _sample(
    model: CIFGLanguageModel,
    max_tokens: int,
    ids: SpecialIds,
    params: Params,
    key: Array,
    request_R: Array,
    count: Array,
    banned_V: Array,
    temperature: Array,
) -> Array:
    size = min(slots_of(model), len(request_R))
    initial = model.initial_carry(size)

    def begin(carry: Any, takes_S: Array, _: Array) -> Any:
        def fresh(new: Array, old: Array) -> Array:
            return jnp.where(takes_S.reshape(-1, *[1] * (new.ndim - 1)), new, old)

        return jax.tree.map(fresh, initial, carry)

    def draw(keys_S: Array, logits_SxV: Array) -> Array:
        logits_SxV = jnp.where(banned_V[None, :], -jnp.inf, logits_SxV / temperature)
        return jax.vmap(jax.random.categorical)(keys_S, logits_SxV).astype(jnp.int32)

    def ended(token_S: Array, stop_S: Array) -> tuple[Array, Array]:
        return token_S == ids.end, stop_S

    step, key_impl = partial(model.step, params), jax.random.key_impl(key)
    sequences = slots.Sequences(step, begin, draw, ended, max_tokens, key_impl)
    words_RxW = jax.random.key_data(jax.vmap(jax.random.fold_in, (None, 0))(key, request_R))
    number_R = jnp.arange(len(request_R), dtype=jnp.int32)
    waiting = slots.Requests(number_R, words_RxW, jnp.full_like(number_R, ids.start), count)
    start = slots.idle(size, words_RxW.shape[1], initial)
    return slots.run(sequences, start, waiting, jnp.bool(True))[1]


def slots_of(model: CIFGLanguageModel) -> int:
    """How many of many sequences run at a time."""
    fitting = max(_LOGITS // model.vocab_size, 64)
    return min(1 << (fitting.bit_length() - 1), 1024)


def generate_sentences(
    model: CIFGLanguageModel,
    params: Params,
    vocabulary: Vocabulary,
    key: Array,
    number: int,
    *,
    max_tokens: int = 20,
    temperature: float = 1.0,
) -> list[str]:
    """`number` sentences; sentence i is a function of (params, key, i) and the settings only."""
    requests_N = np.arange(positive_int("number", number))
    tokens_NxT = sample_tokens(
        model, params, key, requests_N, max_tokens=max_tokens, temperature=temperature
    )
    return [vocabulary.decode(row) for row in tokens_NxT]
