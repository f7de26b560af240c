import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from jaxpfl.errors import CorruptFile, InputError
from jaxpfl.models import PAD
from jaxpfl.text import Vocabulary
from jaxpfl.text.tokenisers.vocabulary import BOS, EOS, OOV, words

TEXTS = ["b a a, don't", "a c b.", "\U0001f469\u200d\U0001f4bb ok"]

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
    vocabulary = Vocabulary.from_texts(TEXTS, 8, source="here")
    assert vocabulary.tokens == ("<unused>", "<bos>", "<eos>", "<oov>", "a", "b", ",", ".")
    assert vocabulary.counts == (0, 0, 3, 5, 3, 2, 1, 1)
    assert Vocabulary.from_texts(TEXTS[::-1], 8, source="here") == vocabulary


def test_encoding_pads_cuts_and_marks():
    vocabulary = Vocabulary.from_texts(TEXTS, 8, source="here")
    got = vocabulary.encode_texts(["a zebra", "", "a b a b", "a b a b a b"], 4)
    assert got.dtype == np.int32
    assert got.tolist() == [
        [BOS, 4, OOV, EOS, PAD],
        [BOS, EOS, PAD, PAD, PAD],
        [BOS, 4, 5, 4, 5],
        [BOS, 4, 5, 4, 5],
    ]


def test_a_text_that_spells_a_special_token_is_not_one():
    vocabulary = Vocabulary.from_texts(["<eos>"] * 3, 10, source="here")
    assert OOV not in vocabulary.encode_texts(["<eos>"], 4)
    assert vocabulary.encode_texts(["<eos>"], 4)[0].tolist().count(EOS) == 1


def test_decode_inverts_encode():
    vocabulary = Vocabulary.from_texts(TEXTS, 20, source="here")
    row = vocabulary.encode_texts(["A, don't b zebra"], 6)[0]
    assert vocabulary.decode(row) == "a , don't b <oov>"
    with pytest.raises(InputError, match="ids"):
        vocabulary.decode([99])


def test_saved_vocabulary_comes_back(tmp_path):
    vocabulary = Vocabulary.from_texts(TEXTS, 20, source="here")
    vocabulary.save(tmp_path / "v.json")
    assert Vocabulary.load(tmp_path / "v.json") == vocabulary


@pytest.mark.parametrize("damage", ["", "[1]", '{"format": "other"}', "\xff"])
def test_a_damaged_file_is_refused(tmp_path, damage):
    path = tmp_path / "v.json"
    path.write_text(damage, encoding="latin-1")
    with pytest.raises(CorruptFile, match=r"v\.json"):
        Vocabulary.load(path)


def test_a_truncated_file_is_refused(tmp_path):
    path = tmp_path / "v.json"
    Vocabulary.from_texts(TEXTS, 20, source="here").save(path)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(CorruptFile):
        Vocabulary.load(path)


def test_prior_is_a_smoothed_distribution():
    vocabulary = Vocabulary.from_texts(TEXTS, 8, source="here")
    prior = np.exp(vocabulary.log_prior(12))
    assert prior.sum() == pytest.approx(1)
    np.testing.assert_allclose(prior * (15 + 12), [1, 1, 4, 6, 4, 3, 2, 2, 1, 1, 1, 1])


@pytest.mark.parametrize("size", [4, 0, 10.0, True])
def test_bad_sizes_are_refused(size):
    with pytest.raises(InputError, match="size"):
        Vocabulary.from_texts(TEXTS, size, source="here")
