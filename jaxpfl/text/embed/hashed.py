"""Hashed n-grams under a random projection: an embedding that needs no weights.

The vector of a text is a fixed linear map of the square roots of counts, scaled to length 1:

    sum over its words w of sqrt(count of w) v(w)
        + 0.7 * sum over its pairs of neighbours u w of sqrt(count of u w) r(u w)

    v(w) = r(w) + (1 / sqrt(n)) * sum of r(g) over the n character 3- to 5-grams g of "<w>"

so that words with common letters have similar vectors. r hashes its argument to one of 32,768
random sign vectors (Weinberger et al. 2009, "Feature hashing for large scale multitask learning",
section 2; Achlioptas 2003, "Database-friendly random projections", theorem 1.1). Inner products
are those of the counts, up to the projection's error of about 1 / sqrt(dimension).

On every platform, text is NFKC-normalised and lowercased; a word is a run of letters, digits and
underscores, or of other visible characters; a run of more than 32 is cut into words of 32. A text
without words has the zero vector.
"""

import itertools
import math
import re
import unicodedata
import zlib
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import numpy as np
from scipy import sparse

from jaxpfl import checks
from jaxpfl.data.columns import text_array
from jaxpfl.text.embed.base import as_texts

_BUCKETS = 2**15
_SEED = 20_240_613
_NEIGHBOURS_WEIGHT = np.float32(0.7)
# The cap bounds the number of n-grams of a word, and therefore memory.
_WORD = re.compile(r"\w{1,32}|[^\w\s]{1,32}")
_GRAMS = range(3, 6)
# The largest numbers of texts and of characters that are embedded at a time.
_BLOCK_TEXTS, _BLOCK_CHARACTERS = 8_192, 2**22


class HashedNgrams:
    """The embedder "hashed:DIMENSION"; see the head of this file.

    A text's vector is the same, bit for bit, in every process and whatever the other texts of a
    call are; between platforms it differs by float32 rounding at most.
    """

    column = "text"

    def __init__(self, dimension: int = 256) -> None:
        self.dimension = checks.positive_int("dimension", dimension)
        self.name = f"hashed:{self.dimension}"

    def __deepcopy__(self, memo: Any) -> "HashedNgrams":
        return self  # which no text changes

    def __call__(self, examples: Any) -> np.ndarray:
        texts = as_texts(examples)
        vectors_NxD = np.zeros((len(texts), self.dimension), np.float32)
        characters, start = np.cumsum([0, *map(len, texts)]), 0
        while start < len(texts):
            most = characters[start] + _BLOCK_CHARACTERS
            fitting = int(np.searchsorted(characters, most, "right")) - 1
            stop = max(start + 1, min(start + _BLOCK_TEXTS, fitting))
            vectors_NxD[start:stop] = self._embed(texts[start:stop])
            start = stop
        return vectors_NxD

    def _embed(self, texts: list[str]) -> np.ndarray:
        words_of_text = [_WORD.findall(unicodedata.normalize("NFKC", t).lower()) for t in texts]
        starts = np.cumsum([0, *map(len, words_of_text)])
        encoded = text_array(list(itertools.chain(*words_of_text))).dictionary_encode()
        words: list[str] = encoded.dictionary.to_pylist()
        if not words:
            return np.zeros((len(texts), self.dimension), np.float32)
        word_of_token = encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64)
        counts = _damped_counts(word_of_token, starts, len(words))
        # Imported late, because importing scikit-learn takes a second.
        from sklearn.feature_extraction import FeatureHasher

        hasher = FeatureHasher(_BUCKETS, input_type="pair")
        features = sparse.csr_matrix(hasher.transform(map(_features, words)), dtype=np.float32)
        vectors_NxD = counts @ (features @ self._projection)

        # Neighbours within a text: all pairs except those whose second word begins a text.
        hash_of_word = np.array([zlib.crc32(word.encode()) for word in words], np.uint64)
        hashes = hash_of_word[word_of_token]
        first = np.zeros(len(hashes) + 1, bool)
        first[starts] = True
        pairs = np.flatnonzero(~first[1:-1])
        # Buckets of ordered pairs, by multiplicative hashing modulo 2^64.
        mixed = hashes[pairs] * np.uint64(0x9E3779B97F4A7C15)
        mixed += hashes[pairs + 1] * np.uint64(0xC2B2AE3D27D4EB4F)
        mixed ^= mixed >> np.uint64(29)
        mixed *= np.uint64(0xBF58476D1CE4E5B9)
        buckets = (mixed >> np.uint64(49)).astype(np.int64)
        neighbours = _damped_counts(buckets, np.searchsorted(pairs, starts), _BUCKETS)
        vectors_NxD += _NEIGHBOURS_WEIGHT * (neighbours @ self._projection)

        norms_N = np.linalg.norm(vectors_NxD, axis=1, keepdims=True)
        return vectors_NxD / np.where(norms_N > 0, norms_N, np.float32(1))

    @cached_property
    def _projection(self) -> np.ndarray:
        """Signs / sqrt(d), float32 [buckets, d], from raw bits, which no platform changes."""
        bits = np.random.Philox(key=_SEED).random_raw(math.ceil(_BUCKETS * self.dimension / 64))
        ones = np.unpackbits(bits.astype("<u8").view(np.uint8), count=_BUCKETS * self.dimension)
        signs = 2 * ones.astype(np.float32).reshape(_BUCKETS, self.dimension) - 1
        return signs / np.float32(math.sqrt(self.dimension))


def _features(word: str) -> Iterator[tuple[str, float]]:
    """The word itself with weight 1, and its n-grams with weights whose squares sum to 1."""
    yield "word " + word, 1.0
    marked = f"<{word}>"
    grams = [marked[i : i + n] for n in _GRAMS for i in range(len(marked) - n + 1)]
    for gram in grams:
        yield gram, 1.0 / math.sqrt(len(grams))


def _damped_counts(
    feature_of_token: np.ndarray, starts: np.ndarray, features: int
) -> sparse.csr_matrix:
    """Square roots of counts [texts, features], with one entry for each token of the text.

    With an entry per token, not per feature, a row is in the order of its text, so that its sum is
    rounded in the same way in every batch.
    """
    text_of_token = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
    pairs = text_of_token * features + feature_of_token
    _, which, counts = np.unique(pairs, return_inverse=True, return_counts=True)
    shares = (1.0 / np.sqrt(counts)).astype(np.float32)[which]
    return sparse.csr_matrix((shares, feature_of_token, starts), (len(starts) - 1, features))
