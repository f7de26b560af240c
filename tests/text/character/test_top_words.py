"""Against enumeration in float64, one word at a time."""

import itertools
import math

import jax
import numpy as np
import pytest

from jaxpfl.text import char_lm
from jaxpfl.text.character.top_words import top_words
from jaxpfl.text.character.words import CHARACTER_IDS, END, START, SYMBOLS, encode_words
from jaxpfl.text.metrics.prediction import log_probabilities
from tests.models.test_recurrent import reference_logits
from tests.trees import drawn

# 0xc3 begins a character of two bytes and 0xa9 ends one; 0xff is in no UTF-8.
ALPHABET = [ord("a"), ord("b"), ord(" "), 0xC3, 0xA9, 0xFF]
CAP = 3
MODEL = char_lm(embedding=6, hidden=10, projection=7, layers=2)


@pytest.fixture(scope="module")
def params():
    """Random, with peaks, and as good as no other bytes."""
    params = drawn(MODEL, 3, 0.5)
    bias = np.full(SYMBOLS, -1e4, np.float32)
    bias[[*ALPHABET, END]] = [0.3, 0.1, -0.4, 0.2, 0.0, -1.0, 0.5]
    # Large where nothing may be drawn: a missing mask would show.
    bias[[0, START]] = 9.0
    return params | {"output_bias": jax.numpy.asarray(bias)}


def scored(params, rows):
    after_start, never = np.insert(rows, 0, START, axis=1), CHARACTER_IDS.banned(SYMBOLS)
    return log_probabilities(MODEL, params, after_start, never)


def next_probabilities(params, prefix):
    """Float64 probabilities of what follows start and `prefix`."""
    logits = reference_logits(MODEL, params, [START, *prefix])[-1]
    logits[[0, START]] = -np.inf
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


@pytest.fixture(scope="module")
def enumerated(params):
    """Word -> probability, of all words of at most CAP bytes, the empty one too."""
    found = {}
    reach: dict[tuple[int, ...], float] = {(): 1.0}
    for length in range(CAP + 1):
        for prefix in itertools.product(ALPHABET, repeat=length):
            after = next_probabilities(params, prefix)
            found[bytes(prefix)] = reach[prefix] * after[END]
            for symbol in ALPHABET:
                reach[(*prefix, symbol)] = reach[prefix] * after[symbol]
    # What is left are sequences that go on.
    unfinished = math.fsum(p for prefix, p in reach.items() if len(prefix) == CAP + 1)
    assert math.isclose(math.fsum(found.values()) + unfinished, 1, rel_tol=1e-9)
    return found


DRAWS = 20_000


@pytest.fixture(scope="module")
def top(params):
    return top_words(MODEL, params, jax.random.key(1), number=1000, draws=DRAWS, max_bytes=CAP)


def test_the_most_probable_words_are_those_of_enumeration(top, enumerated):
    """The chance that one of them was not drawn is below 1e-6."""
    expected = sorted(enumerated, key=lambda word: -enumerated[word])
    expected.remove(b"")
    assert (1 - enumerated[expected[24]]) ** DRAWS < 1e-8
    assert [word.raw for word in top.words[:25]] == expected[:25]
    for word in top.words:
        assert math.isclose(word.probability, enumerated[word.raw], rel_tol=2e-5)


def test_words_are_distinct_and_their_probabilities_sum_to_less_than_one(top, enumerated):
    assert len({word.raw for word in top.words}) == len(top.words)
    assert all(1 <= len(word.raw) <= CAP for word in top.words)
    assert math.isclose(top.covered, math.fsum(word.probability for word in top.words))
    assert top.covered <= math.fsum(enumerated.values()) - enumerated[b""] + 1e-5
    assert 0.5 * DRAWS < sum(word.draws for word in top.words) < DRAWS
    logs = [word.log_probability for word in top.words]
    assert logs == sorted(logs, reverse=True)


def test_words_are_drawn_as_often_as_they_are_probable(top, enumerated):
    """Chi-squared; a third of a word's probability more would be seen."""
    frequent = {word: p * DRAWS for word, p in enumerated.items() if p * DRAWS > 20 and word}
    drawn = {word.raw: word.draws for word in top.words}
    assert len(frequent) > 20
    statistic = sum((drawn[word] - mean) ** 2 / mean for word, mean in frequent.items())
    # Mean n, standard deviation sqrt(2 n) in the limit: five of them.
    assert statistic < len(frequent) + 5 * math.sqrt(2 * len(frequent))


def test_excluded_words_make_room_for_the_next(params):
    key = jax.random.key(0)
    top = top_words(MODEL, params, key, number=8, draws=1_000, max_bytes=CAP)
    excluding = {top.words[0].word, top.words[2].word}
    rest = top_words(MODEL, params, key, number=6, draws=1_000, max_bytes=CAP, excluding=excluding)
    assert top == top_words(MODEL, params, key, number=8, draws=1_000, max_bytes=CAP)
    assert list(rest.words) == [word for word in top.words if word.word not in excluding]
    assert rest.covered == top.covered


def test_invalid_utf8_is_a_word_that_shows_its_bytes(top):
    shown = {word.raw: word.word for word in top.words}
    assert len(set(shown.values())) == len(shown)
    for part in ("\\xff", "\u00e9", " "):
        assert any(part in word for word in shown.values())


def test_scores_of_given_sequences(params, enumerated):
    """An unfinished sequence is scored as far as it goes, and what is never drawn at -inf."""
    rows = encode_words(["a", "ab", "ba\u00e9"], 4)[:, 1:]
    got = scored(params, rows)
    for value, word in zip(got[:2], (b"a", b"ab"), strict=True):
        assert math.isclose(value, math.log(enumerated[word]), rel_tol=1e-5)
    prefix = next_probabilities(params, ())[ord("a")]
    unfinished, banned = scored(params, np.array([[ord("a"), -1], [START, END]], np.int32))
    assert math.isclose(unfinished, math.log(prefix), rel_tol=1e-5)
    assert banned == -math.inf
    assert scored(params, np.zeros((0, 3), np.int32)).shape == (0,)


def test_scores_do_not_depend_on_the_batch(params):
    """More rows than one batch holds, and the last one not full."""
    rows = np.random.default_rng(0).choice([*ALPHABET, END], (1500, 4)).astype(np.int32)
    many = scored(params, rows)
    np.testing.assert_allclose(scored(params, rows[1490:]), many[1490:])


def test_a_model_that_never_ends_a_word_has_no_words(params):
    endless = np.asarray(params["output_bias"]).copy()
    endless[END] = -1e4
    endless = params | {"output_bias": jax.numpy.asarray(endless)}
    top = top_words(MODEL, endless, jax.random.key(0), draws=10, max_bytes=CAP)
    assert (top.words, top.covered) == ((), 0.0)
