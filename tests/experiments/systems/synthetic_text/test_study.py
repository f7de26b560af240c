"""The study of synthetic text: every method end to end, its charges, and what it states."""

import json
import stat
from html import unescape
from pathlib import Path

import numpy as np
import pytest

from jaxpfl import files
from jaxpfl.algorithms.frechet import moments as frechet_moments
from jaxpfl.algorithms.fred import FredPlan, PrivateMoments, score
from jaxpfl.errors import BudgetExhausted, InputError
from jaxpfl.experiments import carry_out
from jaxpfl.experiments.central import scoring
from jaxpfl.experiments.central.training import fit
from jaxpfl.experiments.export import export
from jaxpfl.experiments.systems.synthetic_text.models import StudyModels
from jaxpfl.experiments.systems.synthetic_text.study import prepare
from jaxpfl.federated.clients.client import Static
from jaxpfl.privacy.ledger import Ledger
from jaxpfl.text.embed import embedder
from jaxpfl.text.metrics.leakage import leakage
from tests.experiments import canaries
from tests.experiments.ledgers import certified
from tests.experiments.statements import of_lines, of_page

METHODS = {
    "public": (),
    "generator": (),
    "fed_avg": (),
    "dp_ftrl": ("--privacy.sampling", "cyclic", "--privacy.noise", "banded"),
    "private_evolution": (),
    "pre_text": ("--evolution.form", "pre_text", "--evolution.variation", "redraw"),
    "pe_sft": (),
    "popri": (),
    "steered": (),
    "one_look": (
        *("--popri.clients_send", "moments", "--popri.corpus", "nearest"),
        *("--popri.checkpoint", "judged", "--popri.judge", "hashed:16"),
    ),
}
NEAREST_ALONE = METHODS["one_look"][:4]
ALSO = {"dp_ftrl": "fed_avg", "pre_text": "private_evolution", "one_look": "popri"}
SLOW = ("dp_ftrl", "generator")
LONG = ("pe_sft", "pre_text", "private_evolution", "fed_avg")
MARKED = [
    pytest.param(
        name, marks=pytest.mark.slow if name in SLOW else pytest.mark.long if name in LONG else ()
    )
    for name in METHODS
]


@pytest.fixture(scope="module")
def finished(synthetic_config, tmp_path_factory):
    """Runs a method once, in a directory of its own."""
    folder = tmp_path_factory.mktemp("runs")
    outcomes = {}

    def run(name):
        if name not in outcomes:
            config = synthetic_config(ALSO.get(name, name), *METHODS[name])
            outcomes[name] = carry_out.run(config, folder / name, progress=False)
        return outcomes[name]

    return run


def charges(path: Path) -> list[dict]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [line for line in lines if "event" in line]


def says_everywhere(stamp, outcome):
    """A study that is not private."""
    record, out = outcome.record, outcome.out
    assert record["private"] is False and record["privacy"].startswith("NOT PRIVATE")
    assert record["stamp"].startswith(stamp)
    assert "NOT PRIVATE" in (out / "report.html").read_text()
    assert (out / "config.yaml").read_text().startswith(f"# {stamp}")


def scores_of(out, column, function, written):
    """Arrays of texts by their distance from the moments that were released of a column.

    The nearest comes first; an array without texts is none of them.
    """
    released = files.read_npz(out / "artifacts" / "moments" / "arrays.npz")
    names = ("count", "mean", "covariance", "noise")
    target = PrivateMoments.of_arrays(
        {name: released[f"{column}.{name}"] for name in names}, FredPlan.without_privacy()
    )
    texts = [[text for text in array.ravel().tolist() if text] for array in written]
    moments = {
        str(number): frechet_moments(np.asarray(embedder(function)(some)), 1.0)
        for number, some in enumerate(texts)
        if some
    }
    return score(target, moments)


@pytest.mark.long
@pytest.mark.parametrize("name", ["popri", "fed_avg", "one_look", "steered"])
def test_the_noise_of_a_larger_population_is_named_in_every_statement(
    synthetic_config, tmp_path, name
):
    larger = ("--simulated.population", "100000", "--simulated.delta", "1e-6")
    method = ALSO.get(name, name)
    changes = NEAREST_ALONE if name == "one_look" else METHODS[name]
    small = synthetic_config(method).training.clients_per_round
    more = (*larger, "--simulated.clients_per_round", str(10 * small))
    config = synthetic_config(method, *changes, *more)
    outcome = carry_out.run(config, tmp_path / "run", progress=False)
    took = f"{small} clients scaled as if {10 * small} of 100,000"
    if name in ("one_look", "steered"):
        all_clients = len(prepare(config).clients)
        took = f"{all_clients} clients scaled as if 100,000 of 100,000"
    label = f"SIMULATED: noise of {took} took part"
    record, ledger = outcome.record, Ledger.read(tmp_path / "run" / "ledger.jsonl")
    assert record["privacy"].startswith(f"{label}; no guarantee")
    assert record["privacy"].count("SIMULATED") == 1
    assert "the larger population would have (epsilon = " in record["privacy"]
    assert not record["private"]
    spent = ledger.spent(config.privacy.delta)
    assert record["metrics"]["epsilon"] == pytest.approx(spent)
    assert record["stamp"].startswith(label)
    assert label in outcome.lines[-1]
    assert label in (tmp_path / "run" / "report.html").read_text()
    assert all("SIMULATED" in charge.label for charge in ledger.charges)


@pytest.mark.parametrize("name", MARKED)
def test_every_method_runs_and_has_its_page(finished, name):
    outcome = finished(name)
    record, out = outcome.record, outcome.out
    metrics = record["metrics"]
    assert 0 <= metrics["accuracy"] <= 1
    assert np.isfinite(metrics["perplexity"])
    assert record["method"] == ALSO.get(name, name)
    page = (out / "report.html").read_text()
    assert record["privacy"] in page
    assert f"{out / 'certificate.json'}: fits" in certified(out)
    assert f"Synthetic text: {record['method']}" in page
    assert ("one look" in page) == (name == "one_look")
    assert outcome.lines[-1].endswith(record["privacy"])
    sends = name not in ("public", "generator")
    assert record["private"]
    assert (metrics["epsilon"] > 0) == sends
    assert (out / "ledger.jsonl").exists() == sends
    # Every method starts from the same public model, which is named by its hash.
    start = finished("public").record
    assert record["public_models"]["downstream"] == start["public_models"]["downstream"]
    assert metrics["public_perplexity"] == start["metrics"]["perplexity"]
    assert (metrics["perplexity"] == metrics["public_perplexity"]) == (name == "public")
    # All of them were scored on the same tokens.
    table = {row["model"]: row for row in record["table"]}
    assert table.keys() == {"the public model", "unigram", "this run"}
    assert len({row["count"] for row in table.values()}) == 1
    assert table["this run"]["perplexity"] == metrics["perplexity"]
    assert table["unigram"] == start["table"][1]
    if record["method"] not in ("public", "fed_avg"):
        lines = (out / "corpus.jsonl").read_text().splitlines()
        texts = [json.loads(line)["text"] for line in lines]
        assert len(texts) == record["corpus"] > 0
        assert all(texts)
        assert texts[:12] == record["texts"]


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("popri", ["poisson_sampled"] * 2),
        ("one_look", ["gaussian"] * 3),
        ("steered", ["gaussian"]),
        pytest.param("private_evolution", ["poisson_sampled"] * 2, marks=pytest.mark.long),
        pytest.param("pre_text", ["poisson_sampled"] * 2, marks=pytest.mark.long),
        pytest.param("pe_sft", ["poisson_sampled"] * 2, marks=pytest.mark.long),
        pytest.param("fed_avg", ["poisson_sampled"] * 2, marks=pytest.mark.long),
        pytest.param("dp_ftrl", ["gaussian"], marks=pytest.mark.slow),
    ],
)
def test_the_ledger_holds_a_charge_a_round_and_the_epsilon_that_is_stated(finished, name, kinds):
    """TRUST 13, 29: what is stated is what was charged, and at most what was asked for."""
    outcome = finished(name)
    path = outcome.out / "ledger.jsonl"
    assert [line["event"]["type"] for line in charges(path)] == kinds
    ledger = Ledger.read(path)
    ledger.verify()
    assert ledger.spent(1e-3) == pytest.approx(outcome.record["metrics"]["epsilon"], rel=1e-6)
    assert 7.9 < ledger.spent(1e-3) <= 8.0
    assert len({line["run"] for line in charges(path)}) == 1
    assert outcome.record["privacy"].endswith("if nothing else is released from these clients")


@pytest.mark.parametrize("name", MARKED)
def test_every_number_says_what_it_is_of_and_nothing_private_is_written(finished, name):
    """SPEC C.3, TRUST 40: ids and texts of clients are on no public file.

    The faulty code writes the participants' ids, and an un-noised "recovery percentage".
    """
    outcome = finished(name)
    out, record = outcome.out, outcome.record
    data_sets = [record[name] for name in ("tested_on", "validated_on", "trained_on")]
    assert data_sets[0].startswith("test clients of ")
    assert of_lines(outcome.lines, data_sets) == []
    page = (out / "report.html").read_text()
    assert len(of_page(page.replace(data_sets[0], ""), data_sets)) >= 6
    for each in (out / "report.html", *(out / "runs").glob("*/report.html")):
        assert of_page(each.read_text(), data_sets) == []
    public = canaries.public_files(out)
    assert len(public) >= 3
    canaries.assert_in_none(canaries.CLIENTS, public)
    # Nor how long it took, which follows from how much the clients hold.
    assert "recovery" not in json.dumps(record) and "seconds" not in json.dumps(record)
    for folder in out.rglob("private"):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    kept = {"begun_in", "ledger.jsonl.key", "leakage.json", "leakage.html"}
    assert {path.name for path in (out / "private").glob("*")} <= kept


def test_a_phase_of_scores_holds_the_release_alone(finished):
    """SPEC C.3: no cohort, no sum without noise beside it."""
    out = finished("popri").out
    with np.load(out / "artifacts" / "round_1_scores" / "arrays.npz") as arrays:
        assert arrays.files == ["scores"]
        kept = arrays["scores"]
    assert kept.shape == (4, 4)
    assert np.isfinite(kept).all()


def test_what_the_corpus_repeats_of_clients_is_told_beside_what_the_untuned_model_repeats(
    finished, synthetic_config
):
    """TRUST 48: exact, so that it stays in the private folder, as a simulation's."""
    out = finished("popri").out
    found = json.loads((out / "private" / "leakage.json").read_text())
    study = prepare(synthetic_config("popri"))
    corpus = [json.loads(line)["text"] for line in (out / "corpus.jsonl").read_text().splitlines()]
    first = files.read_npz(out / "artifacts" / "round_1_responses" / "arrays.npz")["texts"]
    written = {"this run": corpus, "the untuned generator": list(filter(None, first.ravel()))}
    number = min(map(len, written.values()))
    texts = {model: texts[:number] for model, texts in written.items()}
    expected = leakage(texts, study.clients, study.held_out["test"])
    assert {**found, **expected} == found
    shown = unescape((out / "private" / "leakage.html").read_text())
    assert "SIMULATION" in shown and "NOT PUBLIC" in shown and found["found"] in shown
    rows = shown.partition("<table")[2].split("</tr>")
    for model, judged in found["writers"].items():
        assert sum(judged["by_words"]["training"]) == number
        longest = len(judged["by_words"]["training"]) - 1
        assert any(model in row and f">{longest}<" in row for row in rows)
    for path in canaries.public_files(out):
        assert b"leakage" not in path.read_bytes(), path


def test_one_look_chooses_the_nearest_corpus_at_no_further_cost(finished):
    outcome = finished("one_look")
    scores = outcome.record["corpora"]
    assert scores["names"] == ["near", "far"]
    assert scores["corrected"] == sorted(scores["corrected"])
    labels = [charge["label"] for charge in charges(outcome.out / "ledger.jsonl")]
    assert labels == [f"one look {part}" for part in ("count", "sum", "second")]
    assert "The nearest public corpus" in (outcome.out / "report.html").read_text()


def test_a_judge_that_no_reward_sees_chooses_the_round(finished):
    """By the distances of what each round wrote from the released moments of its own embedder."""
    outcome = finished("one_look")
    found, stored = outcome.record["checkpoint"], outcome.out / "artifacts"
    moments = files.read_npz(stored / "moments" / "arrays.npz")
    assert moments["judge.mean"].shape == (16,) and moments["judge.noise"][1:].min() > 0
    assert moments["judge.count"] == moments["embedding.count"]
    ratio = moments["judge.noise"][1:4] / moments["embedding.noise"][1:4]
    np.testing.assert_allclose(ratio, 3.0, rtol=1e-6)  # of shares of 0.1 and 0.9
    written = [
        files.read_npz(stored / f"round_{number}_responses" / "arrays.npz")["texts"]
        for number in (1, 2)
    ]
    scores = sorted(scores_of(outcome.out, "judge", "hashed:16", written))
    # The noise's bias is simulated, here without the texts of the last round.
    expected = [score.corrected for score in scores]
    assert found["distances"][:2] == pytest.approx(expected, abs=0.05)
    assert found["distances"][found["round"]] == min(found["distances"])
    assert "When to stop" in (outcome.out / "report.html").read_text()


def test_a_steered_study_shows_what_was_released_beside_its_noise(finished):
    outcome = finished("steered")
    stored = files.read_npz(outcome.out / "artifacts" / "steering" / "arrays.npz")
    ((layer, norm, noise, bound),) = outcome.record["steering"]["layers"]
    assert (layer, noise, bound) == (1, stored["noise"][0], stored["bounds"][0])
    assert norm == pytest.approx(np.linalg.norm(stored["vectors"]))
    assert 0 < noise < np.inf and norm <= bound * (1 + 1e-9)
    page = (outcome.out / "report.html").read_text()
    assert "What steered the generator" in page and f"{norm:.2f}" in page
    assert "in its only round" in page
    labels = [charge["label"] for charge in charges(outcome.out / "ledger.jsonl")]
    assert labels == ["steered"]


def test_a_look_that_a_budget_has_no_room_for_is_not_begun(synthetic_config, tmp_path):
    """Not even its count, which alone would fit."""
    tight = ("--privacy.budget_epsilon", "7.9")
    config = synthetic_config("popri", *METHODS["one_look"], *tight)
    with pytest.raises(BudgetExhausted, match="nothing was released"):
        carry_out.run(config, tmp_path / "run", progress=False)
    assert not (tmp_path / "run").exists()


def test_a_study_without_privacy_says_so_everywhere(synthetic_config, tmp_path):
    """TRUST 11, 21; a run whose noise follows from the seed is looked at where it is resumed."""
    changes = ("--training.rounds", "1", "--privacy.private", "false")
    changes += ("--privacy.epsilon", "null", "--privacy.delta", "null")
    outcome = carry_out.run(synthetic_config("popri", *changes), tmp_path, progress=False)
    assert outcome.record["metrics"]["epsilon"] is None
    says_everywhere("NOT PRIVATE: trained", outcome)


def test_central_training_is_on_the_clients_own_texts_and_not_private(synthetic_config, tmp_path):
    """The same parameters as `fit` gives on these texts; a private one is refused by its key."""
    options = *("--privacy.private", "false"), *("--privacy.epsilon", "null")
    options += "--privacy.delta", "null"
    for refused in ((), (*options, "--privacy.ledger", "shared.jsonl")):
        with pytest.raises(InputError, match=r"privacy.private must be false, and privacy.ledger"):
            synthetic_config("central", *refused)
    config = synthetic_config("central", *options)
    outcome = carry_out.run(config, tmp_path / "run", progress=False)
    says_everywhere("NOT PRIVATE", outcome)
    record = outcome.record
    assert record["metrics"]["epsilon"] is None and record["plan"] is None
    # Clients' texts were read: there is nothing to count, and no model to hand on.
    assert "floats" not in (outcome.out / "report.html").read_text()
    with pytest.raises(InputError, match="must not be 'central'"):
        export(outcome.out, tmp_path / "exported", progress=False)
    assert not (outcome.out / "corpus.jsonl").exists()
    models, study = StudyModels(config), prepare(config)
    rows = models.rows(study.clients.columns["text"].to_pylist())
    start, settings = models.downstream, config.corpus.fine_tuning
    params = fit(start.model, start.params, {"tokens": rows}, settings, seed=config.run.seed).params
    tested = models.rows(study.held_out["test"].columns["text"].to_pylist())
    batches = scoring.in_batches({"tokens": tested}, 16)
    expected = scoring.score(Static(start.model), params, batches).result()
    assert record["metrics"]["loss"] == pytest.approx(expected["loss"], rel=1e-4)
    assert record["metrics"]["loss"] < record["table"][0]["loss"]
