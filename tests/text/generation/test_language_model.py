"""A decoder with its tokeniser: it writes as `generate` does, and texts are cut by its tokens."""

import jax
import numpy as np
import pytest

from jaxpfl.errors import InputError
from jaxpfl.models.decoder.config import DecoderConfig
from jaxpfl.models.decoder.network import Decoder
from jaxpfl.text.generation.generate import generate
from jaxpfl.text.generation.language_model import LanguageModel
from jaxpfl.text.generation.sampling import Sampling
from jaxpfl.text.tokenisers.base import utf8_bytes


def writer(vocab_size=257):
    config = DecoderConfig(
        "llama",
        vocab_size=vocab_size,
        hidden_size=16,
        layers=2,
        heads=2,
        inner_size=32,
        positions=64,
    )
    model = Decoder(config)
    return LanguageModel(model, model.init(jax.random.key(0)), utf8_bytes())


def test_writes_what_generate_writes():
    made = writer()
    sampling, key = Sampling(6), jax.random.key(1)
    found = made.write(["ab", "c"], key, sampling=sampling, responses=2)
    expected = generate(
        made.model, made.params, made.tokeniser, ["ab", "c"], key, responses=2, sampling=sampling
    )
    assert found == expected
    assert [len(row) for row in found] == [2, 2]


def test_texts_are_cut_by_tokens_and_never_within_a_character():
    shortened = writer().shortened
    assert shortened(["abcdef", "abc", "", " ab cd"], 5) == ["abcde", "abc", "", "ab c"]
    # Two bytes a letter: the fifth byte is half of the third letter.
    assert shortened(["äöü", "€€"], 5) == ["äö", "€"]
    # What was not cut stays as it is, be it what it may.
    assert shortened(["a\ufffd"], 5) == ["a\ufffd"]


def test_other_parameters_write_otherwise():
    made = writer()
    other = made.replaced(made.model, made.model.init(jax.random.key(9)))
    key, sampling = jax.random.key(1), Sampling(12)
    assert other.tokeniser is made.tokeniser
    assert other.write(["ab"], key, sampling=sampling) != made.write(["ab"], key, sampling=sampling)
    assert np.array_equal(made.params["norm"]["scale"], writer().params["norm"]["scale"])


def test_a_tokeniser_with_more_ids_than_the_network_is_refused():
    with pytest.raises(InputError, match="token ids up to 256"):
        writer(vocab_size=256)
