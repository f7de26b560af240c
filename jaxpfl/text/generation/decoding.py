"""How texts are decoded: how tokens are chosen, and where a stop string ends a text.

A text ends where its bytes first complete a stop string, and is cut where that stop string begins
(the earliest one, where several end there). A stop string may extend over several tokens or end
inside one. The automaton (Aho and Corasick 1975) reads one token at a time, by a table of [states,
tokens] made once on the host, so that a sequence on the device ends with exactly the token that
completes a stop string.

In UTF-8 no character's bytes lie within another's, so finding the bytes of a stop string is
finding it in the text, even among invalid bytes.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from jaxpfl.checked import Checked, NonNegative, PositiveFraction, PositiveInt
from jaxpfl.errors import InputError

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

    def __post_init__(self):
        super().__post_init__()
        if isinstance(self.stop, str):
            raise InputError("stop must be a list of texts, found one text")
        for i, text in enumerate(self.stop):
            if not isinstance(text, str) or not text or _NOT_TEXT.search(text):
                raise InputError(
                    f"stop[{i}] must be a text of at least one character, without U+FFFD or lone "
                    f"surrogates, found {text!r}"
                )
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
