"""Published models as the generator and the downstream model of a study."""

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxpfl.errors import InputError
from jaxpfl.experiments import carry_out
from jaxpfl.experiments.config.published import PublishedModelConfig
from jaxpfl.experiments.config.reader import to_mapping
from jaxpfl.experiments.engine import artifacts
from jaxpfl.experiments.registry import from_mapping, load
from jaxpfl.experiments.systems.synthetic_text.config import SyntheticTextConfig
from jaxpfl.experiments.systems.synthetic_text.corpus_writer import CorpusWriter
from jaxpfl.models.checkpoints import hub, pretrained
from jaxpfl.models.decoder.config import MODEL_TYPES
from jaxpfl.models.decoder.quantise import quantise
from tests.experiments.ledgers import same_but_heads
from tests.published_models import write_adapters, write_decoder, write_encoder, write_tokeniser

pytest.importorskip("tokenizers", reason="needs jaxpfl[text]")


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Path:
    """The models by name."""
    folder = tmp_path_factory.mktemp("published")
    for number, name in enumerate(MODEL_TYPES):
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
    ) -> SyntheticTextConfig:
        mapping = to_mapping(synthetic_config(method, "--run.reproducible_noise", "True"))
        mapping["generator"] = {"path": str(folders / "llama")} | (generator or {})
        mapping["downstream"] = {"path": str(folders / "gpt2")} | (downstream or {})
        mapping["run"]["devices"] = 1
        return from_mapping(mapping | changes, "here")

    return make


def _digest(params) -> str:
    from jaxpfl.text.generation.language_model import LanguageModel

    return LanguageModel.digest(type("Holder", (), {"params": params}))  # pyright: ignore


@pytest.mark.long
def test_popri_runs_on_published_models_and_resumes_to_the_same_bits(
    published, folders, tmp_path, monkeypatch
):
    """With tokenisers of their own, of which the generator's has a start token."""
    config = published("popri")
    whole = carry_out.run(config, tmp_path / "whole", progress=False)
    about = whole.record["public_models"]
    for name, kind in (("generator", "llama"), ("downstream", "gpt2")):
        _, params = pretrained.load(folders / kind)
        assert about[name]["sha256"] == _digest(params)
        assert about[name]["path"] == str(folders / kind)
        assert about[name]["tokeniser"].startswith(f"{kind} ")
    assert "tokeniser" not in about
    assert np.isfinite(whole.record["metrics"]["perplexity"])
    # Nothing was pretrained.
    assert not list(Path(config.cache).glob("*/" + "training"))

    class Stop(Exception):
        pass

    commit = artifacts.commit

    def stopping(temporary, path, manifest):
        if path.name == "round_2_scores":
            raise Stop
        commit(temporary, path, manifest)

    with monkeypatch.context() as patched, pytest.raises(Stop):
        patched.setattr(artifacts, "commit", stopping)
        carry_out.run(config, tmp_path / "parts", progress=False)
    again = carry_out.resume(tmp_path / "parts", progress=False)
    for key in ("metrics", "history", "texts", "public_models"):
        assert again.record[key] == whole.record[key], key
    for path in ("corpus.jsonl", "ledger.jsonl", "config.yaml"):
        assert same_but_heads(tmp_path / "parts" / path, whole.out / path)
    card = carry_out.synthesize(whole.out, tmp_path / "more.jsonl", texts=40, progress=False)
    assert card["texts"] == 40 and card["written_after_the_run"] > 0
