import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import jaxpfl.data
from jaxpfl.errors import CorruptFile
from jaxpfl.models import PAD
from jaxpfl.text import Vocabulary
from jaxpfl.text.tokenisers.vocabulary import BOS, EOS, OOV, with_words, word_lists, words
from tests.refusals import refusal

TEXTS = ["b a a, don't", "a c b.", "\U0001f469\u200d\U0001f4bb ok"]
EIGHT = Vocabulary.from_texts(TEXTS, 8, source="here")

POLICY = [
    # text, tokens
    ("Don't PANIC: it's 3.14", ["don't", "panic", ":", "it's", "3", ".", "14"]),
    ("'quoted' x''y", ["'", "quoted", "'", "x", "'", "'", "y"]),
    ("a\0b\tc\r\nd\x7fe", ["a", "b", "c", "d", "e"]),
    ("", []),
    (" \n\0", []),
    # A joined emoji gives its parts; the joiner and the variation selector are dropped.
    ("\U0001f469\u200d\U0001f4bb\u2764\ufe0f", ["\U0001f469", "\U0001f4bb", "\u2764"]),
    ("a\ud800b \udfff", ["a", "\ufffd", "b", "\ufffd"]),
    # Composed and decomposed forms are one word.
    ("CAF\u00c9 cafe\u0301", ["caf\u00e9", "caf\u00e9"]),
    ("stra\u00dfe \u0130x", ["stra\u00dfe", "\u0130x"]),
    # A vowel sign belongs to its word.
    ("\u0928\u092e\u0938\u094d\u0924\u0947 ok", ["\u0928\u092e\u0938\u094d\u0924\u0947", "ok"]),
    ("a\u00a0b\ufeffc\u2028d", ["a", "bc", "d"]),
    ("snake_case <tag>", ["snake", "_", "case", "<", "tag", ">"]),
]


@pytest.mark.parametrize(("text", "expected"), POLICY)
def test_stated_policy(text, expected):
    """TRUST 8: one stated reading of every code point."""
    assert list(words(text)) == expected


@given(st.text(st.characters(codec=None)))
@example("\ud83d\ude00'\ufe0fx")
def test_any_text_gives_clean_tokens(text):
    """TRUST 8: no text fails, and no token is empty or holds a separator or a surrogate."""
    for word in words(text):
        assert word
        assert not any(c.isspace() or ord(c) < 32 or "\ud800" <= c <= "\udfff" for c in word)
        assert list(words(word)) == [word]


@given(st.text(st.characters(max_codepoint=127)))
def test_plain_text_takes_no_other_path(text):
    """The short way for ASCII gives what the general way gives."""
    assert list(words(text)) == list(words(text + " \u00e9"))[:-1]


def test_a_giant_line_is_cut():
    """TRUST 8: a line of 1 MB costs a page."""
    assert sum(1 for _ in words("ab " * 400_000)) == 65_536 // 3 + 1


def test_ids_are_by_count_then_code_point():
    assert EIGHT.tokens == ("<unused>", "<bos>", "<eos>", "<oov>", "a", "b", ",", ".")
    assert EIGHT.counts == (0, 0, 3, 5, 3, 2, 1, 1)
    assert Vocabulary.from_texts(TEXTS[::-1], 8, source="here") == EIGHT


def _encoded(vocabulary, texts, sequence_length):
    population = jaxpfl.data.from_clients({"a": {"text": texts}})
    return vocabulary.encode(population, sequence_length).columns["tokens"]


def test_encoding_pads_cuts_and_marks():
    got = _encoded(EIGHT, ["a zebra", "", "a b a b", "a b a b a b"], 4)
    assert got.dtype == np.int32
    assert got.tolist() == [
        [BOS, 4, OOV, EOS, PAD],
        [BOS, EOS, PAD, PAD, PAD],
        [BOS, 4, 5, 4, 5],
        [BOS, 4, 5, 4, 5],
    ]


def test_a_text_that_spells_a_special_token_is_not_one():
    vocabulary = Vocabulary.from_texts(["<eos>"] * 3, 10, source="here")
    row = _encoded(vocabulary, ["<eos>"], 4)[0].tolist()
    assert OOV not in row
    assert row.count(EOS) == 1


def test_decode_inverts_encode():
    vocabulary = Vocabulary.from_texts(TEXTS, 20, source="here")
    row = _encoded(vocabulary, ["A, don't b zebra"], 6)[0]
    assert vocabulary.decode(row) == "a , don't b <oov>"
    refusal(lambda: vocabulary.decode([99]), "ids")


def test_a_saved_vocabulary_comes_back_and_a_damaged_file_is_refused(tmp_path):
    path, vocabulary = tmp_path / "v.json", Vocabulary.from_texts(TEXTS, 20, source="here")
    vocabulary.save(path)
    assert Vocabulary.load(path) == vocabulary
    whole = path.read_bytes()
    other = whole.replace(b'"splitting": "words"', b'"splitting": "syllables"')
    assert other != whole
    for content in (b"", b"[1]", b'{"format": "other"}', b"\xff", whole[:-20], other):
        path.write_bytes(content)
        refusal(lambda: Vocabulary.load(path), "v.json", CorruptFile)


def test_prior_is_a_smoothed_distribution():
    prior = np.exp(EIGHT.log_prior(12))
    assert prior.sum() == pytest.approx(1)
    np.testing.assert_allclose(prior * (15 + 12), [1, 1, 4, 6, 4, 3, 2, 2, 1, 1, 1, 1])


CLIENTS = {"ada": {"text": ["a b", "zebra"]}, "bob": {"text": ["b a b"]}}


def test_a_population_gives_its_vocabulary_and_is_encoded_client_by_client():
    population = jaxpfl.data.from_clients(CLIENTS)
    vocabulary = Vocabulary.from_public(population, 6)
    assert vocabulary.tokens[4:] == ("b", "a")
    assert vocabulary.source == population.name
    encoded = vocabulary.encode(population, sequence_length=4)
    np.testing.assert_array_equal(encoded.offsets, population.offsets)
    assert list(encoded.columns) == ["tokens"]
    assert np.asarray(encoded.examples(1)["tokens"]).tolist() == [[1, 4, 5, 4, 2]]


def test_words_are_the_tokens_of_the_text():
    population = jaxpfl.data.from_clients(
        {
            "ada": {"text": ["I have\x1f it, caf\u00e9", ""], "y": np.arange(2)},
            "bob": {"text": ["\0"], "y": np.arange(1)},
        }
    )
    got = with_words(population)
    assert got.columns["words"].to_pylist() == ["i\x1fhave\x1fit\x1f,\x1fcaf\u00e9", "", ""]
    assert got.columns["y"].tolist() == [0, 1, 0]
    assert got.fingerprint == population.fingerprint
    assert [list(row) for row in word_lists(got)] == [list(row) for row in word_lists(population)]


def test_words_are_encoded_instead_of_the_text():
    """A token with a space in it is looked up whole: it is out of the vocabulary."""
    population = jaxpfl.data.from_clients(
        {"ada": {"text": ["a b", "b"]}, "bob": {"text": ["b a b"]}}
    )
    vocabulary = Vocabulary.from_public(population, 6)
    joined = with_words(population).columns["words"].to_pylist()
    changed = population.with_columns(
        {
            "text": population.columns["text"],
            "words": ["a b", joined[1], "\x1f".join(["b a", "", "b"])],
        }
    )
    got = vocabulary.encode(changed, 3)
    assert got.columns["tokens"].tolist() == [[1, 3, 2, -1], [1, 4, 2, -1], [1, 3, 4, 2]]
    assert with_words(changed).columns["words"].to_pylist()[0] == "a b"
    assert "a b" not in vocabulary
    assert "a" in vocabulary
    assert "<oov>" not in vocabulary
    assert vocabulary.encode(with_words(population), 3).columns["tokens"].tolist() == (
        vocabulary.encode(population, 3).columns["tokens"].tolist()
    )
