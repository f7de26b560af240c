"""A sweep's best point at the price of a private selection: charged once, and alone released."""

import copy
import dataclasses
import json
import re
import shutil
from types import SimpleNamespace

import numpy as np
import pytest

from jaxpfl import cli, files
from jaxpfl.errors import BudgetExhausted, CorruptFile
from jaxpfl.experiments import carry_out
from jaxpfl.experiments.sweep import selection
from jaxpfl.experiments.sweep.config import load_sweep
from jaxpfl.experiments.sweep.points import run_sweep
from jaxpfl.privacy import Guarantee, Ledger, verify
from jaxpfl.privacy import selection as law
from jaxpfl.privacy.keys import RunSecret
from tests.experiments.crashes import stopped
from tests.experiments.sweep.three_points import BASE, result, written
from tests.privacy.ledgers import CLIENTS, charge
from tests.refusals import refusal

GRID = {"grid": {"privacy.clip_norm": [0.125, 0.25, 0.375, 0.5]}, "selection": {"mean": 8}}


@pytest.fixture
def path(tmp_path):
    return written(tmp_path, GRID)


@pytest.fixture
def sweep(path):
    return load_sweep(path)


def scored(config, _):
    return result(config) | {"metrics": {"accuracy": config.privacy.clip_norm}}


@pytest.fixture
def quick(monkeypatch, invented):
    """Points that come to their clip norm as accuracy at once, and export nothing."""
    monkeypatch.setattr(selection, "export_selected", lambda *_, **__: [])
    return lambda result_of=scored: invented(result_of)


def drawn(out):
    """The points that were carried out, in order, by their clip norms."""
    folders = sorted((out / "private" / "points").iterdir())
    return [json.loads((f / "result.json").read_text())["metrics"]["accuracy"] for f in folders]


def test_the_selection_is_charged_once_and_before_the_first_point(sweep, tmp_path, quick):
    out, seen = tmp_path / "out", []

    def look(config, folder):
        charges = Ledger.read(out / "ledger.jsonl").charges
        seen.append([charge.event for charge in charges])
        return scored(config, folder)

    quick(look)
    record = selection.select(sweep, out)
    (only,) = Ledger.read(out / "ledger.jsonl").charges
    assert seen and all(charges == [only.event] for charges in seen)
    # It is the cost of the whole that the config's epsilon is, and one point has more noise.
    assert record["epsilon"] == Guarantee.of_events([only.event], 1e-3).epsilon()
    assert 0.99 * 8 < record["epsilon"] <= 8
    assert record["one"]["epsilon"] < record["epsilon"]
    assert record["selected"]["accuracy"] == max(drawn(out))
    assert record["privacy"] in (out / "report.html").read_text()


def test_the_number_and_the_points_are_drawn_by_the_secret_alone(sweep, tmp_path, quick):
    quick()
    outs = [tmp_path / name for name in ("a", "b")]
    selection.select(sweep, outs[0])
    secret = outs[0] / "private" / "selection" / "secret.json"
    shutil.copytree(secret.parent, outs[1] / "private" / "selection")
    shutil.copy(outs[0] / "points.json", outs[1])
    selection.select(sweep, outs[1])
    assert drawn(outs[0]) == drawn(outs[1])
    words = np.array(json.loads(secret.read_text())["words"], np.uint32)
    draws = RunSecret(words.tobytes())
    number = law.number("geometric", 8.0, draws.seed("selection", "number"))
    assert len(drawn(outs[0])) == number
    places = [draws.seed("selection", f"point {i + 1}") % 4 for i in range(number)]
    assert drawn(outs[0]) == [sweep.points[place].config.privacy.clip_norm for place in places]


@pytest.mark.parametrize("call", [1, 2, 3])
def test_a_killed_selection_goes_on_with_the_same_points_at_the_same_cost(
    sweep, tmp_path, quick, monkeypatch, call
):
    monkeypatch.setattr(law, "number", lambda *_: 3)
    begun = quick()
    out = tmp_path / "out"
    with stopped(carry_out, "run", call):
        selection.select(sweep, out)
    assert not (out / "selection.json").exists()
    before = (out / "ledger.jsonl").read_bytes()
    record = selection.select(sweep, out)
    # The point that was under way is begun again, and none before it.
    assert begun == ["00001", "00002", "00003"]
    assert (out / "ledger.jsonl").read_bytes() == before
    assert selection.select(sweep, out) == record
    assert len(begun) == 3
    # A kill after the export and before the record changes nothing.
    (out / "selection.json").unlink()
    assert selection.select(sweep, out) == record


def test_points_of_a_lost_secret_are_those_of_no_selection(sweep, tmp_path, quick):
    quick()
    out = tmp_path / "out"
    with stopped(carry_out, "run"):
        selection.select(sweep, out)
    (out / "private" / "selection" / "secret.json").unlink()
    refusal(lambda: selection.select(sweep, out), "secret.json: is missing", CorruptFile)
    assert len(Ledger.read(out / "ledger.jsonl").charges) == 1


def test_a_failed_point_releases_nothing_and_the_same_command_goes_on(
    path, tmp_path, quick, monkeypatch, capsys
):
    monkeypatch.setattr(law, "number", lambda *_: 3)
    left = [RuntimeError("the text of a client")]

    def failing(config, folder):
        if folder.name == "00002" and left:
            raise left.pop()
        return scored(config, folder)

    quick(failing)
    out = tmp_path / "out"
    command = ["sweep", str(path), "--private-selection", "--out", str(out)]
    assert cli.main(command) == 2
    printed = capsys.readouterr()
    assert "nothing was released" in printed.err
    assert "the text of a client" not in printed.out + printed.err
    assert not (out / "selection.json").exists() and not (out / "report.html").exists()
    assert cli.main(command) == 0
    assert "the best point" in capsys.readouterr().out


def test_no_point_at_all_is_a_result(path, sweep, tmp_path, quick, monkeypatch):
    """A Poisson number may be 0."""
    monkeypatch.setattr(law, "number", lambda *_: 0)
    assert quick() == []
    record = selection.select(sweep, tmp_path / "out")
    assert record["selected"] is None
    assert len(Ledger.read(tmp_path / "out" / "ledger.jsonl").charges) == 1
    assert "the number of points came to 0" in (tmp_path / "out" / "report.html").read_text()


def test_a_score_that_is_not_finite_is_the_worst(sweep, tmp_path, quick, monkeypatch):
    monkeypatch.setattr(law, "number", lambda *_: 4)

    def diverged(config, folder):
        value = float("nan") if folder.name != "00003" else 0.01
        return result(config) | {"metrics": {"accuracy": value}}

    quick(diverged)
    assert selection.select(sweep, tmp_path / "out")["selected"]["accuracy"] == 0.01


def test_a_point_that_released_more_than_its_plan_is_refused(sweep, tmp_path, quick):
    """Such as one whose release came out otherwise after a crash, and was charged again."""

    def more(config, folder):
        with Ledger(folder / "ledger.jsonl", CLIENTS) as ledger:
            charge(ledger)
        return scored(config, folder)

    quick(more)
    refusal(lambda: selection.select(sweep, tmp_path / "out"), "released more than its plan")
    assert not (tmp_path / "out" / "selection.json").exists()


BAD = [
    ({"grid": {"training.rounds": [1, 2]}}, {}, "must release the same differs"),
    ({"grid": {"privacy.epsilon": [4.0, 8.0]}}, {}, "the same privacy.epsilon"),
    ({"grid": {"data.split_seed": [1, 2]}}, {}, "the same data"),
    ({}, {"run": {"reproducible_noise": True}}, "--private-selection needs private points"),
    ({}, {"privacy": {"private": False, "clip_norm": 0.5}}, "needs private points"),
    ({"selection": {"mean": 0.5}}, {}, "selection.mean must be at least 1"),
    ({"selection": {"law": "uniform"}}, {}, "selection.law must be one of"),
    ({"selection": {"largest": 5}}, {}, "there is no key 'selection.largest'"),
]


@pytest.mark.parametrize(("change", "base", "words"), BAD)
def test_points_that_do_not_go_together_are_refused(tmp_path, quick, change, base, words):
    begun = quick()
    path = written(tmp_path, {**GRID, **change}, {**BASE, **base})
    refusal(lambda: selection.select(load_sweep(path), tmp_path / "out"), words)
    assert begun == [] and not (tmp_path / "out" / "ledger.jsonl").exists()


def test_the_budget_of_a_shared_ledger_holds_before_anybody_is_asked(tmp_path, quick):
    begun = quick()
    base = copy.deepcopy(BASE)
    base["privacy"] |= {"ledger": str(tmp_path / "shared.jsonl"), "budget_epsilon": 10.0}
    sweep = load_sweep(written(tmp_path, GRID, base))
    selection.select(sweep, tmp_path / "a")
    assert len(Ledger.read(tmp_path / "shared.jsonl").charges) == 1
    before = len(begun)
    with pytest.raises(BudgetExhausted):
        selection.select(sweep, tmp_path / "b")
    assert len(begun) == before


def test_a_directory_is_of_one_selection(path, sweep, tmp_path, quick):
    quick()
    selection.select(sweep, tmp_path / "out")
    other = load_sweep(path, ["--training.rounds", "1"])
    refusal(lambda: selection.select(other, tmp_path / "out"), "holds another sweep")
    refusal(lambda: run_sweep(sweep, tmp_path / "out", progress=False), "holds another sweep")


def test_only_the_best_point_leaves_the_private_folder(tmp_path, monkeypatch, capsys):
    """With real runs: no score, name in the ledger, or weight of another one is found outside."""
    monkeypatch.setattr(law, "number", lambda *_: 3)
    grid = {"grid": {"training.client.learning_rate": [0.02, 0.2, 0.5]}, "selection": {"mean": 3}}
    path, out = written(tmp_path, grid), tmp_path / "out"
    with stopped(files, "write_json", when=lambda path, *_, **__: path.name == "point.json"):
        selection.select(load_sweep(path), out)
    assert cli.main(["sweep", str(path), "--private-selection", "--out", str(out)]) == 0
    printed = capsys.readouterr()
    record = json.loads((out / "selection.json").read_text())
    private, public = out / "private", []
    assert private.stat().st_mode & 0o077 == 0
    for file in out.rglob("*"):
        if file.is_file() and private not in file.parents:
            public.append(file)
    text = b"\n".join(file.read_bytes() for file in public) + printed.out.encode()
    values = []
    for folder in sorted((private / "points").iterdir()):
        found = json.loads((folder / "result.json").read_text())
        values.append(found["metrics"]["evaluation"]["accuracy"])
        for secret in (found["run"], Ledger.read(folder / "ledger.jsonl").head, f"/{folder.name}"):
            assert secret.encode() not in text
        losses = {found["metrics"]["evaluation"]["loss"]} - {0.0}
        if values[-1] != max(values):
            assert not any(f"{loss:.5g}".encode() in text for loss in losses)
    assert record["selected"]["accuracy"] == max(values)
    assert len({file.stat().st_mtime for file in public}) == 1
    # What was exported states the cost of the whole, and is checked with dp-accounting alone.
    certificate = out / "selected" / "certificate.json"
    given = [certificate], [out / "ledger.jsonl"], out / "selected", False
    assert any("fits" in line for line in verify.verified(*given))
    assert record["privacy"] in (out / "selected" / "README.md").read_text()
    own = json.loads((private / "points" / "00001" / "certificate.json").read_text())
    assert re.findall(r"epsilon = ([\d.]+)", own["statement"])[0].encode() not in (
        (out / "selected" / "README.md").read_bytes()
    )


def test_a_system_that_asks_its_clients_in_several_runs_is_refused(sweep):
    """Its plans, each of them once, are less than what it releases."""
    other = dataclasses.replace(sweep.points[0], config=SimpleNamespace(system="gan_inversion"))
    several = dataclasses.replace(sweep, points=(other,))
    refusal(lambda: selection.Selection(several, None).points, "gan_inversion")
