"""Notebooks show public facts, in colours of their own, and bars that leave no times."""

import re
from pathlib import Path

import IPython.display
import numpy as np

import jaxpfl as jp
from jaxpfl.algorithms import Algorithm
from jaxpfl.experiments.engine.setting import Result
from jaxpfl.privacy import Ledger
from jaxpfl.progress import Progress

PLAN = jp.Plan(1, jp.Clip(0.5), jp.Noise(1.25), jp.Poisson(37, 20), delta=1e-3)


def clients(number):
    return jp.data.from_clients(
        {f"secret{k}": {"x": np.full((2, 3), 0.625, "f4")} for k in range(number)}
    )


def cells(shown):
    """The texts of the cells of a shown object, row by row, and nothing that sets a colour."""
    html = shown._repr_html_()
    assert "color" not in html and "background" not in html
    return [re.findall(r"<td[^>]*>(.*?)</td>", row, re.S) for row in html.split("</tr>")[:-1]]


def test_objects_show_public_facts(tmp_path):
    held, path = clients(37), tmp_path / "ledger.jsonl"
    asked = jp.Query("<mine>", lambda b, e, key: e.batches["x"].sum(), PLAN, jp.CohortSpec(2, 2))
    jp.release(asked.client_fn, held, PLAN, ledger=path)
    assert ["clip_norm", "0.5"] in cells(PLAN) and ["privacy", PLAN.statement()] in cells(PLAN)
    with Ledger(path, held) as ledger:
        assert ["releases", "release: 1"] in cells(ledger)
    algorithm = Algorithm("a", lambda key: 0, lambda s, r, k: (s, {}), (asked,))
    assert ["asks &lt;mine&gt;", PLAN.statement()] in cells(algorithm)
    model = jp.models.from_functions(lambda key: np.zeros(3, "f4"), lambda p, b: b["x"] @ p)
    evaluator = jp.Evaluator(model, jp.DeclaredPublic(held, "test clients"))
    assert ["on", "test clients (declared public)"] in cells(evaluator)
    result = Result("epsilon = 3", {"evaluation": {"loss": 0.25}}, 3, Path("runs"), 0, None)
    stated = ["privacy", "after 3 rounds: epsilon = 3"]
    assert cells(result)[:2] == [["scores", "loss 0.25 on None"], stated]


def test_a_population_shows_neither_how_many_it_has_nor_who_they_are():
    assert clients(37)._repr_html_() == clients(41)._repr_html_()
    assert ["columns", "x: float32[3]"] in cells(clients(37))
    assert not re.search("secret|0.625", clients(37)._repr_html_())


def test_a_bar_in_a_notebook_counts_and_leaves_no_time(monkeypatch, capsys):
    shown = []

    class Handle:
        def update(self, value):
            shown.append(value.data)

    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    monkeypatch.setattr(IPython.display, "display", lambda value, display_id: Handle())
    with Progress("<mine>", total=2, step="round") as bar:
        bar.update(0)
        bar.update(2, {"loss": "0.25"})
    assert shown[0].startswith("<progress value=0 max=2></progress> &lt;mine&gt;: round 0/2  comp")
    assert shown[1].startswith("<progress value=2 max=2>") and "loss 0.25 at round 2" in shown[1]
    assert shown[2:] == [""] and capsys.readouterr().err == ""
