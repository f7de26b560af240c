"""stories260K continues as published, and as a float64 transcription of llama2.c computes it."""

import hashlib
import math
import struct
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpfl.errors import CorruptFile, InputError
from jaxpfl.models.checkpoints import pretrained
from jaxpfl.text.tokenisers.fast import hugging_face

pytest.importorskip("safetensors", reason="needs jaxpfl[text]")
pytest.importorskip("tokenizers", reason="needs jaxpfl[text]")

from tests.refusals import refusal
from tools import llama2c

SIZES = dict(hidden=12, inner=20, layers=2, heads=3, kv_heads=1, vocab=17, positions=9)

# Of the greedy continuation in llama2.c's doc/stories260K.md, 565 characters.
PUBLISHED_SHA256 = "30b2ffb07967932a88bfdf5e23b517a6f4cfcf7231db9e537360d3c12a4e4d10"
BEGIN = 1


def transcription(path: Path, tokens: Sequence[int]) -> np.ndarray:
    """llama2.c's forward pass in float64, neighbouring features turned: logits after each token."""
    content = path.read_bytes()
    hidden, inner, layers, heads, kv_heads, vocab, positions = struct.unpack("<7i", content[:28])
    tied, vocab, size, count = vocab > 0, abs(vocab), hidden // heads, len(tokens)
    queries, keys, norm = (layers, hidden, hidden), (layers, kv_heads * size, hidden), (hidden,)
    up, down, norms = (layers, inner, hidden), (layers, hidden, inner), (layers, hidden)
    shapes = [(vocab, hidden), norms, queries, keys, keys, queries, norms, up, down, up, norm]
    shapes += [(positions, size), (vocab, hidden)][: 1 + (not tied)]
    ends = np.cumsum([math.prod(shape) for shape in shapes])
    values = np.frombuffer(content[28:], "<f4").astype(np.float64)
    assert len(values) == ends[-1]
    parts = map(np.reshape, np.split(values, ends[:-1]), shapes)
    embedding, attention_norm, q_w, k_w, v_w, o_w, mlp_norm, w1, w2, w3, last_norm, _, *own = parts

    def normed(x, scale):
        return scale * x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + 1e-5)

    angle = np.arange(count)[:, None, None] * 10_000.0 ** (-np.arange(0, size, 2) / size)

    def turned(x):
        both = (x[..., ::2] + 1j * x[..., 1::2]) * np.exp(1j * angle)
        return np.stack([both.real, both.imag], axis=-1).reshape(x.shape)

    x = embedding[np.asarray(tokens)]
    for layer in range(layers):
        n = normed(x, attention_norm[layer])
        q, k, v = ((n @ w[layer].T).reshape(count, -1, size) for w in (q_w, k_w, v_w))
        k, v = (np.repeat(each, heads // kv_heads, axis=1) for each in (turned(k), v))
        scores = np.einsum("thd,shd->hts", turned(q), k) / math.sqrt(size)
        weights = np.tril(np.exp(scores - scores.max()))
        weights /= weights.sum(axis=-1, keepdims=True)
        x = x + np.einsum("hts,shd->thd", weights, v).reshape(count, hidden) @ o_w[layer].T
        n = normed(x, mlp_norm[layer])
        gate = n @ w1[layer].T
        x = x + (gate / (1 + np.exp(-gate)) * (n @ w3[layer].T)) @ w2[layer].T
    return normed(x, last_norm) @ (own[0] if own else embedding).T


def _greedy(model, params, begin: int, count: int) -> list[int]:
    """The most probable continuation, by the cache."""

    def step(carry, _):
        token, cache = carry
        logits, cache = model.step(params, token, cache)
        token = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        return (token, cache), token

    cache = model.prefill(params, np.zeros((1, 0), np.int32), count)
    start = (jnp.full(1, begin, jnp.int32), cache)
    return jax.lax.scan(step, start, None, count)[1][:, 0].tolist()


def _written(path: Path, tied: bool = True, **changed: int) -> Path:
    sizes = SIZES | changed
    rng = np.random.default_rng(0)
    hidden, inner, layers = sizes["hidden"], sizes["inner"], sizes["layers"]
    size = hidden // sizes["heads"]
    keys, vocab = sizes["kv_heads"] * size, sizes["vocab"]
    count = vocab * hidden * (1 if tied else 2) + hidden + sizes["positions"] * size
    count += layers * (2 * hidden + 2 * hidden**2 + 2 * keys * hidden + 3 * hidden * inner)
    values = rng.normal(0, 0.5, count).astype("<f4")
    header = struct.pack("<7i", *(sizes | {"vocab": vocab if tied else -vocab}).values())
    path.write_bytes(header + values.tobytes())
    return path


@pytest.mark.parametrize("tied", [True, False])
def test_logits_equal_the_transcription(tmp_path, tied):
    path = _written(tmp_path / "a.bin", tied)
    model, params = llama2c.weights(path)
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    assert jax.tree.map(np.shape, params) == jax.tree.map(np.shape, shapes)
    tokens = np.array([[1, 5, 16, 0, 3, 3, 9]], np.int32)
    found = model.logits(params, model.hidden(params, tokens))[0]
    np.testing.assert_allclose(found, transcription(path, tokens[0]), atol=5e-5)


@pytest.mark.long
def test_stories260k_continues_greedily_as_published(data_folder, tmp_path):
    folder = data_folder / "weights_stories260k"
    llama2c.main(folder / "stories260K.bin", folder / "tok512.bin", tmp_path)
    model, params = pretrained.load(tmp_path)
    assert (model.config.layers, model.config.heads, model.config.kv_heads) == (5, 8, 4)
    found = _greedy(model, params, BEGIN, 256)
    logits = transcription(folder / "stories260K.bin", [BEGIN, *found[:-1]])
    assert found == logits.argmax(axis=-1).tolist()

    tokeniser = hugging_face(tmp_path)
    assert (tokeniser.start, tokeniser.ends) == (1, (1, 2))
    text = tokeniser.decode(found).strip()
    assert text.startswith("Once upon a time, there was a little girl named Lily.")
    assert hashlib.sha256(text.encode()).hexdigest() == PUBLISHED_SHA256


def test_another_file_is_refused(tmp_path):
    path = _written(tmp_path / "a.bin")
    whole = path.read_bytes()
    sizes = struct.pack("<7i", 12, 20, 2, 5, 1, 17, 9)
    for content, error, words in (
        (whole[:-4], CorruptFile, f"must have {len(whole)} bytes found {len(whole) - 4}"),
        (whole[:27], CorruptFile, "must begin with 28 bytes of sizes, found 27"),
        (sizes + whole[28:], InputError, "multiple of heads"),
    ):
        path.write_bytes(content)
        refusal(lambda: llama2c.weights(path), f"a.bin {words}", error)
    refusal(lambda: llama2c.tokeniser(path), "whole tokenizer", CorruptFile)
