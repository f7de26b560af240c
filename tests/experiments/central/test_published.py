"""Published models that a config section names compute what transformers computes."""

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpfl.experiments.central.published import PublishedModel
from jaxpfl.experiments.config.published import PublishedModelConfig

tokenizers = pytest.importorskip("tokenizers", reason="needs jaxpfl[text]")

GOLDEN = Path(__file__).parents[2] / "golden" / "transformers"


@pytest.mark.parametrize("kind", ["gpt2", "llama_scaled", "llama_untied", "bert_causal"])
def test_a_section_gives_the_logits_of_transformers(kind, tmp_path):
    folder = Path(shutil.copytree(GOLDEN / kind, tmp_path / kind))
    size = json.loads((folder / "config.json").read_text())["vocab_size"]
    words = {f"w{number}": number for number in range(size)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    tokenizer.decoder = tokenizers.decoders.WordPiece()
    tokenizer.save(str(folder / "tokenizer.json"))
    found = PublishedModel.found(PublishedModelConfig(str(folder)), "generator").loaded()
    with np.load(folder / "expected.npz", allow_pickle=False) as stored:
        tokens, real, expected = stored["tokens"], stored["real"], stored["logits"]
    padded = jnp.asarray(np.where(real, tokens, -1).astype(np.int32))

    @jax.jit
    def logits(params):
        return found.model.logits(params, found.model.hidden(params, padded))

    difference = np.abs(np.asarray(logits(found.params)) - expected)[real]
    assert difference.max() < 2e-5
