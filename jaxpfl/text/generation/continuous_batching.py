"""Continuous batching: sequences are generated in a fixed number of slots (Yu et al. 2022).

As soon as the sequence in a slot has ended, the slot takes the next request, so that no slot is
idle and memory does not grow with the number of requests. Every request has its own key and draws
token t with `fold_in(key, t)`, independently of the other slots.

The loop does not depend on the model. The carry is a model's state between two tokens (that of a
recurrence, or a cache of keys and values): `step` reads one token in each slot, and
`begin` sets the carry of the slots that take a new request.
"""

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxpfl.text.microbatches import read

IDLE = -1
"""The request number of a slot without a request."""


class Slots(NamedTuple):
    """The sequences that are being generated.

    Attributes:
      number_S: int32, the request that a slot works on, or IDLE.
      key_SxW: uint32, the words of the request's key.
      place_S: int32, how many tokens have been drawn.
      token_S: int32, the last token drawn; at first, the token that the request begins with.
      stop_S: int32, the state of the search for stop strings.
      carry: the model's state between two tokens.
    """

    number_S: Array
    key_SxW: Array
    place_S: Array
    token_S: Array
    stop_S: Array
    carry: Any


class Requests(NamedTuple):
    """Requests that wait for a slot, in their order.

    Attributes:
      number_R: int32, the numbers of the requests in the log.
      key_RxW: uint32, the words of the requests' keys.
      token_R: int32, the token that each request reads first.
      count: int32, how many requests there are; the rest of the arrays is padding.
    """

    number_R: Array | np.ndarray
    key_RxW: Array | np.ndarray
    token_R: Array | np.ndarray
    count: Array | np.ndarray


class Sequences(NamedTuple):
    """The functions and settings that the loop needs.

    Attributes:
      step: (tokens_S, carry) to (logits_SxV, carry).
      begin: (carry, takes_S bool, row_S) to a carry in which every slot that takes a request has
        the initial carry of request `row_S`.
      draw: (keys_S, logits_SxV) to tokens_S int32.
      ended: (tokens_S, stop_S) to (bool [S], stop_S), whether a sequence ends with its token.
    """

    step: Callable[[Array, Any], tuple[Array, Any]]
    begin: Callable[[Any, Array, Array], Any]
    draw: Callable[[Array, Array], Array]
    ended: Callable[[Array, Array], tuple[Array, Array]]
    max_tokens: int
    key_impl: Hashable


def idle(number: int, words: int, carry: Any) -> Slots:
    """`number` slots without requests, for keys of `words` words."""
    zeros_S = jnp.zeros(number, jnp.int32)
    key_SxW = jnp.zeros((number, words), jnp.uint32)
    return Slots(zeros_S + IDLE, key_SxW, zeros_S, zeros_S, zeros_S, carry)


def run(sequences: Sequences, slots: Slots, requests: Requests, last: Array) -> tuple[Slots, Array]:
    """Generates until every request has begun or, if this is the `last` run, has ended.

    Returned are the slots, in which some requests may be unfinished, and the log int32 [rows, 3, S]
    of each step's request numbers, places and tokens, IDLE where there was none. See `collect`.
    """
    size = slots.number_S.shape[0]
    # No slot is idle before the last request begins, so by then the slots have generated at most
    # `requests + slots` sequences. The last request itself takes at most `max_tokens` steps more.
    rows = sequences.max_tokens * (-(-requests.number_R.shape[0] // size) + 2)
    number_R, key_RxW, token_R, count = map(jnp.asarray, requests)

    def unfinished(state: tuple[Slots, Array, Array, Array]) -> Array:
        slots, begun, _, _ = state
        at_work = jnp.logical_and(last, jnp.any(slots.number_S != IDLE))
        return jnp.logical_or(begun < count, at_work)

    def step(state: tuple[Slots, Array, Array, Array]) -> tuple[Slots, Array, Array, Array]:
        slots, begun, log, filled = state
        free_S = slots.number_S == IDLE
        turn_S = jnp.cumsum(free_S, dtype=jnp.int32)
        takes_S = jnp.logical_and(free_S, begun + turn_S <= count)
        row_S = jnp.where(takes_S, begun + turn_S - 1, 0)
        begun = jnp.minimum(begun + turn_S[-1], count)
        number_S = jnp.where(takes_S, number_R[row_S], slots.number_S)
        key_SxW = jnp.where(takes_S[:, None], key_RxW[row_S], slots.key_SxW)
        place_S = jnp.where(takes_S, 0, slots.place_S)
        stop_S = jnp.where(takes_S, 0, slots.stop_S)
        token_S = jnp.where(takes_S, token_R[row_S], slots.token_S)

        carry = sequences.begin(slots.carry, takes_S, row_S)
        logits_SxV, carry = sequences.step(token_S, carry)
        # The loop carries words, because typed keys in its state look like keys used twice.
        keys_S = jax.random.wrap_key_data(key_SxW, impl=sequences.key_impl)
        keys_S = jax.vmap(jax.random.fold_in)(keys_S, place_S)
        token_S = sequences.draw(keys_S, logits_SxV)
        entry_3xS = jnp.stack([number_S, place_S, token_S])
        log = lax.dynamic_update_slice(log, entry_3xS[None], (filled, 0, 0))

        ended_S, stop_S = sequences.ended(token_S, stop_S)
        ended_S = jnp.logical_or(ended_S, place_S == sequences.max_tokens - 1)
        number_S = jnp.where(ended_S, IDLE, number_S)
        slots = Slots(number_S, key_SxW, place_S + 1, token_S, stop_S, carry)
        return slots, begun, log, filled + 1

    log = jnp.full((rows, 3, size), IDLE, jnp.int32)
    start = (slots, jnp.int32(0), log, jnp.int32(0))
    slots, _, log, _ = lax.while_loop(unfinished, step, start)
    return slots, log


def collect(drawn_NxT: np.ndarray, log: Array) -> None:
    """Writes the tokens in logs of `run`, [..., rows, 3, S], to their requests' rows."""
    number, place, token = np.moveaxis(read(log), -2, 0)
    real = number != IDLE
    drawn_NxT[number[real], place[real]] = token[real]
