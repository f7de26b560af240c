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

PLAN = jp.Plan(
    rounds=3, clip=jp.Clip(0.5), noise=jp.Noise(1.25), delta=1e-3,
    participation=jp.Poisson(37, 20),
)  # fmt: skip


def clients(number):
    ids = [f"secret{k}" for k in range(number)]
    return jp.data.from_clients({name: {"x": np.full((2, 3), 0.625)} for name in ids})


def mean(broadcast, examples, key):
    return examples.batches["x"].sum((0, 1))


def loss(params, batch):
    return batch["x"] @ params


def cells(shown):
    """The texts of the cells of a shown object, row by row, and nothing that sets a colour."""
    html = shown._repr_html_()
    assert "color" not in html and "background" not in html
    return [re.findall(r"<td[^>]*>(.*?)</td>", row, re.S) for row in html.split("</tr>")[:-1]]


def test_objects_show_public_facts(tmp_path):
    held = clients(37)
    path = tmp_path / "ledger.jsonl"
    one = jp.Plan(**{**vars(PLAN), "rounds": 1})
    jp.release(mean, held, one, ledger=path)
    algorithm = Algorithm("<mine>", lambda key: 0, lambda s, r, k: (s, {}), (
        jp.Query("mean", mean, PLAN, jp.CohortSpec(2, 2)),
    ))  # fmt: skip
    assert ["clip_norm", "0.5"] in cells(PLAN) and ["noise_multiplier", "1.25"] in cells(PLAN)
    assert ["privacy", PLAN.statement()] in cells(PLAN)
    with Ledger(path, held) as ledger:
        assert ["releases", "release: 1"] in cells(ledger) and ["unit", "client"] in cells(ledger)
    assert ["asks mean", PLAN.statement()] in cells(algorithm)
    assert "&lt;mine&gt;" in algorithm._repr_html_()
    model = jp.models.from_functions(lambda key: np.zeros(3, "f4"), loss)
    evaluator = jp.Evaluator(model, jp.DeclaredPublic(held, "test clients"))
    assert ["on", "test clients (declared public)"] in cells(evaluator)
    result = Result("epsilon = 3", {"evaluation": {"loss": 0.25}}, 3, Path("runs"), 0, None)
    ((_, found), _) = cells(result)
    assert found == str(result) and "after 3 rounds: epsilon = 3" in found


def test_a_population_shows_neither_how_many_it_has_nor_who_they_are():
    first, second = clients(37), clients(41)
    assert first._repr_html_() == second._repr_html_()
    assert ["columns", "x: float64[3]"] in cells(first)
    assert not re.search("secret|0.625", first._repr_html_())


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
