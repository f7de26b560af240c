"""Adapters of a model in files: exact round trips, PEFT's names, and what is refused."""

import importlib.util
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpfl.errors import CorruptFile, InputError
from jaxpfl.models.checkpoints import adapters as adapter_files
from jaxpfl.models.checkpoints import pretrained
from jaxpfl.models.decoder import lora
from jaxpfl.models.decoder.config import LoRA
from jaxpfl.models.decoder.quantise import quantise

safetensors_numpy = pytest.importorskip("safetensors.numpy", reason="needs jaxpfl[text]")

GOLDEN = Path(__file__).parents[2] / "golden" / "transformers"
SETTINGS = LoRA(3, 6.0, ("q", "v", "o", "down"))
B = "base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight"


def _adapted(kind: str, settings: LoRA = SETTINGS):
    """A base, and the same with adapters that do something."""
    base = pretrained.load(GOLDEN / kind)
    model, params = lora.attach(*base, settings, jax.random.key(0))
    adapters, rest = lora.split(params)
    leaves, tree = jax.tree.flatten(adapters)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    drawn = [jax.random.normal(key, leaf.shape) for key, leaf in zip(keys, leaves, strict=True)]
    return base, (model, lora.join(jax.tree.unflatten(tree, drawn), rest))


def _equal(found, expected) -> None:
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.parametrize("kind", ["gpt2", "llama_untied"])
def test_a_round_trip_is_exact_and_shares_the_base(kind, tmp_path):
    base, (model, params) = _adapted(kind)
    adapter_files.save(tmp_path, model, params)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["adapter_config.json", "adapter_model.safetensors"]
    again, found = adapter_files.load(tmp_path, *base)
    assert again == model
    _equal(found, params)
    assert found["layers"]["q"]["kernel"] is base[1]["layers"]["q"]["kernel"]
    adapters = lora.split(params)[0]
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(adapters))
    assert (tmp_path / names[1]).stat().st_size < size + 4_000


def test_adapters_go_beside_an_int8_base_too(tmp_path):
    base, (model, params) = _adapted("llama_untied")
    adapter_files.save(tmp_path, model, params)
    again, found = adapter_files.load(tmp_path, *quantise(*base))
    assert (again.int8, again.lora) == (True, SETTINGS)
    _equal(lora.split(found)[0], lora.split(params)[0])


def test_the_default_targets_are_those_that_a_model_has(tmp_path):
    base, (model, params) = _adapted("gpt2", LoRA())
    adapter_files.save(tmp_path, model, params)
    again, found = adapter_files.load(tmp_path, *base)
    assert again.lora == LoRA(targets=("q", "k", "v", "o", "up", "down"))
    _equal(found, params)


def test_names_and_orientation_are_pefts(tmp_path):
    _, (model, params) = _adapted("llama_untied")
    adapter_files.save(tmp_path, model, params)
    tensors = safetensors_numpy.load_file(tmp_path / adapter_files.WEIGHTS)
    assert len(tensors) == 2 * 4 * 2
    np.testing.assert_array_equal(tensors[B], params["layers"]["q"]["b"][1].T)
    settings = json.loads((tmp_path / adapter_files.CONFIG).read_text())
    assert (settings["peft_type"], settings["r"], settings["lora_alpha"]) == ("LORA", 3, 6.0)


@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft is not installed")
@pytest.mark.filterwarnings("default")
def test_live_peft_reads_a_llamas_adapters(tmp_path):
    import peft
    import torch
    import transformers

    _, (model, params) = _adapted("llama_untied")
    adapter_files.save(tmp_path, model, params)
    theirs = transformers.LlamaForCausalLM.from_pretrained(GOLDEN / "llama_untied")
    theirs = peft.PeftModel.from_pretrained(theirs, tmp_path).eval()
    tokens = np.random.default_rng(0).integers(0, 61, (2, 9))
    with torch.no_grad():
        expected = theirs(input_ids=torch.tensor(tokens)).logits.numpy()
    found = model.logits(params, model.hidden(params, tokens.astype(np.int32)))
    np.testing.assert_allclose(found, expected, atol=5e-4, rtol=1e-5)


def _changed_settings(folder: Path, **changed) -> None:
    path = folder / adapter_files.CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type must be 'LORA', found 'IA3'"),
        ({"use_dora": True}, "use_dora must be False, found True"),
        ({"bias": "all"}, "bias must be 'none', found 'all'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save must be None"),
        ({"target_modules": "all-linear"}, "target_modules must be a list of names"),
        (
            {"target_modules": ["c_attn"]},
            r"among .* \(of llama\), found 'c_attn'",
        ),
        ({"r": 0}, "rank must be at least 1"),
        ({"r": 4}, r"A.weight' must have shape \[4, 32\], found \[3, 32\]"),
        (
            {"target_modules": ["q_proj", "v_proj", "o_proj"]},
            "is not an adapter of this model",
        ),
        ({"target_modules": ["up_proj"]}, "up_proj.lora_A.weight' is missing"),
    ],
)
def test_settings_that_do_not_fit_are_refused_naming_the_file(tmp_path, changed, message):
    base, adapted = _adapted("llama_untied")
    adapter_files.save(tmp_path, *adapted)
    _changed_settings(tmp_path, **changed)
    with pytest.raises(InputError, match=message) as caught:
        adapter_files.load(tmp_path, *base)
    assert str(tmp_path) in str(caught.value)


def test_weights_that_do_not_fit_are_refused(tmp_path):
    base, adapted = _adapted("llama_untied")
    adapter_files.save(tmp_path, *adapted)
    path = tmp_path / adapter_files.WEIGHTS
    tensors = safetensors_numpy.load_file(path)
    safetensors_numpy.save_file(tensors | {B: tensors[B] * np.float32(np.nan)}, path)
    with pytest.raises(InputError, match=f"tensor '{B}' holds values that are not finite"):
        adapter_files.load(tmp_path, *base)
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(CorruptFile, match="is not a whole safetensors file"):
        adapter_files.load(tmp_path, *base)
    path.unlink()
    with pytest.raises(InputError, match=r"no file .*adapter_model\.safetensors"):
        adapter_files.load(tmp_path, *base)
    (tmp_path / adapter_files.CONFIG).write_text("[]")
    with pytest.raises(CorruptFile, match="must hold a JSON object"):
        adapter_files.load(tmp_path, *base)


def test_a_model_in_the_wrong_state_is_refused(tmp_path):
    base, (model, params) = _adapted("gpt2")
    with pytest.raises(InputError, match="has no adapters to save"):
        adapter_files.save(tmp_path, *base)
    adapter_files.save(tmp_path, model, params)
    with pytest.raises(InputError, match="has adapters already"):
        adapter_files.load(tmp_path, model, params)
    adapters, rest = lora.split(params)
    adapters["q"]["a"] = jnp.full_like(adapters["q"]["a"], jnp.inf)
    with pytest.raises(InputError, match="adapter q/a holds values that are not finite"):
        adapter_files.save(tmp_path, model, lora.join(adapters, rest))
    _equal(adapter_files.load(tmp_path, *base)[1], params)
