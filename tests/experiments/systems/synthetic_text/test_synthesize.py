"""`jaxpfl synthesize`: the corpus of a run, continued without its clients, and its card."""

import dataclasses
import hashlib
import json
import shutil

import pytest

from jaxpfl.cli import main
from jaxpfl.cli.runs import described
from jaxpfl.errors import CorruptFile, InputError
from jaxpfl.experiments import carry_out
from jaxpfl.experiments.carry_out import synthesize
from jaxpfl.experiments.config.reader import to_mapping
from jaxpfl.experiments.engine.setting import NOT_PRIVATE
from jaxpfl.experiments.registry import from_mapping
from jaxpfl.experiments.systems.synthetic_text import study
from jaxpfl.experiments.systems.synthetic_text import synthesize as module
from jaxpfl.privacy.ledger import Ledger


@pytest.fixture(scope="module")
def finished(synthetic_config, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    for method in ("popri", "pe_sft"):
        changes = ("--corpus.texts", "12")
        carry_out.run(synthetic_config(method, *changes), folder / method, progress=False)
    return folder


def texts_of(path):
    return [json.loads(line)["text"] for line in path.read_text().splitlines()]


def test_the_corpus_of_the_run_and_its_card(finished, tmp_path, capsys):
    run, out = finished / "popri", tmp_path / "new" / "corpus.jsonl"
    assert main(["synthesize", str(run), "--out", str(out), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert out.read_bytes() == (run / "corpus.jsonl").read_bytes()
    card = json.loads((tmp_path / "new" / "corpus.jsonl.card.json").read_text())
    assert printed["card"] == card
    record = json.loads((run / "result.json").read_text())
    assert (card["texts"], card["written_after_the_run"]) == (record["corpus"], 0)
    assert card["sha256"] == hashlib.sha256(out.read_bytes()).hexdigest()
    assert card["epsilon"] == record["metrics"]["epsilon"]
    assert card["statement"] == record["privacy"]
    assert (card["delta"], card["unit"]) == (1e-3, "client")
    assert (card["adjacency"], card["accountant"]) == ("add_or_remove_one", "pld")
    ledger = Ledger.read(run / "ledger.jsonl")
    assert card["ledger"]["head"] == ledger.head
    assert card["ledger"]["epsilon_of_all"] == pytest.approx(card["epsilon"])
    config = (run / "config.yaml").read_bytes()
    assert card["config_sha256"] == hashlib.sha256(config).hexdigest()
    assert set(card["public_models"]) == {"tokeniser", "generator", "embedder"}
    assert card["date"] == record["date"]
    assert card["method"] == "popri"
    assert (card["private"], card["stamp"]) == (True, "")


@pytest.mark.parametrize("method", ["popri", "pe_sft"])
def test_more_texts_come_from_the_tuned_writer_and_cost_nothing(
    finished, tmp_path, monkeypatch, method
):
    """Without the clients: their file is not read, and the ledger stays as it is."""
    run = finished / method
    ledger = (run / "ledger.jsonl").read_bytes()

    def private(*_):
        raise AssertionError("the clients' data were read")

    monkeypatch.setattr(study, "read_clients", private)
    monkeypatch.setattr(Ledger, "charge", private)
    card = synthesize(run, tmp_path / "more.jsonl", texts=30, progress=False)
    synthesize(run, tmp_path / "again.jsonl", texts=30, progress=False)
    own, more = texts_of(run / "corpus.jsonl"), texts_of(tmp_path / "more.jsonl")
    assert len(more) == card["texts"] == 30
    assert card["written_after_the_run"] == 30 - len(own)
    assert more[: len(own)] == own
    # Others, not the same once more; and the same when asked again.
    assert more[len(own) : 2 * len(own)] != own
    assert not set(more[len(own) :]) & set(own)
    assert texts_of(tmp_path / "again.jsonl") == more
    assert (run / "ledger.jsonl").read_bytes() == ledger
    assert card["ledger"]["head"] == Ledger.read(run / "ledger.jsonl").head


def test_the_writer_is_the_tuned_one(finished, tmp_path, monkeypatch):
    writers = []
    written = module.CorpusWriter.texts

    def texts(self, writer, *rest):
        writers.append(writer)
        return written(self, writer, *rest)

    monkeypatch.setattr(module.CorpusWriter, "texts", texts)
    for method in ("popri", "pe_sft"):
        synthesize(finished / method, tmp_path / f"{method}.jsonl", texts=20, progress=False)
    assert all(writer.model.lora is not None for writer in writers)
    assert len({writer.digest() for writer in writers}) == 2


def test_fewer_texts_are_the_runs_first(finished, tmp_path):
    card = synthesize(finished / "popri", tmp_path / "few.jsonl", texts=3, progress=False)
    assert texts_of(tmp_path / "few.jsonl") == texts_of(finished / "popri" / "corpus.jsonl")[:3]
    assert (card["texts"], card["written_after_the_run"]) == (3, 0)


def test_what_cannot_be_synthesised_is_refused(finished, synthetic_config, tmp_path):
    run, out = finished / "popri", tmp_path / "corpus.jsonl"
    with pytest.raises(InputError, match="holds no run"):
        synthesize(tmp_path, out)
    with pytest.raises(InputError, match="texts"):
        synthesize(run, out, texts=0)
    out.write_text("mine")
    with pytest.raises(InputError, match="exists already"):
        synthesize(run, out)
    assert out.read_text() == "mine"
    assert main(["synthesize", str(run), "--out", str(tmp_path / "x"), "--texts", "-1"]) == 2
    carry_out.run(synthetic_config("public"), tmp_path / "public", progress=False)
    with pytest.raises(InputError, match="method 'public' writes no synthetic texts"):
        synthesize(tmp_path / "public", tmp_path / "x")
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("damage", ["ledger cut", "ledger gone", "corpus", "round", "generator"])
def test_a_run_that_was_altered_is_refused(finished, tmp_path, monkeypatch, damage):
    """TRUST 35, 40: no card is written for what cannot be vouched for."""
    run = tmp_path / "run"
    shutil.copytree(finished / "popri", run)
    kind = CorruptFile
    if damage == "ledger cut":
        lines = (run / "ledger.jsonl").read_text().splitlines(keepends=True)
        (run / "ledger.jsonl").write_text("".join(lines[:-1]))
    elif damage == "ledger gone":
        (run / "ledger.jsonl").unlink()
    elif damage == "corpus":
        (run / "artifacts" / "corpus" / "arrays.npz").write_bytes(b"PK")
    elif damage == "round":
        shutil.rmtree(run / "artifacts" / "round_2_scores")
    else:
        kind = InputError
        record = json.loads((run / "result.json").read_text())
        record["public_models"]["generator"]["sha256"] = "0" * 64
        (run / "result.json").write_text(json.dumps(record))
    with pytest.raises(kind):
        synthesize(run, tmp_path / "corpus.jsonl", texts=30, progress=False)
    assert not (tmp_path / "corpus.jsonl").exists()
    assert not (tmp_path / "corpus.jsonl.card.json").exists()


@pytest.mark.parametrize("file", ["result.json", "ledger.jsonl", "artifacts/corpus/record.json"])
def test_a_record_without_a_field_is_refused_with_a_sentence(finished, tmp_path, file):
    """TRUST 7, 39: the command's last line says what is wrong; there is no traceback."""
    run = tmp_path / "run"
    shutil.copytree(finished / "popri", run)
    path = run / file
    if not path.exists():
        pytest.fail(f"a run has no {file}")
    text = path.read_text()
    broken = ["", "{}", "7", text[: len(text) // 2]]
    if file == "result.json":
        record = json.loads(text)
        broken += [json.dumps({k: v for k, v in record.items() if k != name}) for name in record]
        broken += [json.dumps(record | {name: 7}) for name in record]
    for number, content in enumerate(broken):
        path.write_text(content)
        out = tmp_path / f"{number}.jsonl"
        try:
            carry_out.synthesize(run, out, progress=False)
        except InputError as error:
            assert str(run) in str(error) and "\n" not in str(error)
            assert not out.exists()


def test_a_run_without_privacy_is_stamped(synthetic_config, tmp_path):
    """TRUST 11."""
    config = synthetic_config("popri", "--training.rounds", "1")
    mapping = to_mapping(config)
    mapping["privacy"] |= {"private": False, "epsilon": None, "delta": None}
    config = from_mapping(mapping, "test")
    assert dataclasses.is_dataclass(config)
    carry_out.run(config, tmp_path / "run", progress=False)
    card = synthesize(tmp_path / "run", tmp_path / "corpus.jsonl", progress=False)
    assert not card["private"]
    assert card["stamp"] == NOT_PRIVATE
    assert card["epsilon"] is None
    assert "NOT PRIVATE" in described(card)
