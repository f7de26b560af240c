"""Texts cut into successive spans of equally many tokens: the samples of LargeFedBench.

Source: Hou et al. 2025 (POPri), section 4: a client's speech or abstract becomes samples of 64
tokens, one after the other.
"""

from collections.abc import Sequence

import numpy as np

from jaxpfl.checks import positive_int
from jaxpfl.data.columns import text_array
from jaxpfl.data.population import Population
from jaxpfl.text.columns import text_column
from jaxpfl.text.tokenisers.base import Tokeniser

_BLOCK = 1_024


def spans(tokeniser: Tokeniser, texts: Sequence[str], tokens: int = 64) -> list[list[str]]:
    """The spans of every text, in order: `tokens` tokens each, the last one the rest.

    White space at a span's ends is removed, and spans without anything else are left out. A
    character whose bytes are divided between two spans is in neither.
    """
    positive_int("tokens", tokens)
    spans_of_texts = []
    for row in tokeniser.encode(texts):
        cut = [
            tokeniser.decode(row[start : start + tokens]).strip("\ufffd").strip()
            for start in range(0, len(row), tokens)
        ]
        spans_of_texts.append([span for span in cut if span])
    return spans_of_texts


def in_spans(population: Population, tokeniser: Tokeniser, tokens: int = 64) -> Population:
    """The same clients, whose examples are the spans of their texts; no other column.

    A client's texts are first joined in their order, and every run of white space in them, newlines
    among it, becomes one space. The fingerprint does not change, because the spans are as private
    as the text.
    """
    column, offsets = text_column(population), population.offsets
    texts: list[str] = []
    sizes = [0]
    for first in range(0, len(population), _BLOCK):
        bounds = offsets[first : first + _BLOCK + 1]
        joined = [
            " ".join(" ".join(column.slice(int(start), int(stop - start)).to_pylist()).split())
            for start, stop in zip(bounds[:-1], bounds[1:], strict=True)
        ]
        for cut in spans(tokeniser, joined, tokens):
            texts.extend(cut)
            sizes.append(len(cut))
    return population.with_examples({"text": text_array(texts)}, np.cumsum(sizes))
