"""The page of a sweep, made of invented results: figure, table, costs, texts."""

import csv
import html
import json
import math
import re

import pytest
import yaml

from jaxpfl.experiments.sweep import page as sweep_page
from jaxpfl.experiments.sweep.config import load_sweep
from jaxpfl.experiments.sweep.page import baseline_lines, table_lines
from jaxpfl.experiments.sweep.points import run_sweep
from tests.experiments.sweep.three_points import BASE

SWEEP = {
    "base": "base.yaml",
    "metric": "accuracy",
    "gap": {"from": "public", "to": "best"},
    "cases": {"public": {}, "best": {"training.rounds": 1}, "ours": {"training.rounds": 2}},
    "grid": {"run.seed": [0, 1]},
}
VALUES = [0.2, 0.3, 0.6, 0.5, 0.3, 0.45]


@pytest.fixture
def finished(tmp_path, invented):
    """Carries out a sweep whose points come to `values`, and to what is given of their cases."""
    folders = (tmp_path / f"out{number}" for number in range(9))

    def carried_out(change, values, of_case=None):
        (tmp_path / "base.yaml").write_text(yaml.safe_dump(BASE))
        (tmp_path / "grid.yaml").write_text(yaml.safe_dump(SWEEP | change, sort_keys=False))
        sweep = load_sweep(tmp_path / "grid.yaml")
        results = {}
        for point, value in zip(sweep.points, values, strict=True):
            more = (of_case or {}).get(point.values["case"], {})
            told = {"metrics": {"accuracy": value}, "privacy": "(8, 0)", "private": True}
            results[point.name] = {**told, **more}

        invented(lambda _, folder: results[folder.name])
        outcome = run_sweep(sweep, next(folders), progress=False)
        return sweep, outcome, (outcome.out / "report.html").read_text()

    return carried_out


@pytest.fixture
def drawn(monkeypatch):
    """The figures of the pages that are written."""
    found, write_page = [], sweep_page.write_page

    def kept(directory, page):
        found.extend(figure for section in page.sections for *_, figure in section.figures)
        return write_page(directory, page)

    monkeypatch.setattr(sweep_page, "write_page", kept)
    return found


def tables(page, heading):
    """The tables under a heading: rows of text."""
    section = page.partition(f"<h2>{heading}</h2>")[2].partition("<h2>")[0]
    return [
        [
            [html.unescape(cell) for cell in re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row)]
            for row in re.findall(r"<tr>(.*?)</tr>", table)
        ]
        for table in re.findall(r"<table>(.*?)</table>", section, re.DOTALL)
    ]


def test_gap_in_files_and_tables(finished):
    sweep, outcome, page = finished({}, VALUES)
    (table,) = tables(page, "Table")
    assert table[0] == ["case", "accuracy", "standard deviation", "runs", "gap closed"]
    assert [row[-1] for row in table[1:]] == ["0 %", "100 %", "50.0 ± 35.4 %"]
    assert "from that of “public” (0 %) to that of “best” (100 %), seed by seed" in page
    lines = table_lines(sweep, outcome.rows)
    assert [line.split(maxsplit=4) for line in lines[1:]] == table[1:]
    with open(outcome.out / "table.csv") as file:
        rows = list(csv.DictReader(file))
    assert float(rows[2]["gap"]) == pytest.approx(50)
    assert float(rows[2]["gap_deviation"]) == pytest.approx(50 / 2**0.5)
    record = json.loads((outcome.out / "sweep.json").read_text())
    assert record["gap"] == {"from": "public", "to": "best"}
    assert record["rows"][2]["gap"] == pytest.approx(50)


def test_where_there_is_no_gap_the_cell_is_empty(finished):
    """Both cases come to 0.4 at one seed of clip norm 1."""
    values = [0.2, 0.3, 0.5, 0.4, 0.6, 0.5, 0.7, 0.4, 0.3, 0.45, 0.4, 0.1]
    change = {"grid": {"privacy.clip_norm": [0.5, 1.0], "run.seed": [0, 1]}}
    _, outcome, page = finished(change, values)
    (table,) = tables(page, "Table")
    assert [row[-1] for row in table[1:]] == ["0 %", "", "100 %", "", "50.0 ± 35.4 %", ""]
    with open(outcome.out / "table.csv") as file:
        assert [row["gap"] == "" for row in csv.DictReader(file)] == [False, True] * 3


def bars(panel):
    """Widths by label."""
    ticks = zip(panel.get_yticks(), panel.get_yticklabels(), strict=True)
    labels = {float(place): label.get_text() for place, label in ticks}
    return {
        labels[round(bar.get_y() + bar.get_height() / 2, 6)]: bar.get_width()
        for bar in panel.patches
    }


def test_bars_are_of_the_gap_closed_without_its_ends(finished, drawn):
    finished({"cases": SWEEP["cases"] | {"worse": {"training.rounds": 4}}}, [*VALUES, 0.1, 0.28])
    (figure,) = drawn
    (panel,) = figure.axes
    assert bars(panel) == pytest.approx({"ours": 50.0, "worse": -17.5})
    assert [text.get_text() for text in panel.texts] == ["50.0 %", "-17.5 %"]
    assert panel.get_title(loc="left") == "Gap in accuracy closed"
    (_, _, (errors,)) = panel.containers[0].lines
    widths = [segment[1][0] - segment[0][0] for segment in errors.get_segments()]
    assert widths == pytest.approx([100 / 2**0.5, 30 / 2**0.5])


@pytest.mark.parametrize(
    ("change", "values"), [({"gap": None}, VALUES), ({}, [0.2, 0.3, 0.2, 0.5, 0.3, 0.45])]
)
def test_without_a_gap_bars_are_of_the_metric(finished, drawn, change, values):
    finished(change, values)
    means = {case: sum(values[2 * i : 2 * i + 2]) / 2 for i, case in enumerate(SWEEP["cases"])}
    assert bars(drawn[0].axes[0]) == pytest.approx(means)


def test_a_sweep_without_gap_costs_and_texts_says_nothing_of_them(finished):
    sweep, outcome, page = finished({"gap": None}, VALUES)
    names = ["case", "mean", "deviation", "runs", "points", "private", "mark"]
    assert list(outcome.rows[0]) == names
    assert "gap" not in (outcome.out / "sweep.json").read_text()
    assert "gap" not in "".join(table_lines(sweep, outcome.rows))
    assert re.findall("<h2>(.*?)</h2>", page) == ["Figure", "Table", "Points"]


def test_cost_has_a_row_for_each_combination_of_values(finished):
    costs = {"public": (0, 0), "best": (1_234_567, 1_234_567), "ours": (89_000, 89)}
    of_case = {name: {"cost": {"down": d, "up": u}} for name, (d, u) in costs.items()}
    _, outcome, page = finished({}, VALUES, of_case)
    (table,) = tables(page, "Cost of a round")
    assert table == [
        ["run", "floats to a client", "floats from a client"],
        ["public", "0", "0"],
        ["best", "1,234,567", "1,234,567"],
        ["ours", "89,000", "89"],
    ]
    record = json.loads((outcome.out / "sweep.json").read_text())
    assert record["points"][-1]["cost"] == {"down": 89_000, "up": 89}


def test_texts_stand_side_by_side(finished):
    """Five cases with texts: four and one beside each other, cut and escaped."""
    cases = {f"m{i}": {"training.rounds": 4 + i} for i in range(5)}
    of_case = {
        name: {"texts": [f"{name} <b>text</b> {i}" for i in range(12)], "private": name != "m4"}
        for name in cases
    }
    of_case["m0"]["texts"] = ["long" * 200]
    _, _, page = finished({"cases": SWEEP["cases"] | cases}, [*VALUES, *[0.4] * 10], of_case)
    four, one = tables(page, "Synthetic texts, side by side")
    assert (four[0], one[0]) == (["m0", "m1", "m2", "m3"], ["m4 (NOT PRIVATE)"])
    assert len(four) == len(one) == 1 + sweep_page._TEXTS
    assert four[1][0] == ("long" * 80)[:-1] + "…" and four[2][:2] == ["", "m1 <b>text</b> 1"]
    assert one[1] == ["m4 <b>text</b> 0"]
    assert "<b>text" not in page
    assert "The first texts of each corpus, at the first seed." in page


def test_what_is_not_private_says_so_wherever_it_is_shown(finished, drawn):
    """TRUST 11: the case's name need not tell."""
    for of_case in (
        {"best": {"private": False}, "ours": {"stamp": "NOT A PRIVATE RELEASE"}},
        {"best": {"private": None}, "ours": {"private": False, "stamp": None}},
    ):
        drawn.clear()
        sweep, outcome, page = finished({}, VALUES, of_case)
        assert [row["private"] for row in outcome.rows] == [True, False, False]
        lines = table_lines(sweep, outcome.rows)
        assert [line.endswith("NOT PRIVATE") for line in lines[1:]] == [False, True, True]
        (table,) = tables(page, "Table")
        assert [row[-1] for row in table] == ["privacy", "", "NOT PRIVATE", "NOT PRIVATE"]
        assert "Some results are NOT PRIVATE" in page and "SIMULATION" in page
        with (outcome.out / "table.csv").open() as file:
            assert [row["private"] for row in csv.DictReader(file)] == ["True", "False", "False"]
        (figure,) = drawn
        (panel,) = figure.axes
        labels = [label.get_text() for label in panel.get_yticklabels()]
        assert labels == ["ours (NOT PRIVATE)"]
        assert panel.get_xlabel().endswith("(0: public;  100: best (NOT PRIVATE))")
    drawn.clear()
    _, _, page = finished({"gap": None}, VALUES, {"best": {"private": False}})
    labels = [label.get_text() for label in drawn[0].axes[0].get_yticklabels()]
    assert labels == ["public", "best (NOT PRIVATE)", "ours"]


def test_lines_over_an_axis_say_so_too(finished, drawn):
    change = {"gap": None, "grid": {"training.clients_per_round": [5, 10]}}
    finished(change, VALUES, {"best": {"private": False}})
    legend = drawn[0].axes[0].get_legend()
    texts = [text.get_text() for text in legend.get_texts()]
    assert texts == ["public", "best (NOT PRIVATE)", "ours"]


ON = "test clients (declared public)"


def with_baselines(tested_on=ON):
    """What a run's result and simulation say of other models, at each number of clients."""
    scores = {"untrained": 0.1, "unigram": 0.2, "this run": 0.3}
    table = [{"model": name, "accuracy": each} for name, each in scores.items()]
    return {"table": [*table, {"model": "no score"}], "tested_on": tested_on}


@pytest.mark.parametrize("axis", [True, False])
def test_baselines_are_in_the_figure_and_beside_the_points(finished, drawn, axis):
    change = {"gap": None}
    change |= {"grid": {"training.clients_per_round": [5, 10]}} if axis else {}
    of_case = {name: with_baselines() for name in SWEEP["cases"]}
    sweep, outcome, page = finished(change, VALUES, of_case)
    (table,) = tables(page, "Compared with")
    assert [row[:3] for row in table[1:]] == [
        ["untrained", "0.1", "6"],
        ["unigram", "0.2", "6"],
        ["the points' runs", "0.3", "6"],
    ]
    assert {row[3] for row in table[1:]} == {ON}
    lines = baseline_lines(sweep, outcome.record["baselines"])
    assert any(line.startswith("unigram: mean accuracy 0.2") for line in lines)
    legend = drawn[0].axes[0].get_legend()
    found = {text.get_text() for text in legend.get_texts()} - set(SWEEP["cases"])
    assert found == {"untrained", "unigram"}
    shown = {line.get_label(): line for line in drawn[0].axes[0].get_lines()}
    places = shown["unigram"].get_ydata() if axis else shown["unigram"].get_xdata()
    assert list(places) == pytest.approx([0.2] * len(places))


def test_baselines_on_other_data_say_so_in_the_figure(finished, drawn):
    change = {"gap": None, "grid": {"training.clients_per_round": [5, 10]}}
    results = {
        name: {
            "table": [{"model": "untrained", "accuracy": 0.1}],
            "tested_on": ON,
            "metrics": {"evaluation": {"accuracy": 0.5}},
            "evaluated_on": "validation clients (declared public)",
        }
        for name in SWEEP["cases"]
    }
    finished(change, VALUES, results)
    texts = [text.get_text() for text in drawn[0].axes[0].get_legend().get_texts()]
    assert "untrained, on other data (see the table)" in texts


@pytest.mark.parametrize("axis", [True, False])
def test_a_metric_that_is_not_finite_is_said_in_tables_and_figure(finished, drawn, axis):
    """As perplexity after training that diverged: the other points are compared as ever."""
    seeds = [0] if axis else [0, 1]
    rounds = {"training.clients_per_round": [5, 10]} if axis else {}
    change = {"gap": None, "grid": {**rounds, "run.seed": seeds}}
    values = [0.2, 0.4, 0.6, math.inf, 0.3, 0.5]
    table = [{"model": "this run", "accuracy": math.nan}, {"model": "unigram", "accuracy": 0.25}]
    of_case = {"best": {"table": table, "tested_on": ON}}
    sweep, outcome, page = finished(change, values, of_case)
    means = [0.2, 0.4, 0.6, None, 0.3, 0.5] if axis else [0.3, None, 0.4]
    assert [row["mean"] for row in outcome.rows] == pytest.approx(means)
    assert all(row["runs"] == row["points"] for row in outcome.rows)
    (shown,) = tables(page, "Table")
    assert ["not finite" in row for row in shown[1:]] == [mean is None for mean in means]
    assert "not finite" in "".join(table_lines(sweep, outcome.rows))
    (points,) = tables(page, "Points")
    assert [row[1] for row in points[1:]] == ["0.2", "0.4", "0.6", "not finite", "0.3", "0.5"]
    (beside,) = tables(page, "Compared with")
    assert [row[1] for row in beside[1:]] == ["not finite", "0.25"]
    (panel,) = drawn[0].axes
    found = panel.get_legend().get_texts() if axis else panel.texts
    assert [text.get_text() for text in found if "not finite" in text.get_text()]


def test_a_sweep_whose_metrics_are_not_finite_has_a_page_and_no_gap(finished):
    _, outcome, page = finished({}, [0.2, 0.3, math.inf, 0.5, 0.3, 0.45])
    assert [row["gap"] for row in outcome.rows] == [None] * 3
    _, outcome, page = finished({}, [math.nan] * 6)
    assert {row["mean"] for row in outcome.rows} == {None} and not outcome.failed
    assert len([row for row in tables(page, "Table")[0] if "not finite" in row]) == 3
