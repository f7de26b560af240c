"""Accuracy and perplexity count every real target once; the released evaluation is inflated."""

import dataclasses
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from jaxpfl.errors import InputError
from jaxpfl.models.base import masked_loss
from jaxpfl.models.decoder.config import DecoderConfig
from jaxpfl.models.decoder.network import Decoder
from jaxpfl.text.metrics.prediction import evaluate, popri_released_evaluation, tokenised_twice
from jaxpfl.text.tokenisers.open import gpt2, one_per_row, utf8_bytes

MODEL = Decoder(DecoderConfig("gpt2", 23, 16, 1, 2, positions=12, initializer_range=0.5))


@pytest.fixture(scope="module")
def params() -> Any:
    return MODEL.init(jax.random.key(0))


def _tokens(rows: int = 11) -> np.ndarray:
    generator = np.random.default_rng(0)
    tokens = generator.integers(0, 23, (rows, 12)).astype(np.int32)
    # Few lengths: the reference compiles each.
    for row, length in enumerate(generator.choice([0, 1, 2, 5, 12], rows)):
        tokens[row, length:] = -1
    return tokens


def test_it_is_the_mean_over_real_targets(params):
    tokens = _tokens()
    hits, losses = [], []
    logits_of = jax.jit(lambda params, row: MODEL.logits(params, MODEL.hidden(params, row)))
    for row in tokens:
        row = row[row >= 0]
        if len(row) < 2:
            continue
        logits = np.asarray(logits_of(params, row[None])[0, :-1], np.float64)
        hits += list(np.argmax(logits, axis=1) == row[1:])
        log_sum = np.log(np.sum(np.exp(logits), axis=1))
        losses += list(log_sum - logits[np.arange(len(row) - 1), row[1:]])
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    for batch_size, devices in ((4, None), (3, mesh)):
        found = evaluate(MODEL, params, tokens, batch_size=batch_size, mesh=devices)
        assert found["count"] == len(hits)
        assert found["accuracy"] == pytest.approx(np.mean(hits))
        assert found["loss"] == pytest.approx(np.mean(losses), rel=1e-5)
        assert found["perplexity"] == pytest.approx(np.exp(np.mean(losses)), rel=1e-5)


def test_no_targets_are_nan_and_no_texts_an_error(params):
    found = evaluate(MODEL, params, np.array([[3, -1]], np.int32))
    assert np.isnan(found["accuracy"])
    assert found["count"] == 0
    with pytest.raises(InputError, match="no texts to evaluate on"):
        evaluate(MODEL, params, np.zeros((0, 4), np.int32))
    with pytest.raises(InputError, match="int32 with two axes, found int64"):
        evaluate(MODEL, params, np.zeros((1, 4), np.int64))
    with pytest.raises(InputError, match="batch_size must be at least 1"):
        evaluate(MODEL, params, _tokens(), batch_size=0)


@dataclasses.dataclass(frozen=True)
class Bigram:
    """Predicts by counts of pairs of tokens, which are the parameters."""

    vocab_size: int
    name: str = "bigram"
    columns: tuple[str, ...] = ("tokens",)

    def init(self, key: jax.Array) -> Any:
        raise NotImplementedError

    def loss(self, params: Any, batch: Any, mask: jax.Array) -> Any:
        tokens = jnp.where(mask[:, None], batch["tokens"], -1)
        logits = jnp.log(params[jnp.maximum(tokens[:, :-1], 0)] + 0.1)
        targets = tokens[:, 1:].reshape(-1)
        return masked_loss(logits.reshape(len(targets), -1), targets, targets >= 0)

    def evaluate(self, params: Any, batch: Any, mask: jax.Array) -> Any:
        return self.loss(params, batch, mask)[1]


def _counts(rows: np.ndarray, vocab_size: int) -> np.ndarray:
    counts = np.zeros((vocab_size, vocab_size), np.float32)
    real = rows[:, 1:] >= 0
    np.add.at(counts, (rows[:, :-1][real], rows[:, 1:][real]), 1)
    return counts


def _texts(seed: int) -> list[str]:
    """Words that nothing announces, five letters of which nothing announces any."""
    generator = np.random.default_rng(seed)
    return [
        " ".join("".join(generator.choice(list("abcdefgh"), 2)) for _ in range(8))
        for _ in range(300)
    ]


def test_the_released_evaluation_is_inflated():
    """One model trained and tested on tokens, one on tokens of tokens, of the same texts."""
    tokeniser = utf8_bytes()
    train, test = _texts(0), _texts(1)
    model = Bigram(tokeniser.vocab_size)
    length = 64
    once = _counts(one_per_row(tokeniser.encode(train), length, tokeniser.end_of_text), 257)
    plain = one_per_row(tokeniser.encode(test), length, tokeniser.end_of_text)
    honest = evaluate(model, jnp.asarray(once), plain, batch_size=50)
    twice = jnp.asarray(_counts(tokenised_twice(tokeniser, train, length)[0], 257))
    found = popri_released_evaluation(model, twice, tokeniser, test, length=length, batch_size=50)
    # Of bytes: two of three are one of eight letters, the third a space.
    assert 0.3 < honest["accuracy"] < 0.5
    assert found.accuracy > honest["accuracy"] + 0.2
    assert found.perplexity < 0.8 * honest["perplexity"]
    assert 0.5 < found.artefacts < 0.7
    assert "Inflated" in found.note


def test_bytes_tokenised_twice():
    """A letter becomes itself after a space; a space the two bytes of the sign for it."""
    tokeniser = utf8_bytes()
    end = tokeniser.end_of_text
    rows, marks = tokenised_twice(tokeniser, ["a b"], 12)
    sign = "\u0120".encode()
    assert list(rows[0]) == [32, end, 32, 97, 32, *sign, 32, 98, 32, end, -1]
    assert list(marks[0]) == [1, 0, 1, 0, 1, 1, 0, 1, 0, 1, 0, 0]
    cut, _ = tokenised_twice(tokeniser, ["a b"], 4)
    assert list(cut[0]) == [32, end, 32, 97]


def test_tokenised_twice_is_what_the_released_code_made(data_folder):
    """Made by GPT2Tokenizer of transformers 4.50.3, which the released code pins: `tokenize`, then
    `encode_plus` with `is_split_into_words` and a bound of 64."""
    pytest.importorskip("tokenizers")
    if not (data_folder / "tokenizer_gpt2").is_dir():
        pytest.skip("GPT-2's tokeniser is not at hand")
    made = json.loads(
        "[220,50256,18435,34754,254,6894,837,34754,254,2616,5746,5196,303,34754,254,34754,254,66,"
        "1878,5746,16224,34754,232,34754,232,632,705,82,34754,254,1238,1731,5145,220,50256]"
    )
    text = "Hello world, naïve  café\n\nIt's 2024!"
    rows, _ = tokenised_twice(gpt2(data_folder / "tokenizer_gpt2"), [text], 64)
    assert list(rows[0][rows[0] >= 0]) == made


def test_a_tokeniser_that_does_not_fit_is_named(params):
    with pytest.raises(InputError, match="vocab_size is 23"):
        popri_released_evaluation(MODEL, params, utf8_bytes(), ["a"], length=12)
