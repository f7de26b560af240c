"""Stop strings, found exactly in the bytes of a text: by an automaton on the device, then the cut.

A text ends where its bytes first complete a stop string, and is cut where that stop string begins
(the earliest one, where several end there). A stop string may extend over several tokens or end
inside one. The automaton (Aho and Corasick 1975) reads one token at a time, by a table of [states,
tokens] made once on the host, so that a sequence on the device ends with exactly the token that
completes a stop string.

In UTF-8 no character's bytes lie within another's, so finding the bytes of a stop string is
finding it in the text, even among invalid bytes.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np


@lru_cache(maxsize=16)
def stop_table(stop: tuple[str, ...], token_bytes: tuple[bytes, ...]) -> np.ndarray:
    """The next state for each state and token, int32 [states, tokens].

    State 0 is the initial one; the last state is the end, which the automaton never leaves.
    """
    next_Nx256 = _automaton([text.encode("utf-8") for text in stop])
    lengths_V = np.array([len(content) for content in token_bytes], np.int64)
    order_V = np.argsort(-lengths_V, kind="stable")
    bytes_VxL = np.zeros((len(token_bytes), max(lengths_V.max(initial=0), 1)), np.uint8)
    for row_L, i in zip(bytes_VxL, order_V.tolist(), strict=True):
        row_L[: lengths_V[i]] = np.frombuffer(token_bytes[i], np.uint8)
    states = len(next_Nx256)
    at_NxV = np.repeat(np.arange(states, dtype=np.int32)[:, None], len(token_bytes), 1)
    for place in range(bytes_VxL.shape[1]):
        # Tokens are in order of falling length, so only the first ones have a byte here.
        longer = int((lengths_V > place).sum())
        at_NxV[:, :longer] = next_Nx256[at_NxV[:, :longer], bytes_VxL[None, :longer, place]]
    table_NxV = np.empty_like(at_NxV)
    table_NxV[:, order_V] = at_NxV
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
