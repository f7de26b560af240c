"""`jaxpfl export` of a trained model: what is written, what never is, and what is refused."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest

import jaxpfl as jp
from jaxpfl.cli import main
from jaxpfl.errors import CorruptFile, InputError
from jaxpfl.experiments import carry_out
from jaxpfl.experiments.engine.evaluate import DeclaredPublic, Evaluator
from jaxpfl.experiments.export import export
from jaxpfl.experiments.records import checkpoint
from jaxpfl.experiments.systems.federated_training.config import Config
from jaxpfl.experiments.systems.federated_training.study import Network, prepare
from jaxpfl.models.checkpoints import folders
from jaxpfl.models.own import from_functions
from jaxpfl.privacy.verify import verified
from jaxpfl.text.tokenisers.vocabulary import Vocabulary
from tests.experiments import canaries
from tests.faults.runs import config_of


def _config(path: Path, *overrides: str) -> Config:
    return config_of(path, ["--run.reproducible_noise", "False", *overrides])


@pytest.fixture(scope="module")
def exported(finished, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("exported") / "model"
    assert main(["export", str(finished), str(folder)]) == 0
    return folder


@pytest.fixture
def copied(finished, tmp_path) -> Path:
    """A copy of the run, to be damaged."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


def test_the_model_is_read_again_bit_by_bit_and_scores_the_same(finished, exported, tiny_config):
    names = {path.name for path in exported.iterdir()}
    expected = {"README.md", "config.json", "model.safetensors", "vocabulary.json"}
    assert names == {"certificate.json", *expected}
    experiment = prepare(_config(tiny_config))
    model, params = folders.load(exported)
    assert model == experiment.network.model
    run = json.loads((finished / "run.json").read_text())
    folder = finished / "checkpoints"
    with checkpoint.Checkpoints(folder, run=run["run"]) as checkpoints:
        state = experiment.algorithm.init(jax.random.key(0))
        found = checkpoints.restore(state, warn=pytest.fail)
    assert found is not None
    jax.tree.map(np.testing.assert_array_equal, params, found.state.params)
    assert experiment.vocabulary is not None
    vocabulary = dataclasses.replace(experiment.vocabulary, source="public.jsonl")
    assert Vocabulary.load(exported / "vocabulary.json") == vocabulary
    scored = Evaluator(model, DeclaredPublic(experiment.test), max_examples=50)(params).result()
    table = json.loads((finished / "result.json").read_text())["table"]
    row = next(row for row in table if row["model"] == "this run")
    assert scored["perplexity"] == row["perplexity"]


def test_the_card_says_what_it_cost_and_where_it_comes_from(finished, exported, tiny_config):
    card = (exported / "README.md").read_text()
    assert f"\n{json.loads((finished / 'result.json').read_text())['privacy']}\n" in card
    assert "| delta | 0.001 |" in card
    assert "| unit | client: " in card
    assert "| adjacency | add or remove one client |" in card
    assert "| private clients | the training clients of clients.jsonl |" in card
    assert "| vocabulary | public text: public.jsonl |" in card
    assert "On test clients of clients.jsonl (declared public):" in card
    assert "NOT PRIVATE" not in card
    # Where it lay on this machine concerns nobody.
    for path in exported.iterdir():
        assert str(tiny_config.parent).encode() not in path.read_bytes(), path


def test_no_canary_and_no_secret_is_exported(finished, exported, drawn):
    """TRUST 40: nothing from private/, no client's id or text, in any byte."""
    secrets = canaries.of_secrets(drawn)
    # The secret of the run, at least.
    assert len(secrets) >= 4 + 1
    names = {path.name for path in finished.rglob("private/*")}
    assert names == {"begun_in", "ledger.jsonl.key", "rounds.jsonl"}
    private = canaries.CLIENTS | secrets | canaries.of_private_folders(finished)
    canaries.assert_in_none(private, canaries.public_files(exported))


def _refused(run: Path, kind: type[Exception], message: str) -> None:
    folder = run.parent / "exported"
    with pytest.raises(kind, match=message) as caught:
        export(run, folder, progress=False)
    assert "\n" not in str(caught.value)
    # Neither the folder nor a part of it.
    assert sorted(path.name for path in run.parent.iterdir()) == [run.name]


def test_what_is_not_a_finished_run_is_refused(copied):
    (copied / "result.json").unlink()
    _refused(copied, InputError, "holds no finished run: .* go on with `jaxpfl resume")
    for name in ("config.yaml", "run.json"):
        (copied / name).unlink()
    _refused(copied, InputError, r"holds no run: there is no config\.yaml")


DAMAGES = {
    "weights": (CorruptFile, r"checkpoints/round_00000007/.*was altered"),
    "no checkpoint": (CorruptFile, "the checkpoint of the last round, 7, is gone"),
    "vocabulary": (CorruptFile, r"vocabulary\.json: is not the vocabulary of the run"),
    "ledger cut": (CorruptFile, "ledger"),
    "ledger gone": (CorruptFile, r"ledger\.jsonl: the run's ledger is missing"),
    "statement": (CorruptFile, "do not cost what the run's statement says"),
    "config": (InputError, "began with another config"),
    "unfinished": (InputError, "is not finished: 3 of 7 rounds"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_run_that_was_altered_is_refused(copied, damage):
    """TRUST 35: no card is written for what cannot be vouched for."""
    ledger, result = copied / "ledger.jsonl", copied / "result.json"
    record = json.loads(result.read_text())
    last = copied / "checkpoints" / "round_00000007"
    if damage == "weights":
        path = max(last.rglob("*"), key=lambda each: each.stat().st_size * each.is_file())
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    elif damage == "no checkpoint":
        shutil.rmtree(last)
    elif damage == "vocabulary":
        path = copied / "vocabulary.json"
        path.write_text(path.read_text().replace("kab", "kax"))
    elif damage == "ledger cut":
        ledger.write_text("".join(ledger.read_text().splitlines(keepends=True)[:-2]))
    elif damage == "ledger gone":
        ledger.unlink()
    elif damage == "statement":
        digits = record["privacy"].split("epsilon = ")[1][:4]
        record["privacy"] = record["privacy"].replace(digits, "0.01", 1)
        result.write_text(json.dumps(record))
    elif damage == "config":
        path = copied / "config.yaml"
        path.write_text(path.read_text().replace("clip_norm: 0.5", "clip_norm: 0.25"))
    else:
        result.write_text(json.dumps({**record, "rounds": 3}))
    _refused(copied, *DAMAGES[damage])


OTHERS = (None, 7, "x", [], {}, [None], {"": 0})


@pytest.mark.parametrize("file", ["result.json", pytest.param("run.json", marks=pytest.mark.long)])
def test_a_record_without_a_field_is_refused_with_a_sentence(copied, file):
    """TRUST 7, 39: each field in turn is left out, or holds something else."""
    path, folder = copied / file, copied.parent / "exported"
    record = json.loads(path.read_text())
    for number, name in enumerate(record):
        for broken in (
            {other: value for other, value in record.items() if other != name},
            record | {name: OTHERS[number % len(OTHERS)]},
        ):
            path.write_text(json.dumps(broken))
            try:
                export(copied, folder, progress=False)
            except InputError as error:
                assert str(copied) in str(error) and "\n" not in str(error)
            else:
                shutil.rmtree(folder)
            assert not list(copied.parent.glob("*exported*"))


def test_a_fault_of_the_program_is_not_called_a_damaged_record(finished, tmp_path, monkeypatch):
    """The sentence has the place of the error, without its text, which may be of a client."""
    fault = "raise TypeError('the text of a client')"
    program = compile(f"def built(*_):\n    {fault}\n", "builder.py", "exec")
    namespace: dict[str, Any] = {}
    exec(program, namespace)
    monkeypatch.setattr(Network, "of", namespace["built"])
    with pytest.raises(CorruptFile, match="or the program is at fault") as caught:
        export(finished, tmp_path / "new")
    assert str(caught.value).endswith("TypeError in builder.py, line 2")
    assert str(finished) in str(caught.value) and not (tmp_path / "new").exists()


def test_a_run_without_privacy_is_stamped_whatever_its_record_says(tiny_config, tmp_path):
    """TRUST 11, 21."""
    run, config = tmp_path / "run", _config(tiny_config, "--run.reproducible_noise", "True")
    carry_out.run(config, run, progress=False)
    path = run / "result.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"stamp": ""}))
    found = export(run, tmp_path / "exported", progress=False)
    card = (tmp_path / "exported" / "README.md").read_text()
    assert found["stamp"].startswith("NOT PRIVATE")
    assert f"**{found['stamp']}**" in card


def _line(private: bool, out: Path) -> Any:
    """A run from Python of functions of one's own; returns its model and its result."""
    model = from_functions(
        lambda key: {"w": jax.random.normal(key, (2,))},
        lambda params, batch: (batch["x"] @ params["w"] - batch["y"]) ** 2,
    )
    rows = {"x": np.ones((2, 2), np.float32), "y": np.ones(2, np.float32)}
    clients = jp.data.from_clients({f"client-{i}": rows for i in range(4)})
    shared: Any = {"rounds": 1, "clip": jp.Clip(0.5), "participation": jp.Poisson(4, 2)}
    plan = jp.Plan.without_privacy(**shared)
    if private:
        plan = jp.Plan(noise=jp.Noise(1.0), delta=1e-2, **shared)
    algorithm = jp.algorithms.fed_avg(
        model, client=optax.sgd(0.1), server=optax.sgd(1.0), plan=plan
    )
    return model, jp.run(algorithm, clients, ledger=out / "ledger.jsonl", out=out)


@pytest.mark.parametrize("private", [True, False])
def test_functions_of_ones_own_are_exported_from_a_run_in_python(private, tmp_path):
    """TRUST: the card has the run's statement, or its stamp, word for word."""
    model, result = _line(private, tmp_path / "run")
    folder = tmp_path / "exported"
    assert main(["export", str(tmp_path / "run"), str(folder)]) == 0
    trained = jp.load(folder, own=model)
    jax.tree.map(np.testing.assert_array_equal, trained.params, result.params)
    card = (folder / "README.md").read_text()
    assert result.privacy in card
    assert ("NOT PRIVATE" in card) != private
    for path in folder.iterdir():
        assert b"client-1" not in path.read_bytes(), path
    assert list(verified([folder / "certificate.json"], [], folder, False))


def test_an_altered_model_of_a_run_in_python_is_refused(tmp_path):
    _line(True, tmp_path / "run")
    path = tmp_path / "run" / "model" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\0")
    _refused(tmp_path / "run", CorruptFile, "model: is not the model that the run ended with")
