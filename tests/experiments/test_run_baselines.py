"""Beside the model of a plain `jp.run` stand the model before its rounds, and word frequencies."""

import json
import math
from collections import Counter

import numpy as np
import optax
import pytest

import jaxpfl as jp
from jaxpfl.experiments.engine.rounds import initial_state
from jaxpfl.privacy import verify
from tests.experiments.statements import of_lines, of_page, of_record
from tests.trees import drawn

PUBLIC = ["the cat sat", "the dog sat on the mat", "a cat"]
HELD_OUT = ["the mat sat", "the zebra", "a dog"]
TEST = "held-out notes"


def population(texts, name):
    rows = np.arange(len(texts))
    ids = [f"{name} {row}" for row in rows]
    return jp.data.from_rows(rows, ids, {"text": texts}, name=name, unit="note")


VOCABULARY = jp.text.Vocabulary.from_public(population(PUBLIC, "public notes"), 9)
MODEL = jp.models.CIFGLanguageModel(vocab_size=9, embedding=4, hidden=4, projection=4)
CLIENTS = VOCABULARY.encode(population(["the cat sat on a mat"] * 12, "clients"), 6)
DECLARED = jp.DeclaredPublic(VOCABULARY.encode(population(HELD_OUT, "held out"), 6), TEST)


def carried_out(folder, *, start=None, rate=0.1, **evaluation):
    target = {"epsilon": 8.0, "delta": 1e-3, "participation": jp.Poisson(len(CLIENTS), 4)}
    plan = jp.Plan.calibrated(rounds=2, clip=jp.Clip(0.5), **target)
    settings = dict(client=optax.sgd(0.1), server=optax.sgd(rate), plan=plan, start=start)
    algorithm = jp.algorithms.fed_avg(MODEL, **settings, cohort=jp.CohortSpec(2, 2))
    evaluator = jp.Evaluator(MODEL, DECLARED, **evaluation)
    ledger, out = folder / "ledger.jsonl", folder / "out"
    return algorithm, jp.run(algorithm, CLIENTS, ledger=ledger, out=out, evaluation=evaluator)


def by_hand():
    """Perplexity and accuracy of word frequencies, from the texts themselves."""
    words = Counter(word for text in PUBLIC for word in text.split())
    kept = [word for word, _ in sorted(words.items(), key=lambda item: (-item[1], item[0]))][:5]
    counts = Counter({word: words[word] for word in kept})
    counts["<eos>"] = len(PUBLIC)
    counts["<oov>"] = sum(count for word, count in words.items() if word not in kept)
    total = sum(counts.values()) + len(kept) + 2
    best = max(sorted(counts - Counter({"<oov>": 99})), key=lambda word: counts[word])
    targets = [w if w in kept else "<oov>" for text in HELD_OUT for w in text.split()]
    targets += ["<eos>"] * len(HELD_OUT)
    loss = -sum(math.log((counts[target] + 1) / total) for target in targets) / len(targets)
    return math.exp(loss), targets.count(best) / len(targets)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return carried_out(tmp_path_factory.mktemp("run"), vocabulary=VOCABULARY)


def test_the_table_has_the_first_model_and_word_frequencies(made):
    algorithm, result = made
    rows = {row["model"]: row for row in result.table}
    assert list(rows) == ["untrained", "unigram", "this run"]
    params = algorithm.params(initial_state(algorithm, 0))
    scores = jp.Evaluator(MODEL, DECLARED)(params).result()
    assert {name: rows["untrained"][name] for name in scores} == pytest.approx(scores)
    perplexity, accuracy = by_hand()
    unigram = rows["unigram"]
    assert (unigram["perplexity"], unigram["accuracy"]) == pytest.approx((perplexity, accuracy))
    assert unigram["frequencies"] == "public notes (declared public)"
    assert {name: rows["this run"][name] for name in scores} == result.metrics["evaluation"]


def test_terminal_page_and_record_show_all_three_with_their_data(made):
    _, result = made
    names = [f"{TEST} (declared public)", "public notes (declared public)"]
    record = json.loads((result.out / "result.json").read_text())
    assert record["table"] == [dict(row) for row in result.table]
    assert record["tested_on"] == names[0]
    page = (result.out / "report.html").read_text()
    said = str(result)
    for model in ("untrained", "unigram"):
        assert model in page and f"\n{model}: " in said
    assert all(name in page and name in said for name in names)
    assert of_lines(said.splitlines(), names) == of_record(record) == of_page(page, names) == []
    assert 'href="certificate.json"' in page and "NOT protected: whatever was declared" in page


def test_the_certificate_is_of_the_ledger_and_what_was_asked(made):
    _, result = made
    ledger = result.out.parent / "ledger.jsonl"
    path = result.out / "certificate.json"
    assert "ledger.jsonl: fits" in "\n".join(verify.verified([path], [ledger], None, False))
    (found,) = json.loads(path.read_text())["ledgers"]
    assert found["epsilon"] == pytest.approx(8.0, rel=1e-3)
    (query,) = found["queries"]
    assert query["plan"]["clip_norm"] == 0.5 and query["flow_checked"]


def test_a_run_that_ends_worse_says_so_and_claims_nothing_that_is_not_known(tmp_path):
    """A start of the caller's is not untrained; without a vocabulary no words were counted."""
    # Whatever the noise, the loss is then worse than a guess, and its exponential is finite.
    start = drawn(MODEL, 1)
    _, result = carried_out(tmp_path, rate=30.0, start=start)
    perplexities = {row["model"]: row["perplexity"] for row in result.table}
    assert list(perplexities) == ["before the rounds", "this run"]
    assert perplexities["this run"] > perplexities["before the rounds"]
    assert "worse than before the rounds" in result.cautions[0]
    assert result.cautions[0] in (result.out / "report.html").read_text()
