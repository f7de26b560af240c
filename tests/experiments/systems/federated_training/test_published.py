"""DP-FedAvg of a published decoder, with and without adapters, and what is refused."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxpfl.errors import InputError
from jaxpfl.experiments import carry_out
from jaxpfl.experiments.central.published import PublishedModel
from jaxpfl.experiments.config.published import PublishedModelConfig
from jaxpfl.experiments.engine.evaluate import DeclaredPublic, Evaluator
from jaxpfl.experiments.export import export
from jaxpfl.experiments.systems.federated_training.config import Config
from jaxpfl.experiments.systems.federated_training.study import prepare
from jaxpfl.federated.release.releaser import Releaser
from jaxpfl.models import adapter_trees
from jaxpfl.models.checkpoints import adapters, pretrained
from jaxpfl.models.decoder.config import LoRA
from tests.experiments.conftest import FAR, NEAR, write_lines
from tests.experiments.crashes import stopped
from tests.experiments.ledgers import assert_same_records
from tests.published_models import federated_training, write_decoder, write_encoder, write_tokeniser

pytest.importorskip("tokenizers", reason="needs jaxpfl[text]")

ADAPTERS = {"rank": 2, "alpha": 4.0, "targets": ["q", "v"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("published")
    write_lines(folder / "clients.jsonl", NEAR, 40, 3, "canarytext{}")
    write_lines(folder / "far.jsonl", FAR, 30, 4)
    for name in ("gpt2", "llama"):
        write_decoder(folder / name, name)
    write_encoder(folder / "bert", "bert")
    write_encoder(folder / "masked", "bert", causal=False)
    for size in (280, 301):
        write_tokeniser(write_decoder(folder / f"wrong_{size}", "gpt2"), size)
    return folder


@pytest.fixture
def configured(folder):
    """Makes the config; `model` and sections change it."""

    def make(model: dict, **changes) -> Config:
        changes["evaluation"] = {"max_examples": 20} | changes.get("evaluation", {})
        return federated_training(folder, model, run={"reproducible_noise": True}, **changes)

    return make


@pytest.mark.long
def test_adapters_alone_are_trained_and_sent_and_a_resumed_run_is_the_same(
    configured, folder, tmp_path
):
    config = configured(
        {"path": str(folder / "llama"), "lora": ADAPTERS}, evaluation={"sentences": 1}
    )
    whole = carry_out.run(config, tmp_path / "whole", progress=False)
    _, params = pretrained.load(folder / "llama")
    about = whole.record["published_model"]
    assert about["path"] == str(folder / "llama")
    assert about["tokeniser"].startswith("llama ")
    table = whole.record["table"]
    assert [row["model"] for row in table] == ["the published model", "this run"]
    assert all(np.isfinite(row["perplexity"]) for row in table)
    assert "perplexity" in (whole.out / "report.html").read_text()
    assert "perplexity" in "\n".join(whole.lines)
    lines = (whole.out / "metrics.jsonl").read_text().splitlines()
    assert any("sentences" in json.loads(line) for line in lines)

    with stopped(Releaser, "step", 2):
        carry_out.run(config, tmp_path / "parts", progress=False)
    carry_out.resume(tmp_path / "parts", progress=False)
    assert_same_records(tmp_path / "parts", whole.out)


def test_what_clients_get_to_train_is_what_the_config_says(configured, folder):
    whole = prepare(configured({"path": str(folder / "gpt2")}))
    _, params = pretrained.load(folder / "gpt2")
    begun = whole.algorithm.init(jax.random.key(0)).params
    jax.tree.map(np.testing.assert_array_equal, begun, params)
    adapted = prepare(configured({"path": str(folder / "gpt2"), "lora": ADAPTERS}))
    state = adapted.algorithm.init(jax.random.key(0))
    assert set(state.params) == {"q", "v"}
    assert adapted.algorithm.params is not None
    found = adapted.algorithm.params(state)
    jax.tree.map(np.testing.assert_array_equal, adapter_trees.split(found)[1], params)
    assert adapted.network.model.lora == LoRA(2, 4.0, ("q", "v"))  # pyright: ignore
    # Its own tokeniser: a row ends with end-of-text, and begins with the start token if it has one.
    tokens = whole.train.columns["tokens"]
    assert tokens.shape[1] == 8
    llama = prepare(configured({"path": str(folder / "llama")})).train.columns["tokens"]
    assert llama.shape[1] == 9 and (llama[:, 0] == 1).all()


def test_the_base_of_adapters_may_be_of_fewer_bits(configured, folder):
    narrow = {"dtype": "bfloat16", "int8": True, "lora": ADAPTERS}
    experiment = prepare(configured({"path": str(folder / "gpt2")} | narrow))
    assert experiment.network.frozen["layers"]["q"]["kernel_int8"].dtype == "int8"
    assert experiment.network.frozen["embed"]["token"].dtype == "bfloat16"
    assert {leaf.dtype.name for leaf in jax.tree.leaves(experiment.network.start)} == {"float32"}
    # Weights that are trained are float32, whatever they are computed in.
    whole = prepare(configured({"path": str(folder / "gpt2"), "dtype": "bfloat16"}))
    assert {leaf.dtype.name for leaf in jax.tree.leaves(whole.network.start)} == {"float32"}
    assert whole.network.model.compute == "bfloat16"  # pyright: ignore


@pytest.mark.long
def test_fred_chooses_the_corpus_that_a_published_model_is_prefinetuned_on(
    configured, folder, tmp_path
):
    """The three stages on DistilGPT-2's kind of model, as in the FreD paper.

    With a large epsilon, so that the choice among so few clients is not left to the noise.
    """
    write_lines(folder / "near.jsonl", NEAR, 30, 4)
    candidates = {name: str(folder / f"{name}.jsonl") for name in ("near", "far")}
    config = configured(
        {"path": str(folder / "gpt2")},
        privacy={"epsilon": 400.0},
        fred={"candidates": candidates, "epsilon": 200.0, "embedder": "hashed:8"},
        prefinetune={"examples": 40, "valid": 0.2, "epochs": 1, "batch_size": 8, "trials": 1},
    )
    record = carry_out.run(config, tmp_path / "run", progress=False).record
    names = [row["model"] for row in record["table"]]
    assert names == ["the published model", "prefinetuned on near", "this run"]
    before, after, _ = record["table"]
    assert after["perplexity"] < before["perplexity"]


PUBLIC = {"data": {"public": "docstrings:jax"}}
REFUSED = [
    ({"path": "masked"}, {}, "holds a bert encoder, expected a decoder, or is_decoder: true"),
    ({"path": "bert", "lora": ADAPTERS}, {}, "must hold a decoder, .* which takes no adapters"),
    ({"path": "bert", "dtype": "bfloat16"}, {}, "model.dtype must be absent for a bert"),
    ({"path": "bert"}, {"evaluation": {"sentences": 1}}, "set evaluation.sentences: 0"),
    ({"path": "gpt2", "int8": True}, {}, "model.int8 must be false, found true"),
    ({"path": "llama", "sequence_length": 64}, {}, "64 positions, .* 65, .* and a start token"),
    ({"path": "gpt2", "vocab_size": 300}, {}, "there is no key 'model.vocab_size'"),
    ({"path": "gpt2", "lora": {"rank": 0}}, {}, "rank must"),
    ({"path": ""}, {}, "model.path must name a folder, found ''"),
    ({"path": "gpt2"}, PUBLIC, "data.public must be absent for a published model"),
    ({"path": "gpt2", "lora": ADAPTERS}, PUBLIC | {"prefinetune": {}}, "model.lora must be null"),
    ({"path": "wrong_301"}, {}, "has 301 token ids, expected the 300 of config"),
    ({"path": "wrong_280"}, {}, "has 280 token ids, expected the 300 of config"),
]


@pytest.mark.parametrize(("model", "changes", "message"), REFUSED)
def test_what_does_not_fit_is_refused_in_one_sentence(
    configured, folder, tmp_path, model, changes, message
):
    if model["path"]:
        model = model | {"path": str(folder / model["path"])}
    with pytest.raises(InputError, match=message) as caught:
        carry_out.run(configured(model, **changes), tmp_path / "run", progress=False)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run" / "config.yaml").exists()


@pytest.mark.long
@pytest.mark.parametrize("adapted", [False, True])
def test_a_run_is_exported_with_its_tokeniser(configured, folder, tmp_path, adapted):
    """The whole decoder, or its adapters in PEFT's format; both score what the run says."""
    path = str(folder / "gpt2")
    config = configured({"path": path, "lora": ADAPTERS if adapted else None})
    run, out = carry_out.run(config, tmp_path / "run", progress=False), tmp_path / "exported"
    export(run.out, out, progress=False)
    if adapted:
        model, params = adapters.load(out, *pretrained.load(path))
        settings = json.loads((out / "adapter_config.json").read_text())
        # Not its place on this machine.
        assert settings["base_model_name_or_path"] == "gpt2"
        assert not (out / "model.safetensors").exists()
    else:
        model, params = pretrained.load(out)
    experiment = prepare(config)
    assert (out / "tokenizer.json").exists()
    scored = Evaluator(model, DeclaredPublic(experiment.test), max_examples=20)(params).result()
    row = run.record["table"][-1]
    assert (row["model"], row["perplexity"]) == ("this run", scored["perplexity"])
    digest = PublishedModel.of(PublishedModelConfig(path), "model").loaded().digest()
    card = (out / "README.md").read_text()
    assert "NOT PRIVATE" in card
    assert f"a folder gpt2; SHA-256 of the parameters, as loaded: {digest}" in card
    assert str(folder) not in card
