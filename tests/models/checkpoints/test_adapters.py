"""Adapters of a model in files: exact round trips, PEFT's names, and what is refused."""

import dataclasses
import functools
import importlib.util
import json
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpfl.errors import CorruptFile, InputError
from jaxpfl.models import adapter_trees
from jaxpfl.models.checkpoints import adapters as adapter_files
from jaxpfl.models.checkpoints import pretrained
from jaxpfl.models.decoder import lora
from jaxpfl.models.decoder.config import LoRA
from jaxpfl.models.decoder.quantise import quantise
from tests.refusals import refusal
from tests.trees import assert_same

safetensors_numpy = pytest.importorskip("safetensors.numpy", reason="needs jaxpfl[text]")

GOLDEN = Path(__file__).parents[2] / "golden" / "transformers"
SETTINGS = LoRA(3, 6.0, ("q", "v", "o", "down"))
B = "base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight"


@functools.cache
def _adapted(kind: str, settings: LoRA = SETTINGS):
    """A base, and the same with adapters that do something."""
    base = pretrained.load(GOLDEN / kind)
    model, params = lora.attach(*base, settings, jax.random.key(0))
    adapters, rest = adapter_trees.split(params)
    rng = np.random.default_rng(1)
    drawn = jax.tree.map(lambda leaf: np.float32(rng.normal(size=leaf.shape)), adapters)
    return base, (model, adapter_trees.join(drawn, rest))


@pytest.mark.parametrize(
    ("kind", "settings"),
    [("gpt2", SETTINGS), ("llama_untied", SETTINGS), ("gemma3", SETTINGS), ("gpt2", LoRA())],
)
def test_a_round_trip_is_exact_and_shares_the_base(kind, settings, tmp_path):
    base, (model, params) = _adapted(kind, settings)
    adapter_files.save(tmp_path, model, params)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["adapter_config.json", "adapter_model.safetensors"]
    again, found = adapter_files.load(tmp_path, *base)
    held = tuple(name for name in settings.targets if name in params["layers"])
    assert again.lora == dataclasses.replace(settings, targets=held)
    assert_same(found, params)
    assert found["layers"]["q"]["kernel"] is base[1]["layers"]["q"]["kernel"]
    # GPT-2's fused matrix needs zeros between the blocks.
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(adapter_trees.split(params)[0]))
    assert (tmp_path / names[1]).stat().st_size < size * (1 + 2 * (kind == "gpt2")) + 4_000
    if kind == "llama_untied":
        tensors = _tensors(tmp_path)
        assert len(tensors) == 2 * 4 * 2
        np.testing.assert_array_equal(tensors[B], params["layers"]["q"]["b"][1].T)


def test_adapters_go_beside_an_int8_base_too(tmp_path):
    base, (model, params) = _adapted("llama_untied")
    adapter_files.save(tmp_path, model, params)
    again, found = adapter_files.load(tmp_path, *quantise(*base))
    assert (again.int8, again.lora) == (True, SETTINGS)
    assert_same(adapter_trees.split(found)[0], adapter_trees.split(params)[0])


def test_a_base_on_the_hub_is_named_with_its_commit_as_peft_does(tmp_path):
    _, adapted = _adapted("llama_untied")
    commit = "0123456789" * 4
    for base, expected in (
        (f"someone/model@{commit}", ("someone/model", commit)),
        ("a@folder", ("a@folder", None)),
        (None, (None, None)),
    ):
        adapter_files.save(tmp_path, *adapted, base=base)
        settings = json.loads((tmp_path / adapter_files.CONFIG).read_text())
        assert (settings["base_model_name_or_path"], settings["revision"]) == expected


def test_adapters_of_one_matrix_that_are_all_zero_are_kept(tmp_path):
    base, (model, params) = _adapted("gpt2", LoRA(targets=("q", "v")))
    adapters, rest = adapter_trees.split(params)
    zeros = jax.tree.map(jnp.zeros_like, adapters)
    adapter_files.save(tmp_path, model, adapter_trees.join(zeros, rest))
    again, found = adapter_files.load(tmp_path, *base)
    assert again.lora == LoRA(targets=("q", "k", "v"))
    assert_same(adapter_trees.split(found)[0], {name: zeros["q"] for name in "qkv"})


def _tensors(folder: Path) -> dict[str, np.ndarray]:
    return safetensors_numpy.load_file(folder / adapter_files.WEIGHTS)


def _kernels(layers) -> np.ndarray:
    """GPT-2's queries, keys and values of each layer side by side, [layers, 32, 96]."""
    return np.concatenate([np.asarray(layers[name]["kernel"]) for name in "qkv"], -1)


def _products(tensors: dict[str, np.ndarray]) -> np.ndarray:
    """A B of the fused matrix's adapter, [layers, 32, 96]."""
    names = [f"base_model.model.transformer.h.{k}.attn.c_attn.lora_{{}}.weight" for k in (0, 1)]
    pairs = [[tensors[name.format(leaf)] for leaf in "AB"] for name in names]
    return np.stack([(b @ a).T for a, b in pairs])


@pytest.mark.parametrize("targets", [("q", "k", "v"), ("v", "down"), ("q", "v", "o", "up")])
def test_gpt2s_fused_matrix_has_one_adapter_that_computes_the_same(targets, tmp_path):
    base, (model, params) = _adapted("gpt2", LoRA(2, 3.0, targets))
    adapter_files.save(tmp_path, model, params, base="somewhere/gpt2")
    settings = json.loads((tmp_path / adapter_files.CONFIG).read_text())
    assert settings["base_model_name_or_path"] == "somewhere/gpt2"
    assert settings["rank_pattern"] == {"attn.c_attn": 6}
    assert settings["alpha_pattern"] == {"attn.c_attn": 9.0}
    tensors = _tensors(tmp_path)
    assert {min(tensor.shape) for tensor in tensors.values() if 96 in tensor.shape} == {6}
    merged = _kernels(lora.merge(model, params)[1]["layers"])
    found = _kernels(base[1]["layers"]) + 9.0 / 6 * _products(tensors)
    np.testing.assert_allclose(found, merged, atol=2e-6)
    again, found = adapter_files.load(tmp_path, *base)
    assert again == model
    assert_same(found, params)


def _peft_writes(folder: Path, tensors: dict[str, np.ndarray], **settings) -> None:
    """What PEFT 0.21.2 writes for a LoraConfig, whose defaults are all here."""
    defaults = {
        "alora_invocation_tokens": None, "alpha_pattern": {}, "arrow_config": None,
        "auto_mapping": None, "base_model_name_or_path": "gpt2", "bias": "none",
        "corda_config": None, "ensure_weight_tying": False, "eva_config": None,
        "exclude_modules": None, "fan_in_fan_out": True, "inference_mode": True,
        "init_lora_weights": True, "kasa_config": None, "layer_replication": None,
        "layers_pattern": None, "layers_to_transform": None, "loftq_config": {},
        "lora_alpha": 8, "lora_bias": False, "lora_dropout": 0.0, "lora_ga_config": None,
        "megatron_config": None, "megatron_core": "megatron.core", "modules_to_save": None,
        "monteclora_config": None, "peft_type": "LORA", "peft_version": "0.21.2",
        "qalora_group_size": 16, "r": 8, "rank_pattern": {}, "revision": None,
        "target_modules": ["c_attn"], "target_parameters": None, "task_type": "CAUSAL_LM",
        "trainable_token_indices": None, "use_bdlora": None, "use_dora": False,
        "use_qalora": False, "use_rslora": False, "velora_config": None,
    }  # fmt: skip
    (folder / adapter_files.CONFIG).write_text(json.dumps(defaults | settings))
    safetensors_numpy.save_file(tensors, folder / adapter_files.WEIGHTS)


def _fused(rank: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        f"base_model.model.transformer.h.{layer}.attn.c_attn.lora_{leaf}.weight": np.float32(
            rng.normal(size=shape)
        )
        for layer in (0, 1)
        for leaf, shape in {"A": (rank, 32), "B": (96, rank)}.items()
    }


@pytest.mark.parametrize("stabilised", [False, True])
def test_pefts_adapter_of_the_fused_matrix_is_read(stabilised, tmp_path):
    base = pretrained.load(GOLDEN / "gpt2")
    tensors = _fused(4)
    _peft_writes(tmp_path, tensors, r=4, use_rslora=stabilised)
    model, params = adapter_files.load(tmp_path, *base)
    assert model.lora is not None and (model.lora.rank, model.lora.targets) == (4, tuple("qkv"))
    scale = 8 / 4 if not stabilised else 8 / np.sqrt(4)
    assert model.lora.scale == pytest.approx(scale, rel=1e-15)
    expected = _kernels(base[1]["layers"]) + scale * _products(tensors)
    merged = _kernels(lora.merge(model, params)[1]["layers"])
    np.testing.assert_allclose(merged, expected, atol=1e-5)


def test_adapters_of_ours_that_were_trained_further_as_one_matrix_are_refused(tmp_path):
    base, (model, params) = _adapted("gpt2", LoRA(2, 3.0, ("q", "v", "o")))
    adapter_files.save(tmp_path, model, params)
    tensors = _tensors(tmp_path)
    name = "base_model.model.transformer.h.1.attn.c_attn.lora_B.weight"
    tensors[name] = tensors[name] + np.float32(0.25)
    safetensors_numpy.save_file(tensors, tmp_path / adapter_files.WEIGHTS)
    refusal(lambda: adapter_files.load(tmp_path, *base), "lora_B of attn.c_attn block-diagonal")


LIVE = pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft is not installed")
THEIRS = {
    "gpt2": "GPT2LMHeadModel",
    "llama_untied": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
}


def _assert_same_logits(model, params, theirs):
    import torch

    tokens = np.random.default_rng(0).integers(0, model.vocab_size, (2, 9))
    with torch.no_grad():
        expected = theirs(input_ids=torch.tensor(tokens)).logits.numpy()
    found = model.logits(params, model.hidden(params, tokens.astype(np.int32)))
    np.testing.assert_allclose(found, expected, atol=5e-4, rtol=1e-5)


@LIVE
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("kind", THEIRS)
def test_live_peft_reads_our_adapters(kind, tmp_path):
    import peft
    import transformers

    _, (model, params) = _adapted(kind)
    adapter_files.save(tmp_path, model, params, base=str(GOLDEN / kind))
    theirs = getattr(transformers, THEIRS[kind]).from_pretrained(GOLDEN / kind)
    theirs = peft.PeftModel.from_pretrained(theirs, tmp_path).eval()
    _assert_same_logits(model, params, theirs)


@LIVE
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("stabilised", [False, True])
@pytest.mark.parametrize("kind", THEIRS)
def test_live_adapters_that_peft_wrote_are_read(kind, stabilised, tmp_path):
    import peft
    import torch
    import transformers

    torch.manual_seed(0)
    theirs = getattr(transformers, THEIRS[kind]).from_pretrained(GOLDEN / kind)
    options = {"task_type": "CAUSAL_LM", "init_lora_weights": False}
    config = peft.LoraConfig(r=4, use_rslora=stabilised, **options)
    theirs = peft.get_peft_model(theirs, config).eval()
    theirs.save_pretrained(tmp_path)
    model, params = adapter_files.load(tmp_path, *pretrained.load(GOLDEN / kind))
    _assert_same_logits(model, params, theirs)


OF = {name: [f"{name}_proj"] for name in ("q", "v", "o", "up")}


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"peft_type": "IA3"}, "peft_type must be 'LORA', found 'IA3'"),
        ({"use_dora": True}, "use_dora must be off, found True"),
        ({"bias": "all"}, "bias must be 'none', found 'all'"),
        ({"layer_replication": [[0, 2], [1, 2]]}, "layer_replication off, found [[0"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights must be True, found 'pissa'"),
        ({"rank_pattern": {"q_proj": 9}}, "rank_pattern must be off, found {'q_proj': 9}"),
        ({"use_rslora": "no"}, "use_rslora must be False, found 'no'"),
        ({"use_newlora": "yes"}, "use_newlora must be off, found 'yes'"),
        ({"target_modules": "all-linear"}, "target_modules must be a list of names"),
        ({"target_modules": ["c_attn"]}, "among (of llama), found 'c_attn'"),
        ({"r": 0}, "rank must be at least 1"),
        # TRUST 39: compared with the tensors before memory is taken.
        ({"r": 2**40}, "must have shape"),
        ({"r": 4}, "A.weight' must have shape [4, 32], found [3, 32]"),
        ({"target_modules": OF["q"] + OF["v"] + OF["o"]}, "is not an adapter of this model"),
        ({"target_modules": OF["up"]}, "up_proj.lora_A.weight' is missing"),
    ],
)
def test_settings_that_do_not_fit_are_refused_naming_the_file(tmp_path, changed, words):
    base, adapted = _adapted("llama_untied")
    adapter_files.save(tmp_path, *adapted)
    path = tmp_path / adapter_files.CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))
    refusal(lambda: adapter_files.load(tmp_path, *base), f"{tmp_path} {words}")


def test_weights_that_do_not_fit_are_refused(tmp_path):
    base, adapted = _adapted("llama_untied")
    adapter_files.save(tmp_path, *adapted)
    path = tmp_path / adapter_files.WEIGHTS
    tensors = _tensors(tmp_path)
    nan = tensors | {B: tensors[B] * np.float32(np.nan)}
    for change, kind, words in (
        (lambda: safetensors_numpy.save_file(nan, path), InputError, f"'{B}' not finite"),
        (lambda: os.truncate(path, 5_000), CorruptFile, "is not a whole safetensors file"),
        (path.unlink, InputError, "no file adapter_model.safetensors"),
        (lambda: (tmp_path / adapter_files.CONFIG).write_text("[]"), CorruptFile, "JSON object"),
    ):
        change()
        refusal(lambda: adapter_files.load(tmp_path, *base), words, kind)


def test_a_model_in_the_wrong_state_is_refused(tmp_path):
    base, (model, params) = _adapted("gpt2")
    adapters, rest = adapter_trees.split(params)
    infinite = adapters | {"q": adapters["q"] | {"a": jnp.full_like(adapters["q"]["a"], jnp.inf)}}
    broken = adapter_trees.join(infinite, rest)
    refusal(lambda: adapter_files.save(tmp_path, *base), "has no adapters to save")
    adapter_files.save(tmp_path, model, params)
    refusal(lambda: adapter_files.load(tmp_path, model, params), "has adapters already")
    refusal(lambda: adapter_files.save(tmp_path, model, broken), "adapter q/a not finite")
    assert_same(adapter_files.load(tmp_path, *base)[1], params)
