"""The field's baseline tasks: each config runs on files of TensorFlow Federated, made small."""

import json
from pathlib import Path

import numpy as np
import pytest

from jaxpfl.errors import InputError
from jaxpfl.experiments import carry_out, registry
from jaxpfl.experiments.export import export

CONFIGS = Path(__file__).parents[4] / "configs"
FEW = ["--training.rounds", "2", "--training.clients-per-round", "2", "--training.batch-size", "2",
       "--training.max-examples", "3", "--training.clients-per-bucket", "2",
       "--evaluation.every", "1", "--evaluation.max-examples", "8",
       "--run.devices", "1"]  # fmt: skip


@pytest.fixture
def fixtures(data_folder, monkeypatch) -> Path:
    folder = data_folder.parent / "fixtures" / "tff"
    if not folder.is_dir():
        pytest.skip("the files written by TensorFlow Federated are not beside JAXPFL_DATA")
    monkeypatch.setenv("JAXPFL_TFF", str(folder))
    return folder


def small(name: str, source: str, *changes: str):
    """The config with both sources replaced by one, and few, small steps."""
    given = ["--data.source", source, "--evaluation.source", source, *FEW, *changes]
    return registry.load(CONFIGS / f"{name}.yaml", given)


@pytest.mark.long
def test_shakespeare_characters(fixtures, tmp_path):
    source = "$JAXPFL_TFF/tff_shakespeare_synthetic.sqlite?dataset=shakespeare"
    config = small(
        "shakespeare_characters", source, "--model.hidden", "8", "--model.sequence-length", "10"
    )
    record = carry_out.run(config, tmp_path / "run", progress=False).record
    assert record["tested_on"] == f"{config.evaluation.source} (declared public)"
    rows = {row["model"]: row for row in record["table"]}
    before, after = rows["untrained"]["loss"], rows["this run"]["loss"]
    assert np.isfinite(after) and before != after
    # Nearly uniform over the 90 characters before training.
    assert rows["untrained"]["perplexity"] == pytest.approx(90, rel=0.1)
    exported = tmp_path / "exported"
    export(tmp_path / "run", exported)
    described = json.loads((exported / "config.json").read_text())
    assert described["architecture"] == "LSTMLanguageModel"


def test_evaluation_on_a_source_needs_no_clients_beside_it():
    source = "cifar100.sqlite?dataset=cifar100"
    with pytest.raises(InputError, match=r"data\.split\.valid"):
        small("cifar100_resnet18", source, "--data.split.train", "0.5", "--data.split.test", "0.5")
    with pytest.raises(InputError, match=r"declared_public"):
        small("cifar100_resnet18", source, "--evaluation.declared-public", "false",
              "--evaluation.every", "0")  # fmt: skip
