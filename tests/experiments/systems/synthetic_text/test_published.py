"""Published models as the generator and the downstream model of a study."""

import dataclasses
import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jaxpfl.errors import InputError
from jaxpfl.experiments import carry_out
from jaxpfl.experiments.config.published import pinned
from jaxpfl.experiments.config.reader import to_mapping
from jaxpfl.experiments.dry_run import dry_run
from jaxpfl.experiments.export import export
from jaxpfl.experiments.records import artifacts
from jaxpfl.experiments.registry import from_mapping
from jaxpfl.experiments.systems.synthetic_text.config import Config
from jaxpfl.experiments.systems.synthetic_text.models import StudyModels
from jaxpfl.models.checkpoints import adapters, pretrained
from jaxpfl.models.decoder.network import Decoder
from jaxpfl.models.decoder.quantise import quantise
from jaxpfl.text.generation.language_model import LanguageModel
from tests.experiments.crashes import stopped
from tests.experiments.ledgers import assert_same_records
from tests.published_models import (
    hub_gives,
    write_adapters,
    write_decoder,
    write_encoder,
    write_tokeniser,
)
from tests.refusals import refusal

pytest.importorskip("tokenizers", reason="needs jaxpfl[text]")


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Path:
    """The models by name."""
    folder = tmp_path_factory.mktemp("published")
    for number, name in enumerate(("gpt2", "llama")):
        write_decoder(folder / name, name, seed=number)
    write_encoder(folder / "bert", "bert")
    write_encoder(folder / "masked", "bert", causal=False)
    write_adapters(folder / "adapters", folder / "llama")
    return folder


@pytest.fixture
def published(synthetic_config, folders):
    """Makes the config of a method in which both models are published."""

    def make(
        method: str, generator: dict | None = None, downstream: dict | None = None, **changes
    ) -> Config:
        mapping = to_mapping(synthetic_config(method, "--run.reproducible_noise", "True"))
        mapping["generator"] = {"path": str(folders / "llama")} | (generator or {})
        mapping["downstream"] = {"path": str(folders / "gpt2")} | (downstream or {})
        mapping["run"]["devices"] = 1
        return from_mapping(mapping | changes, "here")

    return make


@pytest.mark.long
def test_popri_runs_on_published_models_and_resumes_to_the_same_bits(published, folders, tmp_path):
    """With tokenisers of their own, of which the generator's has a start token."""
    config = published("popri")
    whole = carry_out.run(config, tmp_path / "whole", progress=False)
    about = whole.record["public_models"]
    for name, kind in (("generator", "llama"), ("downstream", "gpt2")):
        _, params = pretrained.load(folders / kind)
        held: Any = SimpleNamespace(params=params)
        assert about[name]["sha256"] == LanguageModel.digest(held)
        assert about[name]["path"] == str(folders / kind)
        assert about[name]["tokeniser"].startswith(f"{kind} ")
    assert "tokeniser" not in about
    assert np.isfinite(whole.record["metrics"]["perplexity"])
    # Nothing was pretrained.
    assert not list(Path(config.cache).glob("*/" + "training"))

    with stopped(artifacts, "commit", when=lambda _, path, __: path.name == "round_2_scores"):
        carry_out.run(config, tmp_path / "parts", progress=False)
    carry_out.resume(tmp_path / "parts", progress=False)
    assert_same_records(tmp_path / "parts", whole.out)
    export(whole.out, tmp_path / "more", texts=40, progress=False)
    card = (tmp_path / "more" / "corpus" / "README.md").read_text()
    assert "corpus.parquet has 40 rows" in card


@pytest.mark.long
def test_a_generator_that_answers_messages_writes_for_popri(published, folders, tmp_path):
    folder = write_decoder(tmp_path / "chat", "llama")
    write_tokeniser(folder, start=True, chat=True)
    mapping = to_mapping(published("popri", {"path": str(folder)}))
    mapping["training"]["rounds"] = 1
    with pytest.raises(InputError, match=r"popri.prompt_tokens: .* puts around its text, found"):
        StudyModels(from_mapping(mapping, "here"))
    mapping["popri"] |= {"prompt_tokens": 40, "new_tokens": 6}
    record = carry_out.run(from_mapping(mapping, "here"), tmp_path / "run", progress=False).record
    assert record["history"]
    mapping["generator"]["chat"] = False
    assert StudyModels(from_mapping(mapping, "here")).generator.tokeniser.chat is None  # pyright: ignore


def test_adapters_are_merged_and_weights_rounded_as_the_section_says(published, folders):
    plain, params = pretrained.load(folders / "llama")
    assert isinstance(plain, Decoder)
    settings = {"adapters": str(folders / "adapters"), "int8": True, "dtype": "bfloat16"}
    found = StudyModels(published("popri", settings)).generator
    assert found.model.int8 and found.model.compute == "bfloat16" and found.model.lora is None
    merged = StudyModels(published("popri", {"adapters": str(folders / "adapters")})).generator
    assert merged.model == plain
    weight, before = (tree["layers"]["q"]["kernel"] for tree in (merged.params, params))
    adapted = adapters.load(folders / "adapters", plain, params)[1]["layers"]["q"]
    expected = before + 2 * np.einsum("nir,nro->nio", adapted["a"], adapted["b"]) * 2
    np.testing.assert_allclose(weight, expected, rtol=1e-4, atol=1e-5)
    rounded = quantise(plain, merged.params)[1]["layers"]["q"]["kernel_int8"]
    difference = np.asarray(rounded, np.int32) - np.asarray(
        found.params["layers"]["q"]["kernel_int8"], np.int32
    )
    # The base was rounded to bfloat16 before the adapters were merged.
    assert np.abs(difference).max() <= 2


REFUSED = [
    ({"hidden_size": 16}, {}, "here: generator.hidden_size must be absent where generator.path"),
    ({"pretraining": {}}, {}, "generator.pretraining must be absent where generator.path"),
    ({}, {"corpora": ["far"]}, "downstream.corpora must be absent where downstream.path"),
    ({}, {"int8": True}, "downstream.int8 must be false, found true"),
    ({"path": "bert"}, {}, "must hold a decoder, found a bert, which writes no texts"),
    ({}, {"chat": True}, "downstream.chat"),
    ({"path": "nowhere"}, {}, "generator.path: model .*nowhere' was not found"),
    ({"api": "http://here/v1"}, {}, "generator.api must be absent where generator.path is given"),
]


@pytest.mark.parametrize(("generator", "downstream", "message"), REFUSED)
def test_sections_that_are_refused_say_why(
    published, folders, tmp_path, monkeypatch, generator, downstream, message
):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    for section in (generator, downstream):
        if "path" in section:
            section["path"] = str(folders / Path(section["path"]).name)
    with pytest.raises(InputError, match=message) as caught:
        carry_out.run(published("popri", generator, downstream), tmp_path / "out", progress=False)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out" / "config.yaml").exists()


def test_too_few_positions_and_no_corpus_for_prompts_are_refused(published):
    mapping = to_mapping(published("popri"))
    mapping["popri"]["new_tokens"] = 48
    message = "has 64 positions, expected at least 65, for popri.prompt_tokens, popri.new_tokens"
    with pytest.raises(InputError, match=message):
        StudyModels(from_mapping(mapping, "here"))
    mapping["popri"]["new_tokens"], mapping["corpus"]["tokens"] = 8, 65
    with pytest.raises(InputError, match="downstream.path .* expected at least 65, for corpus.tok"):
        StudyModels(from_mapping(mapping, "here"))
    refusal(lambda: published("popri", corpora=None), "prompts are made of their texts")


def test_rephrasing_without_a_chat_template_is_refused_by_a_dry_run(published, tmp_path):
    """As by a run, before anything is charged."""
    mapping = to_mapping(published("private_evolution"))
    mapping["evolution"] |= {"form": "aug_pe", "variation": "rephrase"}
    mapping["privacy"] |= {"delta": 1e-5, "accountant": "rdp"}
    config = from_mapping(mapping, "here")
    refusal(lambda: dry_run(config), "'rephrase' without a chat template: choose 'continue'")
    refusal(lambda: carry_out.run(config, tmp_path / "out", progress=False), "'rephrase'")
    assert not (tmp_path / "out" / "ledger.jsonl").exists()
    folder = write_decoder(tmp_path / "chat", "llama")
    write_tokeniser(folder, start=True, chat=True)
    mapping["generator"] = {"path": str(folder)}
    dry_run(from_mapping(mapping, "here"))
    mapping["generator"] = {"path": str(folder), "chat": False}
    refusal(lambda: dry_run(from_mapping(mapping, "here")), "without a chat template")
    told = published("popri", {"chat": True})
    refusal(lambda: dry_run(told), "generator.chat has no chat template")


def test_a_name_on_the_hub_becomes_its_commit(published, folders, tmp_path, monkeypatch):
    """In the config that is written, so that a resumed run has the same weights."""
    commit, asked = "c0ffee" * 6 + "beef", []
    snapshot = shutil.copytree(folders / "llama", tmp_path / commit)

    def from_hub(name):
        asked.append(name)
        return snapshot

    hub_gives(monkeypatch, from_hub)
    config = published("popri", {"path": "someone/llama"}, {"path": f"someone/other@{commit}"})
    found = pinned(config)
    assert asked == ["someone/llama"]
    assert found.generator.path == f"someone/llama@{commit}"
    assert found.downstream.path == f"someone/other@{commit}"
    assert pinned(found) == found
    assert dataclasses.replace(found, generator=config.generator) == config
    assert pinned(published("popri")) == published("popri")
    writer = StudyModels(found)
    assert asked[1:] == [f"someone/other@{commit}", f"someone/llama@{commit}"]
    assert writer.about["generator"]["tokeniser"].startswith("llama ")
    # A cache that does not name its commit cannot be pinned.
    hub_gives(monkeypatch, lambda name: folders / "llama")
    refusal(lambda: pinned(config), "generator.path: did not say which commit @COMMIT")


@pytest.mark.long
def test_a_run_writes_the_commit_and_refuses_other_weights_in_its_place(
    published, folders, tmp_path, monkeypatch
):
    commit = "0123456789" * 4
    snapshot = Path(shutil.copytree(folders / "gpt2", tmp_path / commit))
    hub_gives(monkeypatch, lambda name: snapshot)
    config = published("fed_avg", downstream={"path": "someone/model@main"}, corpora=None)
    out = carry_out.run(config, tmp_path / "run", progress=False).out
    assert f"path: someone/model@{commit}" in (out / "config.yaml").read_text()
    about = json.loads((out / "result.json").read_text())["public_models"]["downstream"]
    assert about["path"] == f"someone/model@{commit}"
    write_decoder(snapshot, "gpt2", seed=9)
    with pytest.raises(InputError, match="the field 'start' of the run is not what it was"):
        carry_out.resume(out, progress=False)
