"""Variations of texts: what is kept, and by which key."""

import jax
import pytest

from jaxpfl.models.decoder.config import DecoderConfig
from jaxpfl.models.decoder.network import Decoder
from jaxpfl.text.generation.decoding import Decoding
from jaxpfl.text.generation.language_model import LanguageModel
from jaxpfl.text.generation.variation import Continue
from jaxpfl.text.tokenisers.base import UTF8Bytes


@pytest.fixture(scope="module")
def writer():
    config = DecoderConfig(
        "llama",
        vocab_size=257,
        hidden_size=16,
        layers=2,
        heads=2,
        inner_size=32,
        positions=128,
    )
    model = Decoder(config)
    return LanguageModel(model, model.init(jax.random.key(0)), UTF8Bytes())


def test_continue_keeps_the_beginning_and_the_length(writer):
    vary = Continue(writer, kept=0.5, tokens=16, decoding=Decoding(temperature=2.0))
    texts = ["abcdefghij", "z", "", "mmmmmmmmmmmmmmmmmmmmmmmmmmmmmm"]
    found = vary(texts, jax.random.key(0))
    assert len(found) == len(texts)
    assert found[0].startswith("abcde")
    assert found[0] != texts[0]
    # The first 16 tokens count, of which half are kept.
    assert found[3].startswith("m" * 8)
    assert not found[3].startswith("m" * 16)
    assert all(len(row) <= 16 + 2 for row in writer.tokeniser.encode(found))
    assert found == vary(texts, jax.random.key(0))
    assert found != vary(texts, jax.random.key(1))


def test_a_variation_that_would_be_empty_is_the_text_itself():
    class Silent:
        tokeniser = UTF8Bytes()

        def without_chat(self):
            return self

        def write(self, prompts, key, *, decoding):
            self.prompts, self.decoding = list(prompts), decoding
            return [[""] for _ in prompts]

        def shortened(self, texts, tokens):
            return [text[:tokens] for text in texts]

    silent = Silent()
    vary = Continue(silent, kept=0.4, tokens=8, decoding=Decoding(3, stop=("\n",)))
    # Of "€€" three bytes are kept of six at 0.5, and two, no whole letter, at 0.4.
    assert vary(["a", "hello", "€€"], jax.random.key(0)) == ["a", "he", "€€"]
    assert silent.prompts == ["", "he", ""]
    assert silent.decoding == Decoding(8, stop=("\n",))
