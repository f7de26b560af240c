"""Published models through a config, and whole exports, beside transformers and PEFT on torch.

Run by `make parity`; skipped where torch is not installed.
"""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxpfl.experiments import carry_out
from jaxpfl.experiments.config.reader import to_mapping
from jaxpfl.experiments.engine.build import read_clients, split_clients
from jaxpfl.experiments.export import export
from jaxpfl.experiments.registry import from_mapping
from jaxpfl.models import adapter_trees
from jaxpfl.models.checkpoints import adapters, pretrained
from jaxpfl.models.encoder.network import Encoder
from tests.experiments.conftest import FAR, NEAR, write_lines
from tests.published_models import SIZES, federated_training, write_adapters, write_tokeniser

torch = pytest.importorskip("torch", reason="torch is not installed; see `make parity`")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

# Of transformers and torch, not ours.
pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("default")]

STARTING = ("llama", "mistral")
_MADE = {
    "gpt2": ("GPT2LMHeadModel", "GPT2Config"),
    "llama": ("LlamaForCausalLM", "LlamaConfig"),
    "mistral": ("MistralForCausalLM", "MistralConfig"),
    "gemma3_text": ("Gemma3ForCausalLM", "Gemma3TextConfig"),
    "bert": ("BertForMaskedLM", "BertConfig"),
    "roberta": ("RobertaForMaskedLM", "RobertaConfig"),
}


def _sizes(kind: str) -> dict[str, Any]:
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    if kind == "gpt2":
        names = ("n_embd", "n_layer", "n_head", "n_inner")
    sizes: dict[str, Any] = dict(zip(names, SIZES.values(), strict=True)) | {
        "vocab_size": 300,
        "eos_token_id": 0,
        "bos_token_id": 1 if kind in STARTING else None,
    }
    sizes["n_positions" if kind == "gpt2" else "max_position_embeddings"] = 66
    if kind in ("llama", "mistral", "gemma3_text"):
        sizes["num_key_value_heads"] = 1
    if kind in ("mistral", "gemma3_text"):
        sizes["sliding_window"] = 5
    if kind == "gemma3_text":
        sizes |= {"head_dim": 12, "layer_types": ["sliding_attention", "full_attention"]}
    if kind == "roberta":
        sizes["pad_token_id"] = 1
    return sizes


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Tiny random models, saved by transformers together with their tokenisers."""
    folder = tmp_path_factory.mktemp("published")
    write_lines(folder / "clients.jsonl", NEAR, 40, 3, "canarytext{}")
    for name, words in (("near", NEAR), ("far", FAR)):
        write_lines(folder / f"{name}.jsonl", words, 30, 4)
    generator = torch.Generator().manual_seed(7)
    for kind, (model_class, config_class) in _MADE.items():
        torch.manual_seed(3)
        config = getattr(transformers, config_class)(**_sizes(kind))
        model = getattr(transformers, model_class)(config).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
        (folder / "plain").mkdir(exist_ok=True)
        write_tokeniser(folder / "plain", start=kind in STARTING)
        tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder / "plain")
        model.save_pretrained(folder / kind)
        tokenizer.save_pretrained(folder / kind)
        (folder / kind / "generation_config.json").unlink(missing_ok=True)
    write_adapters(folder / "adapters", folder / "llama")
    return folder


@pytest.fixture
def study(synthetic_config, folder):
    """Makes the config of a study of synthetic text on published models."""

    def make(method: str, generator: dict[str, Any], downstream: dict[str, Any]) -> Any:
        mapping = to_mapping(synthetic_config(method, "--corpus.texts", "12"))
        mapping["run"]["devices"] = 1
        for name, section in (("generator", generator), ("downstream", downstream)):
            mapping[name] = section | {"path": str(folder / section["path"])}
        return from_mapping(mapping, "here")

    return make


def _scored(theirs: Any, tokenizer: Any, texts: list[str], tokens: int) -> dict[str, float]:
    """Loss, perplexity and accuracy of the next tokens, one text at a time, on torch."""
    loss, hits, count = 0.0, 0, 0
    for text in texts:
        row = tokenizer(text, add_special_tokens=False)["input_ids"]
        end = [tokenizer.eos_token_id] if len(row) < tokens else []
        start = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
        row = torch.tensor([[*start, *row[:tokens], *end]])
        with torch.no_grad():
            logits = theirs.eval()(input_ids=row).logits[0, :-1].double()
        targets = row[0, 1:]
        loss += float(torch.nn.functional.cross_entropy(logits, targets, reduction="sum"))
        hits += int((logits.argmax(-1) == targets).sum())
        count += len(targets)
    return {"loss": loss / count, "perplexity": math.exp(loss / count), "accuracy": hits / count}


def _same(found: dict[str, float], record: dict[str, Any]) -> None:
    for name, value in found.items():
        assert value == pytest.approx(record[name], rel=1e-5), name


def _names_no_place(out: Path, *places: Path) -> None:
    for path in out.rglob("*"):
        content = path.read_bytes() if path.is_file() else b""
        for place in places:
            assert str(place).encode() not in content, path


def _of_adapters(base: Path, trained: Path) -> Any:
    import peft

    theirs = transformers.AutoModelForCausalLM.from_pretrained(base)
    return peft.PeftModel.from_pretrained(theirs, trained)


@pytest.mark.parametrize(
    ("kind", "options", "base"),
    [
        ("gemma3_text", {}, None),
        ("roberta", {"is_decoder": True}, None),
        ("gpt2", {"lora": {"rank": 2, "alpha": 4.0}}, "gpt2"),
        ("llama", {"lora": {"rank": 2, "alpha": 4.0}, "adapters": "adapters"}, "base"),
    ],
)
def test_an_exported_run_scores_on_torch_what_its_record_says(
    folder, tmp_path, kind, options, base
):
    if "adapters" in options:
        options = options | {"adapters": str(folder / "adapters"), "int8": True}
    model = {"path": str(folder / kind), "sequence_length": 12} | options
    client = {"name": "sgd", "learning_rate": 0.3}
    config = federated_training(folder, model, training={"client": client})
    run, out = carry_out.run(config, tmp_path / "run", progress=False), tmp_path / "exported"
    export(run.out, out, progress=False)
    _names_no_place(out, folder, tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    if base is None:
        theirs = transformers.AutoModelForCausalLM.from_pretrained(out)
    else:
        settings = json.loads((out / "adapter_config.json").read_text())
        assert settings["base_model_name_or_path"] == base
        theirs = _of_adapters(out / "base" if base == "base" else folder / base, out)
    test = split_clients(read_clients(config.data), config.data)["test"]
    texts = test.columns["text"].to_pylist()
    row = run.record["table"][-1]
    found = _scored(theirs, tokenizer, texts, 12)
    if base == "base":
        # The run computed with int8 weights, which cannot be exported.
        assert found["loss"] == pytest.approx(row["loss"], rel=0.01)
    else:
        _same(found, row)
    assert row["perplexity"] != run.record["table"][0]["perplexity"]


@pytest.mark.parametrize(
    ("method", "generator", "downstream"),
    [
        ("popri", {"path": "mistral"}, {"path": "gpt2"}),
        ("pe_sft", {"path": "llama", "int8": True, "adapters": "a"}, {"path": "bert"}),
    ],
)
def test_an_exported_study_is_opened_whole(study, folder, tmp_path, method, generator, downstream):
    """Its downstream model on torch scores what the record says; its generator's adapters load."""
    if "adapters" in generator:
        generator = generator | {"adapters": str(folder / "adapters")}
    if downstream["path"] == "bert":
        downstream = downstream | {"is_decoder": True}
    config = study(method, generator, downstream)
    run, out = carry_out.run(config, tmp_path / "run", progress=False), tmp_path / "exported"
    export(run.out, out, progress=False)
    _names_no_place(out, folder, tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out)
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    test = split_clients(read_clients(config.data), config.data)["test"]
    texts = test.columns["text"].slice(0, config.evaluation.max_examples).to_pylist()
    _same(_scored(theirs, tokenizer, texts, config.corpus.tokens), run.record["metrics"])
    settings = json.loads((out / "generator_adapter" / "adapter_config.json").read_text())
    if method == "popri":
        assert settings["base_model_name_or_path"] == "mistral"
        base = folder / "mistral"
    else:
        assert settings["base_model_name_or_path"] == "generator"
        base = out / "generator"
    model, params = pretrained.load(base)
    assert not isinstance(model, Encoder)
    model, params = adapters.load(out / "generator_adapter", model, params)
    assert any(np.any(each["b"]) for each in adapter_trees.split(params)[0].values())
    tokens = np.random.default_rng(5).integers(3, 300, (3, 20)).astype(np.int32)
    theirs = _of_adapters(base, out / "generator_adapter")
    with torch.no_grad():
        expected = theirs(input_ids=torch.tensor(tokens.astype(np.int64))).logits.numpy()
    found = model.logits(params, model.hidden(params, tokens))
    assert np.abs(np.asarray(found) - expected).max() < 1e-4
