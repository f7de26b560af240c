"""FreD's release chooses the examples to prefinetune on: of all candidates, once, at no cost."""

import json
from pathlib import Path

import pytest

from jaxpfl.errors import InputError
from jaxpfl.experiments import carry_out, registry
from jaxpfl.experiments.central import text_pool
from jaxpfl.experiments.report import chosen
from jaxpfl.experiments.systems.federated_training import run as pipeline
from jaxpfl.privacy.ledger import Ledger
from jaxpfl.text.tokenisers.vocabulary import Vocabulary
from tests.experiments.conftest import FAR, NEAR, PIPELINE, changed_config, write_lines
from tests.experiments.crashes import stopped

CHOSEN = ("--prefinetune.chosen", "True", "--prefinetune.examples", "40")
ALONE = ("--prefinetune.other_candidates", "False")
EXACT = (
    ("epsilon: 8.0, delta: 1e-3, clip_norm", "private: false, clip_norm"),
    ("  epsilon: 4.0\n", ""),
    ("rounds: 3,", "rounds: 1,"),
    ("examples: 80, valid: 0.2,", "examples: 40, valid: 0.2, chosen: true,"),
)


@pytest.fixture(scope="module")
def of_both(tmp_path_factory) -> Path:
    """A config whose clients are half like one candidate and half like the other."""
    folder = tmp_path_factory.mktemp("both")
    write_lines(folder / "clients.jsonl", NEAR[:10] + FAR[:10], 300, 3, "canarytext{}")
    write_lines(folder / "vocabulary.jsonl", NEAR + FAR, 40, 5)
    for name, words in (("near", NEAR), ("far", FAR)):
        write_lines(folder / f"{name}.jsonl", words, 60, 4)
    path = folder / "pipeline.yaml"
    path.write_text(PIPELINE.format(folder=folder))
    return path


def test_examples_of_all_candidates_are_chosen_in_place_of_the_nearest(
    of_both, tmp_path, monkeypatch
):
    corpora, prefinetune = {}, pipeline.prefinetune

    def spy(model, start, corpus, *more, **settings):
        corpora[corpus.name] = corpus
        return prefinetune(model, start, corpus, *more, **settings)

    monkeypatch.setattr(pipeline, "prefinetune", spy)
    outcome = carry_out.run(changed_config(of_both, *EXACT), tmp_path / "run", progress=False)
    choice = outcome.record["fred"]["choice"]
    assert (choice["texts"], choice["pool"]) == (40, 480)
    corpus, vocabulary = corpora["chosen texts"], Vocabulary.load(outcome.out / "vocabulary.json")
    texts = [
        [vocabulary.decode(row) for row in part["tokens"]] for part in (corpus.train, corpus.valid)
    ]
    assert [len(part) for part in texts] == [32, 8]
    far = sum(text.split()[0] in FAR for part in texts for text in part)
    # Three standard deviations of as many independent draws.
    assert far == pytest.approx(40 * choice["shares"]["far"], abs=9.5) and 5 < far < 35
    assert {*choice["examples"]} <= {*texts[0], *texts[1]}
    pool = {
        json.loads(line)["text"]
        for name in ("near", "far")
        for line in (of_both.parent / f"{name}.jsonl").read_text().splitlines()
    }
    assert {*texts[0], *texts[1]} <= pool
    models = [row["model"] for row in outcome.record["table"]]
    assert models[-2:] == ["prefinetuned on chosen texts", "this run"]
    page = (outcome.out / "report.html").read_text()
    for line in (*chosen.lines(choice), *choice["examples"]):
        assert line.replace("'", "&#39;") in page
    # Every candidate is a simulation now; the nearest one, too.
    simulated = json.loads((outcome.out / "simulation.json").read_text())["table"]
    assert {row["model"] for row in simulated if row["folder"]} == {
        f"the same run from {name}" for name in ("near", "far", "mostly far")
    }


def test_a_choice_is_stored_charged_as_one_release_and_not_made_again(
    of_both, tmp_path, monkeypatch
):
    out = tmp_path / "run"
    with stopped(pipeline, "prefinetune"):
        carry_out.run(registry.load(of_both, (*CHOSEN, *ALONE)), out, progress=False)
    assert len(Ledger.read(out / "ledger.jsonl")) == 3
    record = json.loads((out / "artifacts/fred_scores/record.json").read_text())
    monkeypatch.setattr(text_pool, "choose_from", None)
    outcome = carry_out.resume(out, progress=False)
    assert outcome.record["fred"]["choice"] == record["choice"]
    assert len(Ledger.read(out / "ledger.jsonl")) == 3 + 3
    assert outcome.record["metrics"]["epsilon"] == pytest.approx(8.0, rel=2e-3)


def test_where_the_noise_hides_every_gain_the_mixture_is_taken_and_said(of_both, tmp_path):
    more = ["--fred.epsilon", "0.05", "--training.rounds", "1", "--privacy.accountant", "rdp"]
    config = registry.load(of_both, (*CHOSEN, *ALONE, *more))
    outcome = carry_out.run(config, tmp_path / "run", progress=False)
    assert outcome.record["fred"]["choice"]["kappa"] is None
    (caution,) = chosen.cautions(outcome.record["fred"]["choice"])
    assert f"caution: {caution}" in outcome.lines
    assert caution in (outcome.out / "report.html").read_text()


def test_a_pool_of_too_few_texts_is_refused_before_the_charge(of_both, tmp_path):
    out = tmp_path / "run"
    config = registry.load(of_both, (*CHOSEN, *ALONE, "--prefinetune.examples", "480"))
    with pytest.raises(InputError, match=r"prefinetune.examples .* 480 in all .* found 480"):
        carry_out.run(config, out, progress=False)
    assert not (out / "ledger.jsonl").exists()


def test_a_choice_without_a_release_and_a_candidate_of_its_name_are_refused(of_both):
    text = of_both.read_text()
    fred, rest = text[text.index("fred:") : text.index("prefinetune:")], "prefinetune.chosen"
    chosen_too = ("other_candidates: true", "chosen: true")
    for changes, words in (
        ([(fred, ""), chosen_too], rest),
        ([('"mostly far"', '"chosen texts"'), chosen_too], "chosen texts"),
    ):
        with pytest.raises(InputError, match=words):
            changed_config(of_both, *changes)
