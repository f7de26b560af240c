"""Hashed n-grams under a random projection: an embedding that needs no weights."""

import re
import unicodedata
from typing import Any

import numpy as np
from scipy import sparse

from jaxpfl import checks
from jaxpfl.text.embed.base import as_texts

_BUCKETS = 2**15
_SEED = 20240613
_WORD = re.compile(r"\w+|[^\w\s]+")


class HashedNgrams:
    """Words, pairs of words and the letters inside words, hashed and projected."""

    column = "text"

    def __init__(self, dimension: int = 256) -> None:
        self.dimension = checks.positive_int("dimension", dimension)
        self.name = f"hashed:{self.dimension}"

    def __call__(self, examples: Any) -> np.ndarray:
        from sklearn.feature_extraction import FeatureHasher

        texts = as_texts(examples)
        if not texts:
            return np.zeros((0, self.dimension), np.float32)
        words = [_WORD.findall(unicodedata.normalize("NFKC", text).lower()) for text in texts]
        hashed: sparse.csr_matrix = FeatureHasher(_BUCKETS, input_type="string").transform(words)
        generator = np.random.Generator(np.random.Philox(key=_SEED))
        projection = generator.standard_normal((_BUCKETS, self.dimension), np.float32)
        vectors = hashed.astype(np.float32) @ projection
        norms = np.linalg.norm(vectors, axis=1, keepdims=True)
        return vectors / np.where(norms > 0, norms, 1)
