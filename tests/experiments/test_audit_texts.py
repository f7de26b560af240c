"""`jaxpfl audit --texts`: what published texts repeat of training beside held-out clients."""

import json
from pathlib import Path

import numpy as np
import pytest

from jaxpfl import cli
from jaxpfl.data import open as open_population
from jaxpfl.experiments.audit import audit_texts
from tests.refusals import refusal

SOURCES = ("training", "held_out", "others")
RUN = """\
system: chosen_corpus
data: {{source: "{folder}/clients.jsonl?client=who", split: {{train: 0.4, valid: 0.1, test: 0.4}}}}
corpora: {{others: "{folder}/others.jsonl"}}
privacy: {{epsilon: 1.0, delta: 1.0e-5}}
cut: {cut}
"""


def lines(texts, **more):
    return "".join(json.dumps({"text": text, **more}) + "\n" for text in texts)


@pytest.fixture
def tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """The texts of three files of 60 texts, which are also clients of one text each."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    made = [" ".join(f"secret{word}" for word in rng.integers(0, 500, 15)) for _ in range(180)]
    parts = {name: made[60 * i : 60 * i + 60] for i, name in enumerate(SOURCES)}
    for name, texts in parts.items():
        Path(f"{name}.jsonl").write_text(lines(texts))
    return parts


def audited(texts: str, *more: str) -> int:
    sides = ("--training", "training.jsonl?client=*", "--held-out", "held_out.jsonl?client=*")
    return cli.main(["audit", "--texts", texts, *sides, *more])


def test_clients_own_texts_fail_visibly_and_others_pass(tables, capsys):
    assert audited("others.jsonl") == 0
    passed = capsys.readouterr().out
    rows = [line for line in passed.splitlines() if "FAILS" in line and "below" not in line]
    # The control's, and they alone.
    assert len(rows) == 3 and all(row.startswith("clients' own (control)") for row in rows)
    assert "PASSES" in passed and "not a proof" in passed
    assert audited("training.jsonl", "--json") == cli.privacy.EXCEEDED == 5
    record = json.loads(capsys.readouterr().out)
    assert record["verdict"] == "fails"
    assert record["writers"]["these texts"]["tests"][0]["training"] == 60
    assert audited("held_out.jsonl") == 0


def test_what_is_written_is_private_and_holds_no_text(tables, tmp_path, capsys):
    assert audited("training.jsonl", "--out", "made") == 5
    written = [path for path in Path("made").rglob("*") if path.is_file()]
    names = {path.relative_to("made").as_posix() for path in written}
    assert names == {"private/leakage.json", "private/leakage.html"}
    assert Path("made/private").stat().st_mode & 0o077 == 0
    contents = [path.read_text() for path in written] + [capsys.readouterr().out]
    for content in contents:
        assert "NOT PUBLIC" in content and "secret" not in content


def test_texts_too_short_to_tell_do_not_pass(tables, tmp_path, capsys):
    for name, texts in tables.items():
        Path(f"{name}.jsonl").write_text(lines(" ".join(text.split()[:4]) for text in texts))
    assert audited("others.jsonl") == 5
    assert "CANNOT TELL" in capsys.readouterr().out


def test_a_runs_corpus_is_compared_with_its_own_clients(tables, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    everyone = [text for texts in tables.values() for text in texts]
    Path("clients.jsonl").write_text(
        "".join(lines([text], who=str(number)) for number, text in enumerate(everyone))
    )
    (run / "config.yaml").write_text(RUN.format(folder=tmp_path, cut="messages"))
    (run / "corpus.jsonl").write_text(lines(everyone[:90]))
    found = audit_texts(run)
    parts = open_population("clients.jsonl?client=who").split(
        {"train": 0.4, "valid": 0.1, "test": 0.4}, seed=0
    )
    written = set(everyone[:90])
    for side, part in (("training", "train"), ("held_out", "test")):
        texts = parts[part].columns["text"].to_pylist()
        assert found["clients"][side] == found["searched"] <= len(texts)
        assert 0 < found["writers"]["these texts"]["tests"][1][side] <= len(written & set(texts))
    assert found["verdict"] == "passes" and (run / "private" / "leakage.json").exists()
    # The training clients' own texts are what a run must not publish.
    (run / "corpus.jsonl").write_text(lines(parts["train"].columns["text"].to_pylist()))
    assert audit_texts(run)["verdict"] == "fails"


def test_texts_that_a_run_cut_are_searched_for_in_uncut_ones(tables, tmp_path):
    """A leak is found that lies across two messages of a client, or across a cut."""
    run = tmp_path / "run"
    run.mkdir()
    everyone = [text.split() for texts in tables.values() for text in texts]
    rows = (
        lines([" ".join(part)], who=str(number))
        for number, words in enumerate(everyone)
        for part in (words[:7], words[7:])
    )
    Path("clients.jsonl").write_text("".join(rows))
    (run / "config.yaml").write_text(RUN.format(folder=tmp_path, cut="words:10"))
    parts = open_population("clients.jsonl?client=who").split(
        {"train": 0.4, "valid": 0.1, "test": 0.4}, seed=0
    )
    texts = parts["train"].columns["text"].to_pylist()
    whole = [f"{first} {last}" for first, last in zip(texts[::2], texts[1::2], strict=True)]
    (run / "corpus.jsonl").write_text(lines(" ".join(text.split()[1:14]) for text in whole))
    found = audit_texts(run)
    tests = {test["words"]: test for test in found["writers"]["these texts"]["tests"]}
    assert found["verdict"] == "fails"
    assert tests[13]["training"] == found["clients"]["training"] == found["searched"]
    assert "words:10" in found["text"] and found["cut"] == "words:10"


def test_bad_sources_are_refused(tables):
    refusal(lambda: audit_texts("others.jsonl"), "others.jsonl --training --held-out")
    given = "training.jsonl?client=*", "held_out.jsonl?client=*"
    refusal(lambda: audit_texts("absent.jsonl", *given), "absent.jsonl no such file")
    Path("empty.jsonl").write_text("")
    refusal(lambda: audit_texts("empty.jsonl", *given), "empty.jsonl")
