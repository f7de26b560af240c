"""How texts are decoded: how a token is drawn from logits, and where a stop string ends a text.

A text ends where its bytes first complete a stop string, and is cut where that stop string begins
(the earliest one, where several end there). A stop string may extend over several tokens or end
inside one. The automaton (Aho and Corasick 1975) reads one token at a time, by a table of [states,
tokens] made once on the host, so that a sequence on the device ends with exactly the token that
completes a stop string.

In UTF-8 no character's bytes lie within another's, so finding the bytes of a stop string is
finding it in the text, even among invalid bytes.

Top-p keeps the tokens at or above a threshold; tokens that tie with the last one kept are kept. The
threshold is found by bisection over the bits of the probabilities, which is exact and does not sort
the vocabulary. The draw uses the Gumbel-max trick twice, first for a block of the vocabulary by its
share of the probability, then for a token of the block. The distribution is the same as over all
tokens at once, from a hundredth of the random numbers.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxpfl.checked import Checked, NonNegative, PositiveFraction, PositiveInt
from jaxpfl.errors import InputError
from jaxpfl.models.base import traced_platform

# Slices that are added up, twice; and rows that are cut at a time.
_ADDED, _CPU_ROWS = 16, 2
_NOT_TEXT = re.compile("[\ud800-\udfff\ufffd]")


@dataclass(frozen=True)
class Decoding(Checked):
    """Settings of text generation.

    Attributes:
      max_new_tokens: a response has at most this many tokens.
      temperature: the logits are divided by it before the softmax; at 0 the most probable token is
        always taken.
      top_p: tokens are drawn from the nucleus, the fewest most probable tokens that together have
        this probability (Holtzman et al. 2020); 1 turns this off.
      stop: a response ends before the first of these texts.
    """

    max_new_tokens: PositiveInt = 64
    temperature: NonNegative = 1.0
    top_p: PositiveFraction = 1.0
    stop: tuple[str, ...] = ()

    def check_fields(self) -> None:
        if isinstance(self.stop, str):
            raise InputError("stop must be a list of texts, found one text")
        for i, text in enumerate(self.stop):
            if not isinstance(text, str) or not text or _NOT_TEXT.search(text):
                expected = "a text of a character or more, without U+FFFD or lone surrogates"
                raise InputError(f"stop[{i}] must be {expected}, found {text!r}")
        object.__setattr__(self, "stop", tuple(self.stop))


@lru_cache(maxsize=16)
def stop_table(stop: tuple[str, ...], token_bytes: tuple[bytes, ...]) -> np.ndarray:
    """The next state for each state and token, int32 [states, tokens].

    State 0 is the initial one; the last state is the end, which the automaton never leaves.
    """
    next_Nx256 = _automaton([text.encode("utf-8") for text in stop])
    lengths_V = np.array([len(content) for content in token_bytes], np.int64)
    most = max(lengths_V.max(initial=0), 1)
    bytes_VxL = np.array(token_bytes, f"S{most}").view(np.uint8).reshape(-1, most)
    states = np.arange(len(next_Nx256), dtype=np.int32)
    table_NxV = np.repeat(states[:, None], len(token_bytes), 1)
    for place in range(most):
        longer = np.flatnonzero(lengths_V > place)
        table_NxV[:, longer] = next_Nx256[table_NxV[:, longer], bytes_VxL[longer, place]]
    return table_NxV


def _automaton(patterns: Sequence[bytes]) -> np.ndarray:
    """Next states int32 [N, 256]; state N - 1 is the end, reached with any pattern's last byte.

    Every other state is the longest end of what was read that a pattern begins with.
    """
    begins = sorted({pattern[:i] for pattern in patterns for i in range(len(pattern))}, key=len)
    state_of = {read: state for state, read in enumerate(begins or [b""])}
    next_Nx256 = np.full((len(state_of) + 1, 256), len(state_of), np.int32)
    for read, state in state_of.items():
        for value in range(256):
            text = read + bytes([value])
            if not text.endswith(tuple(patterns)):
                ends = (text[i:] for i in range(len(text) + 1))
                next_Nx256[state, value] = next(state_of[end] for end in ends if end in state_of)
    return next_Nx256


def cut(content: bytes, stop: Sequence[str]) -> bytes:
    """The content before the stop string that is complete first, or all of it without any."""
    patterns = [text.encode("utf-8") for text in stop]
    complete = [content.find(pattern) + len(pattern) for pattern in patterns if pattern in content]
    if not complete:
        return content
    head = content[: min(complete)]
    return head[: min(len(head) - len(p) for p in patterns if head.endswith(p))]


def probabilities(logits_SxV: Array, temperature: Array) -> Array:
    """softmax(logits / temperature), float32 [S, V], scaled to a largest value of 1."""
    scaled_SxV = logits_SxV / temperature
    return jnp.exp(scaled_SxV - jnp.max(scaled_SxV, axis=-1, keepdims=True))


def keep_top_p(weights_SxV: Array, p: Array) -> Array:
    """The nucleus (Holtzman et al. 2020): the fewest largest weights that sum to p of the total.

    No weight may be above 1.
    """
    # A CPU's cache holds a few rows, which are read many times.
    together = _CPU_ROWS if traced_platform() == "cpu" else len(weights_SxV)
    return lax.map(lambda row_V: _nucleus(row_V, p), weights_SxV, batch_size=together)


def _nucleus(weights_V: Array, p: Array) -> Array:
    parts = jnp.split(jnp.pad(weights_V, (0, -len(weights_V) % _ADDED**2)), _ADDED)

    def total(least: Array) -> Array:
        # Sums of slices become one loop of vector instructions; a sum over an axis does not.
        kept = sum(jnp.where(part >= least, part, 0.0) for part in parts)
        return jnp.sum(sum(jnp.split(kept, _ADDED)))

    wanted = p * total(jnp.float32(0))

    def halve(_: int, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = low + (high - low) // 2
        enough = total(lax.bitcast_convert_type(middle, jnp.float32)) >= wanted
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle)

    # Non-negative floats are ordered like their bits; those of 1 are less than 2^30.
    bounds = jnp.int32(0), lax.bitcast_convert_type(jnp.float32(1), jnp.int32) + 1
    threshold, _ = lax.fori_loop(0, 30, halve, bounds)
    return jnp.where(weights_V >= lax.bitcast_convert_type(threshold, jnp.float32), weights_V, 0.0)


def draw(keys_S: Array, weights_SxV: Array) -> Array:
    """A token of each row, int32 [S], drawn with probability proportional to its weight."""
    rows, vocabulary = weights_SxV.shape
    width = 1 << round(math.log2(vocabulary) / 2)
    blocks = -(-vocabulary // width)
    padded = jnp.pad(weights_SxV, ((0, 0), (0, blocks * width - vocabulary)))
    weights_SxNxW = padded.reshape(rows, blocks, width)
    gumbel_SxG = jax.vmap(lambda key: jax.random.gumbel(key, (blocks + width,)))(keys_S)
    shares_SxN = jnp.sum(weights_SxNxW, axis=-1)
    block_S = jnp.argmax(jnp.log(shares_SxN) + gumbel_SxG[:, :blocks], axis=-1)
    within_SxW = jnp.take_along_axis(weights_SxNxW, block_S[:, None, None], axis=1)[:, 0]
    place_S = jnp.argmax(jnp.log(within_SxW) + gumbel_SxG[:, blocks:], axis=-1)
    return (block_S * width + place_S).astype(jnp.int32)
