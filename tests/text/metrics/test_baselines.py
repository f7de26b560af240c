import math

import numpy as np
import pytest

from jaxpfl.text import unigram_baseline


def plain(train, evaluation, vocab_size):
    """The definition, one token at a time."""
    counts = {token: 1 for token in range(2, vocab_size)}
    for row in train.tolist():
        for token in row[1:]:
            if token != -1:
                counts[token] += 1
    best = max(counts.keys() - {3}, key=lambda token: (counts[token], -token))
    loss = hits = number = 0
    for row in evaluation.tolist():
        for token in row[1:]:
            if token != -1:
                loss -= math.log(counts[token] / sum(counts.values()))
                hits += token == best
                number += 1
    return math.exp(loss / number), hits / number, number


def tokens(rng, rows):
    ids = rng.integers(2, 9, (rows, 7))
    ids[:, 0] = 1
    for row, length in enumerate(rng.integers(1, 8, rows)):
        ids[row, length:] = -1
    return ids.astype(np.int32)


def test_equals_a_plain_loop():
    rng = np.random.default_rng(0)
    train, evaluation = tokens(rng, 20), tokens(rng, 15)
    got = unigram_baseline(train, evaluation, vocab_size=12)
    perplexity, accuracy, count = plain(train, evaluation, 12)
    assert got.perplexity == pytest.approx(perplexity, rel=1e-12)
    assert (got.accuracy, got.count) == (pytest.approx(accuracy), count)


def test_without_training_tokens_it_is_uniform():
    evaluation = np.array([[1, 3, 2, -1]])
    got = unigram_baseline(evaluation[:0], evaluation, vocab_size=10)
    assert got.perplexity == pytest.approx(8)
    assert got.accuracy == 0.5


def test_a_tokeniser_of_subwords_has_no_special_ids():
    train = np.array([[5, 0, 0, 0, 3, 3, -1]])
    got = unigram_baseline(train, np.array([[1, 0, 0, 3]]), vocab_size=4, words=False)
    # Counts with one more each: 4, 1, 1 and 3 of 9; the first token of a row is no target.
    assert got.perplexity == pytest.approx((4 / 9 * 4 / 9 * 3 / 9) ** (-1 / 3))
    assert (got.accuracy, got.count) == (pytest.approx(2 / 3), 3)
