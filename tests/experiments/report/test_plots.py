"""Pictures show what they are given; other tests only look at what is drawn, not at the pixels."""

import io
import itertools
import re

import numpy as np
import pytest
from matplotlib.image import imread

from jaxpfl.experiments.report import plots
from jaxpfl.experiments.report.page import Page, Section, Table, write_page
from jaxpfl.experiments.report.plots import bars
from jaxpfl.experiments.report.run_page import RunFiles, run_page
from tests.browser import CHROMIUM, seen

pytestmark = pytest.mark.usefixtures("drawn")


def pixels(figure) -> np.ndarray:
    """What a viewer sees: [height, width, RGB] in 0..1."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    buffer.seek(0)
    return imread(buffer)[..., :3]


def rgb(colour: str) -> np.ndarray:
    """Of a colour such as "#2563eb", in 0..1."""
    return np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])


def share(picture: np.ndarray, colour: str) -> float:
    """The share of pixels of a colour."""
    return float(np.mean(np.all(np.abs(picture - rgb(colour)) < 0.02, axis=-1)))


def test_a_line_is_seen_and_a_stamp_stands_across_it():
    def drawn(stamp):
        axes = plots.axes("Loss", stamp=stamp)
        axes.plot([1, 2, 3], [3.0, 1.0, 2.0], color=plots.ACCENT)
        return pixels(axes.figure)

    plain, stamped = drawn(""), drawn("NOT PRIVATE")
    assert plain.shape == stamped.shape and plain.shape[-1] == 3
    assert 0.001 < share(plain, plots.ACCENT) < 0.05
    reddish, before = (np.mean(each[..., 0] - each[..., 1] > 0.05) for each in (stamped, plain))
    assert reddish > 0.01 > before


@pytest.mark.parametrize("stamp", ["", "SIMULATION"])
def test_a_ranking_has_a_bar_each_and_the_winners_is_another_colour(stamp):
    values = ("distance", "corrected", "low", "high")
    rows = [
        {"candidate": name, **dict.fromkeys(values, distance)}
        for name, distance in [("near", 1.0), ("middle", 2.0), ("far", 3.0)]
    ]
    picture = pixels(bars(rows, stamp))
    winner, others = share(picture, plots.ACCENT), share(picture, plots.PALE)
    assert winner > 0.01
    assert others / winner == pytest.approx(5.0, rel=0.15)  # 2 + 3 against 1


def test_a_page_has_each_value_of_a_curve_where_the_curve_is(tmp_path):
    axes = plots.axes("Loss")
    axes.plot([1, 2, 3], [30.0, 0.25, 4.0], color=plots.ACCENT, marker="o", label="this run")
    axes.set_yscale("log")
    section = Section("Rounds", figures=[("loss", "Loss", plots.labelled(axes, "round", "loss"))])
    html = write_page(tmp_path, Page("A run", "", "", "epsilon = 1", (), (), [section])).read_text()
    found = re.findall(r'<i style="left:(.*?)%;top:(.*?)%;.*?" data-value="(.*?)"', html)
    values = ["this run, round 1: 30", "this run, round 2: 0.25", "this run, round 3: 4"]
    assert [value for _, _, value in found] == values
    picture = imread(tmp_path / "plots" / "loss.png")[..., :3]
    for left, top, value in found:
        place = np.array([float(top), float(left)]) / 100 * picture.shape[:2]
        pixel = picture[tuple(place.round().astype(int))]
        np.testing.assert_allclose(pixel, rgb(plots.ACCENT), atol=0.05, err_msg=value)


def test_a_page_says_whom_its_statement_does_not_cover(tmp_path):
    data = "data: {split: {train: 0.6, valid: 0.1, test: 0, public: 0.3}}\n"
    for declared, parts in (("true", "valid (10 %), public (30 %)"), ("false", "public (30 %)")):
        (tmp_path / "config.yaml").write_text(f"{data}evaluation: {{declared_public: {declared}}}")
        page = write_page(tmp_path, Page("A run", "", "", "epsilon = 1", (), (), []))
        said = f"NOT protected: the clients of {parts}, and whatever else was declared public."
        assert said in page.read_text()
    page = write_page(tmp_path, Page("A run", "", "NOT PRIVATE", "epsilon = 1", (), (), []))
    assert "NOT protected" not in page.read_text()


@pytest.mark.parametrize(("language", "metric"), [(True, "perplexity"), (False, "loss")])
def test_perplexity_is_the_score_of_language_models_alone(tmp_path, language, metric):
    texts = ("label", "population", "unit", "run", "seed", "devices", "backend", "statement")
    plan = {"rounds": 1, "clients_per_round": 2, "population": 3, "unit": "client"}
    plan["sampling"] = "poisson"
    start = dict.fromkeys(texts, "") | {"config": {}, "captured": {}, "versions": {}}
    start |= {"stamp": "", "private": True, "queries": [], "evaluation": "tests", "plan": plan}
    scores = {"loss": 0.5, "perplexity": 1.649, "accuracy": 0.75, "private": True}
    table = [{"model": "first", **scores, metric: 0.4}, {"model": "this run", **scores}]
    run = RunFiles(tmp_path, start, [{"round": 1, "evaluation": scores}],
                   {"table": table, "tested_on": "tests", "language": language})  # fmt: skip
    html = write_page(tmp_path, run_page(run)).read_text()
    assert f"worse than first (0.4): {metric}" in html and f">{metric}</th>" in html
    assert f'alt="{metric.capitalize()} on tests"' in html and ("erplexity" in html) == language


def test_many_packages_are_a_number_and_their_list_is_among_the_details(tmp_path):
    packages = "docstrings:jax,scipy,pandas,rich"
    texts = ("label", "unit", "run", "seed", "devices", "backend", "statement")
    plan = {"rounds": 1, "clients_per_round": 2, "population": 7400, "unit": "client"}
    plan["sampling"] = "poisson"
    start = dict.fromkeys(texts, "") | {"config": {}, "captured": {}, "versions": {}, "queries": []}
    start |= {"stamp": "", "private": True, "plan": plan, "population": packages}
    start["evaluation"] = f"valid clients of {packages}"
    run = RunFiles(tmp_path, start, [{"round": 1, "evaluation": {"loss": 1.0}}], {})
    html = write_page(tmp_path, run_page(run)).read_text()
    assert '"lead">7,400 documented functions and classes of 4 packages<' in html
    assert 'alt="Loss on valid clients of docstrings of 4 packages"' in html
    assert html.count(packages) == 1
    few = RunFiles(tmp_path, start | {"population": "docstrings:jax,scipy"}, [], {})
    assert few.lead == "docstrings:jax,scipy"


@pytest.mark.long
@pytest.mark.skipif(not CHROMIUM, reason="needs Chromium, see tests/browser.py")
def test_in_a_browser_the_pointer_shows_a_value_and_a_click_sorts(tmp_path):
    axes = plots.axes("Loss")
    axes.plot([1, 2, 3], [30.0, 0.25, 4.0], label="this run")
    figures = [("loss", "Loss", plots.labelled(axes, "round", "loss"))]
    table = Table(("run", "loss"), [("9 b", ""), ("10 a", ""), ("1,000 c", "")])
    page = Page("A run", "", "", "epsilon = 1", (), (), [Section("", "", figures, table)])
    found = seen(write_page(tmp_path, page), "report")
    assert found["value"] == '"this run, round 2: 0.25"'
    up = ["9 b", "10 a", "1,000 c"]
    assert found["orders"] == [up, up, up[::-1]]


@pytest.mark.parametrize("values", [[300.0, 450.0], [9.9, 1000.0], [0.5, 4e5], [2.078, 2.11]])
def test_texts_of_a_logarithmic_axis_stand_apart(values):
    axes = plots.axes("Perplexity")
    axes.plot([0, 1], values)
    plots.logarithmic(axes)
    apart(axes, axes.yaxis, lambda box: (box.y0, box.y1))


def test_texts_of_a_sweeps_values_stand_apart():
    axes = plots.axes("Sweep")
    values = [10, 11, 12, 1_000, 1_050, 20_000, 1_000_000]
    axes.plot(values, values)
    axes.set_xscale("log")
    plots.ticks(axes, values)
    assert len(apart(axes, axes.xaxis, lambda box: (box.x0, box.x1))) == 4


def apart(axes, axis, ends):
    axes.figure.draw_without_rendering()
    low, high = sorted(axis.get_view_interval())
    seen = [tick for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high]
    texts = [t.label1 for t in seen if t.label1.get_text() and t.label1.get_visible()]
    places = sorted(ends(text.get_window_extent()) for text in texts)
    assert len(places) >= 2
    assert all(after[0] > before[1] for before, after in itertools.pairwise(places))
    return places
