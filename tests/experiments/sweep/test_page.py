"""The page of a sweep, made of invented results: figure, table, points."""

import csv
import html
import json
import math
import re

import pytest

from jaxpfl.experiments.sweep import page as sweep_page
from jaxpfl.experiments.sweep.config import load_sweep
from jaxpfl.experiments.sweep.page import lines
from jaxpfl.experiments.sweep.points import run_sweep
from tests.experiments.sweep.three_points import written

SWEEP = {
    "gap": {"from": "public", "to": "best"},
    "cases": {"public": {}, "best": {"training.rounds": 1}, "ours": {"training.rounds": 2}},
    "grid": {"run.seed": [0, 1]},
}
OVER_CLIENTS = {"gap": None, "grid": {"training.clients_per_round": [5, 10]}}
VALUES = [0.2, 0.3, 0.6, 0.5, 0.3, 0.45]
WAY = "of the way from public to best"


@pytest.fixture
def finished(tmp_path, invented, monkeypatch):
    """Carries out a sweep whose points come to `values`, and to what is given of their cases.

    Returns the sweep, its outcome, its page, and the axes of its figure.
    """
    folders = (tmp_path / f"out{number}" for number in range(9))
    drawn, write_page = [], sweep_page.write_page

    def kept(directory, page):
        drawn.extend(figure for section in page.sections for *_, figure in section.figures)
        return write_page(directory, page)

    monkeypatch.setattr(sweep_page, "write_page", kept)

    def carried_out(change, values, of_case=None):
        sweep = load_sweep(written(tmp_path, SWEEP | change))
        results = {
            point.name: {"metrics": {"accuracy": value}, "privacy": "(8, 0)", "private": True}
            | (of_case or {}).get(point.values["case"], {})
            for point, value in zip(sweep.points, values, strict=True)
        }
        invented(lambda _, folder: results[folder.name])
        outcome = run_sweep(sweep, next(folders), progress=False)
        page = (outcome.out / "report.html").read_text()
        return sweep, outcome, page, drawn[-1].axes[0]

    return carried_out


def table_of(page, heading):
    """The table under a heading: rows of text."""
    section = page.partition(f"<h2>{heading}</h2>")[2].partition("<h2>")[0]
    return [
        [html.unescape(cell) for cell in re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row)]
        for row in re.findall(r"<tr>(.*?)</tr>", section)
    ]


def legend(panel):
    return [text.get_text() for text in panel.get_legend().get_texts()]


def labels(panel):
    return [text.get_text() for text in panel.get_yticklabels()]


def test_gap_in_files_and_tables(finished):
    sweep, outcome, page, _ = finished({}, VALUES)
    table = table_of(page, "Table")
    assert table[0] == ["case", "accuracy", "standard deviation", "runs", WAY]
    assert [row[-1] for row in table[1:]] == ["0.0 %", "100.0 %", "50.0 ± 35.4 %"]
    assert "between that of “public” (0 %) and that of “best” (100 %), seed by seed" in page
    assert outcome.record["cautions"] == []
    shown = lines(sweep, outcome.record)
    assert [re.split(r"  +", line) for line in shown[1:5]] == table
    with open(outcome.out / "table.csv") as file:
        rows = list(csv.DictReader(file))
    assert float(rows[2]["gap"]) == pytest.approx(50)
    assert float(rows[2]["gap_deviation"]) == pytest.approx(50 / 2**0.5)
    record = json.loads((outcome.out / "sweep.json").read_text())
    assert record["rows"][2]["gap"] == pytest.approx(50)


@pytest.mark.parametrize(("ours", "where"), [(0.1, "Behind public"), (0.8, "Ahead of best")])
def test_beyond_the_ends_of_the_gap_there_is_a_dash_and_a_caution(finished, ours, where):
    """A point behind the start says nothing about the ceiling."""
    sweep, outcome, page, _ = finished({}, [*VALUES[:4], ours, ours])
    assert [row[-1] for row in table_of(page, "Table")] == [WAY, "0.0 %", "100.0 %", "-"]
    (caution,) = outcome.record["cautions"]
    assert caution.startswith(f"{where} in accuracy: ours.") and caution in page
    assert ("best is no ceiling" in caution) == (ours == 0.8)
    assert re.split("  +", lines(sweep, outcome.record)[4])[-1] == "-"


def test_a_ceiling_that_is_not_ahead_is_told(finished):
    """In accuracy, where more is better: half of a way that leads downwards is no half."""
    _, outcome, page, _ = finished({}, [0.6, 0.5, 0.2, 0.3, 0.4, 0.4])
    (caution,) = outcome.record["cautions"]
    assert caution.startswith("best is not ahead of public in accuracy") and caution in page
    assert not finished({}, VALUES)[1].record["cautions"]


def test_bars_are_of_the_means(finished):
    sweep, outcome, page, panel = finished({"gap": None}, VALUES)
    assert labels(panel) == ["public", "best", "ours"]
    assert [bar.get_width() for bar in panel.patches] == pytest.approx([0.25, 0.55, 0.375])
    (_, _, (errors,)) = panel.containers[0].lines
    widths = [segment[1][0] - segment[0][0] for segment in errors.get_segments()]
    assert widths == pytest.approx([2 * each / 2**0.5 for each in (0.1, 0.1, 0.15)])
    assert re.findall("<h2>(.*?)</h2>", page) == ["Figure", "Table", "Points"]
    assert "gap" not in str(outcome.rows) + "".join(lines(sweep, outcome.record))


def test_a_metric_of_several_corpora_has_a_picture_for_each_case(finished):
    """As Figure 2 of the FreD paper: distance against share, and the range over the runs."""
    change = {"gap": None, "cases": {"stated": {}, "realised": {}}}
    values = [{"0%": 3.0 + i, "99%": 2.0 + i, "100%": 1.0 + i} for i in (0, 1, 10, 12)]
    sweep, outcome, page, panel = finished(change, values)
    assert [row["of"] for row in outcome.rows] == [0, 0, 99, 99, 100, 100]
    assert legend(panel) == ["realised"]
    assert panel.lines[0].get_xydata().tolist() == [[0, 14], [99, 13], [100, 12]]
    assert sorted(path.name for path in (outcome.out / "plots").iterdir())[:2] == [
        "sweep-1.png",
        "sweep.png",
    ]
    table = table_of(page, "Table")
    assert table[0] == ["case", "of", "accuracy", "standard deviation", "least", "largest", "runs"]
    assert table[1][:5] == ["stated", "0", "3.5", "0.71", "3"]
    assert "0% 3, 99% 2, 100% 1" in str(table_of(page, "Points"))


def test_what_is_not_private_says_so_wherever_it_is_shown(finished):
    """TRUST 11: the case's name need not tell."""
    for of_case in (
        {"best": {"private": False}, "ours": {"stamp": "NOT PRIVATE: trained without privacy"}},
        {"best": {"private": None}, "ours": {"private": False, "stamp": None}},
    ):
        sweep, outcome, page, panel = finished({}, VALUES, of_case)
        assert [row["private"] for row in outcome.rows] == [True, False, False]
        shown = lines(sweep, outcome.record)
        assert [line.endswith("NOT PRIVATE") for line in shown[2:5]] == [False, True, True]
        table = table_of(page, "Table")
        assert [row[-1] for row in table] == ["privacy", "", "NOT PRIVATE", "NOT PRIVATE"]
        assert "Some results are NOT PRIVATE" in page and "SIMULATION" in page
        with (outcome.out / "table.csv").open() as file:
            assert [row["private"] for row in csv.DictReader(file)] == ["True", "False", "False"]
        assert labels(panel) == ["public", "best (NOT PRIVATE)", "ours (NOT PRIVATE)"]
    *_, panel = finished(OVER_CLIENTS, VALUES, {"best": {"private": False}})
    assert legend(panel) == ["public", "best (NOT PRIVATE)", "ours"]


@pytest.mark.parametrize("axis", [True, False])
def test_a_metric_that_is_not_finite_is_said_in_tables_and_figure(finished, axis):
    """As perplexity after training that diverged: the other points are compared as ever."""
    values = [0.2, 0.4, 0.6, math.inf, 0.3, 0.5]
    change = OVER_CLIENTS if axis else {"gap": None}
    sweep, outcome, page, panel = finished(change, values)
    means = [0.2, 0.4, 0.6, None, 0.3, 0.5] if axis else [0.3, None, 0.4]
    assert [row["mean"] for row in outcome.rows] == pytest.approx(means)
    assert all(row["runs"] == row["points"] for row in outcome.rows)
    shown = table_of(page, "Table")
    assert ["not finite" in row for row in shown[1:]] == [mean is None for mean in means]
    assert "not finite" in "".join(lines(sweep, outcome.record))
    points = table_of(page, "Points")
    assert [row[1] for row in points[1:]] == ["0.2", "0.4", "0.6", "not finite", "0.3", "0.5"]
    wanted = "best, not finite at 10" if axis else "best: not finite"
    assert wanted in (legend(panel) if axis else labels(panel))


def test_it_is_said_whether_a_number_is_of_one_run_or_of_several(finished):
    """TRUST 60."""
    several, once = (finished({"grid": {"run.seed": seeds}, "gap": None}, VALUES[: 3 * len(seeds)])
                     for seeds in ([0, 1], [0]))  # fmt: skip
    assert "accuracy at 6 points, repeated over seeds" in several[2]
    assert "2 of 2" in str(table_of(several[2], "Table"))
    assert "accuracy at 3 points, one run each" in once[2]


def test_a_sweep_without_a_finite_metric_has_a_page_and_no_gap(finished):
    _, outcome, page, _ = finished({}, [math.nan] * 6)
    assert {row["mean"] for row in outcome.rows} == {row["gap"] for row in outcome.rows} == {None}
    assert not outcome.failed
    assert len([row for row in table_of(page, "Table") if "not finite" in row]) == 3
