"""The simplest tokeniser, for models that know nothing."""

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from jaxpfl.text.tokenisers.base import Tokeniser, clean


class UTF8Bytes(Tokeniser):
    """The 256 bytes, and 256 for the end of a text: every text round-trips."""

    name = "utf8-bytes"
    vocab_size = 257
    end_of_text = 256
    ends = (256,)
    start = None

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [
            np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.int32) for text in clean(texts)
        ]

    @cached_property
    def _bytes(self) -> tuple[bytes, ...]:
        return (*(bytes([value]) for value in range(256)), b"")
