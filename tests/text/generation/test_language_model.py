"""A language model writes texts: where they end, what they begin with, and how they are cut."""

from functools import lru_cache

import jax
import numpy as np
import pytest

from jaxpfl.models.decoder.config import DecoderConfig
from jaxpfl.models.decoder.network import Decoder
from jaxpfl.text import Decoding, sample
from jaxpfl.text.generation.decoding import cut
from jaxpfl.text.generation.language_model import LanguageModel, prompt_ids
from jaxpfl.text.tokenisers.base import Tokeniser, pad
from tests.text.tokenisers.utf8_bytes import UTF8Bytes
from tests.trees import drawn

BYTES = UTF8Bytes()
MODEL = Decoder(
    DecoderConfig("gpt2", vocab_size=260, hidden_size=16, layers=1, heads=2, positions=64)
)


class Few(Tokeniser):
    """Seven pieces, so that stop strings occur, across pieces and inside them."""

    name = "few"
    vocab_size = 9
    end_of_text = 0
    ends = (0, 7)
    start = None
    pieces = (b"", b"a", b"b", b"ab", b"ba", b"\xc3", b"\xa9", b"</s>", b"aab")

    def encode(self, texts):
        return [np.array([self.pieces.index(c.encode()) for c in t], np.int32) for t in texts]

    def decode(self, ids):
        return b"".join(self.pieces[i] for i in ids if i >= 0).decode("utf-8", "replace")

    def token_bytes(self):
        return self.pieces


class NoEnds(Few):
    ends = ()


SMALL = Decoder(
    DecoderConfig(
        "llama", 9, hidden_size=8, layers=1, heads=2, positions=64, initializer_range=0.2, tied=True
    )
)


params_of = lru_cache(lambda model: jax.device_put(drawn(model, 0)))


def generated(stop=(), **changed):
    writer = LanguageModel(SMALL, params_of(SMALL), Few(), **changed)
    decoding = Decoding(16, stop=stop)
    return writer.write(["", "a", "bab"], jax.random.key(3), responses=20, decoding=decoding).texts


@pytest.mark.long
def test_a_stop_string_cuts_exactly_what_would_have_been_written():
    """The same requests with and without: nothing else changes, nothing ends early or late."""
    whole = generated()
    for stop in (("ba",), ("aaba", "bb"), ("é", "abab", "aab")):
        stopped = generated(stop)
        expected = [
            [
                None if "\ufffd" in t else cut(t.encode(), stop).decode("utf-8", "replace")
                for t in texts
            ]
            for texts in whole
        ]
        count = 0
        for texts, wanted, full in zip(stopped, expected, whole, strict=True):
            for text, want, before in zip(texts, wanted, full, strict=True):
                assert not any(part in text for part in stop)
                assert before.startswith(text)
                if want is not None:
                    assert text == want
                    count += text != before
        assert count > 0


def test_the_device_ends_with_the_token_that_completes_a_stop_string():
    prompts = pad(Few().encode(["a", "bab"]), 3)
    stop = ("aaba", "bb", "é")
    rows = sample(
        SMALL,
        params_of(SMALL),
        prompts,
        jax.random.key(3),
        decoding=Decoding(16, stop=stop),
        responses=20,
        tokeniser=NoEnds(),
        slots=8,
    )
    completed = 0
    for row in rows.reshape(-1, 16).tolist():
        real = [token for token in row if token >= 0]
        assert not any(part in Few().decode(real[:-1]) for part in stop)
        holds = any(part in Few().decode(real) for part in stop)
        assert holds == (len(real) < 16) or len(real) == 16
        completed += holds
    assert completed > 10


def test_which_texts_ended_by_themselves():
    """By what was drawn: the same text, tokenised again, may have fewer tokens."""
    end = 256
    rows = {
        (97, 98, 99): ("abc", False),
        (97, -1, -1): ("a", True),
        (97, end, -1): ("a", True),
        (97, 98, end): ("ab", True),
        (97, 98, 10): ("ab", True),
        (97, 32, 32): ("a  ", False),
    }
    drawn_PxJxT = np.array(list(rows), np.int32).reshape(2, 3, 3)
    found = LanguageModel(MODEL, {}, BYTES).read(drawn_PxJxT, ("\n",))
    assert [text for texts in found.texts for text in texts] == [text for text, _ in rows.values()]
    assert found.ended_PxJ.reshape(-1).tolist() == [ended for _, ended in rows.values()]


def test_a_start_token_goes_before_every_prompt_and_an_empty_one_is_never_empty():
    class Started(Few):
        start = 7

    assert [ids.tolist() for ids in prompt_ids(Started(), ["", "ab"])] == [[7], [7, 1, 2]]
    # Without a start token it is the end of the text before.
    assert [ids.tolist() for ids in prompt_ids(BYTES, ["", "a", "bc"])] == [[256], [97], [98, 99]]


def test_texts_are_cut_by_tokens_and_never_within_a_character():
    shortened = LanguageModel(MODEL, {}, BYTES).shortened
    assert shortened(["abcdef", "abc", "", " ab cd"], 5) == ["abcde", "abc", "", "ab c"]
    # Two bytes a letter: the fifth byte is half of the third letter.
    assert shortened(["äöü", "€€"], 5) == ["äö", "€"]
    # What was not cut stays as it is, be it what it may.
    assert shortened(["a\ufffd"], 5) == ["a\ufffd"]


def test_other_parameters_write_otherwise():
    made = LanguageModel(SMALL, params_of(SMALL), Few())
    other = made.replaced(SMALL, jax.device_put(drawn(SMALL, 9)))
    key, decoding = jax.random.key(1), Decoding(16)
    assert other.tokeniser is made.tokeniser
    assert other.digest() != made.digest() == LanguageModel(SMALL, made.params, Few()).digest()
    found = other.write(["ab"], key, decoding=decoding, responses=2).texts
    assert [len(row) for row in found] == [2]
    assert found != made.write(["ab"], key, decoding=decoding, responses=2).texts


def test_nothing_is_written_of_no_prompts():
    writer = LanguageModel(MODEL, {}, BYTES)
    assert writer.write([], jax.random.key(0), decoding=Decoding(5)).texts == []
