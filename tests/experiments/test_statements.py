"""Every number that a run shows says which data it is of, and every epsilon whose it is."""

import json

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxpfl as jp
from jaxpfl.experiments.report.page import page_lines
from jaxpfl.experiments.sweep.config import load_sweep
from jaxpfl.experiments.sweep.page import lines
from jaxpfl.experiments.sweep.points import run_sweep
from jaxpfl.experiments.systems.federated_training import page as federated_page
from tests.experiments.statements import of_lines, of_page, of_record
from tests.experiments.sweep.three_points import BASE, written

TEST = "test clients of the digits (declared public)"
SOURCE = BASE["data"]["source"]
DATA_SETS = [
    TEST,
    *(f"{part} clients of {SOURCE} (declared public)" for part in ("validation", "test")),
]


def loss(params, batch):
    chances = jax.nn.log_softmax(batch["image"].reshape(-1, 64) @ params["w"])
    return -jnp.sum(chances * jax.nn.one_hot(batch["label"], 10), axis=1)


MODEL = jp.models.from_functions(
    lambda key: {"w": jnp.zeros((64, 10))}, loss, lambda p, b: {"largest": loss(p, b)}
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two runs on one ledger, from Python."""
    folder = tmp_path_factory.mktemp("runs")
    parts = jp.data.open(SOURCE).split({"train": 0.8, "test": 0.2}, seed=0)
    taken, target = jp.Poisson(len(parts["train"]), 20), {"epsilon": 8.0, "delta": 1e-3}
    plan = jp.Plan.calibrated(**target, rounds=2, clip=jp.Clip(0.5), participation=taken)
    settings = dict(client=optax.sgd(0.1), server=optax.sgd(1.0), plan=plan)
    algorithm = jp.algorithms.fed_avg(MODEL, **settings, cohort=jp.CohortSpec(8, 16))
    evaluator = jp.Evaluator(MODEL, jp.DeclaredPublic(parts["test"], "test clients of the digits"))
    options = {"ledger": folder / "ledger.jsonl", "evaluation": evaluator}
    outs = [folder / name for name in ("first", "second")]
    return [jp.run(algorithm, parts["train"], out=out, **options) for out in outs]


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """A sweep of two runs of a config."""
    folder = tmp_path_factory.mktemp("sweep")
    sweep = load_sweep(written(folder, {"grid": {"training.clients_per_round": [4, 8]}}))
    return sweep, run_sweep(sweep, folder / "out", progress=False)


def read(result):
    return json.loads((result.out / "result.json").read_text())


def test_two_runs_on_one_ledger_show_both_epsilons(runs):
    first, second = runs
    for result in runs:
        assert of_lines(str(result).splitlines(), DATA_SETS) == []
        assert of_record(read(result)) == []
        assert of_page((result.out / "report.html").read_text(), DATA_SETS) == []
    assert first.epsilons["this run"] == first.epsilons["everything on its ledger"]
    own, whole = (second.epsilons[of] for of in ("this run", "everything on its ledger"))
    assert own == pytest.approx(8, abs=1e-3)
    ledger = first.out.parent / "ledger.jsonl"
    assert whole == pytest.approx(jp.Ledger.read(ledger).spent(1e-3), rel=1e-9)
    assert whole > own + 1
    for shown in (str(second), (second.out / "report.html").read_text()):
        assert f"{whole:.4g}" in shown


@pytest.mark.long
def test_a_sweep_and_its_points(swept):
    sweep, outcome = swept
    scored_on = {point["scored_on"] for point in outcome.record["points"]}
    assert scored_on == {DATA_SETS[1]}
    assert of_page((outcome.out / "report.html").read_text(), DATA_SETS) == []
    shown = lines(sweep, outcome.record)
    assert of_lines(shown, DATA_SETS) == []
    for point in sorted((outcome.out / "points").iterdir()):
        record = json.loads((point / "result.json").read_text())
        assert of_record(record) == []
        assert of_page((point / "report.html").read_text(), DATA_SETS) == []
        assert of_lines(page_lines(federated_page.page(point, record)), DATA_SETS) == []


PLANTED = [
    "<h2>Scores</h2><table><tr><th>model</th><th>accuracy</th></tr>"
    "<tr><td>ours</td><td>0.5</td></tr></table>",
    '<div class="fact"><b>8</b><span>epsilon so far</span></div>',
    '<div class="fact"><b>8</b><span>quality</span></div>',
    '<div class="fact"><b>8</b><span>rounds</span></div><p>(epsilon = 8, x)</p>',
    '<div class="fact"><b>8</b><span>next-token accuracy</span></div>',
]


def test_planted_numbers_without_a_label_are_found(runs):
    assert [len(of_page(planted, DATA_SETS)) for planted in PLANTED] == [1] * 5
    assert of_lines([f"on {TEST}:", "ours 0.5", "", "accuracy 0.5"], DATA_SETS) == ["accuracy 0.5"]
    assert of_lines(["epsilon 8"], DATA_SETS) == ["epsilon 8"]
    record = read(runs[0])
    assert len(of_record({**record, "quality": 0.5})) == 1
    assert len(of_record({**record, "evaluated_on": None})) == len(record["metrics"]["evaluation"])
