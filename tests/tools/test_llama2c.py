"""stories260K continues as published, and as a float64 transcription of llama2.c computes it."""

import hashlib
import math
import struct
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

from tools import llama2c

SIZES = dict(hidden=12, inner=20, layers=2, heads=3, kv_heads=1, vocab=17, positions=9)

# Of the greedy continuation in llama2.c's doc/stories260K.md, 565 characters.
PUBLISHED_SHA256 = "30b2ffb07967932a88bfdf5e23b517a6f4cfcf7231db9e537360d3c12a4e4d10"
BEGIN = 1


class Transcription:
    """llama2.c's forward pass in float64: one token at a time, neighbouring features turned."""

    def __init__(self, path: Path):
        content = path.read_bytes()
        self.sizes = dict(zip(SIZES, struct.unpack("<7i", content[:28]), strict=True))
        values = np.frombuffer(content[28:], "<f4").astype(np.float64)
        n = self.sizes
        tied, n["vocab"] = n["vocab"] > 0, abs(n["vocab"])
        size = n["hidden"] // n["heads"]
        keys = n["kv_heads"] * size
        place = 0

        def take(*shape: int) -> np.ndarray:
            nonlocal place
            place += math.prod(shape)
            return values[place - math.prod(shape) : place].reshape(shape)

        layers, hidden, inner = n["layers"], n["hidden"], n["inner"]
        self.embedding = take(n["vocab"], hidden)
        self.attention_norm = take(layers, hidden)
        self.q = take(layers, hidden, hidden)
        self.k, self.v = take(layers, keys, hidden), take(layers, keys, hidden)
        self.o = take(layers, hidden, hidden)
        self.mlp_norm = take(layers, hidden)
        self.w1, self.w2 = take(layers, inner, hidden), take(layers, hidden, inner)
        self.w3 = take(layers, inner, hidden)
        self.norm = take(hidden)
        take(n["positions"], size // 2), take(n["positions"], size // 2)
        self.output = self.embedding if tied else take(n["vocab"], hidden)
        assert place == len(values)
        self.size = size
        self.keys = [[] for _ in range(layers)]
        self.values = [[] for _ in range(layers)]

    def step(self, token: int) -> np.ndarray:
        """Logits of the token after this one."""

        def normed(x, scale):
            return scale * x / math.sqrt(np.mean(x * x) + 1e-5)

        def turned(x, position):
            x = x.copy()
            for i in range(0, len(x), 2):
                angle = position * 10_000.0 ** (-(i % self.size) / self.size)
                a, b = x[i], x[i + 1]
                x[i] = a * math.cos(angle) - b * math.sin(angle)
                x[i + 1] = a * math.sin(angle) + b * math.cos(angle)
            return x

        x = self.embedding[token]
        position = len(self.keys[0])
        shared = self.sizes["heads"] // self.sizes["kv_heads"]
        for layer in range(self.sizes["layers"]):
            n = normed(x, self.attention_norm[layer])
            q = turned(self.q[layer] @ n, position)
            self.keys[layer].append(turned(self.k[layer] @ n, position))
            self.values[layer].append(self.v[layer] @ n)
            parts = []
            for head in range(self.sizes["heads"]):
                own = slice(head * self.size, (head + 1) * self.size)
                read = slice(head // shared * self.size, (head // shared + 1) * self.size)
                scores = [k[read] @ q[own] / math.sqrt(self.size) for k in self.keys[layer]]
                weights = np.exp(np.array(scores) - max(scores))
                weights /= weights.sum()
                parts.append(
                    sum(w * v[read] for w, v in zip(weights, self.values[layer], strict=True))
                )
            x = x + self.o[layer] @ np.concatenate(parts)
            n = normed(x, self.mlp_norm[layer])
            gate = self.w1[layer] @ n
            x = x + self.w2[layer] @ (gate / (1 + np.exp(-gate)) * (self.w3[layer] @ n))
        return self.output @ normed(x, self.norm)


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
    reference = Transcription(path)
    expected = [reference.step(token) for token in tokens[0]]
    np.testing.assert_allclose(found, expected, atol=5e-5)


@pytest.mark.long
def test_stories260k_continues_greedily_as_published(data_folder, tmp_path):
    folder = data_folder / "weights_stories260k"
    llama2c.main(folder / "stories260K.bin", folder / "tok512.bin", tmp_path)
    model, params = pretrained.load(tmp_path)
    assert (model.config.layers, model.config.heads, model.config.kv_heads) == (5, 8, 4)
    found = _greedy(model, params, BEGIN, 256)

    reference, token, expected = Transcription(folder / "stories260K.bin"), BEGIN, []
    for _ in range(256):
        token = int(reference.step(token).argmax())
        expected.append(token)
    assert found == expected

    tokeniser = hugging_face(tmp_path)
    assert (tokeniser.start, tokeniser.ends) == (1, (1, 2))
    text = tokeniser.decode(found).strip()
    assert text.startswith("Once upon a time, there was a little girl named Lily.")
    assert hashlib.sha256(text.encode()).hexdigest() == PUBLISHED_SHA256


def test_another_file_is_refused(tmp_path):
    path = _written(tmp_path / "a.bin")
    whole = path.read_bytes()
    for content, error, message in (
        (whole[:-4], CorruptFile, f"must have {len(whole)} bytes .* found {len(whole) - 4}"),
        (whole[:27], CorruptFile, "must begin with 28 bytes of sizes, found 27"),
        (struct.pack("<7i", 12, 20, 2, 5, 1, 17, 9) + whole[28:], InputError, "multiple of heads"),
    ):
        path.write_bytes(content)
        with pytest.raises(error, match=rf"a\.bin.*{message}"):
            llama2c.weights(path)
    with pytest.raises(CorruptFile, match="whole tokenizer"):
        llama2c.tokeniser(path)
