"""Functions that are called after each round: they see public values, keep parameters, stop."""

import dataclasses
import json

import jax
import numpy as np
import optax
import pytest

import jaxpfl as jp
from jaxpfl import cli
from jaxpfl.experiments.engine.run_directory import Run
from jaxpfl.experiments.engine.setting import Round
from jaxpfl.experiments.records.checkpoint import Checkpoints
from jaxpfl.experiments.registry import load
from jaxpfl.experiments.report.run_page import RunFiles, run_page
from jaxpfl.privacy import Ledger, ReproducibleSeed, verify
from tests.experiments.crashes import stopped
from tests.refusals import refusal

ROUNDS, CLIENTS = 8, 40
PARTS = jp.data.open(f"digits?clients={CLIENTS + 10}").split({"train": 0.8, "test": 0.2}, seed=0)
PLAN = jp.Plan(
    rounds=ROUNDS, clip=jp.Clip(0.5), noise=jp.Noise(1.0), delta=1e-3,
    participation=jp.Poisson(CLIENTS, 20),
)  # fmt: skip


def logits(params, batch):
    return batch["image"].reshape(-1, 64) @ params


MODEL = jp.models.from_functions(
    lambda key: jax.numpy.zeros((64, 10)),
    lambda params, batch: optax.softmax_cross_entropy_with_integer_labels(
        logits(params, batch), batch["label"]
    ),
)
EVALUATION = jp.Evaluator(MODEL, jp.DeclaredPublic(PARTS["test"], "test clients"))


def run(out, on_round=(), *, every=1, evaluation: jp.Evaluator | None = EVALUATION, **more):
    """The server goes back from round 4 on, so that the loss falls, and rises again."""
    server = optax.sgd(lambda done: jax.numpy.where(jax.numpy.less(done, 3), 2.0, -2.0))
    algorithm = jp.algorithms.fed_avg(MODEL, client=optax.sgd(0.5), server=server, plan=PLAN)
    more = {"seed": ReproducibleSeed(0), **more}
    return jp.run(
        algorithm, PARTS["train"], ledger=out / "ledger.jsonl", out=out, every=every,
        evaluation=evaluation, on_round=on_round, **more,
    )  # fmt: skip


def records(out):
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def cost(rounds):
    return dataclasses.replace(PLAN, rounds=rounds).statement().partition(", unit")[0]


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """The losses of all rounds, and the parameters after each, of a run that nobody stops."""
    out, params = tmp_path_factory.mktemp("straight"), []
    run(out, lambda round: params.append(np.array(round.params)))
    return [record["evaluation"]["loss"] for record in records(out)], params


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """A run that ends early, after two rounds without a better loss."""
    return run(tmp_path_factory.mktemp("ended"), jp.KeepBest(patience=2))


def early(losses, patience):
    """The best round and the last one, by a plain loop."""
    best = 0
    for round, loss in enumerate(losses):
        if loss < losses[best]:
            best = round
        if round - best == patience:
            return best, round
    return best, len(losses) - 1


def charged(out):
    return [charge.round for charge in Ledger.read(out / "ledger.jsonl").charges]


def test_a_run_ends_with_its_best_round_and_without_a_better_one_early(ended, straight):
    (losses, params), out = straight, ended.out
    best, last = early(losses, 2)
    assert 0 < best < last < ROUNDS and (ended.kept, ended.rounds) == (best, last)
    np.testing.assert_array_equal(ended.params, params[best])
    assert ended.metrics["evaluation"]["loss"] == losses[best]
    flattered = f"Round {best} was kept for its results: scores on {EVALUATION.name} flatter it."
    assert ended.cautions == (flattered,)
    figures = run_page(RunFiles.read(out)).sections[-1].figures
    (text, *_), *_ = [axes.texts for _, _, figure in figures for axes in figure.axes]
    assert (text.get_text(), *text.xy) == ("kept", best, losses[best])
    assert charged(out) == list(range(1, last + 1))
    # A second call finds a finished run.
    assert not (out / "private" / "secret.json").exists()
    again = run(out, jp.KeepBest(patience=2), resume=True)
    np.testing.assert_array_equal(again.params, params[best])
    assert again.privacy == ended.privacy and len(records(out)) == last + 1


def test_without_patience_a_run_goes_on_to_its_end(tmp_path, straight):
    best, _ = early(straight[0], None)
    found = run(tmp_path, jp.KeepBest("loss", None))
    assert (found.kept, found.rounds) == (best, ROUNDS)


def test_the_highest_accuracy_the_first_of_equals_and_nothing_finite():
    def answers(score, values, patience=None):
        seen, found = [], []
        for number, value in enumerate(values):
            seen = [*seen, {"round": number, "evaluation": {score: value}}]
            found.append(jp.KeepBest(score, patience)(Round(number, seen, None, lambda: "")))
        return found

    assert answers("accuracy", [0.1, 0.3, 0.3, 0.2, 0.4]) == ["keep", "keep", None, None, "keep"]
    losses = [None, 2.0, None, 1.0, 1.0]
    assert answers("loss", losses, 1) == ["keep", "keep", "stop", "keep", "stop"]
    skipped = Round(2, [{"evaluation": {"loss": 1.0}}, {}], None, lambda: "")
    assert jp.KeepBest()(skipped) is None


@pytest.mark.parametrize(
    ("owner", "name"), [pytest.param(Checkpoints, "save", marks=pytest.mark.long), (Run, "end")]
)
def test_a_killed_run_stops_at_the_round_at_which_it_would_have_stopped(
    tmp_path, ended, owner, name
):
    """Killed when it has stopped: the last checkpoint is of an earlier round, or of that one."""
    last = ended.rounds
    with stopped(owner, name, when=lambda _, at, *__, **___: getattr(at, "rounds", at) == last):
        run(tmp_path, jp.KeepBest(patience=2))
    found = run(tmp_path, jp.KeepBest(patience=2), resume=True)
    assert (found.kept, found.rounds) == (ended.kept, last)
    np.testing.assert_array_equal(found.params, ended.params)
    assert charged(tmp_path) == list(range(1, last + 1))
    assert records(tmp_path) == records(ended.out)
    assert found.privacy == ended.privacy and found.metrics == ended.metrics


def test_what_stopped_an_earlier_attempt_holds(tmp_path):
    """A function that forgets is asked again, and the run does not go on."""
    with stopped(Run, "end"):
        run(tmp_path, lambda round: "stop" if round.number == 3 else None)
    assert run(tmp_path, lambda round: None, resume=True).rounds == 3


def test_functions_see_each_round_once_and_what_was_spent_is_stated(tmp_path):
    """Of a run that is private: public values alone; the page and the certificate, too."""
    seen = []

    def look(round):
        seen.append((round.number, len(round.records), round.metrics, round.privacy))

    found = run(tmp_path, [look, lambda round: "stop" if round.number == 2 else None], seed=0)
    assert [(number, count) for number, count, *_ in seen] == [(0, 1), (1, 2), (2, 3)]
    assert [metrics for *_, metrics, _ in seen][:2] == records(tmp_path)[:2]
    assert all(cost(number) in privacy for number, *_, privacy in seen[1:])
    assert found.metrics["epsilon"] == pytest.approx(PLAN.epsilon(2), rel=1e-6)
    assert found.privacy.startswith(cost(2))
    planned = f"only {cost(ROUNDS)} was certain beforehand"
    assert f"after 2 of {ROUNDS} rounds" in found.privacy and planned in found.privacy
    page = (tmp_path / "report.html").read_text()
    assert planned in page and "ended early" in page
    verify.main([str(tmp_path / "certificate.json")])


@pytest.mark.parametrize(
    ("number", "answer", "words"),
    [
        (0, "stop", "one of [None, 'keep'] here, found 'stop'"),
        (1, 0.5, "one of [None, 'stop', 'keep'] here, found 0.5"),
    ],
)
def test_another_answer_is_refused(tmp_path, number, answer, words):
    refusal(lambda: run(tmp_path, lambda at: answer if at.number == number else None), words)


def test_after_an_error_in_a_function_nothing_is_lost(tmp_path, straight, capsys):
    def failing(round):
        if round.number == 6:
            raise ValueError("disk full")

    refusal(lambda: run(tmp_path, failing, every=4), "disk full", ValueError)
    seen = []
    found = run(tmp_path, lambda round: seen.append(round.number), every=4, resume=True)
    # It goes on from its last checkpoint, and the rounds in between are charged once.
    said = "resumed after round 4; charges of later rounds on the ledger: 2."
    assert said in capsys.readouterr().err and seen == [5, 6, 7, 8]
    np.testing.assert_array_equal(found.params, straight[1][-1])
    assert charged(tmp_path) == list(range(1, 9))


def test_there_must_be_scores_on_public_data(tmp_path):
    (tmp_path / "none.yaml").write_text(CONFIG.replace("every: 1", "every: 0") + "keep_best: {}\n")
    for call, words in (
        (lambda: run(tmp_path / "none", jp.KeepBest(), evaluation=None), "score 'loss' declared"),
        (lambda: jp.KeepBest("update_norm"), "score must be one of"),  # pyright: ignore
        (lambda: load(tmp_path / "none.yaml"), "evaluation.every must not be 0"),
    ):
        refusal(call, words)


CONFIG = """
data: {source: "digits?clients=60&alpha=0.5&seed=0", split: {train: 0.6, valid: 0.2, test: 0.2}}
model: {name: classifier_cnn, image_shape: [8, 8, 1], classes: 10}
privacy: {noise_multiplier: 1.0, delta: 1.0e-3, clip_norm: 0.5}
training:
  rounds: 8
  clients_per_round: 10
  server: {name: sgd, learning_rate: 20.0}
evaluation: {every: 1, declared_public: true}
run: {reproducible_noise: true}
"""


@pytest.mark.long
def test_a_config_stops_and_exports_the_best(tmp_path):
    """At its rate the loss rises at once, so that the model before training is the best."""
    from safetensors.numpy import load_file

    exported = []
    for patience in (1, 2):
        config, out = tmp_path / f"{patience}.yaml", tmp_path / f"run {patience}"
        config.write_text(CONFIG + f"keep_best: {{score: loss, patience: {patience}}}\n")
        assert cli.main(["run", str(config), "--out", str(out)]) == 0
        assert cli.main(["resume", str(out)]) == 0
        result = json.loads((out / "result.json").read_text())
        assert (result["kept"], result["rounds"], result["stopped"]) == (0, patience, True)
        assert len(records(out)) == patience + 1
        scores = {row.pop("model"): row for row in result["table"]}
        assert scores["untrained"]["loss"] == scores["this run"]["loss"]
        assert cli.main(["export", str(out), str(tmp_path / f"model {patience}")]) == 0
        exported.append(load_file(tmp_path / f"model {patience}" / "model.safetensors"))
    assert exported[0].keys() == exported[1].keys()
    for name, value in exported[0].items():
        np.testing.assert_array_equal(value, exported[1][name])
