"""The configs of TensorFlow Federated's data sets: each runs a round on a file of its format.

The files are TensorFlow Federated's own, beside JAXPFL_DATA. There is none of CIFAR-100's.
"""

import json
from pathlib import Path

import numpy as np
import pytest

from jaxpfl.errors import InputError
from jaxpfl.experiments import carry_out, registry
from jaxpfl.experiments.export import export

CONFIGS = Path(__file__).parents[4] / "configs"
FILES = {
    name: f"$JAXPFL_TFF/tff_{name}_synthetic.sqlite?dataset={name}"
    for name in ("emnist", "shakespeare", "stackoverflow")
}
FEW = ["--training.rounds", "1", "--training.clients-per-round", "2", "--training.batch-size", "2",
       "--training.max-examples", "3", "--training.clients-per-bucket", "2"]  # fmt: skip
SCORED = ["--evaluation.every", "1", "--evaluation.max-examples", "8"]
HALVES = ["--data.split.train", "0.5", "--data.split.public", "0.5"]
GAN = ["--data.source", FILES["emnist"] + "_36", *HALVES, "--data.clients", "2", "--images", "16",
       "--gan.model.width", "0.03125", "--gan.model.noise", "8", "--gan.generator.batch", "2",
       "--scaled-up.factor", "1", "--selection.epsilon", "1000"]  # fmt: skip
WORDS = ["--data.source", FILES["stackoverflow"], "--data.public", "$WORDS_FOLDER/words.txt"]


def both_sources(name: str) -> list[str]:
    return ["--data.source", FILES[name], "--evaluation.source", FILES[name], *SCORED]


def of_models(*kinds: str) -> list[str]:
    return [part.replace("--", f"--{kind}.", 1) for kind in kinds for part in FEW]


SMALL = {
    "emnist_cnn": [*both_sources("emnist"), "--data.clients", "2", *FEW],
    "shakespeare_characters": [*both_sources("shakespeare"), "--data.clients", "3", *FEW,
                               "--model.hidden", "8", "--model.sequence-length", "10"],
    "pfl/stackoverflow": [*WORDS, *FEW, *SCORED, "--data.clients", "3", "--model.hidden", "8",
                          "--model.vocab-size", "10", "--privacy.delta", "0.01",
                          "--data.split.train", "0.4", "--data.split.valid", "0.3",
                          "--data.split.test", "0.3",
                          "--training.clients-per-round", "1"],
    "papers/stackoverflow_word_lm": [
        *WORDS, *FEW, *SCORED, "--evaluation.source", FILES["stackoverflow"], "--data.clients", "3",
        "--model.hidden", "8", "--model.vocab-size", "10", "--privacy.delta", "0.01"],
    "stackoverflow_oov_concatenation": [
        *WORDS, *of_models("words", "characters"), "--data.clients", "3", "--words.model.hidden",
        "8", "--words.model.vocab-size", "8", "--characters.model.hidden", "8",
        "--words.privacy.delta", "0.01", "--characters.privacy.delta", "0.01",
        "--bug.probabilities", "[0.0, 1.0]", "--drawn.sentences", "20", "--drawn.words", "20"],
    "papers/gan_by_user": [*GAN, *FEW],
    "papers/gan_by_example": [*GAN, *FEW],
}  # fmt: skip


@pytest.fixture
def fixtures(data_folder, monkeypatch, tmp_path) -> Path:
    folder = data_folder.parent / "fixtures" / "tff"
    if not folder.is_dir():
        pytest.skip("the files written by TensorFlow Federated are not beside JAXPFL_DATA")
    monkeypatch.setenv("JAXPFL_TFF", str(folder))
    monkeypatch.setenv("WORDS_FOLDER", str(tmp_path))
    (tmp_path / "words.txt").write_text("the spec is\nyou find the median\n" * 4)
    return folder


def carried_out(name: str, out: Path, changes: list[str]) -> dict:
    config = registry.load(CONFIGS / f"{name}.yaml", [*changes, "--run.devices", "1"])
    return carry_out.run(config, out, progress=False).record


@pytest.mark.long
@pytest.mark.parametrize("name", SMALL)
def test_a_round_on_files_of_tensorflow_federated(name, fixtures, tmp_path):
    record = carried_out(name, tmp_path / "run", SMALL[name])
    numbers = [value for value in _numbers(record["metrics"]) if isinstance(value, int | float)]
    assert numbers and np.all(np.isfinite(numbers))
    assert (tmp_path / "run" / "report.html").exists()


def _numbers(metrics):
    for value in metrics.values():
        yield from _numbers(value) if isinstance(value, dict) else [value]


@pytest.mark.long
def test_shakespeare_characters(fixtures, tmp_path):
    changes = [*SMALL["shakespeare_characters"], "--training.rounds", "2"]
    record = carried_out("shakespeare_characters", tmp_path / "run", changes)
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
    def small(*changes: str):
        source = "cifar100.sqlite?dataset=cifar100"
        given = ["--data.source", source, "--evaluation.source", source, *changes]
        return registry.load(CONFIGS / "cifar100_resnet18.yaml", given)

    with pytest.raises(InputError, match=r"data\.split\.valid"):
        small("--data.split.train", "0.5", "--data.split.test", "0.5")
    with pytest.raises(InputError, match=r"declared_public"):
        small("--evaluation.declared-public", "false", "--evaluation.every", "0")
