"""`jaxpfl export` of a study: its models in Hugging Face's format, and its corpus."""

import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow.parquet as parquet
import pytest

from jaxpfl.cli import main
from jaxpfl.errors import CorruptFile, InputError
from jaxpfl.experiments import carry_out
from jaxpfl.experiments.central.public_models import data_mesh
from jaxpfl.experiments.central.scoring import in_batches, score
from jaxpfl.experiments.engine import build
from jaxpfl.experiments.export import export
from jaxpfl.experiments.systems.synthetic_text.methods import Author
from jaxpfl.experiments.systems.synthetic_text.models import StudyModels
from jaxpfl.experiments.systems.synthetic_text.study import prepare
from jaxpfl.federated.clients.client import Static
from jaxpfl.models import adapter_trees
from jaxpfl.models.checkpoints import adapters, pretrained
from jaxpfl.privacy.ledger import Ledger
from jaxpfl.text.microbatches import dealt, placed
from jaxpfl.text.tokenisers.fast import hugging_face
from tests.experiments import canaries

METHODS = ("popri", "pe_sft", "steered", "fed_avg")


# Whole runs.
pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def finished(synthetic_config, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    for method in METHODS:
        config = synthetic_config(method, "--corpus.texts", "12")
        carry_out.run(config, folder / method, progress=False)
    return folder


@pytest.fixture(scope="module")
def exported(finished, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("exported")
    with pytest.MonkeyPatch.context() as patched:
        # Nothing of the clients is read.
        patched.setattr("jaxpfl.experiments.engine.build.open_population", pytest.fail)
        for method in METHODS:
            assert main(["export", str(finished / method), str(folder / method)]) == 0
    return folder


MODEL = {
    "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
    "tokenizer_config.json",
}  # fmt: skip


@pytest.mark.parametrize("method", METHODS)
def test_the_downstream_model_is_read_again_and_scores_what_the_run_says(
    finished, exported, synthetic_config, method
):
    model, params = pretrained.load(exported / method)
    tokeniser = hugging_face(exported / method)
    config = synthetic_config(method, "--corpus.texts", "12")
    models = StudyModels(config)
    study = prepare(config)
    texts = (
        study.held_out["test"].columns["text"].slice(0, config.evaluation.max_examples).to_pylist()
    )
    # The exported tokeniser is the study's.
    own = models.public.tokeniser
    assert (tokeniser.end_of_text, tokeniser.ends) == (own.end_of_text, own.ends)
    assert tokeniser.start == own.start
    for found, expected in zip(tokeniser.encode(texts), own.encode(texts), strict=True):
        np.testing.assert_array_equal(found, expected)
    assert model == models.downstream.model
    batches = dealt(in_batches({"tokens": models.rows(texts)}, 16), data_mesh(16))
    scored = score(Static(model), placed(params, data_mesh(16)), batches).result()
    record = json.loads((finished / method / "result.json").read_text())
    for name in ("perplexity", "loss", "accuracy"):
        assert scored[name] == record["metrics"][name], name
    assert record["metrics"]["perplexity"] != record["metrics"]["public_perplexity"]


@pytest.mark.parametrize("method", ["popri", "pe_sft"])
def test_the_tuned_generator_is_a_public_base_and_its_adapters(exported, method):
    folder = exported / method
    base = pretrained.load(folder / "generator")
    model, params = adapters.load(folder / "generator_adapter", *base)
    assert model.lora is not None
    assert any(np.any(each["b"]) for each in adapter_trees.split(params)[0].values())
    settings = json.loads((folder / "generator_adapter" / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == "generator"
    assert {path.name for path in (folder / "generator").iterdir()} == MODEL


@pytest.mark.parametrize("method", ["generator", "public"])
def test_other_methods_are_exported(synthetic_config, tmp_path, method):
    run, folder = tmp_path / "run", tmp_path / "exported"
    carry_out.run(synthetic_config(method, "--corpus.texts", "12"), run, progress=False)
    export(run, folder, progress=False)
    pretrained.load(folder)
    assert (folder / "corpus").exists() == (method != "public")
    card = (folder / "README.md").read_text()
    assert "clients sent nothing" in card
    assert "\n(epsilon = 0): clients send nothing\n" in card
    if method == "public":
        with pytest.raises(InputError, match="wrote no synthetic texts: leave out --texts"):
            export(run, tmp_path / "texts", texts=3, progress=False)
        assert not (tmp_path / "texts").exists()


@pytest.mark.parametrize("method", ["popri", "pe_sft", "steered"])
def test_more_texts_come_from_the_tuned_writer_and_cost_nothing(
    finished, tmp_path, monkeypatch, method
):
    """Without the clients: their file is not read, and the ledger stays as it is."""
    run, writers = finished / method, []
    ledger, written = (run / "ledger.jsonl").read_bytes(), Author.texts

    def texts(self, *rest, **parts):
        writers.append(self.generator)
        return written(self, *rest, **parts)

    monkeypatch.setattr(build, "open_population", pytest.fail)
    monkeypatch.setattr(Ledger, "charge", pytest.fail)
    monkeypatch.setattr(Author, "texts", texts)
    found = {}
    for name, number in (("more", 30), ("again", 30), ("few", 3)):
        export(run, tmp_path / name, texts=number, progress=False)
        found[name] = _texts(tmp_path / name)
        assert len(found[name]) == number
    own, more = _texts_of_run(run), found["more"]
    assert more[: len(own)] == own
    # Others, not the same once more; and the same when asked again.
    assert not set(more[len(own) :]) & set(own)
    assert (found["again"], found["few"]) == (more, own[:3])
    assert (run / "ledger.jsonl").read_bytes() == ledger
    steered = method == "steered"
    assert all(writer.model.steered == steered for writer in writers)
    assert all((writer.model.lora is None) == steered for writer in writers)
    # The model is still the one that the run's own texts made.
    for name in ("model.safetensors", "generator_adapter/adapter_model.safetensors")[: 2 - steered]:
        assert (tmp_path / "more" / name).read_bytes() == (tmp_path / "few" / name).read_bytes()


def _texts_of_run(run: Path) -> list[str]:
    return [json.loads(line)["text"] for line in (run / "corpus.jsonl").read_text().splitlines()]


def _texts(folder: Path) -> list[str]:
    return parquet.read_table(folder / "corpus" / "corpus.parquet")["text"].to_pylist()


def test_the_corpus_is_a_table_with_a_card(finished, exported):
    folder = exported / "popri" / "corpus"
    assert {path.name for path in folder.iterdir()} == {"README.md", "corpus.parquet"}
    texts = _texts(exported / "popri")
    assert texts == _texts_of_run(finished / "popri")
    statement = json.loads((finished / "popri" / "result.json").read_text())["privacy"]
    for card in (folder / "README.md", exported / "popri" / "README.md"):
        assert f"\n{statement}\n" in card.read_text()
    assert (
        "released mean differences of hidden states, once"
        in (exported / "steered" / "README.md").read_text()
    )
    assert f"{len(texts)} rows" in (folder / "README.md").read_text()
    assert "data_files: corpus.parquet" in (folder / "README.md").read_text()
    assert {path.name for path in (exported / "fed_avg").iterdir()} == {
        *MODEL,
        "README.md",
        "certificate.json",
    }


def test_no_canary_and_no_secret_is_exported(finished, exported):
    """TRUST 40: looked for in every byte, and in every text."""
    private = canaries.of_private_folders(finished)
    assert len(private) > 6
    canaries.assert_in_none(private | canaries.CLIENTS, canaries.public_files(exported))


DAMAGES = {
    "corpus": (CorruptFile, "artifacts/corpus/.* was altered"),
    "fine-tuning": (CorruptFile, "fine_tuning/round_.* was altered"),
    "no fine-tuning": (CorruptFile, "the checkpoints of a finished training are missing"),
    "round": (CorruptFile, "lacks the artifact of a phase"),
    "statement": (CorruptFile, "do not cost what the run's statement says"),
    "config": (InputError, "began with another config"),
    "downstream": (InputError, "the public downstream must be the one that the run used"),
    "generator": (InputError, "the public generator must be the one that the run used"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_run_that_was_altered_is_refused(finished, tmp_path, damage):
    """TRUST 35."""
    run = Path(shutil.copytree(finished / "popri", tmp_path / "run"))
    result = run / "result.json"
    record = json.loads(result.read_text())
    if damage == "corpus":
        (run / "artifacts" / "corpus" / "arrays.npz").write_bytes(b"PK")
    elif damage == "fine-tuning":
        next((run / "fine_tuning").glob("round_*/record.json")).write_text("{}")
    elif damage == "no fine-tuning":
        shutil.rmtree(run / "fine_tuning")
    elif damage == "round":
        shutil.rmtree(run / "artifacts" / "round_2_scores")
    elif damage == "statement":
        record["privacy"] = record["privacy"].replace("epsilon = ", "epsilon = 0.", 1)
        result.write_text(json.dumps(record))
    elif damage == "config":
        path = run / "config.yaml"
        path.write_text(path.read_text().replace("batch_size: 4", "batch_size: 5"))
    else:
        record["public_models"][damage]["sha256"] = "0" * 64
        result.write_text(json.dumps(record))
    kind, message = DAMAGES[damage]
    with pytest.raises(kind, match=message) as caught:
        export(run, tmp_path / "exported", progress=False)
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
