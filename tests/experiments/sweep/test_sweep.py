"""Sweeps: a grid of runs, each with its own noise, ledger and directory; one table, one plot."""

import json

import numpy as np
import pytest

from jaxpfl.experiments.sweep import results
from jaxpfl.experiments.sweep.config import load_sweep
from jaxpfl.experiments.sweep.points import run_sweep
from jaxpfl.experiments.sweep.results import gap_closed, value_of
from jaxpfl.federated.release import prepared_query
from jaxpfl.privacy.ledger import Ledger
from tests.experiments.crashes import stopped
from tests.experiments.sweep.three_points import written
from tests.federated.lowering import lowered_programs
from tests.refusals import refusal

SWEEP = {
    "grid": {"training.clients_per_round": [5, 10], "run.seed": [0, 1]},
    "cases": {"slow": {"training.server.learning_rate": 0.1}, "fast": {}},
}


def summary(sweep, values):
    return results.summary(sweep, [{"value": value, "mark": ""} for value in values])


@pytest.fixture
def write(tmp_path):
    return lambda change={}: written(tmp_path, SWEEP | change)


def test_points_are_the_product_in_order(write):
    sweep = load_sweep(write())
    assert len(sweep.points) == 8
    names = ("case", "training.clients_per_round", "run.seed")
    values = [tuple(point.values[name] for name in names) for point in sweep.points]
    assert values[:3] == [("slow", 5, 0), ("slow", 5, 1), ("slow", 10, 0)]
    assert sweep.points[0].name == "case=slow,clients_per_round=5,seed=0"
    assert sweep.points[0].config.training.server.learning_rate == 0.1
    assert sweep.points[-1].config.training.server.learning_rate == 1.0
    assert sweep.points[-1].config.training.clients_per_round == 10
    assert sweep.x == "training.clients_per_round"
    assert sweep.varied == ("case", "training.clients_per_round")


def test_a_field_with_one_value_is_set_and_names_nothing(write):
    grid = {"training.rounds": [2], "run.seed": [0, 1]}
    sweep = load_sweep(write({"grid": grid}))
    assert [point.name for point in sweep.points[:2]] == ["case=slow,seed=0", "case=slow,seed=1"]
    assert {point.config.training.rounds for point in sweep.points} == {2}
    # Nor is it an axis.
    assert (sweep.x, sweep.varied) == (None, ("case",))


def test_settings_of_the_command_line_are_the_base_s_and_replace_the_grid_s(write):
    typed = ["--privacy.clip_norm", "0.7", "--training.clients_per_round=7"]
    sweep = load_sweep(write(), typed)
    assert {point.config.privacy.clip_norm for point in sweep.points} == {0.7}
    assert {point.config.training.clients_per_round for point in sweep.points} == {7}
    assert [point.name for point in sweep.points[:2]] == ["case=slow,seed=0", "case=slow,seed=1"]
    # A case is what is compared, and keeps its own.
    kept = load_sweep(write(), ["--training.server.learning_rate", "0.3"])
    rates = [point.config.training.server.learning_rate for point in kept.points]
    assert rates == [0.1] * 4 + [0.3] * 4
    wrong = ["--training.round", "7"]
    refusal(lambda: load_sweep(write(), wrong), "nearest valid name is '--training.rounds'")


def test_mean_and_standard_deviation(write):
    sweep = load_sweep(write())
    rows = summary(sweep, [1.0, 3.0, 5.0, 5.0, 0.0, 1.0, 2.0, 4.0])
    assert [row["mean"] for row in rows] == [2.0, 5.0, 0.5, 3.0]
    # Of two values it is their distance over the root of two.
    deviations = np.array([2.0, 0.0, 1.0, 2.0]) / 2**0.5
    np.testing.assert_allclose([row["deviation"] for row in rows], deviations)
    assert rows[0]["runs"] == 2 and "run.seed" not in rows[0]
    one = load_sweep(write({"grid": {"training.clients_per_round": [5, 10]}}))
    assert [row["deviation"] for row in summary(one, [1.0, 2.0, 3.0, 4.0])] == [None] * 4


GAP = {
    "cases": {"public": {}, "best": {"training.rounds": 1}, "ours": {"training.rounds": 2}},
    "gap": {"from": "public", "to": "best"},
    "grid": {"privacy.clip_norm": [0.5, 1.0], "run.seed": [0, 1]},
}
# By case, then clip norm, then seed.
VALUES = [0.2, 0.3, 0.5, 0.0, 0.6, 0.5, 0.7, 0.4, 0.3, 0.45, 0.4, 0.1]


def test_the_gap_closed_is_that_of_the_same_repetition_and_values(write):
    """By hand: at clip 0.5 0.1 / 0.4 and 0.15 / 0.2, at clip 1 -0.1 / 0.2 and 0.1 / 0.4."""
    sweep = load_sweep(write(GAP))
    assert sweep.gap == ("public", "best")
    assert gap_closed(sweep, VALUES) == pytest.approx([0] * 4 + [100] * 4 + [25, 75, -50, 25])
    rows = summary(sweep, VALUES)
    assert [row["gap"] for row in rows] == pytest.approx([0, 0, 100, 100, 50, -12.5])
    deviations = [0, 0, 0, 0, 50 / 2**0.5, 75 / 2**0.5]
    assert [row["gap_deviation"] for row in rows] == pytest.approx(deviations)
    assert [row["mean"] for row in rows] == pytest.approx([0.25, 0.25, 0.55, 0.55, 0.375, 0.25])
    # Of one repetition there is no deviation.
    rows = summary(load_sweep(write(GAP | {"grid": None})), [0.2, 0.4, 0.3])
    assert [row["gap"] for row in rows] == pytest.approx([0, 100, 50])
    assert [row["gap_deviation"] for row in rows] == [None] * 3


def test_no_gap_where_its_ends_came_to_the_same(write):
    """At one seed of clip norm 1: a mean over the others would be of fewer runs than it says."""
    values = VALUES.copy()
    values[3] = values[7] = 0.4
    rows = summary(load_sweep(write(GAP)), values)
    assert [row["gap"] is None for row in rows] == [False, True] * 3
    assert [row["gap_deviation"] is None for row in rows] == [False, True] * 3
    assert all("gap" not in row for row in summary(load_sweep(write(GAP | {"gap": None})), values))


def test_a_metric_is_found_by_name():
    result = {"metrics": {"epsilon": 3.0, "evaluation": {"accuracy": 0.5, "count": 7.0}}}
    assert value_of(result, "accuracy") == 0.5
    words = "one of accuracy, count, epsilon, found 'acuracy'"
    refusal(lambda: value_of(result, "acuracy"), words)
    for value in (None, float("inf")):
        assert value_of({"metrics": {"evaluation": {"perplexity": value}}}, "perplexity") is None


def test_a_metric_of_several_models_has_a_row_for_each(write):
    """Names with numbers are numbers; what is not finite hides the mean of its row alone."""
    sweep = load_sweep(write())
    values = [{"99%": float(i), "far": 2.0 * i} for i in range(8)]
    values[1]["far"] = None
    points = [{"value": value, "mark": ""} for value in values]
    rows = results.rows_of(sweep, points)
    assert [row["of"] for row in rows] == [99] * 4 + ["far"] * 4
    assert [row["mean"] for row in rows] == [0.5, 2.5, 4.5, 6.5, None, 5.0, 9.0, 13.0]
    assert [(row["least"], row["largest"]) for row in rows[1:5:2]] == [(2.0, 3.0), (6.0, 7.0)]
    metrics = {"fred": {"near": 1.0, "far": float("inf")}}
    assert value_of({"metrics": metrics}, "fred") == {"near": 1.0, "far": None}


def test_a_case_may_be_of_another_experiment(write, tmp_path):
    """Settings of the command line are of all of them."""
    path = write({"cases": {"here": {}, "there": {"base": "other.yaml"}}, "grid": None})
    base = (tmp_path / "base.yaml").read_text()
    (tmp_path / "other.yaml").write_text(base.replace("rounds: 2", "rounds: 7"))
    sweep = load_sweep(path, ["--privacy.clip_norm", "0.7"])
    assert [point.values for point in sweep.points] == [{"case": "here"}, {"case": "there"}]
    assert [point.config.training.rounds for point in sweep.points] == [2, 7]
    assert {point.config.privacy.clip_norm for point in sweep.points} == {0.7}


TWO_POINTS = {"grid": {"training.clients_per_round": [5, 10]}, "cases": None}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sweep")
    sweep = load_sweep(written(folder, TWO_POINTS))
    return sweep, run_sweep(sweep, folder / "out", progress=False)


def test_every_point_has_its_own_noise_and_ledger(finished):
    """One epsilon for all, so more clients a round have less noise relative to their number."""
    sweep, outcome = finished
    noises, epsilons = {}, []
    for point in sweep.points:
        folder = outcome.out / "points" / point.name
        run = json.loads((folder / "run.json").read_text())
        plan = run["plan"]
        noises.setdefault(plan["clients_per_round"], set()).add(plan["noise_multiplier"])
        ledger = Ledger.read(folder / "ledger.jsonl")
        epsilons.append(ledger.spent(1e-3, "rdp"))
        assert len(ledger.charges) == 2
    assert all(len(found) == 1 for found in noises.values())
    assert min(noises[10]) > min(noises[5]) and min(noises[10]) / 10 < min(noises[5]) / 5
    np.testing.assert_allclose(epsilons, 8.0, rtol=1e-3)


@pytest.fixture
def two_points(write):
    """Half of the points of `finished`."""
    return load_sweep(write(TWO_POINTS))


def test_points_share_compiled_code(finished, two_points, tmp_path, monkeypatch):
    """TRUST: a sweep compiles once; the same points again trace nothing of the rounds."""
    sweep, outcome = finished
    with lowered_programs() as names:
        run_sweep(two_points, tmp_path / "again", progress=False)
    assert not any("accumulate" in name for name in names)
    # In its own directory nothing is run again.
    monkeypatch.setattr("jaxpfl.experiments.carry_out.run", None)
    monkeypatch.setattr("jaxpfl.experiments.carry_out.resume", None)
    assert run_sweep(sweep, outcome.out, progress=False).rows == outcome.rows


def test_an_interrupted_point_goes_on(two_points, tmp_path):
    """TRUST 33: a crash within a point; the sweep is started again and ends alike."""
    with stopped(prepared_query, "Cohort", 4):
        run_sweep(two_points, tmp_path / "out", progress=False)
    done = list((tmp_path / "out" / "points").glob("*/point.json"))
    assert len(done) == 1
    written = done[0].stat().st_ino
    outcome = run_sweep(two_points, tmp_path / "out", progress=False)
    assert done[0].stat().st_ino == written
    for point in two_points.points:
        ledger = Ledger.read(outcome.out / "points" / point.name / "ledger.jsonl")
        assert len(ledger.charges) == 2


LEDGER = {"a": {"privacy.ledger": "l.jsonl"}, "b": {}}
BAD = [
    ({"base": None}, "base must be text, found None"),
    ({"base": "a\0b"}, "the config cannot be read: no file has such a name"),
    ({"metric": None}, "metric must be text, found None"),
    ({"metric": "acuracy"}, "one of accuracy, perplexity, found 'acuracy'"),
    ({"metric": "fred"}, "metric must be a number found 'fred'"),
    ({"cases": {"a": {"base": "b.yaml"}}}, "b.yaml"),
    ({"gird": {}}, "there is no key 'gird'"),
    ({"base": 3}, "base must be text, found 3"),
    ({"grid": {"training.round": [1]}}, "there is no key 'training.round'"),
    ({"grid": {"training.rounds": []}}, "grid.training.rounds must be a list"),
    ({"grid": {"training.rounds": [1, 1]}}, "grid.training.rounds none of them twice"),
    ({"grid": {"training.rounds": [1, -1]}}, "training.rounds = -1: training.rounds"),
    ({"grid": {"data.source.x": [1]}}, "data.source.x is in no section"),
    ({"cases": {"a": 3}}, "cases must be a mapping of names"),
    ({"cases": {"a": {"run.seed": 1}}}, "run.seed in grid case 'a'"),
    ({"cases": LEDGER}, "privacy.ledger must be absent, or the same at all points, found 2"),
    ({"grid": {"run.seed": list(range(1001))}}, "at most 1000 points"),
    ({"gap": "slow"}, "gap must be a mapping of names, found 'slow'"),
    ({"gap": {"from": "slow", "to": "fats"}}, "gap.to must be one of 'slow', 'fast', found 'f"),
    ({"gap": {"from": "slow", "to": "slow"}}, "gap must be two cases, found"),
    ({"gap": {"from": "slow", "to": "fast"}, "cases": None}, "gap.from must be one of"),
    ({"seeds": 0}, "--seeds must be at least 1"),
    ({"seeds": 10**12}, "at most 1000 points"),
    ({"cases": {"a": {"run.seed": 1}}, "seeds": 2}, "run.seed in grid case 'a'"),
]


@pytest.mark.parametrize(("change", "words"), BAD)
def test_bad_sweeps(write, change, words):
    """TRUST 10: before the first run, with file, point and field."""
    seeds = {"seeds": change["seeds"]} if "seeds" in change else {}
    path = write({name: change[name] for name in change.keys() - seeds})
    refusal(lambda: load_sweep(path, **seeds), words)
