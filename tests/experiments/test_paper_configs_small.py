"""The papers' configs of text, on generated data of the right shape, by tiny published models."""

import json
from pathlib import Path

import pytest

from jaxpfl.experiments import carry_out, registry
from tests.experiments.conftest import FAR, NEAR, write_lines
from tests.published_models import write_decoder, write_encoder

PAPERS = Path(__file__).parents[2] / "configs" / "papers"
FEW = [
    "--training.rounds", "1", "--training.clients-per-round", "8", "--training.clients-per-bucket",
    "4", "--training.max-examples", "4", "--evaluation.every", "1", "--evaluation.max-examples",
    "20", "--run.reproducible-noise", "True", "--run.devices", "1", "--privacy.delta", "1e-3",
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("papers")
    write_lines(folder / "clients.jsonl", NEAR, 40, 3, "canarytext{}")
    write_lines(folder / "held_out.jsonl", NEAR, 20, 3, "othertext{}")
    write_lines(folder / "far.jsonl", FAR, 30, 4)
    for name in ("gpt2", "llama"):
        write_decoder(folder / name, name)
    write_encoder(folder / "bert", "bert")
    return folder


def load(name: str, folder: Path, *changes: str):
    source, held_out = (str(folder / f"{part}.jsonl") for part in ("clients", "held_out"))
    given = ["--data.source", source, "--evaluation.source", held_out, *FEW, *changes]
    return registry.load(PAPERS / f"{name}.yaml", given)


POPRI = [
    "--data.clients", "40", "--embedder", "hashed:32", "--popri.prompts", "4", "--popri.responses",
    "5", "--popri.prompt-tokens", "16", "--popri.new-tokens", "8", "--popri.response-tokens", "8",
    "--popri.preference.batch-size", "4", "--popri.preference.microbatch-size", "2",
    "--popri.preference.multiple", "32", "--corpus.texts", "8", "--corpus.tokens", "8",
    "--corpus.fine-tuning.epochs", "1", "--corpus.fine-tuning.batch-size", "4",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "method", "downstream"),
    [("popri_biorxiv", "popri", "gpt2"), ("popri_pubmed", "popri", "bert"),
     ("popri_congress", "fed_avg", "gpt2")],
)  # fmt: skip
def test_popri_runs(name, method, downstream, folder, tmp_path):
    corpora = json.dumps({"far": str(folder / "far.jsonl")})
    models = ["--generator.path", str(folder / "llama"), "--generator.dtype", "float32"]
    models += ["--downstream.path", str(folder / downstream), "--corpora", corpora]
    models += ["--cache", str(tmp_path / "cache"), "--method", method]
    outcome = carry_out.run(load(name, folder, *models, *POPRI), tmp_path / "out", progress=False)
    assert outcome.record["metrics"]["epsilon"] > 0
    assert outcome.record["metrics"]["count"] > 0
    assert "held_out.jsonl" in outcome.record["tested_on"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fred_table1", "fred_table2"])
def test_fred_chooses_the_nearer_corpus_for_a_published_model(name, folder, tmp_path):
    far = str(folder / "far.jsonl")
    near = "split:public"
    candidates = {"far": far, "near": near, "40%": {"near": 0.4, "far": 0.6}}
    split = ["--data.split.train", "0.6", "--data.split.public", "0.4"]
    if name == "fred_table1":
        candidates = {"stackoverflow": str(folder / "held_out.jsonl"), "wikitext": far}
        split = []
    config = load(
        name, folder, *split, "--data.clients", "40", "--model.path", str(folder / "gpt2"),
        "--model.sequence-length", "8", "--fred.candidates", json.dumps(candidates),
        "--fred.embedder", "hashed:8", "--fred.clip-norm", "1.0", "--fred.epsilon", "50.0",
        "--fred.delta", "1e-3", "--prefinetune.examples", "30", "--prefinetune.epochs", "1",
        "--prefinetune.trials", "1", "--evaluation.sentences", "0",
    )  # fmt: skip
    record = carry_out.run(config, tmp_path / "out", progress=False).record
    assert "epsilon = " in record["fred"]["statement"]
    # All candidates but the chosen one.
    others = list((tmp_path / "out" / "other_candidates").iterdir())
    assert len(others) == len(candidates) - 1
