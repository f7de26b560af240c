"""Hashed n-grams: against a plain loop, against fixed values, and what must not matter."""

import math
import re
import unicodedata
import zlib
from collections import Counter

import numpy as np
import pyarrow as pa
from sklearn.utils import murmurhash3_32

from jaxpfl.text.embed import hashed as module
from jaxpfl.text.embed.hashed import HashedNgrams

SENTENCES = [
    "How do I mount a USB stick?",
    "how do i mount a usb stick ?",
    "The cat sat on the mat, and the dog on the cat.",
    "",
    " \t\n",
    "ﬁne ＡＢＣ 123_x",
    "日本語のテキスト 👩‍🚀 naïve",
    "a",
    "a a a a",
    "x" * 100,
    "NUL \0 and lone \ud83d surrogate",
]


def _signs(dimension: int) -> np.ndarray:
    """Bit k of the Philox stream, from the lowest byte's highest bit: 1 means +1."""
    words = np.random.Philox(key=20_240_613).random_raw(-(-(2**15) * dimension // 64))
    content = b"".join(int(word).to_bytes(8, "little") for word in words)
    bits = np.array([byte >> shift & 1 for byte in content for shift in range(7, -1, -1)])
    return 2.0 * bits[: 2**15 * dimension].reshape(2**15, dimension) - 1.0


def _bucket(feature: str) -> tuple[int, int]:
    number = murmurhash3_32(feature, seed=0)
    return abs(number) % 2**15, 1 if number >= 0 else -1


def _reference(text: str, signs: np.ndarray) -> np.ndarray:
    text = unicodedata.normalize("NFKC", text).lower()
    words = re.findall(r"\w{1,32}|[^\w\s]{1,32}", text)
    words = [word.replace("\ud83d", "\ufffd") for word in words]
    vector = np.zeros(signs.shape[1])
    for word, count in Counter(words).items():
        bucket, sign = _bucket("word " + word)
        vector += math.sqrt(count) * sign * signs[bucket]
        marked = "<" + word + ">"
        grams = [marked[i : i + n] for n in (3, 4, 5) for i in range(len(marked) - n + 1)]
        for gram in grams:
            bucket, sign = _bucket(gram)
            vector += math.sqrt(count / len(grams)) * sign * signs[bucket]
    pairs: Counter[int] = Counter()
    for left, right in zip(words, words[1:], strict=False):
        mixed = zlib.crc32(left.encode()) * 0x9E3779B97F4A7C15
        mixed = (mixed + zlib.crc32(right.encode()) * 0xC2B2AE3D27D4EB4F) % 2**64
        mixed = (mixed ^ (mixed >> 29)) * 0xBF58476D1CE4E5B9 % 2**64
        pairs[mixed >> 49] += 1
    for bucket, count in pairs.items():
        vector += 0.7 * math.sqrt(count) * signs[bucket]
    norm = np.linalg.norm(vector)
    return vector / norm if norm else vector


def test_vectors_are_those_of_a_plain_loop():
    signs = _signs(24)
    expected = np.stack([_reference(text, signs) for text in SENTENCES])
    found = HashedNgrams(24)(SENTENCES)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_values_are_fixed():
    """A change of any of them makes every saved embedding, and every reported distance, void.

    So would Python's own hash of strings, which differs between processes.
    """
    expected = [
        [0.0135174, 0.0001428, 0.0632054, 0.0028960],
        [-0.1017464, 0.0307486, 0.0035550, -0.0643956],
    ]
    found = HashedNgrams()(["How do I mount a USB stick?", "naïve 日本語"])
    assert HashedNgrams().name == "hashed:256"
    np.testing.assert_allclose(found[:, [0, 1, 100, 255]], expected, atol=1e-6)


def test_a_vector_does_not_depend_on_the_batch(monkeypatch):
    embedder = HashedNgrams(64)
    together = embedder(SENTENCES)
    for row, text in enumerate(SENTENCES):
        np.testing.assert_array_equal(embedder([text])[0], together[row])
    np.testing.assert_array_equal(embedder(SENTENCES[::-1] * 2), np.tile(together[::-1], (2, 1)))
    monkeypatch.setattr(module, "_BLOCK_TEXTS", 3)
    np.testing.assert_array_equal(embedder(SENTENCES), together)
    monkeypatch.setattr(module, "_BLOCK_CHARACTERS", 20)
    np.testing.assert_array_equal(embedder(SENTENCES), together)


def test_any_sequence_of_strings_is_taken():
    embedder = HashedNgrams(16)
    expected = embedder(["x y", "z"])
    for examples in (("x y", "z"), np.array(["x y", "z"]), pa.array(["x y", "z"])):
        np.testing.assert_array_equal(embedder(examples), expected)
