"""`jaxpfl synthesize --label`: texts for each label of a public list, by one release."""

import json

import numpy as np
import pytest

from jaxpfl.algorithms.fred.scores import visible
from jaxpfl.cli import main
from jaxpfl.data import from_clients
from jaxpfl.experiments.systems.chosen_corpus import study
from jaxpfl.experiments.systems.chosen_corpus.config import LabelsConfig
from jaxpfl.experiments.systems.chosen_corpus.run import shares_of
from jaxpfl.experiments.systems.chosen_corpus.study import labelled
from jaxpfl.privacy import Ledger, verify
from jaxpfl.text.cut import Cut
from tests.experiments.conftest import FAR, NEAR, write_lines

CLIENTS, TEXTS = 200, 30
WORDS = {"near": NEAR, "far": FAR}


def rows_of(path):
    return list(map(json.loads, path.read_text().split("\n")[:-1]))


@pytest.fixture
def table(tmp_path):
    """Clients of whose texts two thirds are like one public corpus, and are labelled so."""
    (tmp_path / "public").mkdir()
    made = []
    for name, words in WORDS.items():
        lines = 4 if name == "near" else 2
        write_lines(tmp_path / "lines.jsonl", words, CLIENTS, lines, "canarytext{}")
        made += [{**row, "topic": name} for row in rows_of(tmp_path / "lines.jsonl")]
        write_lines(tmp_path / "public" / f"{name}.jsonl", words, 60, 4, f"{name}{{}}")
    made += [{**row, "topic": "canarylabel"} for row in made[:50]]
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made))
    return tmp_path


def synthesized(table, *more, labels="near,far", epsilon=60):
    given = ["synthesize", table / "mine.jsonl", "--public", table / "public", "--label", "topic"]
    given += ["--labels", labels, "--epsilon", epsilon, "--texts", TEXTS, "--embedder", "hashed:8"]
    return main(list(map(str, [*given, "--out", table / "out", "--json", *more])))


@pytest.mark.parametrize("cut", ["messages", "words:4"])
def test_texts_of_each_label_are_chosen_by_one_release(table, capsys, cut):
    assert synthesized(table, "--cut", cut, epsilon=1_000) == 0
    record, out = json.loads(capsys.readouterr().out), table / "out"
    rows = rows_of(out / "corpus.jsonl")
    numbers = {label: [row for row in rows if row["label"] == label] for label in WORDS}
    assert sum(map(len, numbers.values())) == len(rows) == TEXTS
    assert len(numbers["near"]) > len(numbers["far"]) > 1
    for label, of_label in numbers.items():
        like = [row for row in of_label if row["source"] == label]
        assert len(like) > 0.6 * len(of_label)
        assert len({row["text"] for row in of_label}) == len(of_label)
        assert record["labels"][label]["texts"] == len(of_label)
        # The other label's texts have a third of every client.
        share = {"near": 2 / 3, "far": 1 / 3}[label]
        found = record["labels"][label]["clients"]
        assert found == pytest.approx(share * CLIENTS, rel=0.15)
    ledger = Ledger.read(out / "ledger.jsonl")
    assert len(ledger.charges) == 3 and len({charge.run for charge in ledger.charges}) == 1
    assert ledger.spent(1e-4) <= 1_000 * 1.001
    sayings = verify.verified([out / "certificate.json"], [out / "ledger.jsonl"], None, False)
    assert f"{out / 'ledger.jsonl'}: fits" in list(sayings)
    for name in ("card.md", "certificate.json", "corpus.jsonl", "ledger.jsonl", "report.html"):
        assert "canary" not in (out / name).read_text(), name
    assert "near" in (out / "card.md").read_text()


def test_a_label_that_noise_hides_costs_the_others_nothing(table, capsys, monkeypatch):
    """Whether any client has it is private: it is told by the release alone.

    By chance a release of noise alone shows a direction, so that what has no clients shows none.
    """

    def nothing_of_few(released):
        few = released.moments.count < 20
        return (np.zeros(0), np.zeros((1, 0)), np.zeros((1, 1))) if few else visible(released)

    monkeypatch.setattr(study, "visible", nothing_of_few)
    assert synthesized(table, labels="near,far,nobody", epsilon=1_000) == 0
    record = json.loads(capsys.readouterr().out)
    assert {row["label"] for row in rows_of(table / "out" / "corpus.jsonl")} == {"near", "far"}
    assert any("nobody" in text for text in record["cautions"])


def test_clients_that_noise_hides_are_refused(table, capsys, monkeypatch):
    nothing = (np.zeros(0), np.zeros((1, 0)), np.zeros((1, 1)))
    monkeypatch.setattr(study, "visible", lambda released: nothing)
    assert synthesized(table) == 2
    said = capsys.readouterr().err
    assert "with about" in said and "was charged" in said
    assert not (table / "out" / "corpus.jsonl").exists()


@pytest.mark.parametrize(
    ("more", "word"),
    [
        (["--labels", "near"], "two labels"),
        (["--labels", "near,near"], "two labels"),
        (["--texts", "1"], "texts"),
        (["--label", "topik"], "topik"),
    ],
)
def test_labels_that_cannot_be_are_refused_before_a_charge(table, more, word, capsys):
    assert synthesized(table, *more) == 2
    assert word in capsys.readouterr().err
    assert not (table / "out" / "ledger.jsonl").exists()


def test_labels_must_be_a_public_list(table, capsys):
    given = ["synthesize", table / "mine.jsonl", "--public", table / "public", "--epsilon", 4]
    assert main(list(map(str, [*given, "--label", "topic", "--out", table / "out"]))) == 2
    assert "--labels" in capsys.readouterr().err


def test_no_piece_has_text_of_two_labels():
    rng, rows = np.random.default_rng(0), {}
    for client in range(9):
        topics = rng.choice(["a", "b", "c"], client % 4 * 3)
        texts = [f"{topic}{client} {topic}{client}{n}" for n, topic in enumerate(topics)]
        rows[str(client)] = {"text": texts, "topic": topics.tolist()}
    clients = from_clients(rows)
    for rule in ("messages", "words:3", "documents:2"):
        cut = labelled(clients, LabelsConfig("topic", ("b", "a")), Cut.parse(rule))
        assert len(cut) == len(clients)
        for client in range(len(cut)):
            examples = cut.examples(client)
            for text, label in zip(examples["text"].tolist(), examples["label"], strict=True):
                assert {word[:2] for word in text.split()} == {f"{'ba'[label]}{client}"}
            words = sum(len(text.split()) for text in examples["text"].tolist())
            listed = [text for text in rows[str(client)]["text"] if text[0] in "ab"]
            if rule != "documents:2":
                assert words == 2 * len(listed)


@pytest.mark.parametrize("counts", [[1.0, 1.0], [5.5, 1.0, 93.5], [1e4], [1.0, 1e6, 1.0]])
def test_texts_are_divided_as_the_released_counts_say(counts):
    for texts in (len(counts), 10, 997):
        shares = np.array(shares_of(texts, counts))
        assert shares.sum() == texts and shares.min() >= 1
        exact = 1 + np.array(counts) / sum(counts) * (texts - len(counts))
        assert np.abs(shares - exact).max() <= 1
