"""The study of inverted pixels, on a few digits."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from scipy import linalg

import jaxpfl as jp
from jaxpfl.data.corruptions import invert_pixels
from jaxpfl.data.draws import client_uniforms
from jaxpfl.errors import CorruptFile
from jaxpfl.experiments import carry_out, registry
from jaxpfl.experiments.export import export
from jaxpfl.experiments.records.artifacts import Artifacts
from jaxpfl.experiments.report.page import page_lines
from jaxpfl.experiments.sweep.results import value_of
from jaxpfl.experiments.systems.gan_inversion import page as gan_inversion_page
from jaxpfl.experiments.systems.gan_inversion import run as gan_inversion
from jaxpfl.experiments.systems.gan_inversion.study import prepare
from jaxpfl.federated.clients.evaluation import correct_examples, logits
from jaxpfl.models import sample_images
from jaxpfl.privacy import Plan
from jaxpfl.privacy.ledger import Charge, Ledger, guarantee_of
from tests.experiments.crashes import crashed_and_resumed
from tests.experiments.ledgers import assert_same_records, certified
from tests.experiments.statements import of_lines, of_page
from tests.refusals import refusal

# Two models of several networks each, or four, are many programs to compile.
pytestmark = pytest.mark.long

STUDY = """\
system: gan_inversion
data:
  source: "digits?clients=60&alpha=5&seed=0"
  public: "split:public"
  split: {train: 0.6, valid: 0.0, test: 0.0, public: 0.4}
gan:
  model: {image_shape: [8, 8, 1], width: 0.03125, noise: 8}
  generator: {steps: 2, batch: 8}
  generator_optimizer: {name: sgd, learning_rate: 0.05}
classifier: {classes: 10, epochs: 12, examples: 400, batch_size: 16, learning_rate: 0.003}
selection: {by: client, low: 25, high: 75, epsilon: 4.0}
privacy: {noise_multiplier: 0.3, delta: 1.0e-3, clip_norm: 0.1}
training: {rounds: 3, clients_per_round: 4, batch_size: 8, max_examples: 16, clients_per_bucket: 8,
           client: {name: sgd, learning_rate: 0.05}, server: {name: sgd, learning_rate: 1.0}}
images: 70
scaled_up: {factor: 10, population: 1000000, delta: 1.0e-8}
run: {checkpoint_every: 2, reproducible_noise: true, devices: 2}
"""


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    path = tmp_path_factory.mktemp("gan") / "gan.yaml"
    path.write_text(STUDY)
    return registry.load(path)


@pytest.fixture(scope="module")
def straight(config, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("straight") / "study"
    carry_out.run(config, out, progress=False)
    return out


@pytest.fixture(scope="module")
def study(config):
    return prepare(config)


@pytest.fixture(scope="module")
def evaluator(config, study, tmp_path_factory):
    store = Artifacts(tmp_path_factory.mktemp("evaluator"), run="test")
    return gan_inversion.image_evaluator(config, study.public, store)


def _selected(study, side, evaluator, settings, thresholds):
    """Of the clients, of whom half have inverted images."""
    struck = invert_pixels(study.clients, 0.5, 0)
    config = dataclasses.replace(study.config, selection=settings)
    return gan_inversion.selected_examples(struck, side, evaluator.classifier, config, thresholds)


def test_one_ledger_has_every_release_of_the_study(straight):
    """TRUST 29 and 31: thresholds from private accuracies are charged like the GANs."""
    record = json.loads((straight / "result.json").read_text())
    ledger = Ledger.read(straight / "ledger.jsonl")
    # Two histograms and four GANs of three rounds.
    assert len(ledger) == 2 + 4 * 3
    composed = record["metrics"]["epsilon"]
    assert composed == pytest.approx(ledger.spent(1e-3))
    assert composed > max(run["epsilon"] for run in record["runs"].values())
    # A GAN's own epsilon has the histograms in it that it was selected by.
    for name, run in record["runs"].items():
        assert 0.0 <= run["inverted_share"] <= 1.0 and 1.0 <= run["classifier_score"] <= 10.0
        assert run["frechet"] > 0.0 and 0.0 <= run["labelled_accuracy"] <= 1.0
        assert run["epsilon"] > Plan.from_dict(run["plan"]).epsilon()
        label = f"GAN {name.replace('_', ', ')} accuracy"
        own = [charge for charge in ledger.charges if charge.label == label]
        behind = _histograms(ledger, ("before", "bug") if name.startswith("bug") else ("before",))
        assert len(own) == 3
        assert run["epsilon"] == pytest.approx(guarantee_of([*own, *behind], 1e-3).epsilon())
        # Also the first GAN's, which was made when the ledger held nothing of the others.
        assert "with everything else on its ledger" in run["privacy"]
        result = json.loads((straight / "runs" / name / "result.json").read_text())
        assert result["privacy"] == run["privacy"]
    (at_scale, *_) = record["at_scale"]
    assert at_scale.startswith("everything, in a deployment of 1,000,000 clients")
    before = record["accuracy"]["before"]
    # What was not released is in no public file.
    assert before["stamp"] and "correct_examples" not in json.dumps(record)
    assert record["limits"] == {"low": before["low"], "high": before["high"]}
    assert certified(straight).count("ledger.jsonl: fits") == 1
    assert "certificate.json" in (straight / "report.html").read_text()


def test_its_scores_can_be_swept(straight, config):
    """Each score has a value for each GAN; what the config promises is there."""
    record = json.loads((straight / "result.json").read_text())
    found = {name: value_of(record, name) for name in config.metrics}
    for score in config.metrics - {"epsilon"}:
        assert found[score] == {name: run[score] for name, run in record["runs"].items()}
    assert f"epsilon = {found['epsilon']:.4g}"[:13] in record["privacy"]


def test_every_number_says_what_it_is_of(straight):
    record = json.loads((straight / "result.json").read_text())
    judges = "digits?clients=60&alpha=5&seed=0 [public] (declared public)"
    shown = page_lines(gan_inversion_page.page(straight, record))
    assert of_lines(shown, [judges]) == []
    assert len(of_lines([line.replace(judges, "") for line in shown], [judges])) >= 4
    page = (straight / "report.html").read_text()
    assert len(of_page(page.replace("&amp;", "&").replace(judges, ""), [judges])) >= 8
    for path in straight.rglob("report.html"):
        assert of_page(path.read_text(), [judges]) == []


def _histograms(ledger: Ledger, names: tuple[str, ...]) -> list[Charge]:
    labels = [f"accuracy of users, {name}" for name in names]
    found = [charge for charge in ledger.charges if charge.label in labels]
    assert len(found) == len(names)
    return found


def test_so_many_are_sampled_that_the_wanted_number_matches(straight, config, study):
    record = json.loads((straight / "result.json").read_text())
    for run in record["runs"].values():
        wanted = round(config.training.clients_per_round / run["share"])
        assert run["plan"]["clients_per_round"] == min(len(study.clients), wanted)
        # Its epsilon is that of sampling from everyone.
        assert run["plan"]["population"] == len(study.clients)


def test_the_share_of_who_matches_follows_from_the_released_histogram():
    released = {"histogram": [30.0, -5.0, 10.0, 60.0], "plan": {"edges": [0.0, 0.25, 0.5, 0.75, 1]}}
    thresholds = {"low": 0.5, "high": 0.875}
    assert gan_inversion.matching_share(released, "low", thresholds) == pytest.approx(0.3)
    assert gan_inversion.matching_share(released, "high", thresholds) == pytest.approx(0.3)
    assert gan_inversion.matching_share(released, "low", {"low": 0.0, "high": 1.0}) == 0.05


def test_selection_keeps_every_client_and_the_ledger(config, study, evaluator):
    """Who matches is told by nothing but which examples are left."""
    settings = config.selection, {"low": 0.5, "high": 0.75}
    low, high = (_selected(study, side, evaluator, *settings) for side in ("low", "high"))
    for held in (low, high):
        assert len(held) == len(study.clients)
        assert held.fingerprint == study.clients.fingerprint
    assert not np.any((low.sizes() > 0) & (high.sizes() > 0))
    # The classifier fails on inverted digits: those are who does badly.
    inverted = client_uniforms("inverted pixels", 0, study.clients.client_ids) < 0.5
    assert np.mean(inverted[low.sizes() > 0]) > 0.8
    assert np.mean(inverted[high.sizes() > 0]) < 0.2


def test_the_evaluator_tells_inverted_images_from_normal_ones(study, evaluator):
    images = np.asarray(study.clients.columns["image"])
    normal, inverted = evaluator.score(images), evaluator.score(1.0 - images)
    assert normal["inverted_share"] < 0.02
    assert inverted["inverted_share"] > 0.98
    assert evaluator.accuracy > 0.8


def test_real_images_train_a_classifier_and_are_near_and_noise_is_neither(study, evaluator):
    """The Frechet distance of logits by its formula; task T5's accuracy between its two ends."""
    images = np.asarray(study.clients.columns["image"], np.float32)
    noise = np.random.default_rng(0).uniform(size=images.shape).astype(np.float32)
    real, drawn = evaluator.score(images), evaluator.score(noise)
    # Even labels of noise teach something.
    assert real["labelled_accuracy"] > max(0.6, 0.15 + drawn["labelled_accuracy"])
    assert real["frechet"] < 0.1 * drawn["frechet"]
    model, params = evaluator.classifier
    one, other = (logits(model, params, each) for each in (evaluator.image, noise))
    means, covariances = zip(
        *((x.mean(axis=0), np.cov(x.T, bias=True)) for x in (one.astype(float), other)), strict=True
    )
    root: Any = np.real(np.asarray(linalg.sqrtm(covariances[0] @ covariances[1])))
    expected = np.sum((means[0] - means[1]) ** 2) + np.trace(sum(covariances) - 2 * root)
    assert drawn["frechet"] == pytest.approx(expected, rel=1e-3)


def test_random_examples_are_selected_without_a_release_of_accuracies(config, tmp_path):
    """Tasks T1 and T5: two GANs, which the ledger holds alone."""
    changes = ["--selection.by", "random", "--selection.epsilon", "null"]
    config = changed(tmp_path, *changes, "--selection.fraction", "0.5")
    carry_out.run(config, tmp_path / "out", progress=False)
    record = json.loads((tmp_path / "out" / "result.json").read_text())
    assert list(record["runs"]) == ["bug_random", "fixed_random"] and record["accuracy"] == {}
    assert len(Ledger.read(tmp_path / "out" / "ledger.jsonl")) == 2 * 3
    study = prepare(config)
    selected = gan_inversion.selected_examples(study.clients, "random", NONE, config, None)
    assert 0.3 < selected.num_examples / study.clients.num_examples < 0.7
    assert "random images, with the bug" in (tmp_path / "out" / "report.html").read_text()
    carry_out.resume(tmp_path / "out", progress=False)


def test_slices_are_chosen_by_a_private_count_of_each(tmp_path, study, evaluator):
    """Task T4: the slice with the bug is found by its released accuracy, which is charged."""
    images, labels = (study.clients.columns[name] for name in ("image", "label"))
    inverted = study.clients.with_columns({"image": 1.0 - images, "label": labels})
    model, params = evaluator.classifier
    wrong = ~correct_examples(model, params, inverted)
    # A digit that the classifier does not take inverted images for.
    struck = int(np.argmax([np.mean(wrong[labels == digit]) for digit in range(10)]))
    values = [str(digit) for digit in range(10)]
    slices = ["--selection.column", "label", "--selection.values", json.dumps(values)]
    bug = ["--bug.value", str(struck), "--bug.probability", "1.0", "--selection.epsilon", "1000"]
    most = ["--training.max_examples", "64"]
    config = changed(tmp_path, "--selection.by", "slice", *slices, *bug, *most)
    out = tmp_path / "out"
    carry_out.run(config, out, progress=False)
    record = json.loads((out / "result.json").read_text())
    ledger = Ledger.read(out / "ledger.jsonl")
    assert len(ledger) == 2 + 4 * 3
    correct = correct_examples(model, params, study.clients)
    for value, found in record["accuracy"]["before"]["slices"].items():
        # Everyone's examples count: no client holds more than `training.max_examples`.
        exact = np.mean(correct[labels == int(value)])
        assert found["accuracy"] == pytest.approx(exact, abs=6 * found["noise"] + 0.02)
    assert record["limits"]["low"] == str(struck) != record["limits"]["high"]
    # Each GAN depends on both counts, and says so.
    least = guarantee_of([c for c in ledger.charges if "slices" in c.label], 1e-3).epsilon()
    assert all(run["epsilon"] > least for run in record["runs"].values())
    low = gan_inversion.selected_examples(study.clients, "low", NONE, config, record["limits"])
    assert low.num_examples == np.sum(labels == struck)
    page = (out / "report.html").read_text()
    assert f"label {struck}, the slice of least accuracy" in page and "Accuracy by slice" in page


NONE: Any = ()  # a classifier that is not asked


def changed(folder: Path, *changes: str):
    path = folder / "gan.yaml"
    path.write_text(STUDY)
    return registry.load(path, changes)


def test_classifier_score_against_its_definition():
    logits = np.random.default_rng(0).normal(size=(50, 4)) * 3
    p = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    divergence = [sum(row * np.log(row / p.mean(axis=0))) for row in p]
    assert gan_inversion.classifier_score(logits) == pytest.approx(np.exp(np.mean(divergence)))
    # Certain of every class alike: as many as there are classes.
    assert gan_inversion.classifier_score(1000 * np.eye(4)) == pytest.approx(4.0)
    assert gan_inversion.classifier_score(np.zeros((5, 4))) == pytest.approx(1.0)


def test_a_study_that_was_cut_off_ends_in_the_same_bits(config, straight, tmp_path):
    """Ends before an artifact or a checkpoint has its name, three times, and goes on from there."""
    out = tmp_path / "study"
    crashed_and_resumed(config, out, at=(3, 4, 6))
    assert_same_records(out, straight)
    assert not list(out.rglob("*secret*"))


def test_a_histogram_is_neither_taken_from_another_plan_nor_without_its_charge(
    config, straight, tmp_path
):
    """TRUST 29: what was released stays charged, and is used with the plan that it was made by."""
    out = tmp_path / "study"
    shutil.copytree(straight, out)
    text = (out / "config.yaml").read_text()
    (out / "config.yaml").write_text(text.replace("epsilon: 4.0", "epsilon: 5.0", 1))
    refusal(lambda: carry_out.resume(out, progress=False), "artifacts")
    (out / "config.yaml").write_text(text)
    ledger = out / "ledger.jsonl"
    ledger.write_text("".join(ledger.read_text().splitlines(keepends=True)[:1]))
    refusal(lambda: carry_out.resume(out, progress=False), "ledger", CorruptFile)


def test_by_example_everyone_is_sampled_as_one_who_matches(config, study, evaluator):
    by_example = dataclasses.replace(config.selection, by="example", at_least=2)
    wrong, right = (_selected(study, side, evaluator, by_example, None) for side in ("low", "high"))
    sizes = wrong.sizes() + right.sizes()
    assert np.all(sizes <= study.clients.sizes())
    assert wrong.sizes()[wrong.sizes() > 0].min() >= 2
    assert gan_inversion.limits_of({}, by_example) is None


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ("noise_multiplier: 0.3", "epsilon: 3.0", "privacy.epsilon must be absent"),
        ('public: "split:public"', 'public: "docstrings:numpy"', "data.public must be"),
        ("low: 25, high: 75", "low: 80, high: 75", "percentiles with 0 < low <= high < 100"),
        ("epsilon: 4.0}", "at_least: 3}", "selection.epsilon is required"),
        ("by: client,", "by: random,", "selection.epsilon is random"),
        ("by: client,", "by: slice, column: label,", "at least two different selection.values"),
        ("low: 25,", 'column: label, values: ["1", "2"],', "selection.by: slice needs"),
        ("images: 70", 'images: 70\nbug: {value: "3"}', "bug.value must be one of"),
        ("by: client,", 'by: slice, column: country, values: ["1", "2"],', "column 'country'"),
        ("image_shape: [8, 8, 1]", "image_shape: [28, 28, 1]", "has [8, 8, 1]"),
        ("population: 1000000", "population: 10", "scaled_up.population is 10"),
    ],
)
def test_a_bad_study_is_refused(tmp_path, before, after, words):
    path, out = tmp_path / "bad.yaml", tmp_path / "out"
    path.write_text(STUDY.replace(before, after, 1))
    refusal(lambda: carry_out.run(registry.load(path), out, progress=False), words)
    assert not (out / "config.yaml").exists()


def test_its_four_gans_are_exported_and_draw(straight, tmp_path):
    export(straight, tmp_path / "exported", progress=False)
    folders = {path.parent.name for path in (tmp_path / "exported").glob("*/config.json")}
    first, *_ = names = list(json.loads((straight / "result.json").read_text())["runs"])
    assert folders == set(names) and len(names) == 4
    gan = jp.load(tmp_path / "exported" / first)
    assert sample_images(gan.model, gan.params, jax.random.key(0), 2).shape[0] == 2
    refusal(lambda: gan.predict("digits"), "draws images, by jaxpfl.models.sample_images")
    refusal(lambda: jp.load(tmp_path / "exported"), f"holds several models {first}")
