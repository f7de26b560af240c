"""Published models that a config section names compute what transformers computes."""

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpfl.experiments.central.published import PublishedModel
from jaxpfl.experiments.config.published import PublishedGeneratorConfig, PublishedModelConfig
from tests.published_models import write_decoder, write_encoder, write_tokeniser
from tests.refusals import refusal
from tests.trees import assert_same

tokenizers = pytest.importorskip("tokenizers", reason="needs jaxpfl[text]")

GOLDEN = Path(__file__).parents[2] / "golden" / "transformers"


@pytest.mark.parametrize("kind", ["gpt2", "llama_untied", "qwen2", "roberta_causal"])
def test_a_section_gives_the_logits_of_transformers(kind, tmp_path):
    folder = Path(shutil.copytree(GOLDEN / kind, tmp_path / kind))
    size = json.loads((folder / "config.json").read_text())["vocab_size"]
    words = {f"w{number}": number for number in range(size)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    tokenizer.decoder = tokenizers.decoders.WordPiece()
    tokenizer.save(str(folder / "tokenizer.json"))
    found = PublishedModel.of(PublishedModelConfig(str(folder)), "generator").loaded()
    with np.load(folder / "expected.npz", allow_pickle=False) as stored:
        tokens, real, expected = stored["tokens"], stored["real"], stored["logits"]
    padded = jnp.asarray(np.where(real, tokens, -1).astype(np.int32))

    @jax.jit
    def logits(params):
        return found.model.logits(params, found.model.hidden(params, padded))

    difference = np.abs(np.asarray(logits(found.params)) - expected)[real]
    assert difference.max() < 2e-5


def test_a_section_makes_a_masked_language_model_causal(tmp_path):
    masked = write_encoder(tmp_path / "masked", "roberta", causal=False)
    causal = Path(shutil.copytree(masked, tmp_path / "causal"))
    settings = json.loads((causal / "config.json").read_text())
    (causal / "config.json").write_text(json.dumps(settings | {"is_decoder": True}))
    plain = PublishedModelConfig(str(masked))
    words = "or is_decoder: true in section downstream"
    refusal(lambda: PublishedModel.of(plain, "downstream"), words)
    section = PublishedModelConfig(str(masked), is_decoder=True)
    found = PublishedModel.of(section, "downstream").loaded(trained=True)
    expected = PublishedModel.of(PublishedModelConfig(str(causal)), "x").loaded()
    assert found.model == expected.model
    assert_same(found.params, expected.params)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("gpt2", "downstream.is_decoder must be absent for a gpt2, found true: it is one already"),
        ("albert", "downstream.is_decoder: must be one of 'bert', 'roberta', found 'albert'"),
    ],
)
def test_what_cannot_be_made_causal_is_refused(kind, words, tmp_path):
    if kind == "gpt2":
        write_decoder(tmp_path, kind)
    else:
        write_encoder(tmp_path, kind, causal=False)
    section = PublishedModelConfig(str(tmp_path), is_decoder=True)
    refusal(lambda: PublishedModel.of(section, "downstream"), words)


def test_a_generator_uses_the_chat_template_of_its_folder(tmp_path):
    folder = write_decoder(tmp_path, "llama")

    def tokeniser(section=PublishedGeneratorConfig, **chat):
        return PublishedModel.of(section(str(folder), **chat), "generator").tokeniser

    plain = tokeniser()
    assert plain.chat is None
    refusal(lambda: tokeniser(chat=True), "generator.chat must be has no chat template")
    write_tokeniser(folder, start=True, chat=True)
    found = tokeniser()
    assert found.chat is not None and len(found.prompts(["ab"])[0]) > len(plain.prompts(["ab"])[0])
    # A name follows from all that the token ids follow from.
    assert tokeniser(chat=True).name == found.name != plain.name
    for other in (tokeniser(chat=False), tokeniser(PublishedModelConfig)):
        assert other.chat is None and other.name == plain.name
