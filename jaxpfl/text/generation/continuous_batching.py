"""The loop that draws sequences: a fixed number of slots, refilled as soon as one is free.

Every request has its own key and draws token t with `fold_in(key, t)`, in a slot of its own; what
the other slots hold changes nothing. The device works on what was asked for, in memory that does
not grow with the number of requests.

The loop knows nothing of models. What they keep between tokens (the state of a recurrence, a cache
of keys and values) is the carry: `step` reads one token per slot, `begin` sets the carries of the
slots that take a new request.
"""

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

IDLE = -1
"""The number of no request."""


class Slots(NamedTuple):
    """Sequences that run at a time.

    Attributes:
      number_S: int32, the request a slot works on, or IDLE.
      key_SxW: uint32, the words of its key.
      place_S: int32, tokens drawn so far.
      token_S: int32, the last one; at first, the one to begin with.
      stop_S: int32, the state of the search for stop strings.
      carry: what the model keeps.
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
      number_R: int32, what a request is called in the log.
      key_RxW: uint32, the words of their keys.
      token_R: int32, the token that each reads first.
      count: int32, how many there are; the rest of the arrays is filling.
    """

    number_R: Array | np.ndarray
    key_RxW: Array | np.ndarray
    token_R: Array | np.ndarray
    count: Array | np.ndarray


class Sequences(NamedTuple):
    """What the loop asks of a model and of the way to draw.

    Attributes:
      step: (tokens_S, carry) to (logits_SxV, carry).
      begin: (carry, takes_S bool, row_S) to the carry in which every slot that takes a request
        has what request `row_S` begins with.
      draw: (keys_S, logits_SxV) to tokens_S int32.
      ended: (tokens_S, stop_S) to (bool [S], stop_S).
      max_tokens: of a sequence.
      key_impl: what kind of keys the requests have.
    """

    step: Callable[[Array, Any], tuple[Array, Any]]
    begin: Callable[[Any, Array, Array], Any]
    draw: Callable[[Array, Array], Array]
    ended: Callable[[Array, Array], tuple[Array, Array]]
    max_tokens: int
    key_impl: Hashable


def idle(number: int, words: int, carry: Any) -> Slots:
    """Slots without requests, for keys of so many words."""
    zeros_S = jnp.zeros(number, jnp.int32)
    key_SxW = jnp.zeros((number, words), jnp.uint32)
    return Slots(zeros_S + IDLE, key_SxW, zeros_S, zeros_S, zeros_S, carry)


def log_rows(requests: int, slots: int, max_tokens: int) -> int:
    """Steps that `run` can take at most.

    Until the last request begins no slot is idle, so that at most `requests + slots` sequences have
    been drawn by `slots` slots; then that request goes on.
    """
    return max_tokens * (-(-requests // slots) + 2)


def run(
    sequences: Sequences, slots: Slots, requests: Requests, last: Array
) -> tuple[Slots, Array, Array]:
    """Draws until every request has begun, or where it is the `last` run, has ended.

    Returns:
      The slots, in which some requests may still be at work; the log int32 [rows, 3, S] of each
      step's numbers, places and tokens; and how many of its rows are filled. See `collect`.
    """
    size = slots.number_S.shape[0]
    rows = log_rows(requests.number_R.shape[0], size, sequences.max_tokens)
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
        # Words in the loop, for keys in its state look as if they were used anew in every step.
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
    slots, _, log, filled = lax.while_loop(unfinished, step, start)
    return slots, log, filled


def collect(drawn_NxT: np.ndarray, log_Lx3xS: np.ndarray, filled: int) -> None:
    """Writes the tokens of a log of `run` to their requests' rows of `drawn_NxT`."""
    number_LxS, place_LxS, token_LxS = log_Lx3xS[:filled].transpose(1, 0, 2)
    real_LxS = number_LxS != IDLE
    drawn_NxT[number_LxS[real_LxS], place_LxS[real_LxS]] = token_LxS[real_LxS]
