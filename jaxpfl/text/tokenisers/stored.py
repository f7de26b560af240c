"""Texts as sequences of word ids on the disk: `jaxpfl convert SOURCE OUT --vocabulary ...`.

A text becomes beginning of sentence, the ids of ALL its words, and end of sentence. The row that a
model of any sequence length reads is the beginning of that, padded; `Vocabulary.encode` makes it.
"""

import array
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from jaxpfl.data.columns import text_buffers
from jaxpfl.data.sequences import Sequences
from jaxpfl.text.tokenisers.splitting import CONTROL
from jaxpfl.text.tokenisers.vocabulary import BOS, EOS, OOV, Vocabulary


@dataclass(frozen=True)
class WordEncoder:
    """Makes sequences of ids of texts; a `data.stream.Encoder`."""

    vocabulary: Vocabulary

    @property
    def encoding(self) -> Mapping[str, Any]:
        return self.vocabulary.encoding

    def sequences(self, texts: pa.Array) -> Sequences:
        """The ids of each text of a large_string array: uint16, or uint32 for a larger vocabulary.

        All words of a text are there: none is cut off.
        """
        if self.vocabulary.splitting == "spaces":
            ids, words_N = self._by_spaces(texts)
        else:
            ids, words_N = self._one_by_one(texts)
        edges = np.concatenate([np.zeros(1, np.int64), np.cumsum(words_N + 2)])
        values = np.empty(int(edges[-1]), np.uint16 if len(self.vocabulary) <= 2**16 else np.uint32)
        inside = np.ones(len(values), bool)
        for places, special in ((edges[:-1], BOS), (edges[1:] - 1, EOS)):
            values[places] = special
            inside[places] = False
        values[inside] = ids
        return Sequences(values, edges, self.encoding)

    def save(self, path: Path) -> None:
        self.vocabulary.save(path)

    def _one_by_one(self, texts: pa.Array) -> tuple[np.ndarray, np.ndarray]:
        split, find = self.vocabulary.split, self.vocabulary.ids.get
        ids, words_N = array.array("i"), []
        for text in texts.to_pylist():
            found = [find(word, OOV) for word in split(text)]
            ids.extend(found)
            words_N.append(len(found))
        return np.frombuffer(ids, np.intc), np.array(words_N, np.int64)

    def _by_spaces(self, texts: pa.Array) -> tuple[np.ndarray, np.ndarray]:
        """As `_one_by_one` with `splitting.spaces`, by Arrow: many times as fast."""
        # Called by name: Arrow creates these functions at import, so that type checkers miss them.
        if len(texts) and _has_control(texts):
            removed = pc.ReplaceSubstringOptions(CONTROL, "")
            texts = pc.call_function("replace_substring_regex", [texts], removed)
        split = pc.call_function("split_pattern", [texts], pc.SplitPatternOptions(" "))
        words = split.flatten()
        real = pc.call_function("binary_length", [words]).to_numpy() > 0
        ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(real)])
        found = pc.call_function("index_in", [words], pc.SetLookupOptions(self._words))
        # A word's place in the list, or -1; the list begins with the id after OOV.
        ids = found.fill_null(-1).to_numpy()[real] + (OOV + 1)
        edges = split.offsets.to_numpy()
        return ids, np.diff(ends[edges - edges[0]])

    @cached_property
    def _words(self) -> pa.Array:
        return pa.array(self.vocabulary.tokens[OOV + 1 :], pa.large_string())


def _has_control(texts: pa.Array) -> bool:
    content = np.frombuffer(text_buffers(texts)[1], np.uint8)
    return bool(np.any((content < 32) | (content == 127)))
